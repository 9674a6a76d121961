"""Events for routers: which of vLLM's blocks the tier for ordinary prompts has, and no longer has.

The events are vLLM's own, with the medium ``CPU`` and vLLM's block hashes, so that a router treats the tier like any
other offloading connector. Chunks have no events, because no block hash stands for a chunk at any position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from .host import Geometry


logger = init_logger("vllm.kvcache")


@dataclass(frozen=True)
class Told:
    """A block as a router knows it."""

    block_hash: bytes
    parent_hash: bytes | None
    token_ids: list[int]
    lora_id: int | None
    lora_name: str | None


class TierEvents:
    """The events of the tier, for a host that publishes events."""

    def __init__(self, shape: Geometry) -> None:
        self.block_size, self.groups = shape.engine_block_size, list(enumerate(shape.groups))
        self.saving: dict[bytes, Told] = {}
        """The blocks on their way to the tier, by the tier's keys."""
        self.stored: dict[bytes, Told] = {}
        """The blocks that routers have been told of."""

    def note(self, key: bytes, request: Request, index: int) -> None:
        """Notes the block that a request is about to save."""
        start, lora = index * self.block_size, request.lora_request
        self.saving[key] = Told(
            block_hash=request.block_hashes[index],
            parent_hash=request.block_hashes[index - 1] if index else None,
            token_ids=list(request.all_token_ids[start : start + self.block_size]),
            lora_id=lora.lora_int_id if lora else None,
            lora_name=lora.lora_name if lora else None,
        )

    def drop(self, key: bytes) -> None:
        """Forgets a block that could not be saved."""
        self.saving.pop(key, None)

    def of(self, changes: list[tuple[str, bytes | None]]) -> Iterator[Any]:
        """Returns vLLM's events for the changes of a pool."""
        from vllm.distributed.kv_events import MEDIUM_CPU, BlockStored
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash as external

        for what, key in changes:
            if what == "stored" and key in self.saving:
                told = self.stored[key] = self.saving.pop(key)
                # The tier has the rows of all groups, and a router knows each group's blocks.
                for number, group in self.groups:
                    yield BlockStored(
                        block_hashes=[external(told.block_hash)],
                        parent_block_hash=external(told.parent_hash) if told.parent_hash is not None else None,
                        token_ids=told.token_ids,
                        block_size=self.block_size,
                        lora_id=told.lora_id,
                        medium=MEDIUM_CPU,
                        lora_name=told.lora_name,
                        group_idx=number,
                        kv_cache_spec_kind=group.kind,
                        kv_cache_spec_sliding_window=group.window,
                    )
            elif what == "removed" and key in self.stored:
                yield from self._removed([self.stored.pop(key)])
            elif what in ("cleared", "lost") and self.stored:
                # `AllBlocksCleared` would also be about the blocks of the device.
                told_of = list(self.stored.values())
                self.stored.clear()
                yield from self._removed(told_of)

    def _removed(self, blocks: list[Told]) -> Iterator[Any]:
        from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash as external

        hashes = [external(one.block_hash) for one in blocks]
        for number, _ in self.groups:
            yield BlockRemoved(block_hashes=hashes, medium=MEDIUM_CPU, group_idx=number)


def tier_events(vllm_config: VllmConfig, host: Any, shape: Geometry) -> TierEvents | None:
    """Returns the events for a host that publishes some; ``None`` for any other host."""
    config, block_size = vllm_config.kv_events_config, shape.engine_block_size
    if config is None or not config.enable_kv_cache_events:
        return None
    hashed = getattr(host, "hash_block_size", block_size)
    if hashed != block_size:
        # The tier has a key per block of the host, and a router knows the blocks by the host's hashes.
        logger.warning(
            "the tier publishes no KV events: vLLM hashes blocks of %d tokens (hash_block_size), and its blocks have %d tokens "
            "(block_size); set --block-size %d if the model allows it",
            hashed,
            block_size,
            hashed,
        )
        return None
    return TierEvents(shape)
