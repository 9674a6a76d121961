"""What the counters of a connector must be, from what was asked, what ran, and what workers were told to save.

Nothing here reads the connector's own counters. A request is identified by its client: the connector's requests have the
client of the request that they are for.
"""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import SIZE, Engine

from kvcache import PieceHold
from kvcache.vllm import pieces


class Ledger:
    """Watches an engine from its first step on."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, max_chunks: int, max_chunk_tokens: int) -> None:
        self.engine, self.max_chunks, self.max_chunk_tokens = engine, max_chunks, max_chunk_tokens
        self.computed: dict[str, dict[Any, int]] = {}
        """The number of tokens of each piece that was computed for a request before it ran, by client."""
        self.saved_pieces = self.cleared_pieces = 0
        self.there: dict[Any, int] = {}
        """The pieces that must be in host memory, each with its number of blocks: none has been evicted since they were saved."""
        self.evictions = self.saved_while_all_are_there = 0
        self.blocks: set[int] = set()
        """The blocks of the tier that were written since the last reset."""
        self.saved_blocks = self.overwritten_blocks = 0
        self.kept: set[tuple[int, ...]] = set()
        """The blocks of each piece that was kept when it was stored."""
        self.unkept = 0
        """The pieces that were handed to requests while all pieces that were kept had readers."""
        self.loaded: dict[str, set[int]] = {}
        """The numbers of tokens of chunks that were copied in for each request at once."""
        engine.ordered.append(self.order)
        hand_over = pieces._hand_over

        def watched(work: Any) -> None:
            self.hand_over(work)
            hand_over(work)

        monkeypatch.setattr(pieces, "_hand_over", watched)

    def hand_over(self, work: Any) -> None:
        """Notes that a piece is about to be stored. If the index is full, it replaces a piece without readers."""
        side, blocks = self.engine.side.chunks, tuple(work.reservation.block_ids)
        of_requests = (one for state in side.pieces.states for own in state.pieces.values() for one in own)
        held = {tuple(one.block_ids) for one in of_requests if isinstance(one, PieceHold)}
        if side.cache.get_metrics().cached_chunks == self.max_chunks == len(held & self.kept):
            self.unkept += 1
            self.kept.discard(blocks)
        else:
            self.kept.add(blocks)

    def needed(self, tokens: list[int], params: dict[str, Any], first: int) -> int:
        """Returns the number of blocks of host memory for the parts of a prompt with rows after the ``first`` tokens. A question
        chooses among the rows of all parts, if there are any such rows."""
        lengths, mode, blocks, start = params["chunk_lengths"], params.get("chunk_mode", "alone"), {}, 0
        if params.get("chunk_recompute", "").startswith("question") and first < sum(lengths):
            first = 0
        system = tokens[: lengths[0]]
        for number, length in enumerate(lengths):
            before = [] if number == 0 or mode == "alone" else system if mode == "with-system" else system[: int(mode[5:])]
            for at in range(0, length if start + length > first else 0, self.max_chunk_tokens):
                end = min(at + self.max_chunk_tokens, length)
                blocks[tuple(before), tuple(tokens[start : start + end])] = -(-(end - at) // SIZE)
            start += length
        return sum(blocks.values())

    def order(self, orders: Any) -> None:
        """Notes a step's orders. No save fails in the engine."""
        for load in orders.loads:
            if not load.of_prefix:
                self.loaded.setdefault(load.request_id, set()).add(sum(source[2] for source, *_ in load.rows))
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
        self.has_left()
        where = self.engine.context(encode)
        assert (where, piece) not in self.there, "a piece is computed again, although host memory has it"
        self.there[where, piece] = -(-count // SIZE)
        self.saved_while_all_are_there += len(self.there) > 1
        client = self.engine.clients[encode.client_index]
        if client not in self.engine.ran:
            self.computed.setdefault(client, {})[piece] = count

    def has_left(self) -> None:
        """Forgets which pieces are in host memory if any of them may have left it."""
        left = self.engine.side.chunks.cache.get_metrics().evictions + self.unkept
        if left != self.evictions:
            self.evictions = left
            self.there.clear()

    def check_gauges(self, gauges: dict[str, float]) -> None:
        """Checks how much memory is said to be used, once no request runs."""
        shape = self.engine.side.chunks.shape
        if shape.prefix_blocks > 0:
            assert gauges["prefix_memory_usage_perc"] == pytest.approx(len(self.blocks) / shape.prefix_blocks)
        self.has_left()
        used = sum(self.there.values())
        if self.evictions == 0:
            assert gauges["chunk_memory_usage_perc"] == pytest.approx(used / shape.num_blocks)
        assert used / shape.num_blocks - 1e-9 <= gauges["chunk_memory_usage_perc"] <= 1

    def reset(self, kept: int) -> None:
        """Notes that the connector has forgotten everything, also the ``kept`` pieces that it had."""
        self.cleared_pieces += kept
        self.there.clear()
        self.blocks.clear()
        self.kept.clear()

    def happened(self) -> dict[str, int]:
        """Returns how often something happened that only pressure brings about."""
        return {
            "preemptions": self.engine.preemptions,
            "evictions of pieces": self.lost_pieces(self.engine.side.chunks.cache.get_metrics().cached_chunks),
            "evictions of blocks": self.overwritten_blocks,
            "pieces used and not kept": self.unkept,
            "pieces saved while nothing has left": self.saved_while_all_are_there,
            "failed copies": len(self.engine.broken),
            "failed copies after own blocks": sum(first > 0 for first in self.engine.broken.values()),
        }

    def lost_pieces(self, kept: int) -> int:
        """Returns the number of pieces that were saved and kept, that no reset cleared, and that are not among the ``kept``
        ones."""
        return self.saved_pieces - self.cleared_pieces - self.unkept - kept

    def computed_for(self, client: str) -> int:
        """Returns the number of tokens that were computed for a request before it ran."""
        return sum(self.computed.get(client, {}).values())
