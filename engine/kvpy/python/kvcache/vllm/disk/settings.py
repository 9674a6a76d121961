"""The settings of a ``SlabTier``, from its entry in ``secondary_tiers``."""

from __future__ import annotations

import difflib
import os
from dataclasses import MISSING, dataclass, fields
from typing import Any

from ..host import _bytes

DAY = 24 * 60 * 60
EXAMPLES = {"path": "the folder for its records, such as \"/var/lib/kvcache\"", "limit": "the size of its file, such as \"50GiB\""}


@dataclass(frozen=True)
class SlabSettings:
    path: str
    """The folder. It is created if it does not exist."""
    limit: int
    """The size of the file in bytes. It is reserved at once."""
    read_deadline: float = 2.0
    """Seconds that a block may take to be read."""
    write_deadline: float = 30.0
    """Seconds that 32 MiB may take to be written."""
    version: str = ""
    """A part of every block's identity. Change it when weights change without their files changing."""
    locality: str | None = None
    """``LOCAL`` or ``REMOTE``, as requests may name it in ``kv_load_tiers``."""

    @classmethod
    def of(cls, given: dict[str, Any]) -> SlabSettings:
        """Reads the settings. Raises ``ValueError`` for an unknown or missing name, or an invalid value."""
        known = {field.name: field for field in fields(cls)}
        for name in given:
            if name not in known:
                like = difflib.get_close_matches(name, known, 1)
                hint = f"; use {like[0]}" if like else ""
                raise ValueError(f"SlabTier has the unknown setting {name}{hint}; the known settings are {', '.join(known)}")
        for name, field in known.items():
            if field.default is MISSING and given.get(name) is None:
                raise ValueError(f"SlabTier needs the setting {name}: {EXAMPLES[name]}")
        settings = cls(**{**given, "path": _path(given["path"]), "limit": _bytes("limit", given["limit"])})
        if type(settings.limit) is not int or not 0 < settings.limit < 1 << 63:
            raise ValueError(f"limit is {given['limit']!r}: it must be a number of bytes above 0 that a file can have, or a text such as \"50GiB\"")
        for name in ("read_deadline", "write_deadline"):
            value = getattr(settings, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= DAY:
                raise ValueError(f"{name} is {value!r}: it must be a number of seconds above 0, at most a day")
        if not isinstance(settings.version, str):
            raise ValueError(f"version is {settings.version!r}: it must be a text")
        if settings.locality not in (None, "LOCAL", "REMOTE"):
            raise ValueError(f"locality is {settings.locality!r}: it must be \"LOCAL\" or \"REMOTE\"")
        return settings


def _path(value: Any) -> str:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ValueError(f"path is {value!r}: it must be {EXAMPLES['path']}")
    return os.path.abspath(os.path.expanduser(os.fspath(value)))
