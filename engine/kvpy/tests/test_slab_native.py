"""Rows of another engine as records: the calls check their arguments, and the rows arrive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache._native import Slab

MIB = 1 << 20


def test_the_native_calls_check_their_arguments(tmp_path: Path) -> None:
    slab = Slab(tmp_path, "identity", limit=4 * MIB, row_bytes=64)
    rows = np.zeros((4, 64), np.int8)

    def load(name: bytes, table: Any, row: int) -> str | None:
        handle = slab.begin_load(name)
        assert handle.wait(10)
        return handle.end(table, row)

    with pytest.raises(ValueError, match="row 4 does not exist; there are 4"):
        slab.store([b"a"], rows, [4], deadline=1)
    with pytest.raises(ValueError, match="2 names, 1 rows and 1 costs; each row needs a name and a cost"):
        slab.store([b"a", b"b"], rows, [0], deadline=1)
    with pytest.raises(ValueError, match="1 names, 1 rows and 2 costs"):
        slab.store([b"a"], rows, [0], deadline=1, costs=[1.0, 2.0])
    with pytest.raises(ValueError, match="row 4 does not exist; there are 4"):
        load(b"a", rows, 4)
    with pytest.raises(ValueError, match="rows must be 64 bytes, not 32"):
        load(b"a", np.zeros((4, 32), np.int8), 0)
    with pytest.raises(ValueError, match="contiguous"):
        load(b"a", np.zeros((4, 64), np.int8).T, 0)
    with pytest.raises(ValueError, match="deadline is 0"):
        slab.store([b"a"], rows, [0], deadline=0)
    with pytest.raises(ValueError, match="deadline is NaN"):
        slab.close(deadline=float("nan"))
    with pytest.raises(ValueError, match="at most a day"):
        slab.store([b"a"], rows, [0], deadline=1e18)
    read_only = rows.copy()
    read_only.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        load(b"a", read_only, 0)
    assert slab.store([], rows, [], deadline=1) == []
    assert load(b"a", rows, 0) == "absent" and slab.peek(b"a") is None and slab.expected(1) is None
    # Rows may stand apart in memory.
    apart = np.zeros((8, 128), np.int8)[::2, :64]
    apart[3] = 7
    assert slab.store([b"a"], apart, [3], deadline=10, costs=[2.5]) == [True]
    assert slab.peek(b"a")[1] == 2.5
    assert load(b"a", rows, 1) is None and rows[1].tolist() == [7] * 64 and not rows[[0, 2, 3]].any()
    assert slab.expected(1) > 0
    handle = slab.begin_load(b"a")
    assert handle.wait(10) and handle.is_over and handle.progress == 1.0 and handle.end(rows, 2) is None
    with pytest.raises(RuntimeError, match="the load was already ended"):
        handle.end(rows, 2)
    assert slab.close(deadline=10) and slab.close(deadline=10)
    with pytest.raises(RuntimeError, match="closed; open the folder again"):
        slab.contains(b"a")


def test_the_newest_times_are_taken_once(tmp_path: Path) -> None:
    slab = Slab(tmp_path, "identity", limit=4 * MIB, row_bytes=64)
    rows = np.zeros((1, 64), np.int8)
    assert slab.take_times() == {"load_seconds": [], "write_seconds": []}
    assert slab.store([b"a"], rows, [0], deadline=10) == [True]
    for loads in (2, 10_001):
        for _ in range(loads):
            handle = slab.begin_load(b"a")
            assert handle.wait(10) and handle.end(rows, 0) is None
        times = slab.take_times()
        assert len(times["load_seconds"]) == min(loads, 10_000) and len(times["write_seconds"]) == (loads == 2)
        assert all(0 < seconds < 60 for kind in times.values() for seconds in kind)
    assert slab.close(deadline=10) and slab.take_times() == {"load_seconds": [], "write_seconds": []}
