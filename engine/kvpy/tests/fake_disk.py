"""A folder, and vLLM with a connector over it, which can be restarted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import ROW, SIZE, Engine, context
from fake_offloading import model_in
from roomy import Roomy
from slow_disk import Hanging  # noqa: F401

ROOMY = Roomy()
LENGTHS = [20, 30, 40]
FILE = "records.kvslab"
MIB = 1 << 20


class Disk:
    """A folder, and vLLM with a connector over it, which can be restarted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.monkeypatch, self.folder, self.model = monkeypatch, folder / "disk", model_in(folder / "model")
        self.open: list[Engine] = []
        self.asked = 0

    def start(self, **settings: Any) -> Engine:
        given = {
            "disk_path": str(self.folder),
            "disk_limit": "8MiB",
            "disk_loads": "always",
            "prefix_memory": 64 * SIZE * ROW,
            "path": str(self.model),
            **settings,
        }
        engine = Engine(self.monkeypatch, **given)
        self.open.append(engine)
        return engine

    def stop(self) -> None:
        for engine in self.open:
            engine.close()
        self.open.clear()

    def restart(self, **settings: Any) -> Engine:
        self.stop()
        return self.start(**settings)

    def ask(self, engine: Engine, tokens: list[int], *, salt: str | None = None, count: int = 2, **params: Any) -> dict[str, Any] | None:
        """Asks a prompt. The answer must be right. Returns what the connector says about it."""
        name = f"ask-{self.asked}"
        self.asked += 1
        engine.ask(name, tokens, salt=salt, count=count, **params)
        engine.run()
        got, said = engine.answers[name]
        assert got == ROOMY.answer(tokens, count, context(engine.weights, None, {}, salt), params or None), f"{params}, {said}"
        return said

    @property
    def file(self) -> Path:
        return self.folder / FILE


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(monkeypatch, tmp_path)
    yield disk
    disk.stop()


def reused(said: dict[str, Any] | None) -> int:
    assert said is not None
    return said["chunk_tokens_reused"]


def missed(said: dict[str, Any] | None) -> dict[str, str]:
    assert said is not None
    return said.get("chunk_missed", {})


def settle(engine: Engine) -> None:
    """Waits until everything is on the disk."""
    until = time.monotonic() + 20
    while engine.disk.is_busy():
        assert time.monotonic() < until, "the disk never gets everything"
        time.sleep(0.005)
    assert engine.disk.slab.flush(deadline=20)


def usage(engine: Engine, *names: str) -> tuple[int, ...]:
    counts = engine.disk.usage()
    return tuple(counts[name] for name in names)


def nothing_held_but_the_disk(engine: Engine) -> None:
    """As ``nothing_held``, without a reset, which would forget the disk, too."""
    for _ in range(3):
        engine.step()
    side = engine.side
    assert not side.requests and not side.saving and not side.loads, "something is kept of requests that have ended"
    assert not side.asks.under_way and not side.asks.sums and not side.asks.orders, "an answer is waited for"
    assert len(engine.kv_cache_manager.unused) == len(engine.kv_cache_manager.holders) - 1, "blocks of the engine are held"
    side.chunks.cache.check_invariants()
    assert not side.chunks.pieces.under_way and not side.chunks.pieces.states and not side.chunks.pieces.queue
    counts = side.prefixes.counts() and side.prefixes.pool.counts()
    assert not counts or (counts["mutable"], counts["shared"]) == (0, 0), f"blocks of prefixes are held: {counts}"
    settle(engine)
    assert not engine.disk.reads.fetches and not engine.disk.copying and not engine.disk.stores
