"""The state of vLLM's requests on the scheduler's side, in one table with an entry per request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kvcache import ChunkReservation, ChunkWaiter, MutableBlocks, PieceHold, SharedBlocks

from .orders import Record, Save
from .prompt import ChunkPlan

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from .disk.prefixes import PrefixFetch

Outcome = PieceHold | ChunkReservation | ChunkWaiter | None
"""What a lookup in the chunk cache returns for a piece."""


class Saver(Protocol):
    """An owner of host memory that the workers fill."""

    def stored(self, saving: Saving) -> None:
        """Called when all workers have saved the rows."""

    def lost(self, saving: Saving) -> None:
        """Called when a worker could not save the rows. Frees their memory."""

    def records(self, saving: Saving) -> list[Record]:
        """Returns the rows as records for a disk."""


@dataclass(eq=False)
class Saving:
    """Rows that the workers copy to host memory."""

    name: str
    owner: Saver
    order: Save | None = field(default=None, kw_only=True)
    """The order to the workers, once it has been given."""
    saved_by: int = field(default=0, kw_only=True)
    """The number of workers that have saved the rows."""


@dataclass(eq=False)
class Encode(Saving):
    """A part of a prompt that is computed as a separate request."""

    prefix: int
    """The number of tokens before the part in that request."""
    prompt_tokens: int
    pieces: list[Work]
    """The missing pieces."""
    state: ChunkState
    """The request that lacked the pieces first."""
    number: int
    """The number of the part in that request."""
    request: Request
    """The request that computes the part, unless the disk has all of its pieces."""
    unanswered: int = 0
    """The number of pieces that the disk is asked for."""
    reason: str | None = None
    """Why a piece was neither in host memory nor on the disk."""
    is_over: bool = False
    """True once the pieces are stored, or given up."""


@dataclass(eq=False)
class Work:
    """A missing piece that an encode computes. It is handed to its waiters when it is stored."""

    start: int
    """The index of the piece's first token in its part."""
    reservation: ChunkReservation
    tokens: list[int] = field(default_factory=list)
    waiters: list[tuple[ChunkState, int, int]] = field(default_factory=list)
    """The requests that wait for the piece, each with the number of the part and of the piece in it."""

    @property
    def key(self) -> bytes:
        """The hash by which the piece is found."""
        return self.reservation.chunk_hash.hash_bytes


@dataclass(eq=False)
class BlockSaving(Saving):
    """An ordinary request's block that is being saved to host memory."""

    blocks: MutableBlocks
    parent: bytes | None
    key: bytes
    index: int
    """The index of the block in the request."""
    tokens: list[int]
    before: SharedBlocks
    """The blocks before it that were known when the saves began. The last of these saves ends the hold."""


@dataclass(eq=False)
class ChunkState:
    """The chunks of a request."""

    plan: ChunkPlan
    salt: str | None
    """The salt that the client gave."""
    root: bytes
    pieces: dict[int, list[PieceHold | Work]] = field(default_factory=dict)
    """The pieces of each part that was looked up, in order: held, or still being computed."""
    first: int = 0
    """The number of tokens at the beginning of the prompt that vLLM has in its own blocks."""
    sizes: dict[int, dict[bytes, int]] = field(default_factory=dict)
    """The number of blocks of each piece of a part, by hash. Known for requests that there was no room for."""
    computed: dict[bytes, int] = field(default_factory=dict)
    """The number of tokens of each piece that was computed for this request, by hash."""
    missed: dict[int, str] = field(default_factory=dict)
    """Why each part that was computed for this request was not found, by its number."""
    is_served: bool = False
    """True once vLLM has run the request with its chunks. Later lookups are not counted."""
    losses: int = 0
    """The number of encodes that were given up while the request waited for them."""
    room: RoomWait | None = None
    """The wait for room, if the request is the first in the queue."""

    def wanted(self) -> list[int]:
        """Returns the numbers of the parts with rows that vLLM lacks. A question chooses among the rows of all parts,
        unless vLLM has them all.
        """
        plan = self.plan
        first = 0 if plan.chosen_tokens() > 0 and self.first < plan.question_start else self.first
        return [number for number, part in enumerate(plan.parts) if part.end > first]

    def is_held(self) -> bool:
        """Returns true if all pieces of the wanted parts are held."""
        wanted = self.wanted()
        held = (isinstance(piece, PieceHold) for number in wanted for piece in self.pieces.get(number, ()))
        return all(number in self.pieces for number in wanted) and all(held)

    def held(self) -> Iterator[tuple[int, PieceHold]]:
        """Returns the pieces of the wanted parts in order, each with the index of its first token in the prompt."""
        for number in self.wanted():
            start = self.plan.parts[number].start
            for hold in self.pieces[number]:
                yield start, hold
                start += hold.num_tokens

    @property
    def is_public(self) -> bool:
        """True if other tenants may learn that the request's documents are stored."""
        return self.salt is None

    def counts(self) -> dict[str, int]:
        """Returns how many tokens of chunks were reused, and how many were computed."""
        computed = sum(self.computed.values())
        return {"chunk_tokens_reused": self.plan.question_start - computed, "chunk_tokens_computed": computed}

    def drop(self, numbers: list[int]) -> None:
        """Lets the pieces of some parts go, whether they are held or still being computed."""
        for number in numbers:
            for piece in self.pieces.pop(number, ()):
                if isinstance(piece, PieceHold):
                    piece.release()
                else:
                    piece.waiters = [one for one in piece.waiters if one[:2] != (self, number)]


@dataclass(eq=False)
class RoomWait:
    """A wait for room in host memory."""

    holders: set[ChunkState]
    """The requests that held rows when the wait began, and still do."""
    encodes: set[Encode]
    """The encodes that were under way when the wait began, and still are."""
    was_over: bool = False
    """True once all of them have let go."""
    seen: int = -1
    """The number of changes when the request last looked."""

    def look(self, changes: int) -> None:
        """Removes the requests and encodes that have let go."""
        self.seen = changes
        self.holders = {state for state in self.holders if state.pieces}
        self.encodes = {encode for encode in self.encodes if not encode.is_over}
        self.was_over = not self.holders and not self.encodes


@dataclass
class PrefixState:
    """The blocks of an ordinary request, for the prefix tier."""

    root: bytes
    keys: list[bytes] = field(default_factory=list)
    """The keys of the first full blocks; computed when needed."""
    offered: int = 0
    """The number of first blocks that are in the tier, are on their way to it, or cannot be saved any more."""
    first_found: int = 0
    """The first token that was found."""
    found: SharedBlocks | None = None
    """The blocks that were found, until they are copied."""
    copied: int = 0
    """The number of tokens that are being copied."""
    fetch: PrefixFetch | None = None
    """What the disk is asked for."""
    report: dict[str, Any] | None = None
    """What was found when the request was looked up first, and why the rest was not."""
    is_barred: bool = False
    """True if the request's blocks could not be copied in, so it is computed instead."""

    def release(self) -> None:
        if self.found is not None:
            self.found.release()
            self.found = None


@dataclass(eq=False)
class Tracked:
    """One of vLLM's requests."""

    request: Request
    chunks: ChunkState | None = None
    encode: Encode | None = None
    """The part that the request computes, if the connector has added it."""
    refused: str | None = None
    """Why the request is answered without its chunks."""
    is_mixed: bool = False
    """True if vLLM computes the rest of a prompt after chunks. Other requests cannot use such blocks."""
    prefix: PrefixState | None = None
    is_receiving: bool = False
    """True while rows are copied in, in parallel with steps."""
    awaits_step: bool = False
    """True once rows have been copied in, until vLLM runs the request."""
    is_stale: bool = False
    """True if some of the request's blocks are older than the last reset, so the tier must not save any. Until vLLM
    preempts the request, it has a salt of its own.
    """
    salt_before: str | None = None
    """The salt of a stale request before the reset."""
    has_ended: bool = False
    """True if the request ended while receiving. Its rows are then held until the copy ends."""

    def is_plain(self) -> bool:
        """Returns true if the bytes of the request's blocks depend on its tokens alone, under ordinary
        attention."""
        request = self.request
        of_tokens = request.prompt_token_ids is not None and request.prompt_embeds is None
        of_text = of_tokens and not request.mm_features and request.pooling_params is None
        return of_text and self.chunks is None and self.encode is None and not self.is_mixed


def set_salt(request: Request, salt: str | None) -> None:
    """Changes the salt of the blocks that vLLM registers for a request from now on."""
    request.cache_salt = salt
    request.block_hashes.clear()
    request.update_block_hashes()
