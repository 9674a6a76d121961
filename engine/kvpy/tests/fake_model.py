"""A model without weights, over caches laid out as by vLLM's CPU kernels: ``[blocks, heads, 32, 2 * dim]``,
keys transposed.

A token's keys and values are drawn from the tokens that it sees, up to and including itself, and keys are
rotated to its position. The tokens that a token saw therefore determine its bytes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from kvcache import Ropes


class Tensor(np.ndarray):
    """An array with the ``device`` of a torch tensor."""

    device = SimpleNamespace(type="cpu")


class FakeModel:
    """A model with these groups of layers. As in vLLM, the groups share memory: their layers with the same number are
    views of the same blocks. Layers are in the order of the numbers at the ends of their names.
    """

    def __init__(self, ropes: Ropes, groups: list[list[str]], blocks: int, heads: int, block_size: int, dim: int) -> None:
        self.ropes, self.heads, self.size, self.dim = ropes, heads, block_size, dim
        shape = (blocks, heads, block_size, 2 * dim)
        names = in_order(groups)
        self.groups = [[names.index(name) for name in group] for group in groups]
        """The numbers of each group's layers in the model."""
        memory = [np.full(shape, np.nan, np.float32).view(Tensor) for _ in max(groups, key=len)]
        shared = {name: memory[place] for group in groups for place, name in enumerate(group)}
        self.caches = {name: shared[name] for name in names}
        halves = [cache.view(np.ndarray).reshape(blocks, heads, 2, block_size * dim) for cache in self.caches.values()]
        self.keys = [half[:, :, 0].reshape(blocks, heads, dim, block_size) for half in halves]
        self.values = [half[:, :, 1].reshape(blocks, heads, block_size, dim) for half in halves]
        for views in (self.keys, self.values):
            assert all(np.shares_memory(view, cache) for view, cache in zip(views, self.caches.values()))
        self.rows = lru_cache(maxsize=None)(self._rows)
        self.angles = lru_cache(maxsize=None)(self._angles)

    def _angles(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines ``[layers, 1, dim]`` for a position."""
        of_layers = [self.ropes.at(layer, position)[:2] for layer in range(len(self.caches))]
        cos, sin = (np.array([angles[i] * 2 for angles in of_layers], np.float32)[:, None] for i in range(2))
        return cos, sin

    def _rows(self, seen: tuple[int, ...], position: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the keys and values ``[layers, heads, dim]`` of a token at a position that sees ``seen``.
        """
        seed = int.from_bytes(hashlib.blake2b(np.array(seen, np.int32).tobytes(), digest_size=8).digest(), "little")
        shape = (2, len(self.caches), self.heads, self.dim)
        keys, values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
        cos, sin = self.angles(position)
        half = self.dim // 2
        return keys * cos + np.concatenate([-keys[..., half:], keys[..., :half]], -1) * sin, values

    def write(self, tables: Sequence[list[int]], position: int, seen: tuple[int, ...]) -> None:
        """Computes a token of a request with these tables, one for each group."""
        row, (keys, values) = position % self.size, self.rows(seen, position)
        for table, layers in zip(tables, self.groups, strict=True):
            block = table[position // self.size]
            for layer in layers:
                self.keys[layer][block, :, :, row], self.values[layer][block, :, row] = keys[layer], values[layer]

    def values_of(self, tables: Sequence[list[int]], windows: Sequence[int | None], tokens: int) -> list[np.ndarray]:
        """Returns the values ``[tokens, heads, dim]`` in the first layer of each group, of the ``tokens`` first tokens that
        are in its window."""
        found = []
        for table, layers, window in zip(tables, self.groups, windows, strict=True):
            places = np.arange(0 if window is None else max(0, tokens - window), tokens)
            found.append(self.values[layers[0]][np.array(table)[places // self.size], :, places % self.size])
        return found

    def fault(self, tables: Sequence[list[int]], seen: dict[int, tuple[int, ...]]) -> str | None:
        """Describes the tokens that have wrong bytes in their slots; None if all are right. Blocks that a window has passed
        have none."""
        faults = (self._fault(table, layers, seen) for table, layers in zip(tables, self.groups, strict=True))
        return next((fault for fault in faults if fault is not None), None)

    def _fault(self, table: list[int], layers: list[int], seen: dict[int, tuple[int, ...]]) -> str | None:
        # Block 0 stands for a block that was freed because a window has passed it.
        seen = {position: tokens for position, tokens in seen.items() if table[position // self.size] != 0}
        if not seen:
            return None
        places = np.array(list(seen))
        expected = [self.rows(tokens, position) for position, tokens in seen.items()]
        blocks, rows = np.array(table)[places // self.size], places % self.size
        for layer in layers:
            keys = np.abs(self.keys[layer][blocks, :, :, rows] - [keys[layer] for keys, _ in expected]) < 1e-5
            values = self.values[layer][blocks, :, rows] == [values[layer] for _, values in expected]
            for what, right in (("keys", keys), ("values", values)):
                if not right.all():
                    wrong = places[~right.all((1, 2))]
                    return f"the {what} of tokens {wrong.tolist()} in layer {layer} are wrong"
        return None


def in_order(groups: list[list[str]]) -> list[str]:
    """Returns the names of all layers in the order of the model."""

    def number(name: str) -> int:
        return next((int(part) for part in name.split(".") if part.isdigit()), 0)

    return sorted((name for group in groups for name in group), key=number)


def chunk_at(lengths: list[int], position: int) -> tuple[int, int] | None:
    """Returns the number and the first token of the chunk that contains a token of a prompt with parts of these lengths;
    ``None`` for a token of the system prompt or of the question."""
    start = lengths[0]
    for number, length in enumerate(lengths[1:]):
        if start <= position < start + length:
            return number, start
        start += length
    return None


def provide(monkeypatch: Any, recomputer: Any) -> None:
    """Puts a recomputer in the place of the module that imports torch."""
    module = SimpleNamespace(Recomputer=lambda *_: recomputer)
    monkeypatch.setitem(sys.modules, "kvcache.vllm.recompute", module)


def choice(where: tuple[int, ...], tokens: list[int], question_start: int, places: list[int], count: int) -> list[int]:
    """Returns the ``count`` places that a question chooses. Every token of the question matters, and ``where``: what rows
    depend on besides tokens."""
    seen = (where, tuple(tokens[question_start:]))
    return sorted(sorted(places, key=lambda place: hashlib.blake2b(repr((*seen, place)).encode()).digest())[:count])


def recomputer() -> type:
    """Returns the recomputer of the connector, also without torch."""
    has_torch = importlib.util.find_spec("torch") is not None
    if not has_torch:
        sys.modules["torch"] = ModuleType("torch")
    try:
        return importlib.import_module("kvcache.vllm.recompute").Recomputer
    finally:
        if not has_torch:
            del sys.modules["torch"]


class FakeRecomputer(recomputer()):
    """The connector's recomputer over the fake model, which takes the place of everything that needs torch. Recomputed
    tokens see everything before them."""

    def __init__(self, model: FakeModel) -> None:
        super().__init__(None, None, [], [], "", model.size, None)
        self.model = model
        self.context: Callable[[Any], tuple[int, ...]] = lambda _: ()
        """Returns what the rows of an order depend on besides tokens."""
        self.where: tuple[int, ...] = ()
        self.places: dict[tuple[int, ...], set[int]] = {}
        """The positions that a question has chosen, by prompt."""

    def run(self, again: Any) -> None:
        if again.chosen is not None:
            assert sum(target[2] for _, target, _ in again.rows) == again.question_start, "a question chooses among all rows"
        self.where = self.context(again)
        super().run(again)

    def chosen(self, again: Any) -> list[tuple[int, int]]:
        among = [place for start, end in again.runs for place in range(start, end)]
        places = choice(self.where, again.tokens, again.question_start, among, again.chosen)
        self.places.setdefault(tuple(again.tokens), set()).update(places)
        return [(place, place + 1) for place in places]

    def forward(self, tokens: list[int], table: list[int], runs: list[tuple[int, int]]) -> None:
        for place in (place for start, end in runs for place in range(start, end)):
            self.model.write([table], place, (*self.where, *tokens[: place + 1]))
