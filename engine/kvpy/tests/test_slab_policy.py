"""What leaves a full file of records first."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvcache._native import Slab

MIB = 1 << 20


@pytest.mark.parametrize(("policy", "stays"), [("lru", False), ("tiny-lfu", True), ("s3-fifo", True)])
def test_a_policy_keeps_what_is_asked_for_often(tmp_path: Path, policy: str, stays: bool) -> None:
    rows = np.zeros((1, 4096), np.int8)
    slab = Slab(tmp_path, "identity", limit=MIB, row_bytes=4096, policy=policy)
    assert slab.store([b"often"], rows, [0], deadline=10) == [True]
    for number in range(30):
        assert slab.store([b"before %d" % number], rows, [0], deadline=10) == [True]
        load = slab.begin_load(b"often")
        assert load.wait(10) and load.end(rows, 0) is None
    for number in range(400):
        slab.store([b"once %d" % number], rows, [0], deadline=10)
    assert slab.usage()["evicted"] > 100 and slab.contains(b"often") == stays
    assert slab.close(deadline=10)
    with pytest.raises(ValueError, match="policy"):
        Slab(tmp_path, "identity", limit=MIB, row_bytes=4096, policy="random")
