"""The settings of a ``SlabTier``, from its entry in ``secondary_tiers``, and the checks of settings about a disk."""

from __future__ import annotations

import difflib
import os
from dataclasses import MISSING, dataclass, fields
from typing import Any

from ..sizes import size_of

DAY = 24 * 60 * 60
EXAMPLES = {"path": "the folder for its records, such as \"/var/lib/kvcache\"", "limit": "the size of its file, such as \"50GiB\""}

LOADS = ("if-faster", "always")
POLICIES = ("lru", "s3-fifo", "tiny-lfu")


@dataclass(frozen=True)
class SlabSettings:
    path: str
    """The folder. It is created if it does not exist."""
    limit: int
    """The size of the file in bytes. It is reserved at once."""
    read_deadline: float = 2.0
    """Seconds that a block may take to be read."""
    loads: str = "if-faster"
    """``if-faster``: what is computed sooner is not loaded. ``always``: everything is loaded."""
    write_deadline: float = 30.0
    """Seconds that 32 MiB may take to be written."""
    policy: str = "lru"
    """What leaves first when the file is full: ``lru``, ``s3-fifo`` or ``tiny-lfu``."""
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
        settings = cls(**{**given, "path": folder_of("path", given["path"]), "limit": limit_of("limit", given["limit"])})
        for name in ("read_deadline", "write_deadline"):
            check_seconds(name, getattr(settings, name))
        check_loads("loads", settings.loads)
        check_policy("policy", settings.policy)
        check_version("version", settings.version)
        if settings.locality not in (None, "LOCAL", "REMOTE"):
            raise ValueError(f"locality is {settings.locality!r}: it must be \"LOCAL\" or \"REMOTE\"")
        return settings


def check_loads(name: str, value: Any) -> None:
    """Raises ``ValueError`` if a setting does not say what is loaded."""
    if value not in LOADS:
        raise ValueError(f"{name} is {value!r}: it must be \"if-faster\" or \"always\"")


def check_policy(name: str, value: Any) -> None:
    """Raises ``ValueError`` if a setting is not the name of a policy that needs no priorities."""
    if value not in POLICIES:
        raise ValueError(f"{name} is {value!r}: it must be one of {', '.join(POLICIES)}")


def folder_of(name: str, value: Any) -> str:
    """Returns a setting's folder as an absolute path. Raises ``ValueError`` if it is none."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ValueError(f"{name} is {value!r}: it must be {EXAMPLES['path']}")
    return os.path.abspath(os.path.expanduser(os.fspath(value)))


def limit_of(name: str, value: Any) -> int:
    """Returns the size of a file in bytes. Raises ``ValueError`` if it is none."""
    limit = size_of(name, value)
    if type(limit) is not int or not 0 < limit < 1 << 63:
        raise ValueError(f"{name} is {value!r}: it must be a number of bytes above 0 that a file can have, or a text such as \"50GiB\"")
    return limit


def check_seconds(name: str, value: Any) -> None:
    """Raises ``ValueError`` if a setting is not a deadline."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= DAY:
        raise ValueError(f"{name} is {value!r}: it must be a number of seconds above 0, at most a day")


def check_version(name: str, value: Any) -> None:
    """Raises ``ValueError`` if a setting is not a version."""
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}: it must be a text")


def check_room(name: str, given: Any, limit: int, record_bytes: int) -> None:
    """Raises ``ValueError`` if a file of this size has no room for a few records."""
    least = 8 * record_bytes + (1 << 20)
    if limit < least:
        raise ValueError(f"{name} is {given!r}, which is too small: a block takes {record_bytes} bytes; use at least {least}")
