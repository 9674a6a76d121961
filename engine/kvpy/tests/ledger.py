"""What the counters of a connector must be, from what was asked, what ran, and what workers were told to save.

Nothing here reads the connector's own counts. A request is identified by its client: the connector's requests have the
client of the request that they are for.
"""

from __future__ import annotations

from typing import Any

from fake_engine import SIZE, Engine


class Ledger:
    """Watches an engine from its first step on."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.computed: dict[str, dict[Any, int]] = {}
        """The number of tokens of each piece that was computed for a request before it ran, by client."""
        self.saved_pieces = self.cleared_pieces = 0
        self.blocks: set[int] = set()
        """The blocks of the tier that were written since the last reset."""
        self.saved_blocks = self.overwritten_blocks = 0
        engine.ordered.append(self.order)

    def order(self, orders: Any) -> None:
        """Notes a step's orders. No save fails in the engine."""
        for save in orders.saves:
            for (to, offset, count), sources in save.rows:
                if save.of_prefix:
                    assert (offset, count) == (0, SIZE)
                    self.save_block(*to)
                else:
                    self.save_piece(save.name, count, sources[0])

    def save_block(self, block: int) -> None:
        self.saved_blocks += 1
        self.overwritten_blocks += block in self.blocks
        self.blocks.add(block)

    def save_piece(self, name: str, count: int, source: Any) -> None:
        self.saved_pieces += 1
        encode = self.engine.requests[name]
        table = self.engine.kv_cache_manager.tables[name][0]
        first = table.index(source[0][0]) * SIZE + source[1]
        piece = (tuple(encode.prompt_token_ids[: first + count]), first)
        client = self.engine.clients[encode.client_index]
        if client not in self.engine.ran:
            self.computed.setdefault(client, {})[piece] = count

    def reset(self, kept: int) -> None:
        """Notes that the connector has forgotten everything, also the ``kept`` pieces that it had."""
        self.cleared_pieces += kept
        self.blocks.clear()

    def lost_pieces(self, kept: int) -> int:
        """Returns the number of pieces that were saved, that no reset cleared, and that are not among the ``kept``
        ones."""
        return self.saved_pieces - self.cleared_pieces - kept

    def computed_for(self, client: str) -> int:
        """Returns the number of tokens that were computed for a request before it ran."""
        return sum(self.computed.get(client, {}).values())
