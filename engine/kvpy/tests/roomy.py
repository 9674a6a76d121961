"""The answers of an engine with room for everything, for the tests over ``fake_engine.py``."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from fake_blocks import SIZE
from fake_engine import FULL, model_of, sample
from fake_model import FakeModel, choice, chunk_at

from kvcache import Ropes
from kvcache.vllm.prompt import plan_of


class Roomy:
    """The answers of an engine with room for everything, which asks one request at a time: the values follow
    from what each token has seen."""

    def __init__(self, windows: Sequence[int | None] = FULL) -> None:
        positions = 8192
        model, groups = model_of(windows)
        ropes = Ropes(json.dumps({**model, "max_position_embeddings": positions}), positions)
        self.model, self.windows = FakeModel(ropes, groups, 1, 1, SIZE, 32), windows
        self.known: dict[Any, list[int]] = {}

    def answer(
        self, prompt: list[int], count: int, where: tuple[int, ...], params: dict[str, Any] | None, told: Sequence[int] = ()
    ) -> list[int]:
        """Returns ``count`` tokens of an answer that begins with ``told``."""
        key = (tuple(prompt), tuple(told), count, where, json.dumps(params, sort_keys=True))
        if key not in self.known:
            tokens, values = list(prompt), [self._values(prompt, position, where, params) for position in range(len(prompt))]
            for number in range(len(told) + count):
                tokens.append(told[number] if number < len(told) else sample(self._seen(values)))
                values.append(self.model.rows((*where, *tokens), len(tokens) - 1)[1])
            self.known[key] = tokens[len(prompt) + len(told) :]
        return self.known[key]

    def _values(self, prompt: list[int], position: int, where: tuple[int, ...], params: dict[str, Any] | None) -> np.ndarray:
        return self.model.rows((*where, *seen(prompt, position, params, where)), position)[1]

    def _seen(self, values: list[np.ndarray]) -> list[np.ndarray]:
        """Returns the values of the tokens that a next token sees in the first layer of each group."""
        firsts = [layers[0] for layers in self.model.groups]
        return [np.array([of_token[layer] for of_token in values[-(window or 0) :]]) for layer, window in zip(firsts, self.windows)]


def seen(prompt: list[int], position: int, params: dict[str, Any] | None, where: Sequence[int] = ()) -> list[int]:
    """Returns the tokens that a token of a prompt sees, up to and including itself. Choices of a question also depend on
    ``where``."""
    everything = prompt[: position + 1]
    # A copy may have failed, so that only the tokens before it are as the request asks.
    if not params or position >= params.get("until", len(prompt)):
        return everything
    lengths, mode, again = params["chunk_lengths"], params.get("chunk_mode", "alone"), params.get("chunk_recompute", "none")
    system, found = lengths[0], chunk_at(lengths, position)
    if found is None:
        return everything
    number, start = found
    if again.startswith("question:") and position in _chosen(tuple(where), tuple(prompt), json.dumps(params)):
        return everything
    if again.startswith("link:") and position < start + int(again[5:]) and (mode != "with-system" or number > 0):
        return everything
    before = {"alone": 0, "with-system": system}.get(mode)
    before = min(int(mode[5:]), system) if before is None else before
    return [*prompt[:before], *prompt[start : position + 1]]


@functools.cache
def _chosen(where: tuple[int, ...], prompt: tuple[int, ...], params: str) -> set[int]:
    """Returns the tokens that the question of a prompt chooses."""
    plan = plan_of(json.loads(params), prompt)
    places = [place for part in plan.apart() for place in range(part.start, part.end)]
    return set(choice(where, list(prompt), plan.question_start, places, plan.chosen_tokens()))
