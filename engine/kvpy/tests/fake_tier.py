"""A folder, and vLLM's offloading with a ``SlabTier`` in it, which can be restarted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_offloading import ROW, Offloading, config_of, model_in, vllm_config_of
from slow_disk import Hanging

MIB = 1 << 20
FILE = "records.kvslab"


class Disk:
    """A folder, and vLLM with a tier in it, which can be restarted."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder / "disk", model_in(folder / "model")
        self.open: list[Offloading] = []

    def start(self, limit: Any = "4MiB", config: Any = None, vllm_config: Any = None, row: int = ROW, **settings: Any) -> Offloading:
        vllm_config = vllm_config or vllm_config_of(self.model)
        host = Offloading(config or config_of(), vllm_config, row, path=str(self.folder), limit=limit, **settings)
        self.open.append(host)
        return host

    def restart(self, **changes: Any) -> Offloading:
        self.stop()
        return self.start(**changes)

    def stop(self) -> None:
        for host in self.open:
            host.end()
        self.open.clear()

    @property
    def file(self) -> Path:
        return self.folder / FILE


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path)
    yield disk
    disk.stop()


class HangingSlab(Hanging):
    """As ``Hanging``, for rows. A store returns at its deadline, as the native one does."""

    def store(self, names: list[bytes], rows: Any, at: list[int], *, deadline: float, costs: list[float]) -> list[bool]:
        self.begun += 1
        time.sleep(deadline)
        return [False] * len(names)


def hang(host: Offloading) -> HangingSlab:
    hanging = HangingSlab(host.tier._slab)
    host.tier._slab = host.tier._jobs.slab = hanging
    return hanging
