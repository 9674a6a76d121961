"""Hashes of blocks."""


def maybe_convert_block_hash(block_hash: bytes) -> bytes:
    return block_hash
