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
    assert not (side.states or side.encodes or side.unsaved or side.refused), "something is kept of requests that have ended"
    chunks = side.cache
    chunks.check_invariants()
    chunks.clear()
    assert chunks.metrics()["used_blocks"] == 0, "something stays held when no request runs"


def test_an_encode_is_stored_when_all_ranks_have_saved_it(monkeypatch: pytest.MonkeyPatch) -> None:
    Replay(golden_calls.read("together"), monkeypatch, ranks=2).run()
    one_is_silent = Replay(golden_calls.read("together"), monkeypatch, ranks=2)
    one_is_silent.ranks = 1
    with pytest.raises(AssertionError, match=r"get_num_new_matched_tokens .* returns \[None, False\] instead of \[\d+, True\]"):
        one_is_silent.run()
