"""Makes the calls of a golden file to a real connector with a fake vLLM, and compares its results and
effects.

Before every forward pass of the fake model, the blocks of each request must contain exactly the keys and
values of the tokens that it has computed or loaded. A token's rows depend on the tokens that it saw, which
the request's parameters determine.
"""

from __future__ import annotations

import json
from collections import defaultdict
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import golden_calls
from fake_model import FakeModel, FakeRecomputer, chunk_at, in_order, provide
from golden_calls import Call, Effects, described, numbers, plain, tables_of
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.request import Request, block_hashes
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from kvcache import KvCacheError
from kvcache.vllm import ChunkConnector
from kvcache.vllm.host import Settings, geometry, ropes_for

RECORD = "if the connector changed on purpose, record again: python proof/vllm/record.py FOLDER"


class Scheduler(SchedulerInterface):
    """Requests and their blocks, as in the golden file."""

    def __init__(self, config: Any, caches: Any, replay: Replay) -> None:
        self.replay = replay
        self.requests: dict[str, Request] = {}
        self.tables: dict[str, list[list[int]]] = {}
        self.failed_recving_kv_req_ids: set[str] = set()
        self.kv_cache_manager = SimpleNamespace(
            get_block_ids=lambda name: tuple(self.tables[name]),
            get_computed_blocks=lambda request: (None, replay.found_first[request.request_id], 0),
            block_pool=SimpleNamespace(num_gpu_blocks=0),
            evict_blocks=lambda blocks: blocks and replay.effects.note("evict_blocks", plain(blocks)),
        )
        self.connector = ChunkConnector(config, KVConnectorRole.SCHEDULER, caches)

    def add_request(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.replay.added(request)

    def finish_requests(self, names: list[str], status: Any) -> None:
        """Aborts requests of the connector. Recordings contain no resets, so there are none left."""
        assert not set(names) & set(self.requests)


class Runner(GPUModelRunner):
    """The model, and the worker's side of the connector."""

    def __init__(self, config: Any, caches: Any, model: FakeModel) -> None:
        self.connector = ChunkConnector(config, KVConnectorRole.WORKER, caches)
        self.connector.register_kv_caches(model.caches)


def configs(config: dict[str, Any], ranks: int) -> tuple[Any, Any]:
    """Returns the parts of vLLM's configuration, and of its caches', that the connector reads."""
    text, layers = config["model"], in_order([group["layers"] for group in config["groups"]])
    settings = SimpleNamespace(to_json_string=lambda: json.dumps(text), to_dict=lambda: text)
    # As attributes, transformers has these numbers for every model. In `to_dict`, GPT-2 and others name them otherwise.
    settings.vocab_size, settings.num_hidden_layers = text["vocab_size"], text.get("num_hidden_layers", len(layers))
    model = SimpleNamespace(
        hf_text_config=settings,
        hf_config=settings,
        max_model_len=config["max_model_len"],
        model=config.get("path", "small"),
        revision=None,
        dtype="float32",
        quantization=None,
    )
    layer = SimpleNamespace(isa="vec")
    vllm_config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=config["extra_config"]),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks, pipeline_parallel_size=1),
        device_config=SimpleNamespace(device_type="cpu"),
        lora_config=None,
        kv_events_config=None,
        speculative_config=None,
        attention_config=SimpleNamespace(backend=None),
        model_config=model,
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(layers, layer)),
    )
    specs = [type(group["spec"]["kind"], (SimpleNamespace,), {})(**group["spec"]) for group in config["groups"]]
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=group["layers"]) for spec, group in zip(specs, config["groups"])]
    return vllm_config, SimpleNamespace(kv_cache_groups=groups, num_blocks=config["num_blocks"])


# Decision: docs/decisions/vllm.md#tests-replay-the-calls-of-a-real-vllm
class Replay:
    """One scenario. With several ranks, there is one worker, and the other ranks repeat its reports."""

    def __init__(self, golden: dict[str, Any], monkeypatch: Any, ranks: int = 1) -> None:
        self.calls = golden["calls"]
        self.ranks = ranks
        config, caches = configs(golden["config"], ranks)
        groups = golden["config"]["groups"]
        shape = geometry(config, caches, Settings.of(golden["config"]["extra_config"]))
        ropes, spec = ropes_for(config, shape), groups[0]["spec"]
        names = [group["layers"] for group in groups]
        self.model = FakeModel(ropes, names, caches.num_blocks, spec["num_kv_heads"], spec["block_size"], spec["head_size"])
        self.recomputer = FakeRecomputer(self.model)
        provide(monkeypatch, SimpleNamespace(run=self.recompute))
        # As in the recording, so that salts and request IDs are the recorded ones.
        monkeypatch.setattr("kvcache.vllm.names.new_secret", lambda: bytes(32))
        self.effects = Effects(self.salts)
        self.expected: list[list[Any]] = []
        """The recorded requests that the running calls add, innermost call last."""
        self.scheduler = Scheduler(config, caches, self)
        self.side = self.scheduler.connector
        self.runner = Runner(config, caches, self.model)
        self.worker = self.runner.connector
        finished = [args for method, args, *_ in (one for one in self.calls if len(one) > 1) if method.startswith("request_fin")]
        self.outputs = {name: numbers(outputs) for name, _, outputs in finished}
        self.found_first = _found_first(self.calls)
        self.found: dict[str, int] = {}
        """How many tokens of each request the host's own cache had."""
        self.step: dict[str, Any] = {}
        self.orders: Any = None
        self.report: Any = None

    def run(self) -> None:
        """Makes the calls. Raises ``AssertionError`` at the first different result or wrong bytes."""
        for number, one in enumerate(self.calls):
            self.repeat(one, f"call {number}")
        self.side.shutdown()
        self.worker.shutdown()

    def repeat(self, recorded: Call, where: str) -> None:
        """Makes one call, and compares its result and its effects with the recorded ones."""
        method, args, result, effects = [*recorded, *[None] * (4 - len(recorded))]
        where = f"{where}, {method} {args}"
        if not hasattr(ChunkConnector, method):
            getattr(self, method)(where)
            return
        if method == "on_new_request":
            self.arrive(args)
        self.expected.append([effect for effect in effects or () if effect[0] == "add_request"])
        got, did = self.effects.of(lambda: getattr(self, method)(args))
        self.expected.pop()
        assert plain(got) == result, f"{where} returns {plain(got)} instead of {result}; {RECORD}"
        assert did == (effects or []), f"{where} does {did} instead of {effects}; {RECORD}"

    def salts(self) -> dict[str, str | None]:
        return {name: request.cache_salt for name, request in self.scheduler.requests.items()}

    def added(self, request: Request) -> None:
        """Adds one of the connector's requests. The host makes the calls that followed in the recording."""
        assert self.expected[-1], f"the connector adds {described(request)}, which was not recorded; {RECORD}"
        _, _, calls = self.expected[-1].pop(0)
        self.effects.note("add_request", described(request), calls)
        for one in calls:
            self.repeat(one, f"while {request.request_id} is added")

    def recompute(self, again: Any) -> None:
        self.effects.note("recompute", plain(again))
        self.recomputer.run(again)

    # Calls on the scheduler's side.

    def arrive(self, told: dict[str, Any]) -> None:
        """Gives the scheduler a client's request."""
        if told["id"] not in self.scheduler.requests:
            extra = {"kv_transfer_params": told["params"]} if "params" in told else None
            sampling = SamplingParams(max_tokens=told["max_tokens"], extra_args=extra)
            request = Request(told["id"], numbers(told["tokens"]), sampling, None, 0, None, told.get("salt"), 0, block_hashes)
            self.scheduler.requests[told["id"]] = request

    def on_new_request(self, told: dict[str, Any]) -> None:
        self.side.on_new_request(self.scheduler.requests[told["id"]])

    def get_num_new_matched_tokens(self, args: list[Any]) -> Any:
        name, computed, known = args
        self.found[name] = computed
        self.answered(self.scheduler.requests[name], known)
        return self.side.get_num_new_matched_tokens(self.scheduler.requests[name], computed)

    def answered(self, request: Request, known: int) -> None:
        """Gives a request its answer tokens so far: ``known`` tokens, including the prompt."""
        count = max(known - len(request.prompt_token_ids), len(request.output_token_ids))
        request.output_token_ids = self.outputs[request.request_id][:count]

    def update_state_after_alloc(self, args: list[Any]) -> None:
        name, blocks, external = args
        self.scheduler.tables[name] = tables_of(blocks)
        held = SimpleNamespace(get_block_ids=lambda: tuple(tables_of(blocks)))
        self.side.update_state_after_alloc(self.scheduler.requests[name], held, external)

    def build_connector_meta(self, step: dict[str, Any]) -> Any:
        self.step = step
        for name, (count, computed, blocks) in step.items():
            request = self.scheduler.requests[name]
            request.num_computed_tokens = computed
            self.answered(request, computed + count)
            self.scheduler.tables[name] = tables_of(blocks)
        counts = {name: count for name, (count, _, _) in step.items()}
        self.orders = self.side.build_connector_meta(SimpleNamespace(num_scheduled_tokens=counts))
        return self.orders

    def update_connector_output(self, args: list[Any]) -> None:
        meta, received = args
        assert plain(self.report) == meta
        said = self.report
        for _ in range(1, self.ranks if said is not None else 1):
            said = said.aggregate(self.report)
        output = SimpleNamespace(kv_connector_worker_meta=said, finished_recving=set(received or ()))
        self.side.update_connector_output(output)

    def request_finished_all_groups(self, args: list[Any]) -> Any:
        name, blocks, _ = args
        try:
            return self.side.request_finished_all_groups(self.scheduler.requests[name], tuple(tables_of(blocks)))
        finally:
            del self.scheduler.requests[name]

    # Calls on the worker's side.

    def bind_connector_metadata(self, _: Any) -> None:
        self.worker.bind_connector_metadata(self.orders)

    def clear_connector_metadata(self, _: Any) -> None:
        self.worker.clear_connector_metadata()

    def start_load_kv(self, _: Any) -> None:
        self.worker.start_load_kv(None)

    def wait_for_save(self, _: Any) -> None:
        self.worker.wait_for_save()

    def get_finished(self, names: Any) -> Any:
        # As in the recording, wait for loads in every step.
        ended: Future[None] = self.worker._worker.threads.submit(lambda: None)
        ended.result()
        return self.worker.get_finished(set(names or ()))

    def get_block_ids_with_load_errors(self, _: Any) -> Any:
        return self.worker.get_block_ids_with_load_errors()

    def build_connector_worker_meta(self, _: Any) -> Any:
        self.report = self.worker.build_connector_worker_meta()
        return self.report

    # Other lines of a file.

    def break_loads(self, _: str) -> None:
        own = self.own_arena = self.worker._worker.arena

        class Broken:
            save = own.save

            @staticmethod
            def load(*_: Any) -> None:
                raise KvCacheError("the disk is on fire")

        self.worker._worker.arena = Broken()

    def mend_loads(self, _: str) -> None:
        self.worker._worker.arena = self.own_arena

    def forward(self, where: str) -> None:
        """Computes the tokens of a step, after checking the blocks."""
        for name, (count, computed, blocks) in self.step.items():
            request, tables = self.scheduler.requests[name], tables_of(blocks)
            tokens = [*request.prompt_token_ids, *self.outputs[name]]
            seen = {position: self.seen(request, tokens, position) for position in range(computed)}
            # The host drops the tokens of a step in which the request's load failed.
            if name not in self.worker._worker.not_loaded:
                fault = self.model.fault(tables, seen)
                assert fault is None, f"{where}, {name}: {fault}"
            for layer in self.model.caches:
                self.worker.wait_for_layer_load(layer)
                self.worker.save_kv_layer(layer, self.model.caches[layer], None)
            for position in range(computed, computed + count):
                self.model.write(tables, position, tuple(tokens[: position + 1]))

    def seen(self, request: Request, tokens: list[int], position: int) -> tuple[int, ...]:
        """Returns the tokens that one of a request's tokens has seen, up to and including itself."""
        everything = tuple(tokens[: position + 1])
        tracked = self.side._scheduler.requests[request.request_id]
        # The host computes a request that could not be loaded, starting after the tokens that its own cache
        # had.
        chunked = tracked.chunks is not None or (tracked.is_mixed and position < self.found[request.request_id])
        if not chunked:
            return everything
        params = request.kv_transfer_params
        lengths, mode, again = params["chunk_lengths"], params["chunk_mode"], params.get("chunk_recompute", "none")
        system, found = lengths[0], chunk_at(lengths, position)
        if found is None:
            return everything
        number, start = found
        apart = mode != "with-system" or number > 0
        if again.startswith("link:") and apart and position < start + int(again[5:]):
            return everything
        chosen = self.recomputer.places.get(tuple(request.prompt_token_ids), ())
        if again.startswith("question:") and float(again[9:]) > 0 and position in chosen:
            return everything
        before = int(mode[5:]) if mode.startswith("sink:") else 0 if mode == "alone" else system
        decoys = params["chunk_decoys"][: int(mode[7:])] if mode.startswith("behind:") else []
        return (*tokens[:before], *(token for decoy in decoys for token in decoy), *tokens[start : position + 1])


def _found_first(calls: list[Call]) -> dict[str, int]:
    """Returns the number of tokens that the host's own cache had when it first asked for each request. Requests that
    are aborted before have none.
    """
    found: dict[str, int] = defaultdict(int)
    for method, args, *rest in (one for one in calls if len(one) > 1):
        inner = [one for effect in (rest[1] if len(rest) > 1 else None) or () if effect[0] == "add_request" for one in effect[2]]
        for name, count in _found_first(inner).items():
            found.setdefault(name, count)
        if method == "get_num_new_matched_tokens":
            found.setdefault(args[0], args[1])
    return found
