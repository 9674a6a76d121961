"""The scheduler side's orders to the workers for one step, and the workers' report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

Run = tuple[list[int], int, int]
"""A run of tokens in blocks: the block IDs in order, the first token's offset from the start of the first
block, and the number of tokens. Tokens in a negative block are not written.
"""


Tables = Sequence[list[int]]
"""The blocks of a request for each group of layers."""

Rows = tuple[Run, list[Run], int]
"""Rows to copy: in host memory, in the blocks of each group of layers, and the distance to rotate keys by."""


def run_of(block_ids: Sequence[int], block_size: int, first: int, count: int) -> Run:
    """Returns tokens ``first`` to ``first + count`` of ``block_ids``, with only the blocks that hold them."""
    start = first // block_size
    return list(block_ids[start : -(-(first + count) // block_size)]), first - start * block_size, count


def runs_of(tables: Tables, block_size: int, first: int, count: int) -> list[Run]:
    """Returns tokens ``first`` to ``first + count`` in the table of each group of layers."""
    return [run_of(table, block_size, first, count) for table in tables]


def writable(tables: Tables) -> list[list[int]]:
    """Returns a request's tables with negative numbers for the blocks that a window has passed, which vLLM has given
    to others. Block 0 stands for them in vLLM's tables."""
    return [[block or -1 for block in table] for table in tables]


@dataclass
class Again:
    """Chunk tokens for the model to recompute."""

    tokens: list[int]
    """The prompt."""
    table: list[int]
    """The request's blocks."""
    runs: list[tuple[int, int]]
    """The start and end of each run to recompute or, with ``chosen``, of each run that the question chooses
    from.
    """
    first: int
    """The first token that vLLM's own cache does not have. The tokens before it need no work."""
    chosen: int | None
    """The number of tokens for the question to choose."""
    question_start: int
    key: bytes
    """Identifies the prompt and everything else that decides the question's choice."""
    rows: list[tuple[Run, Run, int]]
    """The rows that the question chooses from: those of all tokens before it, unchanged, to be written to
    consecutive blocks. Each entry has the rows in host memory, the rows to write, and the distance to rotate keys
    by. Empty without ``chosen``.
    """


@dataclass
class Load:
    """Rows that a worker copies from the arena into a request's blocks."""

    request_id: str
    rows: list[Rows]
    """Rows in host memory, and where they go in the request's blocks."""
    block_ids: list[int]
    """The blocks that are written at once. They are reported if the copy fails."""
    at_once: bool = False
    """True if the request runs in this step, after the copy."""
    again: Again | None = None
    """Tokens to recompute after the copy."""
    of_prefix: bool = False
    """True for rows of an ordinary prompt."""


@dataclass
class Save:
    """Rows that a worker copies into host memory, from the blocks of an encode or of an ordinary request."""

    name: str
    """The encode or the block to save."""
    rows: list[tuple[Run, list[Run]]]
    """Rows in host memory, and the rows in vLLM's blocks of each group of layers."""
    of_prefix: bool = False


@dataclass
class Record:
    """A piece of a chunk, or a block of an ordinary prompt, as a record on a disk."""

    key: bytes
    """Covers everything that the bytes depend on but the host and its weights."""
    tokens: list[int]
    start: int
    """The position of the first key."""
    blocks: list[int]
    """The blocks in host memory. Empty if the record is only looked up."""
    of_prefix: bool = False
    parent: bytes | None = None
    """The key of the block before it. A block is only found through the blocks before it."""
    is_public: bool = True
    """False if no other tenant may learn that these tokens are stored."""


@dataclass
class Fetch:
    """Records that a request lacks, to be read from the disk into host memory."""

    name: str
    records: list[Record]


@dataclass
class DiskOrders:
    """Orders about the disk, in a step of a host that has one."""

    saves: dict[str, list[Record]]
    """The records of the rows that this step saves to host memory, by the name of the save."""
    fetches: list[Fetch]
    used: list[tuple[bool, list[bytes]]]
    """Keys of records that were found in host memory, which therefore leave the disk last. Each list comes with whether it
    is of an ordinary prompt, and is in the order in which the records may leave."""
    tokens: int
    """The number of tokens that this step computes."""


class Orders(KVConnectorMetadata):
    """Orders for one step."""

    disk: DiskOrders | None = None
    """None without a disk."""

    def __init__(self, loads: list[Load], saves: list[Save], *, is_idle: bool, was_reset: bool) -> None:
        self.loads = loads
        self.saves = saves
        self.is_idle = is_idle
        """True if the step computes nothing, in which case the workers may wait for copies."""
        self.was_reset = was_reset
        """True if the workers must forget what questions chose."""


Answers = dict[str, dict[int, tuple[int, str | None]]]
"""What became of records that were to be fetched, by the name of the fetch and the number of the record in it: the number
of workers that say so, and None, or why the record is not in host memory."""


class Report(KVConnectorWorkerMetadata):
    """A step's report: saved rows by name, each with the number of workers that saved it; rows that could not
    be saved; and requests whose rows could not be loaded.
    """

    fetched: Answers | None = None
    """The records that have been fetched, or could not be."""

    def __init__(self, saved: dict[str, int], not_saved: set[str], not_loaded: set[str]) -> None:
        self.saved = saved
        self.not_saved = not_saved
        self.not_loaded = not_loaded

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, Report)
        saved = dict(self.saved)
        for name, count in other.saved.items():
            saved[name] = saved.get(name, 0) + count
        report = Report(saved, self.not_saved | other.not_saved, self.not_loaded | other.not_loaded)
        if self.fetched or other.fetched:
            report.fetched = merged(self.fetched or {}, other.fetched or {})
        return report


def merged(one: Answers, other: Answers) -> Answers:
    """Adds up the answers of workers. A record that one of them lacks is not used."""
    sums = {name: dict(answers) for name, answers in one.items()}
    for name, answers in other.items():
        known = sums.setdefault(name, {})
        for number, (count, reason) in answers.items():
            before, first = known.get(number, (0, None))
            known[number] = (before + count, first or reason)
    return sums
