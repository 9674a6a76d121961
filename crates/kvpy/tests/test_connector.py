"""The connector for vLLM, without vLLM: it answers recorded calls as it did when they were recorded, and the bytes are right.

When the connector changes on purpose, ``python tools/vllm/record.py FOLDER`` records the files in ``golden/vllm`` anew from a real vLLM,
and their difference is the change.
"""

from __future__ import annotations

import golden_calls
import pytest
from replay import Replay


@pytest.mark.parametrize("name", golden_calls.names())
def test_recorded_calls_are_answered_as_they_were(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = Replay(golden_calls.read(name), monkeypatch)
    replay.run()
    side = replay.side._scheduler
    kept = [side.states, side.encodes, side.unsaved, side.refused, side.receiving, side.ended, side.behind_chunks]
    if side.tier is not None:
        kept += [side.tier.holds, side.tier.saving, side.tier.on_their_way, side.tier.progress, side.tier.barred]
    assert not any(kept), "something is kept of requests that have ended"
    chunks = side.cache
    chunks.check_invariants()
    counted = side.stats()
    assert counted is None or name == "refused" or counted.data["chunk_tokens_computed"] or counted.data["prefix_blocks_saved"]
    side.reset()
    assert chunks.get_metrics().used_blocks == 0, "something stays held when no request runs"
    if side.tier is not None:
        side.tier.pool.check_invariants()
        counts = side.tier.pool.counts()
        assert counts["free"] == counts["total"], "a block of a prefix stays held when no request runs"


def test_an_encode_is_stored_when_all_ranks_have_saved_it(monkeypatch: pytest.MonkeyPatch) -> None:
    Replay(golden_calls.read("together"), monkeypatch, ranks=2).run()
    one_is_silent = Replay(golden_calls.read("together"), monkeypatch, ranks=2)
    one_is_silent.ranks = 1
    with pytest.raises(AssertionError, match=r"get_num_new_matched_tokens .* returns \[None, False\] instead of \[\d+, True\]"):
        one_is_silent.run()
