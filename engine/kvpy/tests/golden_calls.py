"""Golden files with the calls that vLLM makes to the connector: how values are written, and the files.

A call is a list of its method, its arguments, its result and its effects; empty values at the end are left
out. Effects are the connector's other actions on its host: requests that it adds, with the calls that follow;
salts that it sets; recomputations.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "golden" / "vllm"

Call = list[Any]


def ints(values: Any) -> str:
    """Writes numbers as runs: ``"5..25 40 -1"``."""
    runs: list[list[int]] = []
    for value in values:
        if runs and runs[-1][1] + 1 == value:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return " ".join(str(first) if first == last else f"{first}..{last}" for first, last in runs)


def numbers(text: str) -> list[int]:
    """Parses numbers written by ``ints``."""
    values: list[int] = []
    for run in text.split():
        first, _, last = run.partition("..")
        values.extend(range(int(first), int(last or first) + 1))
    return values


def blocks(tables: Sequence[list[int]]) -> str | list[str]:
    """Writes a request's blocks: those of a single group, or a list with those of each group."""
    written = [ints(table) for table in tables]
    return written[0] if len(written) == 1 else written


def tables_of(written: str | list[str]) -> list[list[int]]:
    """Parses blocks written by ``blocks``."""
    return [numbers(table) for table in ([written] if isinstance(written, str) else written)]


def plain(value: Any) -> Any:
    """Returns a value as JSON. Objects become their fields; lists of numbers become runs."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        value = sorted(value)
    if isinstance(value, (list, tuple)):
        if len(value) > 1 and all(type(item) is int for item in value):
            return ints(value)
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if type(value).__module__.split(".")[0] in ("kvcache", "vllm"):
        return plain(vars(value))
    raise TypeError(f"{type(value)} has no plain form")


def described(request: Any) -> dict[str, Any]:
    """Returns the parts of a new request that the connector reads."""
    sampling = request.sampling_params
    fields = {
        "id": request.request_id,
        "tokens": ints(request.prompt_token_ids),
        "params": request.kv_transfer_params,
        "salt": request.cache_salt,
        "priority": request.priority or None,
        "max_tokens": sampling.max_tokens if sampling else None,
    }
    return {key: value for key, value in fields.items() if value is not None}


class Effects:
    """The effects of the running calls, innermost last."""

    def __init__(self, salts: Callable[[], dict[str, str | None]]) -> None:
        self.salts = salts
        self.running: list[list[Any]] = []

    def note(self, *effect: Any) -> None:
        self.running[-1].append(list(effect))

    def of(self, work: Callable[[], Any]) -> tuple[Any, list[Any]]:
        """Runs a call, and returns its result and its effects."""
        before = self.salts()
        self.running.append([])
        try:
            result = work()
        finally:
            effects = self.running.pop()
        changed = {name: salt for name, salt in self.salts().items() if before.get(name, salt) != salt}
        return result, effects + [["salt", name, salt] for name, salt in changed.items()]


def call(method: str, args: Any = None, result: Any = None, effects: list[Any] | None = None) -> Call:
    """Returns a call without trailing empty values."""
    made = [method, args, result, effects or None]
    while made[-1] is None:
        made.pop()
    return made


def write(name: str, header: dict[str, Any], calls: list[Call]) -> None:
    """Writes a golden file: a line per call with arguments, and one line for consecutive calls without any.
    """
    lines, bare = [], []
    for one in [*calls, None]:
        if one is not None and len(one) == 1:
            bare.append(json.dumps(one))
            continue
        if bare:
            lines.append(", ".join(bare))
            bare = []
        if one is not None:
            lines.append(json.dumps(one))
    head = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in header.items())
    FOLDER.mkdir(parents=True, exist_ok=True)
    text = "{\n" + head + ',\n"calls": [\n' + ",\n".join(lines) + "\n]\n}\n"
    (FOLDER / f"{name}.json").write_text(text)


def read(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))
