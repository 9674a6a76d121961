"""The scheduler's side: which chunks are there, who computes those that are missing, and what the workers copy.

```text
  on_new_request ── names chunks? ── no ──► an ordinary request
        │ yes
        ▼
  parts are acquired ── held ──────────────────────────────► matched_tokens: n, loaded asynchronously
        │ missing: an encode, a request of its own        ▲
        │ another request's encode: wait                  │ asked again in a later step
        ▼                                                 │
  matched_tokens: None (parked) ── encode computed ── rows saved ── stored
```

A request in a chunk mode has a salt of its own, so that vLLM's prefix cache never gives its blocks to another kind of request.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from kvcache import ChunkCacheConfig, ChunkCacheManager, ChunkReservation, ChunkWaiter, PieceHold, key_root

from .host import Geometry, Settings, caller_of, ropes_of
from .orders import Again, Load, Save
from .prefix import PrefixTier
from .prompt import ChunkPlan, ChunkRequestError, Part, plan_of
from .stats import ChunkStats, Counting

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvcache")

ENCODE = "kvcache-encode-"


@dataclass
class Encode:
    """A part of a prompt that is computed as a request of its own."""

    request_id: str
    prefix: int
    """The number of tokens before the part in that request."""
    prompt_tokens: int
    waiting: list[tuple[int, ChunkReservation]]
    """The first token in the part, and the reservation, of each missing piece."""
    scheduled: bool = False


@dataclass
class State:
    """A request that names chunks."""

    plan: ChunkPlan
    salt: str | None
    """The salt that the client gave."""
    root: bytes
    holds: dict[int, list[PieceHold]] = field(default_factory=dict)
    """The pieces of each part, once all of them are there."""
    waiters: dict[int, list[Any]] = field(default_factory=dict)
    """Work that a part waits for: encodes by their ids, and waiters for those of others."""
    reused: int = 0
    computed: int = 0

    def parts(self) -> list[Part]:
        return [self.plan.system, *self.plan.chunks]

    def release(self) -> None:
        for holds in self.holds.values():
            for hold in holds:
                hold.release()
        self.holds.clear()
        self.waiters.clear()


class ChunkScheduler:
    def __init__(self, vllm_config: VllmConfig, shape: Geometry, settings: Settings) -> None:
        from vllm.v1.core.sched.interface import SchedulerInterface

        self.host = caller_of(SchedulerInterface, "the scheduler")
        self.shape = shape
        # Behind a window, the rows of a chunk depend on where it ends: a piece of another chunk must not be found.
        self.piece_tokens = vllm_config.model_config.max_model_len if shape.sliding else settings.max_chunk_tokens
        self.no_recompute = _no_recompute(vllm_config, shape)
        self.ranks = vllm_config.parallel_config.tensor_parallel_size
        model = vllm_config.model_config
        self.ropes = ropes_of(model.hf_text_config, model.max_model_len)
        self.model = (model.model, json.dumps([model.revision, model.hf_text_config.to_dict()], default=str, sort_keys=True))
        config = ChunkCacheConfig(
            max_chunks=min(settings.max_chunks, shape.num_blocks),
            max_chunk_tokens=self.piece_tokens,
            cache_policy=settings.cache_policy,
        )
        self.cache = ChunkCacheManager(config, shape.num_blocks, shape.block_size)
        self.states: dict[str, State] = {}
        self.refused: dict[str, str] = {}
        self.encodes: dict[str, Encode] = {}
        self.unsaved: dict[str, int] = {}
        """Workers that have saved the rows of an encode or of a block, by its name."""
        self.new_encodes: list[Request] = []
        self.loads: list[Load] = []
        self.numbers = itertools.count()
        self.receiving: set[str] = set()
        """Requests whose rows are being copied in beside a step."""
        self.ended: dict[str, State | None] = {}
        """Requests that ended meanwhile, with the chunks that the copy still reads."""
        self.counting = Counting()
        self.num_refused = 0
        self.tier: PrefixTier | None = None
        if shape.prefix_blocks > 0:
            self.tier = PrefixTier(shape.prefix_blocks, shape.engine_block_size, settings.cache_policy, self._root)
        self.behind_chunks: set[str] = set()
        """Requests without chunks whose blocks are behind some all the same."""

    # A request comes.

    def on_new_request(self, request: Request) -> None:
        if request.request_id in self.encodes:
            return
        try:
            plan = self._plan(request)
        except ChunkRequestError as error:
            self._refuse(request, str(error))
            return
        if plan is None:
            return
        state = State(plan, request.cache_salt, self._root(request))
        self.states[request.request_id] = state
        _salt(request, self._mode_salt(request, state))
        self._acquire(request, state, 0)
        self._submit()

    def _plan(self, request: Request) -> ChunkPlan | None:
        plan = plan_of(request.kv_transfer_params, request.prompt_token_ids or ())
        if plan is None:
            return None
        if request.pooling_params is not None or request.mm_features or request.prompt_embeds is not None:
            raise ChunkRequestError("chunks are for text that is generated from text")
        if request.skip_reading_prefix_cache:
            raise ChunkRequestError("log-probabilities of the prompt are those of ordinary attention")
        if plan.recompute != "none" and self.no_recompute is not None:
            raise ChunkRequestError(f"{self.no_recompute}: take chunk_recompute none")
        return plan

    def _root(self, request: Request) -> bytes:
        lora = request.lora_request
        return key_root(
            self.model[0],
            self.model[1].encode(),
            self.ropes,
            dtype_name=self.shape.dtype,
            num_heads=self.shape.num_heads * self.ranks,
            head_dim=self.shape.head_dim,
            block_size=self.shape.block_size,
            adapter=(lora.lora_name, lora.lora_path.encode()) if lora else None,
            salt=request.cache_salt.encode() if request.cache_salt else None,
        )

    @staticmethod
    def _mode_salt(request: Request, state: State) -> str:
        """The same prompt cut or computed in another way has other keys and values."""
        plan = state.plan
        ends = [part.end for part in state.parts()]
        # Keys and values that the question has chosen to be computed again are for this question.
        question = list(request.prompt_token_ids[plan.question_start :]) if plan.chosen_tokens() > 0 else []
        what = json.dumps(["kvcache chunks v2", state.salt, plan.mode, plan.recompute, ends, question])
        return "kvcache:" + hashlib.sha256(what.encode()).hexdigest()

    # Parts are looked up.

    def _acquire(self, request: Request, state: State, num_computed: int) -> None:
        for number, part in enumerate(state.parts()):
            if number in state.holds:
                continue
            if any(not self._is_over(waiter) for waiter in state.waiters.get(number, ())):
                continue
            if not self._acquire_part(request, state, number, part):
                reason = "the memory for chunks has no room: raise host_memory"
                self._go_without(request, state, reason, behind_chunks=num_computed > 0)
                return

    def _acquire_part(self, request: Request, state: State, number: int, part: Part) -> bool:
        tokens, system = request.prompt_token_ids, state.plan.system
        seen = state.plan.seen() if number > 0 else 0
        mode = state.plan.mode if number > 0 else "alone"
        prefix = tokens[system.start : system.start + seen]
        own = tokens[part.start : part.end]
        outcomes = self.cache.acquire(state.root, mode, tokens[: system.end], own, seen)
        first = not state.waiters.get(number)
        holds, missing, waiters, at = [], [], [], 0
        for piece in outcomes:
            if isinstance(piece, PieceHold):
                holds.append(piece)
                at += piece.num_tokens
            elif isinstance(piece, ChunkReservation):
                missing.append((at, piece))
                at += len(piece.slots)
            elif isinstance(piece, ChunkWaiter):
                waiters.append(piece)
                # Its length follows from those of the others: pieces are of one size but the last.
                at += min(part.tokens - at, self.piece_tokens)
            else:
                for hold in holds:
                    hold.release()
                for _, reservation in missing:
                    reservation.abandon()
                return False
        if not missing and not waiters:
            state.holds[number] = holds
            state.waiters.pop(number, None)
            if first:
                state.reused += part.tokens
            return True
        for hold in holds:
            hold.release()
        if missing:
            state.computed += part.tokens
            waiters.append(self._encode(request, state, prefix, own, missing))
        state.waiters[number] = waiters
        return True

    def _is_over(self, waiter: Any) -> bool:
        if isinstance(waiter, str):
            return waiter not in self.encodes
        return waiter.is_over

    def _refuse(self, request: Request, reason: str) -> None:
        logger.warning("request %s is answered without chunks: %s", request.request_id, reason)
        self.refused[request.request_id] = reason
        self.num_refused += 1

    def _go_without(self, request: Request, state: State, reason: str, *, behind_chunks: bool = False) -> None:
        """Lets vLLM compute what is not in the request's blocks yet, which may be behind chunks that vLLM's own cache had."""
        self._refuse(request, reason)
        state.release()
        del self.states[request.request_id]
        if behind_chunks:
            # Blocks behind chunks are nobody else's.
            self.behind_chunks.add(request.request_id)
            _salt(request, f"kvcache-mixed-{next(self.numbers)}")
        else:
            _salt(request, state.salt)

    # Missing parts are computed.

    # Decision: docs/decisions/vllm.md#what-is-missing-is-encoded-by-requests-of-its-own
    def _encode(
        self,
        request: Request,
        state: State,
        prefix: list[int],
        own: list[int],
        missing: list[tuple[int, ChunkReservation]],
    ) -> str:
        from vllm import SamplingParams
        from vllm.v1.request import Request as EngineRequest

        name = f"{ENCODE}{next(self.numbers)}"
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        encode = EngineRequest(
            request_id=name,
            prompt_token_ids=[*prefix, *own],
            sampling_params=params,
            pooling_params=None,
            client_index=request.client_index,
            lora_request=request.lora_request,
            cache_salt=state.salt,
            priority=request.priority,
            block_hasher=request._block_hasher,
        )
        self.encodes[name] = Encode(name, len(prefix), len(prefix) + len(own), missing)
        self.new_encodes.append(encode)
        return name

    def _submit(self) -> None:
        encodes, self.new_encodes = self.new_encodes, []
        for encode in encodes:
            self.host.add_request(encode)

    def saved(self, counts: dict[str, int]) -> None:
        """Takes note of rows that are in the arenas of workers."""
        for name, count in counts.items():
            if name not in self.unsaved:
                continue
            self.unsaved[name] += count
            if self.unsaved[name] < self.ranks:
                continue
            del self.unsaved[name]
            if name not in self.encodes:
                self.tier.stored(name)
                continue
            for _, reservation in self.encodes.pop(name).waiting:
                reservation.store().release()

    def not_saved(self, names: set[str]) -> None:
        """Gives up rows that a worker could not copy out: requests that wait for them are answered without chunks."""
        for name in names:
            if self.unsaved.pop(name, None) is None:
                continue
            if name not in self.encodes:
                self.tier.lost(name)
                continue
            for _, reservation in self.encodes.pop(name).waiting:
                reservation.abandon()
            for request_id, state in list(self.states.items()):
                if any(name in waiters for waiters in state.waiters.values()):
                    reason = "a chunk could not be copied to host memory: the log of the worker says why"
                    self._go_without(self.host.requests[request_id], state, reason)

    def not_loaded(self, names: set[str]) -> None:
        """Lets requests go on whose rows could not be copied in: vLLM computes them."""
        for name in names:
            state, request = self.states.get(name), self.host.requests.get(name)
            if request is None:
                continue
            if state is not None:
                # They are known by the salt of chunks, and vLLM computes something else into them.
                (block_ids,) = self.host.kv_cache_manager.get_block_ids(name)
                self.host.kv_cache_manager.evict_blocks(set(block_ids))
                reason = "the chunks could not be copied: the log of the worker says why"
                self._go_without(request, state, reason, behind_chunks=True)
            elif self.tier is not None:
                self.tier.bar(name)

    def received(self, names: set[str]) -> None:
        """Takes note of copies beside steps that have ended."""
        for name in names:
            self.receiving.discard(name)
            has_ended, state = name in self.ended, self.ended.pop(name, None)
            if state is not None:
                state.release()
            if self.tier is not None:
                self.tier.let_go(name)
                if has_ended:
                    self.tier.finished(name)

    # The host schedules.

    def matched_tokens(self, request: Request, num_computed: int) -> tuple[int | None, bool]:
        state = self.states.get(request.request_id)
        if state is None:
            return self._prefix_matched(request, num_computed)
        if len(state.holds) <= len(state.plan.chunks):
            self._acquire(request, state, num_computed)
            if request.request_id not in self.states:
                return self._prefix_matched(request, num_computed)
            if len(state.holds) <= len(state.plan.chunks):
                return None, False
        tokens = state.plan.question_start - num_computed
        # What is computed again needs the model, in the step in which the question runs.
        return (tokens, state.plan.recompute == "none") if tokens > 0 else (0, False)

    def _prefix_matched(self, request: Request, num_computed: int) -> tuple[int, bool]:
        """Looks an ordinary prompt up."""
        if self.tier is None or not self._is_plain(request):
            return 0, False
        tokens = self.tier.matched(request, num_computed)
        return tokens, tokens > 0

    def _is_plain(self, request: Request) -> bool:
        """Tells whether the bytes of a request's blocks follow from its tokens alone, under ordinary attention."""
        name = request.request_id
        of_tokens = request.prompt_token_ids is not None and request.prompt_embeds is None
        of_text = of_tokens and not request.mm_features and request.pooling_params is None
        of_chunks = name in self.states or name in self.behind_chunks or name.startswith(ENCODE)
        return of_text and not of_chunks

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external: int) -> None:
        name = request.request_id
        state = self.states.get(name)
        if num_external == 0:
            if self.tier is not None:
                self.tier.let_go(name)
            return
        (block_ids,) = blocks.get_block_ids()
        size = self.shape.engine_block_size

        def slot(token: int) -> int:
            block = block_ids[token // size]
            # Block 0 stands for one that a window has let go of.
            return block * size + token % size if block != 0 else -1

        if state is None:
            first, own = self.tier.found(name)
            rows = [(own, [slot(token) for token in range(first, first + num_external)], 0)]
            written = block_ids[first // size : (first + num_external) // size]
            self.loads.append(Load(name, rows, written, of_prefix=True))
            self.receiving.add(name)
            return
        end = state.plan.question_start
        first = end - num_external

        rows = []
        for number, part in enumerate(state.parts()):
            start = part.start
            for hold in state.holds[number]:
                own = hold.slots
                # The stored position of a piece is that of its first token.
                skip = max(0, first - start)
                if skip < len(own):
                    tokens = range(start + skip, start + len(own))
                    rows.append((own[skip:], [slot(token) for token in tokens], start - hold.stored_start))
                start += len(own)
        written = block_ids[first // size : -(-end // size)]
        again = self._again(request, state.plan, first, block_ids)
        at_once = state.plan.recompute != "none"
        self.loads.append(Load(name, rows, written, at_once, again))
        if not at_once:
            self.receiving.add(name)

    def _again(self, request: Request, plan: ChunkPlan, first: int, block_ids: list[int]) -> Again | None:
        """Returns the tokens that are computed again of a request whose tokens before ``first`` are in vLLM's own cache."""
        chosen = plan.chosen_tokens()
        parts = plan.apart() if chosen > 0 else plan.linked()
        if not any(part.end > first for part in parts):
            return None
        held = len(block_ids) * self.shape.engine_block_size
        return Again(
            tokens=list(request.prompt_token_ids[:held]),
            table=list(block_ids),
            runs=[(part.start, part.end) for part in parts],
            first=first,
            chosen=chosen if chosen > 0 else None,
            question_start=plan.question_start,
            key=hashlib.sha256(json.dumps([request.cache_salt, list(request.prompt_token_ids)]).encode()).digest(),
        )

    def orders(self, output: SchedulerOutput) -> tuple[list[Load], list[Save]]:
        """Returns what the workers copy in this step."""
        self._submit()
        loads, self.loads = self.loads, []
        saves = []
        for name, count in output.num_scheduled_tokens.items():
            encode = self.encodes.get(name)
            if encode is not None:
                if not encode.scheduled:
                    saves += self._saves_of_encode(encode, count)
            elif self.tier is not None:
                saves += self._saves_of_prefix(name, count)
        return loads, saves

    def _saves_of_encode(self, encode: Encode, count: int) -> list[Save]:
        """Saves the rows of an encode once its last tokens are computed, in this step."""
        name = encode.request_id
        if self.host.requests[name].num_computed_tokens + count < encode.prompt_tokens:
            return []
        (block_ids,) = self.host.kv_cache_manager.get_block_ids(name)
        size = self.shape.engine_block_size
        to, slots = [], []
        for start, reservation in encode.waiting:
            to += reservation.slots
            for token in range(encode.prefix + start, encode.prefix + start + len(reservation.slots)):
                slots.append(block_ids[token // size] * size + token % size)
        encode.scheduled = True
        self.unsaved[name] = 0
        return [Save(name, to, slots)]

    def _saves_of_prefix(self, name: str, count: int) -> list[Save]:
        """Saves the blocks of an ordinary request that are full behind this step, if the tier lacks them."""
        request = self.host.requests[name]
        if not self._is_plain(request):
            return []
        new = self.tier.new_blocks(request, request.num_computed_tokens + count)
        if not new:
            return []
        (block_ids,) = self.host.kv_cache_manager.get_block_ids(name)
        size, saves = self.shape.engine_block_size, []
        for at, save, block in new:
            if block_ids[at] == 0:
                # A window has let go of it.
                self.tier.lost(save)
                continue
            self.unsaved[save] = 0
            to, slots = ([start * size + token for token in range(size)] for start in (block, block_ids[at]))
            saves.append(Save(save, to, slots, of_prefix=True))
        return saves

    # A request ends.

    def finished(self, request: Request) -> dict[str, Any] | None:
        name = request.request_id
        encode = self.encodes.get(name)
        if encode is not None:
            if not encode.scheduled:
                # It was ended from outside: whoever waits for it asks again.
                for _, reservation in encode.waiting:
                    reservation.abandon()
                del self.encodes[name]
            return None
        self.behind_chunks.discard(name)
        state = self.states.pop(name, None)
        if name in self.receiving:
            # The copy still reads what is held.
            self.ended[name] = state
        else:
            if state is not None:
                state.release()
            if self.tier is not None:
                self.tier.finished(name)
        reason = self.refused.pop(name, None)
        if reason is not None:
            return {"chunk_error": reason}
        if state is None:
            return None
        return {"chunk_tokens_reused": state.reused, "chunk_tokens_computed": state.computed}

    def reset(self) -> bool:
        """Forgets everything that nobody holds, and returns whether nothing was held."""
        self.cache.clear_cache()
        if self.tier is not None:
            self.tier.reset()
        return not (self.states or self.encodes or self.unsaved)

    def stats(self) -> ChunkStats | None:
        """Returns what was counted since the last call."""
        chunks = self.cache.get_metrics()
        totals = {
            "chunk_tokens_reused": chunks.tokens_reused,
            "chunk_tokens_computed": chunks.tokens_computed,
            "chunk_evictions": chunks.evictions,
            "chunk_requests_refused": self.num_refused,
        }
        gauges = {"chunk_memory_usage_perc": chunks.memory_utilization}
        if self.tier is not None:
            counts = self.tier.pool.counts()
            totals |= {
                "prefix_tokens_found": self.tier.tokens_found,
                "prefix_blocks_saved": self.tier.blocks_saved,
                "prefix_blocks_evicted": counts["evictions"],
            }
            gauges["prefix_memory_usage_perc"] = 1 - counts["free"] / counts["total"]
        return self.counting.report(totals, gauges)


def _no_recompute(vllm_config: VllmConfig, shape: Geometry) -> str | None:
    """Says why tokens cannot be computed again on this host, or nothing."""
    if shape.sliding:
        return "layers with a sliding window let go of what recomputed tokens would see"
    if vllm_config.lora_config is not None:
        return "a host with adapters computes tokens again without them"
    if vllm_config.device_config.device_type != "cpu":
        return "tokens are computed again on CPUs only"
    return None


# Decision: docs/decisions/vllm.md#a-request-with-chunks-changes-its-own-salt
def _salt(request: Request, salt: str | None) -> None:
    """Gives a request that has no blocks yet another salt."""
    request.cache_salt = salt
    request.block_hashes.clear()
    request.update_block_hashes()
