"""The numbers of a disk tier, by the names that its slab gives them."""

from __future__ import annotations

GAUGES = {
    "bytes": "Bytes of the disk tier's file that contain blocks or are set aside.",
    "limit_bytes": "The size of the disk tier's file.",
    "records": "Blocks in the disk tier.",
}
SLAB_COUNTERS = {
    "hits": "Blocks that were read from the disk tier.",
    "misses": "Blocks that were to be read from the disk tier and were not, for any reason.",
    "differs": "Blocks in the disk tier that belonged to another prompt or layout.",
    "damaged": "Blocks in the disk tier whose bytes had changed.",
    "deadline_exceeded": "Blocks that the disk did not deliver in time.",
    "loads_skipped_slower": "Blocks that were not read because computing them is faster.",
    "read_errors": "Blocks that the disk refused to read.",
    "write_errors": "Writes that the disk refused.",
    "write_deadline_exceeded": "Batches of blocks that were given up, because the disk did not end a write in time.",
    "stores_dropped": "Blocks that were not written, because there was no room.",
    "evicted": "Blocks that were evicted from the disk tier.",
}
SLAB_TIMES = {
    "load_seconds": "Seconds from the start of a block's load from the disk tier until it was read and checked, or was not.",
    "write_seconds": "Seconds from the first write of a batch of blocks until the disk tier's file was synced, or the disk failed.",
}
TIMES = {
    **SLAB_TIMES,
    "wait_seconds": "Seconds from the start of a request's loads from the disk tier until the last one arrived or was given up.",
}
BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""The bounds of the histograms' buckets in seconds."""
COUNTERS = {
    **SLAB_COUNTERS,
    "loads_failed": "Blocks that were asked for and not delivered.",
    "stores_failed": "Blocks that vLLM offered and that are not on the disk.",
    "stores_refused": "Of these, blocks that were refused at once, because too many waited.",
}
