"""Tracks the chunks of requests: which are stored, which request computes the missing ones, and which rows
the workers copy.

```text
  begin ── names chunks? ── no ──► an ordinary request
    │ yes
    ▼
  parts are acquired ── held ──────────────────────────────► matched: n tokens, loaded asynchronously
    │ missing: an encode, a request of its own          ▲
    │ another request's encode: wait                    │ asked again in a later step
    ▼                                                   │
  matched: None (parked) ── encode computed ── rows saved ── stored
```

A request with chunks gets its own salt, which keeps vLLM's prefix cache from giving its blocks to another
kind of request.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from kvcache import ChunkCacheConfig, ChunkCacheManager, ChunkReservation, ChunkWaiter, PieceHold

from .host import Geometry, Roots, Settings
from .orders import Again, Load, Save, run_of
from .prompt import ChunkPlan, ChunkRequestError, Part, plan_of
from .requests import ChunkState, Encode, Saving, Tracked

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

logger = init_logger("vllm.kvcache")

ENCODE = "kvcache-encode-"


class Chunks:
    """The chunk cache, and the requests that wait for it."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        shape: Geometry,
        settings: Settings,
        roots: Roots,
        host: Any,
        requests: dict[str, Tracked],
    ) -> None:
        self.host, self.shape, self.roots, self.requests = host, shape, roots, requests
        self.max_model_len = vllm_config.model_config.max_model_len
        self.vocab_size = vllm_config.model_config.hf_text_config.vocab_size
        # With a sliding window, a chunk's rows depend on where it ends, so one chunk's piece must not be
        # found in another.
        self.piece_tokens = self.max_model_len if shape.sliding else settings.max_chunk_tokens
        self.no_recompute = no_recompute(vllm_config, shape)
        config = ChunkCacheConfig(
            max_chunks=min(settings.max_chunks, shape.num_blocks),
            max_chunk_tokens=self.piece_tokens,
            cache_policy=settings.cache_policy,
        )
        self.cache = ChunkCacheManager(config, shape.num_blocks, shape.block_size)
        self.new_encodes: list[Request] = []
        self.numbers = itertools.count()
        self.num_refused = 0

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
        _salt(request, _mode_salt(request, state))
        self._acquire(tracked, state, 0)
        self.submit()

    def _plan(self, request: Request) -> ChunkPlan | None:
        plan = plan_of(request.kv_transfer_params, request.prompt_token_ids or ())
        if plan is None:
            return None
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
        return plan

    def _refuse(self, tracked: Tracked, reason: str) -> None:
        logger.warning("request %s is answered without chunks: %s", tracked.request.request_id, reason)
        tracked.refused = reason
        self.num_refused += 1

    def go_without(self, tracked: Tracked, reason: str, *, after_chunks: bool) -> None:
        """Lets vLLM compute the rest of the request. ``after_chunks`` is true if some of its blocks hold
        chunks."""
        self._refuse(tracked, reason)
        state, tracked.chunks = tracked.chunks, None
        state.release()
        if after_chunks:
            # Blocks computed after chunks cannot be used for any other request.
            tracked.is_mixed = True
            _salt(tracked.request, f"kvcache-mixed-{next(self.numbers)}")
        else:
            _salt(tracked.request, state.salt)

    # Parts are looked up.

    def _acquire(self, tracked: Tracked, state: ChunkState, num_computed: int) -> None:
        for number, part in enumerate(state.parts()):
            if number in state.holds or any(not waiter.is_over for waiter in state.waiters.get(number, ())):
                continue
            if not self._acquire_part(tracked.request, state, number, part):
                reason = "the memory for chunks is full; raise host_memory"
                self.go_without(tracked, reason, after_chunks=num_computed > 0)
                return

    def _acquire_part(self, request: Request, state: ChunkState, number: int, part: Part) -> bool:
        """Holds a part, or starts the work that the part has to wait for. Returns False if there is no
        room for it.
        """
        tokens = request.prompt_token_ids
        # The system prompt is a part too, computed alone.
        mode, before = (state.plan.mode, state.plan.before(tokens)) if number > 0 else ("alone", [])
        own = tokens[part.start : part.end]
        outcomes = self.cache.acquire(state.root, mode, before, own, len(before))
        is_first_try = not state.waiters.get(number)
        holds, missing, waiters, at = [], [], [], 0
        for piece in outcomes:
            if isinstance(piece, PieceHold):
                holds.append(piece)
                at += piece.num_tokens
            elif isinstance(piece, ChunkReservation):
                missing.append((at, piece))
                at += piece.num_tokens
            elif isinstance(piece, ChunkWaiter):
                waiters.append(piece)
                # All pieces have the same length, except the last.
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
            if is_first_try:
                state.reused += part.tokens
            return True
        for hold in holds:
            hold.release()
        if missing:
            state.computed += part.tokens
            waiters.append(self._encode(request, state, before, own, missing))
        state.waiters[number] = waiters
        return True

    # Missing parts are computed.

    # Decision: docs/decisions/vllm.md#missing-chunks-are-encoded-by-separate-requests
    def _encode(
        self,
        request: Request,
        state: ChunkState,
        prefix: list[int],
        own: list[int],
        missing: list[tuple[int, ChunkReservation]],
    ) -> Encode:
        from vllm import SamplingParams
        from vllm.v1.request import Request as EngineRequest

        name = f"{ENCODE}{next(self.numbers)}"
        computing = EngineRequest(
            request_id=name,
            prompt_token_ids=[*prefix, *own],
            sampling_params=SamplingParams(max_tokens=1, temperature=0.0, detokenize=False),
            pooling_params=None,
            client_index=request.client_index,
            lora_request=request.lora_request,
            cache_salt=state.salt,
            priority=request.priority,
            block_hasher=request._block_hasher,
        )
        encode = Encode(name, self, len(prefix), len(prefix) + len(own), missing)
        self.requests[name] = Tracked(computing, encode=encode)
        self.new_encodes.append(computing)
        return encode

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
        (block_ids,) = self.host.kv_cache_manager.get_block_ids(request.request_id)
        rows = []
        for start, piece in encode.pieces:
            source = run_of(block_ids, self.shape.engine_block_size, encode.prefix + start, piece.num_tokens)
            rows.append((run_of(piece.block_ids, self.shape.block_size, 0, piece.num_tokens), source))
        encode.order = Save(encode.name, rows)
        return [encode]

    def stored(self, encode: Encode) -> None:
        for _, piece in encode.pieces:
            piece.store().release()
        encode.is_over = True

    def lost(self, encode: Encode) -> None:
        """Drops an encode that a worker could not copy out. Requests that wait for it are answered without
        chunks."""
        self.abandon(encode)
        reason = "a chunk could not be copied to host memory: see the log of the worker"
        for tracked in self.requests.values():
            state = tracked.chunks
            if state is not None and any(one is encode for waiters in state.waiters.values() for one in waiters):
                self.go_without(tracked, reason, after_chunks=False)

    def abandon(self, encode: Encode) -> None:
        """Frees an encode's memory. Requests that wait for it will ask again."""
        for _, piece in encode.pieces:
            piece.abandon()
        encode.is_over = True

    # The host schedules.

    def matched(self, tracked: Tracked, num_computed: int) -> tuple[int | None, bool] | None:
        """Returns the answer to vLLM for a request with chunks; None for a request without chunks."""
        state = tracked.chunks
        if state is not None and not state.is_held():
            self._acquire(tracked, state, num_computed)
            if tracked.chunks is not None and not state.is_held():
                return None, False
        if tracked.chunks is None:
            return None
        tokens = state.plan.question_start - num_computed
        # Recomputing needs the model, so it happens in the step that runs the question.
        return (tokens, state.plan.recompute == "none") if tokens > 0 else (0, False)

    def load(self, tracked: Tracked, block_ids: list[int], count: int) -> Load:
        """Returns the last ``count`` tokens before the question."""
        request, state, size = tracked.request, tracked.chunks, self.shape.engine_block_size
        end = state.plan.question_start
        first = end - count
        # Block 0 stands for a block that vLLM freed because a window has passed it.
        table, rows = [block or -1 for block in block_ids], []
        for start, hold in state.pieces():
            skipped = max(0, first - start)
            left = hold.num_tokens - skipped
            if left > 0:
                source = run_of(hold.block_ids, self.shape.block_size, skipped, left)
                # A piece is stored under the position of its first token.
                rows.append((source, run_of(table, size, start + skipped, left), start - hold.stored_start))
        again = self._again(request, state.plan, first, block_ids)
        at_once = state.plan.recompute != "none"
        return Load(request.request_id, rows, block_ids[first // size : -(-end // size)], at_once, again)

    def _again(self, request: Request, plan: ChunkPlan, first: int, block_ids: list[int]) -> Again | None:
        """Returns the tokens to recompute. The request's tokens before ``first`` are in vLLM's own cache.
        """
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

    def counts(self) -> tuple[dict[str, int], dict[str, float]]:
        """Returns the cache's counters and gauges."""
        chunks = self.cache.get_metrics()
        totals = {
            "chunk_tokens_reused": chunks.tokens_reused,
            "chunk_tokens_computed": chunks.tokens_computed,
            "chunk_evictions": chunks.evictions,
            "chunk_requests_refused": self.num_refused,
        }
        return totals, {"chunk_memory_usage_perc": chunks.memory_utilization}


def no_recompute(vllm_config: VllmConfig, shape: Geometry) -> str | None:
    """Returns the reason that tokens cannot be recomputed on this host, or None if they
    can."""
    if shape.sliding:
        return "layers with a sliding window have freed blocks that recomputed tokens would see"
    if vllm_config.lora_config is not None:
        return "a host with adapters recomputes tokens without them"
    if vllm_config.device_config.device_type != "cpu":
        return "tokens are recomputed on CPUs only"
    return None


def _mode_salt(request: Request, state: ChunkState) -> str:
    """Returns a salt for the prompt's cuts and modes, which affect keys and values just as its tokens do.
    """
    plan = state.plan
    ends = [part.end for part in state.parts()]
    # The question chooses which keys and values are recomputed, so they are only valid for this question.
    question = list(request.prompt_token_ids[plan.question_start :]) if plan.chosen_tokens() > 0 else []
    what = json.dumps(["kvcache chunks v2", state.salt, plan.mode, plan.recompute, ends, question, *plan.decoys])
    return "kvcache:" + hashlib.sha256(what.encode()).hexdigest()


# Decision: docs/decisions/vllm.md#a-request-with-chunks-gets-its-own-salt
def _salt(request: Request, salt: str | None) -> None:
    """Changes the salt of a request that has no blocks yet."""
    request.cache_salt = salt
    request.block_hashes.clear()
    request.update_block_hashes()
