"""Sizes in settings: a number of bytes, or a text with a unit."""

from __future__ import annotations

import math
import re
from typing import Any

UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def size_of(name: str, value: Any) -> Any:
    """Returns a size in bytes, given as a number, or as a text with a unit. Raises ``ValueError`` for other
    texts."""
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|KiB|MiB|GiB|TiB)", value.strip())
        if match is None:
            raise ValueError(f"{name} is {value!r}: it must be a number of bytes, or a number with KiB, MiB, GiB or TiB")
        value = float(match[1]) * UNITS[match[2]]
    # Whole bytes; a float such as 8e9 is a number of bytes, too.
    return int(value) if isinstance(value, float) and math.isfinite(value) else value
