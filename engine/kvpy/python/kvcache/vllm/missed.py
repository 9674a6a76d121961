"""The reasons why a part of a prompt was not in host memory. Their names are those of ``kvc run --json``."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

MOST = 1 << 16
"""The number of keys, and of texts, that are remembered."""


def combined(host: str, disk: str | None) -> str:
    """Returns the reason for a part that neither host memory nor the disk has."""
    return host if disk is None or (disk == "new" and host != "new") else disk


class Known:
    """What was in host memory since the last reset."""

    def __init__(self) -> None:
        self.keys: OrderedDict[bytes, None] = OrderedDict()
        self.texts: OrderedDict[bytes, None] = OrderedDict()

    def stored(self, key: bytes, tokens: list[int], *, is_public: bool) -> None:
        """Notes that host memory has tokens. If they are not public, no other tenant learns of them."""
        _add(self.keys, key)
        if is_public:
            _add(self.texts, _text(tokens))

    def why_absent(self, key: bytes, tokens: list[int], *, is_public: bool) -> str:
        """Returns why host memory lacks tokens."""
        if key in self.keys:
            return "evicted"
        return "other_context" if is_public and _text(tokens) in self.texts else "new"

    def reset(self) -> None:
        self.keys.clear()
        self.texts.clear()


def _add(known: OrderedDict[bytes, None], what: bytes) -> None:
    known[what] = None
    known.move_to_end(what)
    if len(known) > MOST:
        known.popitem(last=False)


def _text(tokens: list[int]) -> bytes:
    return hashlib.blake2b(repr(tokens).encode(), digest_size=16).digest()
