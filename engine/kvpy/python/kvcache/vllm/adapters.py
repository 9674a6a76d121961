"""Identities of LoRA adapters. An adapter whose files were replaced is another adapter, whatever its name."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from .names import Names

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest


def stamp_of(path: str) -> str:
    """Returns a hash of the names, sizes and times of an adapter's files. The stamp of a path that is not a local
    folder is empty, because vLLM loads such an adapter only once.
    """
    try:
        with os.scandir(path) as found:
            files = sorted((entry.name, entry.stat()) for entry in found if entry.is_file())
    except OSError:
        return ""
    # A copy can keep the time of its contents, but not the time of the change.
    described = [(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in files]
    return hashlib.sha256(repr(described).encode()).hexdigest()


# Decision: docs/decisions/vllm.md#an-adapter-is-its-files
class Adapters:
    """The adapters that requests have used."""

    def __init__(self) -> None:
        self.first: dict[str, str] = {}
        """The stamp with which each adapter was first used, by name."""

    def salt(self, adapter: LoRARequest | None, salt: str | None, names: Names) -> str | None:
        """Returns the salt of a request with this adapter and salt. vLLM identifies an adapter's blocks by its
        name, so requests for an adapter whose files were replaced get another salt.
        """
        if adapter is None:
            return salt
        stamp = stamp_of(adapter.lora_path)
        if self.first.setdefault(adapter.lora_name, stamp) == stamp:
            return salt
        return names.salt("adapter", salt, stamp)
