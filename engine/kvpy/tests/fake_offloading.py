"""The side of vLLM's offloading that calls a secondary tier: its host memory, its keys and its jobs.

It follows ``TieringOffloadingManager`` of vLLM 0.32.0 in everything that a tier can observe. A row of host memory is
filled with bytes that follow from the block's key, so a wrong row shows. ``proof/vllm/check_slab.py`` compares the
classes in ``fake_vllm`` with vLLM's, and runs ``SlabTier`` in a real vLLM.
"""

from __future__ import annotations

import hashlib
import itertools
import mmap
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from kvcache.vllm import SlabTier

ROW = 3 * 4096
ROWS = 64


def key(number: int, group: int = 0) -> bytes:
    """Returns the key of a block, as vLLM makes it: a hash and the index of a group."""
    return hashlib.sha256(str(number).encode()).digest() + group.to_bytes(4, "big")


def contents(of: bytes, size: int = ROW) -> np.ndarray:
    return np.frombuffer(hashlib.shake_128(of).digest(size), np.int8)


def model_in(folder: Path) -> Path:
    """Writes the files of a model, and returns their folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def config_of(**changes: Any) -> SimpleNamespace:
    """Returns vLLM's configuration of the offloading."""
    parallel = {"rank": 0, "world_size": 1, "tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1}
    values = {
        "groups": [SimpleNamespace(group_id=0, tokens_per_block=16, layer_names=("model.0", "model.1"))],
        "worker_kv_bytes_per_block": ROW,
        "model": SimpleNamespace(name="model", dtype="bfloat16"),
        "cache": SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
        "parallel": SimpleNamespace(**parallel, data_parallel_index=0, data_parallel_size=1),
        "replicated_layout": False,
        "canonical_layout": False,
        "kv_cache_layout": "LBHNC",
    }
    return SimpleNamespace(**{**values, **changes})


def vllm_config_of(model: Path, **changes: Any) -> SimpleNamespace:
    """Returns vLLM's configuration."""
    hf = SimpleNamespace(to_dict=lambda: {"rope_theta": 10000.0}, _commit_hash=None)
    values = {"model": str(model), "revision": None, "dtype": "bfloat16", "quantization": None, "max_model_len": 4096, "hf_config": hf}
    return SimpleNamespace(
        kv_transfer_config=None,
        model_config=SimpleNamespace(**{**values, **changes.pop("model_config", {})}),
        cache_config=SimpleNamespace(prefix_caching_hash_algo=changes.pop("hash", "sha256")),
        lora_config=changes.pop("lora_config", None),
        speculative_config=None,
        attention_config=SimpleNamespace(backend=None),
        **changes,
    )


class Connector(KVConnectorBase_V1):
    """vLLM's connector, which creates the tier."""

    def tier(self, config: SimpleNamespace, view: memoryview, **settings: Any) -> SlabTier:
        spec = SimpleNamespace(config=config)
        return SlabTier(offloading_spec=spec, primary_kv_view=view, tier_type="SlabTier", backpressure_detector=None, **settings)


class Offloading:
    """vLLM's host memory over one tier."""

    numbers = itertools.count()

    def __init__(self, config: SimpleNamespace, vllm_config: SimpleNamespace, row: int = ROW, **settings: Any) -> None:
        self.row = row
        self.map = mmap.mmap(-1, ROWS * row)
        self.memory: np.ndarray | None = np.frombuffer(self.map, np.int8).reshape(ROWS, row)
        self.view = memoryview(self.memory)
        self.tier = Connector(vllm_config, KVConnectorRole.SCHEDULER, None).tier(config, self.view, **settings)
        self.jobs: dict[int, TransferJob] = {}
        self.results: dict[int, JobResult] = {}

    def request(self, blocks: Sequence[bytes] = ()) -> ReqContext:
        context = ReqContext(f"request-{next(self.numbers)}")
        for end, block in enumerate(blocks, 1):
            context.set_offload_key_position(block, 16 * end)
        self.tier.on_new_request(context)
        return context

    def submit_store(self, blocks: Iterable[bytes], context: ReqContext | None = None, first: int = 0) -> int:
        """Stores blocks whose host memory begins at the row ``first``. As in vLLM, they come as a set."""
        wanted = set(blocks)
        rows = [first + row for row in range(len(wanted))]
        for row, block in zip(rows, wanted):
            self.memory[row] = contents(block, self.row)
        return self._submit(wanted, rows, False, context or self.request())

    def submit_load(self, blocks: Sequence[bytes], context: ReqContext | None = None, first: int = 0) -> int:
        rows = [first + row for row in range(len(blocks))]
        self.memory[rows] = 85
        return self._submit(list(blocks), rows, True, context or self.request())

    def _submit(self, blocks: Any, rows: list[int], is_load: bool, context: ReqContext) -> int:
        number = next(self.numbers)
        job = TransferJob(number, blocks, np.array(rows, np.int32), is_load, context)
        self.jobs[number] = job
        (self.tier.submit_load if is_load else self.tier.submit_store)(job)
        return number

    def poll(self) -> None:
        for result in self.tier.get_finished_jobs():
            assert result.job_id in self.jobs, "a job that vLLM does not know has ended"
            job = self.jobs.pop(result.job_id)
            assert set(result.successful_keys or ()) <= set(job.keys)
            self.results[result.job_id] = result
            if not job.is_promotion:
                # vLLM fills the rows with something else.
                self.memory[job.chunk_ids] = -86

    def wait(self, number: int, limit: float = 60.0) -> JobResult:
        until = time.monotonic() + limit
        while number not in self.results:
            assert time.monotonic() < until, f"the job does not end within {limit} s"
            self.poll()
            time.sleep(0.002)
        return self.results.pop(number)

    def store(self, blocks: Iterable[bytes], context: ReqContext | None = None) -> JobResult:
        """Stores blocks, as many at a time as host memory has rows."""
        wanted = list(blocks)
        for first in range(0, max(len(wanted), 1), ROWS):
            result = self.wait(self.submit_store(wanted[first : first + ROWS], context))
        return result

    def load(self, blocks: Sequence[bytes], context: ReqContext | None = None) -> list[bytes]:
        """Loads blocks as vLLM does: those that a lookup finds. Returns the blocks that were loaded, after checking
        their bytes.
        """
        context = context or self.request()
        found = [block for block in blocks if self.tier.lookup(block, context) is LookupResult.HIT]
        loaded = []
        for first in range(0, len(found), ROWS):
            part = found[first : first + ROWS]
            result = self.wait(self.submit_load(part, context))
            good = part if result.success else list(result.successful_keys or ())
            for row, block in enumerate(part):
                if block in good:
                    assert np.array_equal(self.memory[row], contents(block, self.row)), "the bytes of another block were served"
            loaded += good
        return loaded

    def hits(self, blocks: Sequence[bytes]) -> list[bytes]:
        context = self.request()
        return [block for block in blocks if self.tier.lookup(block, context) is LookupResult.HIT]

    def end(self) -> None:
        """Ends vLLM: its host memory must not be used any more."""
        self.tier.shutdown()
        self.view.release()
        self.memory = None
        # Fails if anything refers to the memory.
        self.map.close()
