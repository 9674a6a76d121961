"""Orders of the scheduler's side to the workers for a step, and their report."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass
class Again:
    """Tokens of chunks that the model computes again."""

    tokens: list[int]
    """The prompt, as far as the request has blocks."""
    table: list[int]
    """The request's blocks."""
    runs: list[tuple[int, int]]
    """Where the tokens begin and end that are computed again; with ``chosen``, those among which the question chooses."""
    first: int
    """The first token that vLLM's own cache does not have. Those before it are as they have to be."""
    chosen: int | None
    """The number of tokens that the question chooses."""
    question_start: int
    key: bytes
    """The prompt and all that decides what the question chooses."""


@dataclass
class Load:
    """Rows that a worker copies from the arena into a request's blocks."""

    request_id: str
    rows: list[tuple[list[int], list[int], int]]
    block_ids: list[int]
    """The blocks that are written, to be named if the copy fails."""
    at_once: bool = False
    """True if the request runs in this step, behind the copy."""
    again: Again | None = None
    """Tokens that are computed again behind the copy."""
    of_prefix: bool = False
    """True for rows of an ordinary prompt."""


@dataclass
class Save:
    """Rows that a worker copies from the blocks of an encode, or of an ordinary request, into host memory."""

    name: str
    """The encode, or the block that is saved."""
    to: list[int]
    slots: list[int]
    of_prefix: bool = False


class Orders(KVConnectorMetadata):
    """Orders for a step."""

    def __init__(self, loads: list[Load], saves: list[Save], *, is_idle: bool) -> None:
        self.loads = loads
        self.saves = saves
        self.is_idle = is_idle
        """Nothing is computed in the step, so that the workers may wait for copies."""


class Report(KVConnectorWorkerMetadata):
    """The report of a step: names of what was saved with the number of workers that did, of what could not be saved, and the requests
    whose rows could not be loaded."""

    def __init__(self, saved: dict[str, int], not_saved: set[str], not_loaded: set[str]) -> None:
        self.saved = saved
        self.not_saved = not_saved
        self.not_loaded = not_loaded

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, Report)
        saved = dict(self.saved)
        for name, count in other.saved.items():
            saved[name] = saved.get(name, 0) + count
        return Report(saved, self.not_saved | other.not_saved, self.not_loaded | other.not_loaded)
