"""Tracks the chunks of requests: which are stored, which request computes the missing ones, and which rows
the workers copy.

```text
  begin ── names chunks? ── no ──► an ordinary request
    │ yes
    ▼
  parts are acquired ── held ──────────────────────────────► matched: n tokens ── loaded ──► let go
    │ missing: an encode, a request of its own          ▲
    │ another request's encode, or no room: wait        │ asked again in a later step
    ▼                                                   │
  matched: None (parked) ── encode computed ── rows saved ── stored and handed over
```

With a disk, an encode first asks it for the missing pieces, and computes what the disk lacks.

A request with chunks gets its own salt, which keeps vLLM's prefix cache from giving its blocks to another
kind of request. ``pieces.py`` bounds every wait. A request that waits in vain goes on without chunks.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from kvcache import ChunkCacheConfig, ChunkCacheManager

from .disk.asks import Asks
from .host import Geometry, Roots, Settings
from .missed import Known, combined
from .names import Names
from .orders import Again, Load, Record, Rows, Save, Tables, run_of, runs_of, writable
from .pieces import Found, Part, Pieces
from .prompt import ChunkPlan, ChunkRequestError, plan_of
from .requests import ChunkState, Encode, Saving, Tracked, Work, set_salt

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

logger = init_logger("vllm.kvcache")

LOSSES = 2
"""The number of encodes that a request sees given up before it goes on without chunks."""


class Chunks:
    """The requests with chunks, and the encodes of missing chunks."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        shape: Geometry,
        settings: Settings,
        roots: Roots,
        names: Names,
        host: Any,
        requests: dict[str, Tracked],
        asks: Asks | None = None,
    ) -> None:
        self.asks = asks
        """The questions to the disk, or None without one."""
        self.asked: list[Encode] = []
        """Encodes whose pieces the disk is about to be asked for."""
        self.known = Known()
        self.host, self.shape, self.roots, self.names, self.requests = host, shape, roots, names, requests
        if shape.no_chunks is not None:
            logger.warning(
                "only the tier for ordinary prompts is used, and host_memory is not allocated, because keys cannot be moved: %s",
                shape.no_chunks,
            )
        self.max_model_len = vllm_config.model_config.max_model_len
        self.vocab_size = vllm_config.model_config.hf_text_config.vocab_size
        # With a sliding window, a chunk's rows depend on where it ends, so one chunk's piece must not be
        # found in another.
        self.piece_tokens = self.max_model_len if shape.sliding else settings.max_chunk_tokens
        if shape.sliding and shape.no_chunks is None and settings.max_chunk_tokens != Settings.max_chunk_tokens:
            logger.warning(
                "max_chunk_tokens is ignored: in a model with a sliding window, a chunk is one piece; remove the setting, or start "
                "vLLM with --disable-hybrid-kv-cache-manager if only some layers have a window"
            )
        self.no_recompute = no_recompute(vllm_config, shape)
        # A cache of no blocks does not exist. Requests with chunks are refused before they reach this one.
        blocks = max(1, shape.num_blocks)
        config = ChunkCacheConfig(
            max_chunks=min(settings.max_chunks, blocks),
            max_chunk_tokens=self.piece_tokens,
            cache_policy=settings.cache_policy,
        )
        self.pieces = Pieces(config, blocks, shape.block_size)
        self.new_encodes: list[Request] = []
        self.answered = {"chunk_tokens_reused": 0, "chunk_tokens_computed": 0, "chunk_requests_refused": 0}
        """The sums of what the answers of requests with chunks say."""

    @property
    def cache(self) -> ChunkCacheManager:
        return self.pieces.cache

    # A request arrives.

    def begin(self, tracked: Tracked) -> None:
        """Looks up the chunks that a new request names, and submits encodes for the missing ones."""
        request = tracked.request
        try:
            plan = self._plan(request)
        except ChunkRequestError as error:
            self._refuse(tracked, str(error))
            return
        if plan is None:
            return
        state = tracked.chunks = ChunkState(plan, request.cache_salt, self.roots.of(request))
        set_salt(request, self._salt(request, state))
        _, state.first, _ = self.host.kv_cache_manager.get_computed_blocks(request)
        if not state.is_held():
            self._acquire(tracked, state)
        self.submit()

    def _plan(self, request: Request) -> ChunkPlan | None:
        plan = plan_of(request.kv_transfer_params, request.prompt_token_ids or ())
        if plan is None:
            return None
        if self.shape.no_chunks is not None:
            raise ChunkRequestError(f"chunks are not supported for this model, whose keys cannot be moved: {self.shape.no_chunks}")
        if request.pooling_params is not None or request.mm_features or request.prompt_embeds is not None:
            raise ChunkRequestError("chunks are supported only for text generated from text")
        if request.skip_reading_prefix_cache:
            raise ChunkRequestError("log-probabilities of the prompt need ordinary attention")
        unknown = [token for token in plan.decoys if token >= self.vocab_size]
        if unknown:
            raise ChunkRequestError(f"chunk_decoys contains token {unknown[0]}, but the vocabulary has {self.vocab_size} tokens")
        longest = len(plan.before(request.prompt_token_ids)) + max(chunk.tokens for chunk in plan.chunks)
        if longest >= self.max_model_len:
            raise ChunkRequestError(
                f"a chunk with everything that it sees has {longest} tokens, but the model takes fewer than {self.max_model_len}; "
                "use fewer or shorter chunk_decoys"
            )
        if plan.recompute != "none" and self.no_recompute is not None:
            raise ChunkRequestError(f"{self.no_recompute}; use chunk_recompute none")
        tokens, most = len(request.prompt_token_ids), self.shape.question_tokens
        if plan.chosen_tokens() > 0 and tokens > most:
            raise ChunkRequestError(
                f"a question chooses in prompts of at most {most} tokens here, and this one has {tokens}; "
                "raise question_memory, or use chunk_recompute link:K"
            )
        return plan

    def _refuse(self, tracked: Tracked, reason: str) -> None:
        logger.warning("request %s is answered without chunks: %s", tracked.request.request_id, reason)
        tracked.refused = reason

    def go_without(self, tracked: Tracked, reason: str, *, after_chunks: bool) -> None:
        """Lets vLLM compute the rest of the request. ``after_chunks`` is true if some of its blocks hold
        chunks."""
        self._refuse(tracked, reason)
        state, tracked.chunks = tracked.chunks, None
        self.pieces.let_go(state)
        if after_chunks:
            # Blocks computed after chunks cannot be used for any other request.
            tracked.is_mixed = True
            set_salt(tracked.request, self.names.fresh_salt())
        else:
            set_salt(tracked.request, state.salt)

    # Decision: docs/decisions/vllm.md#a-request-with-chunks-gets-its-own-salt
    def _salt(self, request: Request, state: ChunkState) -> str:
        """Returns a salt for the prompt's cuts and modes, which affect keys and values just as its tokens do.
        """
        plan = state.plan
        ends = [one.end for one in (plan.system, *plan.chunks)]
        # The question chooses which keys and values are recomputed, so they are only valid for this question.
        question = list(request.prompt_token_ids[plan.question_start :]) if plan.chosen_tokens() > 0 else []
        return self.names.salt("chunks", state.salt, plan.mode, plan.recompute, ends, question, plan.decoys)

    # Parts are looked up.

    def _acquire(self, tracked: Tracked, state: ChunkState) -> None:
        """Holds the parts of a request, starts what they wait for, or lets the request go on without chunks."""
        request = tracked.request

        def part(number: int) -> Part:
            own = state.plan.parts[number]
            # The system prompt is a part too, computed alone.
            is_chunk = own is not state.plan.system
            before = state.plan.before(request.prompt_token_ids) if is_chunk else []
            mode = state.plan.mode if is_chunk else "alone"
            return mode, before, list(request.prompt_token_ids[own.start : own.end]), len(before)

        def encode(number: int, missing: list[Work]) -> Encode:
            return self._encode(request, state, number, part(number), missing)

        found = self.pieces.acquire(state, part, encode)
        self._ask()
        if found == Found.NO_ROOM:
            needed, size = self.pieces.blocks_of(state, part), self.shape.block_size
            self.go_without(tracked, self._no_room(needed * size), after_chunks=False)

    def _no_room(self, needed: int) -> str:
        held = self.shape.num_blocks * self.shape.block_size
        if needed > held:
            return f"the chunks take {needed} tokens of host memory, which holds {held}; raise host_memory, or send fewer chunks"
        return f"other requests use the host memory, which holds {held} tokens; raise host_memory, or send fewer requests at once"

    # Missing parts are computed.

    # Decision: docs/decisions/vllm.md#missing-chunks-are-encoded-by-separate-requests
    def _encode(self, request: Request, state: ChunkState, number: int, part: Part, missing: list[Work]) -> Encode:
        """Creates the request that computes the missing pieces of a part. If there is a disk, it is asked first."""
        from vllm import SamplingParams
        from vllm.v1.request import Request as EngineRequest

        _, before, own, _ = part
        name = self.names.request_id("encode")
        computing = EngineRequest(
            request_id=name,
            prompt_token_ids=[*before, *own],
            sampling_params=SamplingParams(max_tokens=1, temperature=0.0, detokenize=False),
            pooling_params=None,
            client_index=request.client_index,
            lora_request=request.lora_request,
            cache_salt=state.salt,
            priority=request.priority,
            block_hasher=request._block_hasher,
        )
        encode = Encode(name, self, len(before), len(before) + len(own), missing, state, number, computing)
        for work in missing:
            work.tokens = own[work.start : work.start + work.reservation.num_tokens]
            encode.reason = encode.reason or self.known.why_absent(work.key, work.tokens, is_public=state.is_public)
        if self.asks is None:
            self._compute(encode)
        else:
            self.asked.append(encode)
        return encode

    def _compute(self, encode: Encode) -> None:
        """Has vLLM compute the missing pieces of a part."""
        self.requests[encode.name] = Tracked(encode.request, encode=encode)
        self.new_encodes.append(encode.request)

    # Decision: docs/decisions/vllm.md#the-disk-is-asked-before-a-chunk-is-computed
    def _ask(self) -> None:
        """Asks the disk for the missing pieces of a request, in the order of its parts."""
        encodes, self.asked = self.asked, []
        if self.asks is None or not encodes:
            return
        pieces = [(encode, work) for encode in encodes for work in encode.pieces]
        for encode in encodes:
            encode.unanswered = len(encode.pieces)
        records = [self._record(encode, work) for encode, work in pieces]
        self.asks.ask(records, lambda number, reason: self._answered(*pieces[number], reason))

    def _record(self, encode: Encode, work: Work) -> Record:
        piece = work.reservation
        return Record(work.key, work.tokens, piece.stored_start, piece.block_ids, is_public=encode.state.is_public)

    def _answered(self, encode: Encode, work: Work, reason: str | None) -> None:
        """Called when a piece has come from the disk, or cannot come from there."""
        if encode.is_over:
            return
        encode.unanswered -= 1
        if reason is None:
            self.known.stored(work.key, work.tokens, is_public=encode.state.is_public)
            self.pieces.fetched(encode, work)
        elif encode.reason is not None:
            encode.reason = combined(encode.reason, reason)
        if encode.unanswered > 0 or encode.is_over:
            return
        if any(work.waiters for work in encode.pieces):
            self._compute(encode)
        else:
            # The requests that needed it have ended.
            self.pieces.abandon(encode)

    def records(self, encode: Encode) -> list[Record]:
        """Returns the records of the rows that an encode saves."""
        return [self._record(encode, work) for work in encode.pieces]

    def submit(self) -> None:
        """Submits the encodes to vLLM's scheduler, which then calls the connector for each of them."""
        encodes, self.new_encodes = self.new_encodes, []
        for encode in encodes:
            self.host.add_request(encode)

    def saves(self, tracked: Tracked, count: int) -> list[Saving]:
        """Returns the rows of an encode, if its last tokens are among the ``count`` tokens computed in this
        step.
        """
        encode, request = tracked.encode, tracked.request
        if encode.order is not None or request.num_computed_tokens + count < encode.prompt_tokens:
            return []
        tables = self.host.kv_cache_manager.get_block_ids(request.request_id)
        rows = []
        for work in encode.pieces:
            piece, first = work.reservation, encode.prefix + work.start
            # A window that has passed a block at the end of its chunk passes it wherever the chunk is. Whatever is
            # saved of it is not read.
            sources = runs_of(tables, self.shape.engine_block_size, first, piece.num_tokens)
            rows.append((run_of(piece.block_ids, self.shape.block_size, 0, piece.num_tokens), sources))
        encode.order = Save(encode.name, rows)
        return [encode]

    def stored(self, encode: Encode) -> None:
        for work in encode.pieces:
            self.known.stored(work.key, work.tokens, is_public=encode.state.is_public)
        if not encode.state.is_served and encode.reason is not None:
            encode.state.missed.setdefault(encode.number, encode.reason)
        self.pieces.stored(encode)

    def lost(self, encode: Encode) -> None:
        """Drops an encode that a worker could not copy out. Requests that wait for it are answered without
        chunks."""
        reason = "a chunk could not be copied to host memory: see the log of the worker"
        self._fail(self.pieces.abandon(encode), reason)

    def aborted(self, encode: Encode) -> None:
        """Drops an encode that vLLM has aborted. Requests that wait for it ask again, but not for ever."""
        waited = self.pieces.abandon(encode)
        for state in waited:
            state.losses += 1
        reason = f"the requests that compute its chunks were aborted {LOSSES} times"
        self._fail({state for state in waited if state.losses >= LOSSES}, reason)

    def _fail(self, states: set[ChunkState], reason: str) -> None:
        for tracked in self.requests.values():
            if tracked.chunks in states:
                self.go_without(tracked, reason, after_chunks=False)

    def let_go(self, tracked: Tracked) -> None:
        """Ends the holds of a request whose rows are in vLLM's blocks, or that has ended."""
        if tracked.chunks is not None:
            self.pieces.let_go(tracked.chunks)

    def ended(self, tracked: Tracked, *, was_answered: bool) -> dict[str, Any] | None:
        """Returns what the answer of a request says about its chunks; None if it named none or vLLM has not run it.
        Counts the request if it was answered."""
        if tracked.refused is not None:
            self.answered["chunk_requests_refused"] += was_answered
            return {"chunk_error": tracked.refused}
        if tracked.chunks is None or not tracked.chunks.is_served:
            return None
        counts, missed = tracked.chunks.counts(), tracked.chunks.missed
        if was_answered:
            for name, count in counts.items():
                self.answered[name] += count
        return {**counts, "chunk_missed": {str(number): missed[number] for number in sorted(missed)}} if missed else counts

    def reset(self) -> list[str]:
        """Forgets all chunks. Returns the IDs of the encodes that were under way, which vLLM must abort."""
        self.new_encodes.clear()
        self.known.reset()
        return [encode.name for encode in self.pieces.reset()]

    # The host schedules.

    def matched(self, tracked: Tracked, num_computed: int) -> tuple[int | None, bool] | None:
        """Returns the answer to vLLM for a request with chunks; None for a request without chunks."""
        state = tracked.chunks
        if state is None:
            return None
        state.first = num_computed
        if not state.is_held():
            self._acquire(tracked, state)
            # A request that goes on without chunks has another salt now, under which vLLM looks it up again.
            if tracked.chunks is None or not state.is_held():
                return None, False
        tokens = state.plan.question_start - num_computed
        # Recomputing needs the model, so it happens in the step that runs the question.
        return (tokens, state.plan.recompute == "none") if tokens > 0 else (0, False)

    def load(self, tracked: Tracked, tables: Tables, count: int) -> Load:
        """Returns the last ``count`` tokens before the question."""
        request, state, size = tracked.request, tracked.chunks, self.shape.engine_block_size
        end = state.plan.question_start
        first = end - count
        rows = self._rows(state, first, writable(tables))
        if self.asks is not None:
            self.asks.use([hold.chunk_hash.hash_bytes for _, hold in state.held()], of_prefix=False)
        if state.plan.recompute == "none":
            return Load(request.request_id, rows, [])
        # A model whose tokens can be recomputed has one table.
        (block_ids,) = tables
        again = self._again(request, state, first, block_ids)
        return Load(request.request_id, rows, block_ids[first // size : -(-end // size)], at_once=True, again=again)

    def _rows(self, state: ChunkState, first: int, tables: Tables) -> list[Rows]:
        """Returns the rows of a request's parts from token ``first`` on, to be written to the blocks in ``tables``."""
        rows = []
        for start, hold in state.held():
            skipped = max(0, first - start)
            left = hold.num_tokens - skipped
            if left > 0:
                source = run_of(hold.block_ids, self.shape.block_size, skipped, left)
                targets = runs_of(tables, self.shape.engine_block_size, start + skipped, left)
                # A piece is stored under the position of its first token.
                rows.append((source, targets, start - hold.stored_start))
        return rows

    # Decision: docs/decisions/vllm.md#a-question-chooses-before-its-request-has-blocks
    def _again(self, request: Request, state: ChunkState, first: int, block_ids: list[int]) -> Again | None:
        """Returns the tokens to recompute. The request's tokens before ``first`` are in vLLM's own cache.
        """
        plan = state.plan
        chosen = plan.chosen_tokens()
        parts = plan.apart() if chosen > 0 else plan.linked()
        if not any(part.end > first for part in parts):
            return None
        tokens = list(request.prompt_token_ids)
        blocks = list(range(-(-len(tokens) // self.shape.engine_block_size)))
        return Again(
            tokens=tokens,
            table=list(block_ids),
            runs=[(part.start, part.end) for part in parts],
            first=first,
            chosen=chosen if chosen > 0 else None,
            question_start=plan.question_start,
            key=hashlib.sha256(json.dumps([request.cache_salt, tokens]).encode()).digest(),
            rows=[(source, target, turn) for source, (target,), turn in self._rows(state, 0, [blocks])] if chosen > 0 else [],
        )

    def counts(self) -> tuple[dict[str, int], dict[str, float]]:
        """Returns the cache's counters and gauges."""
        chunks = self.cache.get_metrics()
        totals = {
            **self.answered,
            "chunk_evictions": chunks.evictions,
        }
        return totals, {"chunk_memory_usage_perc": chunks.memory_utilization}


def no_recompute(vllm_config: VllmConfig, shape: Geometry) -> str | None:
    """Returns the reason that tokens cannot be recomputed on this host, or None if they
    can."""
    if shape.sliding:
        return "layers with a sliding window have freed blocks that recomputed tokens would see"
    if len(shape.groups) > 1:
        # Layers with the same attention, of which there are too many for one table.
        return "tokens are recomputed only if all layers share one table of blocks"
    if vllm_config.lora_config is not None:
        return "a host with adapters recomputes tokens without them"
    if vllm_config.device_config.device_type != "cpu":
        return "tokens are recomputed on CPUs only"
    return None
