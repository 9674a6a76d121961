"""The state of vLLM's requests on the scheduler's side, in one table with an entry per request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvcache import ChunkReservation, ChunkWaiter, MutableBlocks, PieceHold, SharedBlocks

from .orders import Save
from .prompt import ChunkPlan, Part

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Saver(Protocol):
    """An owner of host memory that the workers fill."""

    def stored(self, saving: Saving) -> None:
        """Called when all workers have saved the rows."""

    def lost(self, saving: Saving) -> None:
        """Called when a worker could not save the rows. Frees their memory."""


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
    """A part of a prompt that is computed as a separate request, which other requests wait for."""

    prefix: int
    """The number of tokens before the part in that request."""
    prompt_tokens: int
    pieces: list[tuple[int, ChunkReservation]]
    """The missing pieces, each with the index of its first token in the part, and its memory."""
    is_over: bool = False
    """True once the pieces are stored, or given up."""


@dataclass(eq=False)
class BlockSaving(Saving):
    """An ordinary request's block that is being saved to host memory."""

    blocks: MutableBlocks
    parent: bytes | None
    key: bytes
    index: int
    """The index of the block in the request."""
    is_forgotten: bool = False
    """True once a reset has asked to forget the block."""


@dataclass
class ChunkState:
    """The chunks of a request."""

    plan: ChunkPlan
    salt: str | None
    """The salt that the client gave."""
    root: bytes
    holds: dict[int, list[PieceHold]] = field(default_factory=dict)
    """The pieces of each part, once all of them are stored."""
    waiters: dict[int, list[Encode | ChunkWaiter]] = field(default_factory=dict)
    """Work that a part waits for: this connector's encodes, and other requests' work."""
    reused: int = 0
    computed: int = 0

    def parts(self) -> list[Part]:
        return [self.plan.system, *self.plan.chunks]

    def is_held(self) -> bool:
        """Returns true if all parts are held."""
        return len(self.holds) > len(self.plan.chunks)

    def pieces(self) -> Iterator[tuple[int, PieceHold]]:
        """Returns the pieces of all parts in order, each with the index of its first token in the prompt."""
        for number, part in enumerate(self.parts()):
            start = part.start
            for hold in self.holds[number]:
                yield start, hold
                start += hold.num_tokens

    def release(self) -> None:
        for holds in self.holds.values():
            for hold in holds:
                hold.release()
        self.holds.clear()
        self.waiters.clear()


@dataclass
class PrefixState:
    """The blocks of an ordinary request, for the prefix tier."""

    root: bytes
    keys: list[bytes] = field(default_factory=list)
    """The keys of the first full blocks; computed when needed."""
    offered: int = 0
    """The number of blocks that are in the tier or on their way to it."""
    first_found: int = 0
    """The first token that was found."""
    found: SharedBlocks | None = None
    """The blocks that were found, until they are copied."""
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
    has_ended: bool = False
    """True if the request ended while receiving. Its rows are then held until the copy ends."""

    def is_plain(self) -> bool:
        """Returns true if the bytes of the request's blocks depend on its tokens alone, under ordinary
        attention."""
        request = self.request
        of_tokens = request.prompt_token_ids is not None and request.prompt_embeds is None
        of_text = of_tokens and not request.mm_features and request.pooling_params is None
        return of_text and self.chunks is None and self.encode is None and not self.is_mixed

    def release(self) -> None:
        for state in (self.chunks, self.prefix):
            if state is not None:
                state.release()
