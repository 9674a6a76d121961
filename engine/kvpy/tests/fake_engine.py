"""An engine that drives a real connector as vLLM's scheduler and runner do, over the model of ``fake_model.py``.

The recordings in ``golden/vllm`` show single scenarios. This engine runs any number of requests under any
limits: few blocks, small steps, preemption, aborts, resets, late copies. It follows ``Scheduler`` of vLLM
0.32.0 in everything that a connector can observe. ``proof/vllm/check_pressure.py`` runs the same kinds of
requests in a real vLLM.

A sampled token is a hash of the values that the request's blocks contain, so a wrong row gives a wrong answer.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
from fake_blocks import SIZE, Blocks
from fake_model import FakeModel, FakeRecomputer, provide
from replay import Runner, configs
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.request import Request, RequestStatus

from kvcache import Ropes
from kvcache.vllm import ChunkConnector

VOCAB = 500
MODEL = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}
ROW = 2 * 32 * 4
"""The number of bytes that a token of a layer takes in host memory."""
FULL = (None,)
"""The windows of a model whose layers see everything: there is one group."""


def model_of(windows: Sequence[int | None]) -> tuple[dict[str, Any], list[list[str]]]:
    """Returns the configuration of a model with these windows, and the layers of each group. A model with one group has
    one layer. With several groups, all but the last one have two layers."""
    if len(windows) == 1:
        return MODEL, [["one"]]
    layers = [number % len(windows) for number in range(2 * len(windows) - 1)]
    groups = [[f"layer.{number}" for number, own in enumerate(layers) if own == group] for group in range(len(windows))]
    kinds = ["full_attention" if windows[group] is None else "sliding_attention" for group in layers]
    ropes = {kind: {"rope_theta": theta, "rope_type": "default"} for kind, theta in (("full_attention", 1e6), ("sliding_attention", 1e4))}
    several = {"model_type": "gemma3_text", "num_hidden_layers": len(layers), "layer_types": kinds, "rope_parameters": ropes}
    return {**MODEL, **several, "sliding_window": 32, "query_pre_attn_scalar": 32}, groups


def hasher(request: Request) -> list[bytes]:
    """Returns the hashes of a request's new blocks. As in vLLM, they cover the adapter's name and the salt."""
    done, tokens = len(request.block_hashes), request.all_token_ids
    lora = request.lora_request.lora_name if request.lora_request else None
    ends = range((done + 1) * SIZE, len(tokens) + 1, SIZE)
    return [hashlib.sha256(repr((lora, request.cache_salt, tokens[:end])).encode()).digest() for end in ends]


def spec_of(window: int | None) -> dict[str, Any]:
    """Returns what vLLM says of the blocks of a group."""
    kind = "FullAttentionSpec" if window is None else "SlidingWindowSpec"
    shape = {"dtype": "torch.float32", "num_kv_heads": 1, "head_size": 32, "block_size": SIZE}
    return {"kind": kind, "sliding_window": window, **shape}


class LateThreads:
    """Runs each copy a number of steps after it was submitted, so that rows which are reused too early are
    read too late."""

    def __init__(self, delay: Callable[[], int]) -> None:
        self.delay = delay
        self.copies: list[tuple[int, Future[None], Callable[..., None], tuple[Any, ...]]] = []

    def submit(self, work: Callable[..., None], *args: Any) -> Future[None]:
        future: Future[None] = Future()
        self.copies.append((self.delay(), future, work, args))
        return future

    def tick(self, *, at_once: bool) -> None:
        """Ends a step. ``at_once`` runs every copy."""
        left = []
        for steps, future, work, args in self.copies:
            if steps > 0 and not at_once:
                left.append((steps - 1, future, work, args))
                continue
            try:
                work(*args)
                future.set_result(None)
            except Exception as error:
                future.set_exception(error)
        self.copies = left

    def shutdown(self, wait: bool = True) -> None:
        self.tick(at_once=True)


class Engine(SchedulerInterface):
    """vLLM with the connector: requests are added, steps run, and answers come out."""

    def __init__(
        self,
        monkeypatch: Any,
        *,
        blocks: int = 512,
        step_tokens: int = 256,
        max_running: int = 64,
        delay: Callable[[], int] = lambda: 0,
        lora: Any = None,
        has_events: bool = False,
        positions: int = 512,
        windows: Sequence[int | None] = FULL,
        path: str = "small",
        unheard_of: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        model, groups = model_of(windows)
        model = {**model, "max_position_embeddings": positions}
        described = {
            "model": model,
            "max_model_len": positions,
            "extra_config": {"host_memory": 4096 * ROW * model["num_hidden_layers"], "block_size": SIZE, **settings},
            "groups": [{"layers": layers, "spec": spec_of(window)} for layers, window in zip(groups, windows)],
            "num_blocks": blocks,
            "path": path,
        }
        if unheard_of is not None:
            # The model's configuration, from which no rotary embeddings can be read.
            described["model"] = {"vocab_size": VOCAB, **unheard_of}
        config, caches = configs(described, 1)
        config.lora_config = lora
        config.kv_events_config = SimpleNamespace(enable_kv_cache_events=has_events)
        self.model = FakeModel(Ropes(json.dumps(model), positions), groups, blocks, 1, SIZE, 32)
        self.windows = windows
        self.recomputer = FakeRecomputer(self.model)
        self.recomputer.context = self._context_of
        provide(monkeypatch, self.recomputer)
        self.kv_cache_manager = Blocks(blocks, windows)
        self.step_tokens, self.max_running = step_tokens, max_running
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.receiving: set[str] = set()
        """Requests whose rows are being copied in."""
        self.finished_recving_kv_req_ids: set[str] = set()
        self.failed_recving_kv_req_ids: set[str] = set()
        self.weights = 0
        """The version of the model's weights. Rows of different versions differ."""
        self.adapters: dict[str, int] = {}
        """The version of each adapter's files, by name."""
        self.clients: list[str] = []
        """The name of each client's request. Its index is the number of the client."""
        self.salts: list[str | None] = []
        """The salt that each client gave."""
        self.answers: dict[str, tuple[list[int], dict[str, Any] | None]] = {}
        """The tokens of each request that has ended, and what the connector says about it."""
        self.aborted: set[str] = set()
        self.ordered: list[Callable[[Any], None]] = []
        """Called with the connector's orders for each step."""
        self.ran: set[str] = set()
        """The requests that have run, or whose rows have been ordered."""
        self.steps = self.encodes = self.preemptions = 0
        self.is_paused = False
        self.external: dict[str, int] = {}
        """The number of tokens of ordinary prompts that are being copied in for each request."""
        self.voided: set[str] = set()
        """Requests whose rows were on their way during a reset."""
        self.arrived = 0
        """The tokens of ordinary prompts that have been copied in, also for requests that were aborted."""
        self.failing: Callable[[], bool] = lambda: False
        """Returns whether the next copy into the engine's blocks fails."""
        self.failing_saves: Callable[[], bool] = lambda: False
        """Returns whether the next copy to host memory fails."""
        self.broken: dict[str, int] = {}
        """The requests with a copy that failed, each with the number of tokens before it that it keeps until it is
        preempted."""
        self.connector = ChunkConnector(config, KVConnectorRole.SCHEDULER, caches)
        self.worker = Runner(config, caches, self.model).connector
        self.worker._worker.threads.shutdown()
        self.worker._worker.threads = self.threads = LateThreads(delay)
        for name in ("arena", "prefixes"):
            arena = getattr(self.worker._worker, name)
            if arena is not None:
                setattr(self.worker._worker, name, self._breakable(arena))

    def _breakable(self, arena: Any) -> Any:
        """Returns an arena whose copies fail when the engine says so."""

        def load(*args: Any) -> None:
            if self.failing():
                raise OSError("the copy failed")
            arena.load(*args)

        def save(*args: Any) -> None:
            if self.failing_saves():
                raise OSError("the copy to host memory failed")
            arena.save(*args)

        return SimpleNamespace(load=load, save=save, own=arena)

    @property
    def side(self) -> Any:
        return self.connector._scheduler

    @property
    def disk(self) -> Any:
        return self.worker._worker.disk

    def salt_of(self, name: str) -> str | None:
        """Returns the salt that a client gave for a request."""
        return next(salt for client, salt in zip(self.clients[::-1], self.salts[::-1]) if client == name)

    def close(self) -> None:
        """Ends the process."""
        self.worker.shutdown()

    # Clients.

    def ask(
        self,
        name: str,
        tokens: list[int],
        *,
        count: int = 2,
        salt: str | None = None,
        adapter: Any = None,
        **params: Any,
    ) -> None:
        """Adds a client's request for ``count`` tokens, with these parameters in ``kv_transfer_params``."""
        sampling = SamplingParams(max_tokens=count, extra_args={"kv_transfer_params": params} if params else None)
        # Requests of the connector have the client of the request that they are for.
        self.clients.append(name)
        self.salts.append(salt)
        self.add_request(Request(name, list(tokens), sampling, None, len(self.clients) - 1, adapter, salt, 0, hasher))

    def add_request(self, request: Request) -> None:
        assert request.request_id not in self.requests, "duplicate request id"
        self.encodes += request.sampling_params.max_tokens == 1 and "encode" in request.request_id
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.connector.on_new_request(request)

    def abort(self, *names: str) -> None:
        self.finish_requests(names, RequestStatus.FINISHED_ABORTED)

    def finish_requests(self, names: Any, status: Any) -> None:
        for name in [names] if isinstance(names, str) else list(names):
            request = self.requests.get(name)
            if request is None or name in self.aborted:
                continue
            if request in self.running:
                self.running.remove(request)
            else:
                self.waiting.remove(request)
            delay = name in self.receiving and name not in self.finished_recving_kv_req_ids
            self.finished_recving_kv_req_ids.discard(name)
            self.failed_recving_kv_req_ids.discard(name)
            self.aborted.add(name)
            self._end(request, status, keep_blocks=delay)

    def run(self, most: int = 3_000) -> None:
        """Runs steps until every request has ended. Raises ``AssertionError`` after ``most`` steps."""
        for _ in range(most):
            if not self.has_requests():
                return
            self.step()
        raise AssertionError(f"requests {sorted(self.requests)} have not ended after {most} steps and {self.encodes} encodes")

    def has_requests(self) -> bool:
        """Returns whether vLLM runs another step."""
        return bool(self.requests) and not self.is_paused or self.connector.has_pending_push_work()

    def reset(self, *, running: bool = True, new_weights: bool = False) -> bool:
        """Resets the caches as ``reset_prefix_cache(reset_running_requests=running, reset_connector=True)`` does: if a
        request keeps blocks, vLLM keeps its own cache, and either raises ``RuntimeError`` or resets the connector
        all the same."""
        while running and self.running:
            self._preempt(self.running.pop())
        own = self.kv_cache_manager.reset()
        if running and not own:
            raise RuntimeError("Failed to reset KV cache even when all the running requests are preempted")
        self.weights += new_weights
        self.voided |= self.receiving
        return self.connector.reset_cache() is not False and own

    def pause(self, mode: str) -> None:
        """Pauses and resets the caches, as ``/pause`` does, and ``/sleep`` before it frees memory: ``abort`` aborts all
        requests and runs steps until copies have ended, and ``keep`` runs no step. Raises ``RuntimeError`` if vLLM could
        not reset its cache, and is paused all the same."""
        if mode == "abort":
            self.abort(*self.requests)
            self.run(50)
        self.is_paused = True
        if not self.reset():
            raise RuntimeError("Failed to reset the KV connector cache.")

    def resume(self) -> None:
        self.is_paused = False

    # A step.

    def step(self) -> None:
        self.steps += 1
        scheduled, has_sync = self._schedule()
        orders = self.connector.build_connector_meta(SimpleNamespace(num_scheduled_tokens=dict(scheduled)))
        for watch in self.ordered:
            watch(orders)
        before = {name: self.requests[name].num_computed_tokens for name in scheduled}
        for name, count in scheduled.items():
            self.requests[name].num_computed_tokens += count
        # The worker.
        worker = self.worker
        worker.bind_connector_metadata(orders)
        if has_sync:
            worker.start_load_kv(None)
        sampled = self._forward(scheduled, before)
        if not has_sync:
            worker.start_load_kv(None)
        worker.wait_for_save()
        self.threads.tick(at_once=not scheduled)
        results = worker.get_transfer_results(set())
        bad = worker.get_block_ids_with_load_errors()
        report = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        # The scheduler again.
        for name in results.failed_recving:
            if name in self.receiving and name not in self.aborted:
                self.requests[name].num_computed_tokens = self.broken[name] = 0
                self.failed_recving_kv_req_ids.add(name)
        failed = set()
        for request in self.running:
            if not bad:
                break
            # vLLM refuses reports of blocks of models with several groups.
            (table,) = self.kv_cache_manager.tables[request.request_id]
            wrong = [i for i, block in enumerate(table) if block in bad and i * SIZE < before.get(request.request_id, 0)]
            if wrong:
                request.num_computed_tokens = self.broken[request.request_id] = wrong[0] * SIZE
                failed.add(request.request_id)
        for name, token in sampled.items():
            request = self.requests.get(name)
            if request is None or name in failed or request not in self.running:
                continue
            request.output_token_ids.append(token)
            request.update_block_hashes()
            if len(request.output_token_ids) >= request.sampling_params.max_tokens:
                self.running.remove(request)
                self._end(request, RequestStatus.FINISHED_LENGTH_CAPPED)
        output = SimpleNamespace(kv_connector_worker_meta=report, finished_recving=set(results.finished_recving))
        self.connector.update_connector_output(output)
        for name in results.finished_recving:
            self.arrived += self.external[name] if name not in {*results.failed_recving, *self.voided} else 0
            self.voided.discard(name)
            if name in self.aborted:
                self.receiving.discard(name)
                self._free(self.requests[name])
            else:
                self.finished_recving_kv_req_ids.add(name)

    def _schedule(self) -> tuple[dict[str, int], bool]:
        budget, scheduled, preempted, has_sync = 0 if self.is_paused else self.step_tokens, {}, False, False
        at = 0
        while at < len(self.running) and budget > 0:
            request = self.running[at]
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            while not self._grow(request, request.num_computed_tokens + count):
                last = self.running.pop()
                budget += scheduled.pop(last.request_id, 0)
                self._preempt(last)
                preempted = True
                if last is request:
                    break
            if at >= len(self.running):
                break
            self.kv_cache_manager.cache(request, request.num_computed_tokens + count)
            scheduled[request.request_id] = count
            budget -= count
            at += 1
        skipped: list[Request] = []
        # Requests that hold blocks come first.
        self.waiting = deque(sorted(self.waiting, key=lambda one: one.request_id not in self.receiving))
        while self.waiting and budget > 0 and not preempted and len(self.running) < self.max_running:
            request = self.waiting[0]
            admitted = self._admit(request, budget)
            if admitted is None:
                break
            self.waiting.popleft()
            if admitted == 0:
                skipped.append(request)
                continue
            self.running.append(request)
            request.status = RequestStatus.RUNNING
            scheduled[request.request_id] = admitted
            budget -= admitted
            has_sync |= request.request_id in self.sync
        self.waiting.extendleft(reversed(skipped))
        self.sync = set()
        return scheduled, has_sync

    sync: set[str] = set()
    """Requests whose rows are copied in at the beginning of the step."""

    def _admit(self, request: Request, budget: int) -> int | None:
        """Returns the number of tokens that a waiting request computes in this step: 0 if it waits on, and
        ``None`` if there are too few blocks for it."""
        name, manager = request.request_id, self.kv_cache_manager
        if name in self.receiving:
            if name not in self.finished_recving_kv_req_ids:
                return 0
            self._received(request)
        found, external = None, 0
        if request.num_computed_tokens == 0:
            assert name not in manager.tables, "vLLM looks up only requests without blocks"
            found = manager.found(request)
            external, parallel = self.connector.get_num_new_matched_tokens(request, len(found[0]) * SIZE)
            if external is None:
                return 0
            computed = len(found[0]) * SIZE + external
            assert computed < request.num_tokens or parallel, "nothing is left to compute"
            count = 0 if parallel else min(request.num_tokens - computed, budget)
        else:
            computed, parallel = request.num_computed_tokens, False
            count = min(request.num_tokens - computed, budget)
        if parallel and self._missing(request, found) > len(manager.unused) - self._reserved(name):
            # Rows on their way hold blocks without progress, so that others could wait for them for ever.
            return None
        if not manager.grow(name, computed + count, computed, found):
            return None
        self.ran.add(name)
        self.connector.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: manager.get_block_ids(name)), external)
        self._check_loads(name)
        if external and not parallel:
            self.sync = self.sync | {name}
        request.num_computed_tokens = computed
        if parallel:
            self.receiving.add(name)
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
            self.external[name] = external if self.side.requests[name].chunks is None else 0
            return 0
        manager.cache(request, computed + count)
        return count

    def _check_loads(self, name: str) -> None:
        """Checks that rows are only copied to blocks that nobody but the request holds and that nothing finds."""
        manager = self.kv_cache_manager
        for load in (load for load in self.side.loads if load.request_id == name):
            for table, blocks in zip(manager.tables[name], zip(*([run[0] for run in runs] for _, runs, _ in load.rows)), strict=True):
                for block in {block for run in blocks for block in run if block >= 0}:
                    assert block in table and manager.holders[block] == 1 and block not in manager.hash_of, "not the request's own"

    def _missing(self, request: Request, tables: list[list[int]]) -> int:
        """Returns the number of blocks that a request with these tables still needs for all of its tokens. A window and the
        tokens of a step bound the blocks that a group uses at once."""
        full = -(-request.num_tokens // SIZE)
        most = [full if window is None else -(-(window - 1 + self.step_tokens) // SIZE) + 1 for window in self.windows]
        return sum(max(0, min(full, bound) - len(table)) for bound, table in zip(most, tables))

    def _reserved(self, name: str) -> int:
        """Returns the number of blocks that other requests need which have not computed all of their tokens."""
        tables = self.kv_cache_manager.tables
        others = (one for one in self.requests.values() if one.request_id in tables and one.request_id != name)
        return sum(self._missing(one, tables[one.request_id]) for one in others)

    def _received(self, request: Request) -> None:
        name, request.status = request.request_id, RequestStatus.WAITING
        self.receiving.discard(name)
        self.finished_recving_kv_req_ids.discard(name)
        if name in self.failed_recving_kv_req_ids:
            self.failed_recving_kv_req_ids.discard(name)
            if request.num_computed_tokens == 0:
                self.kv_cache_manager.release(name)
                return
        self.kv_cache_manager.cache(request, request.num_computed_tokens)
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1

    def _grow(self, request: Request, tokens: int) -> bool:
        return self.kv_cache_manager.grow(request.request_id, tokens, request.num_computed_tokens)

    def _preempt(self, request: Request) -> None:
        self.preemptions += 1
        if request.request_id in self.broken:
            self.broken[request.request_id] = 0
        self.kv_cache_manager.release(request.request_id)
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED
        self.waiting.appendleft(request)

    def _end(self, request: Request, status: RequestStatus, *, keep_blocks: bool = False) -> None:
        name, request.status = request.request_id, status
        tables = self.kv_cache_manager.tables.get(name, [[] for _ in self.windows])
        _, said = self.connector.request_finished_all_groups(request, tuple(list(table) for table in tables))
        self.answers[name] = (list(request.output_token_ids), said)
        if not keep_blocks:
            self._free(request)

    def _free(self, request: Request) -> None:
        self.kv_cache_manager.release(request.request_id)
        self.receiving.discard(request.request_id)
        del self.requests[request.request_id]

    # The model.

    def context(self, request: Request) -> tuple[int, ...]:
        """Returns what rows depend on besides tokens: the weights, the adapter and, unlike in vLLM, the client's salt, so
        that a client who gets another one's rows gets a wrong answer."""
        lora = request.lora_request
        return context(self.weights, lora.lora_name if lora else None, self.adapters, self.salts[request.client_index])

    def _context_of(self, again: Any) -> tuple[int, ...]:
        """Returns what the rows of a request depend on that is recomputed."""
        tables = self.kv_cache_manager.tables
        name = next(name for name, (table, *_) in tables.items() if table[: len(again.table)] == again.table)
        return self.context(self.requests[name])

    def _forward(self, scheduled: dict[str, int], before: dict[str, int]) -> dict[str, int]:
        """Computes a step's tokens. Returns the tokens that are sampled."""
        sampled = {}
        for name, count in scheduled.items():
            request, tables = self.requests[name], self.kv_cache_manager.tables[name]
            tokens, seen = request.all_token_ids, self.context(request)
            for position in range(before[name], before[name] + count):
                self.model.write(tables, position, (*seen, *tokens[: position + 1]))
            if before[name] + count == len(tokens):
                sampled[name] = sample(self.model.values_of(tables, self.windows, len(tokens)))
        return sampled


def context(weights: int, adapter: str | None, versions: dict[str, int], salt: str | None = None) -> tuple[int, ...]:
    """Returns numbers that no token has, for everything that rows depend on besides tokens."""
    number = -1 if adapter is None else -2 - sorted(versions).index(adapter) - 100 * versions[adapter]
    of_salt = int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=3).digest(), "little") + 1 if salt else 0
    return (-1 - weights, number, -1 - of_salt)


def sample(values: list[np.ndarray]) -> int:
    """Returns the token that follows tokens with these values in each group of layers."""
    seen = b"".join(of_group.tobytes() for of_group in values)
    return int.from_bytes(hashlib.blake2b(seen, digest_size=4).digest(), "little") % VOCAB
