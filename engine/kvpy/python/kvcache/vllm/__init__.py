"""Position-independent chunks inside vLLM, through its connector interface.

Start vLLM with ``KVTransferConfig(kv_connector="ChunkConnector", kv_connector_module_path="kvcache.vllm",
kv_role="kv_both")``. ``python -m kvcache.vllm check MODEL`` tests whether a model works with chunks. Clients
that only build requests need no vLLM, which is imported on the first use of ``ChunkConnector``.

``SlabTier`` is a disk tier for vLLM's own ``OffloadingConnector``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .prompt import ChunkPrompt, ChunkRequestError

if TYPE_CHECKING:
    from .connector import ChunkConnector
    from .disk.cpu import CpuTieringSpec
    from .disk.tier import SlabTier

__all__ = ["ChunkConnector", "ChunkPrompt", "ChunkRequestError", "CpuTieringSpec", "SlabTier"]


def __getattr__(name: str) -> Any:
    if name == "ChunkConnector":
        from .connector import ChunkConnector

        return ChunkConnector
    if name == "SlabTier":
        from .disk.tier import SlabTier

        return SlabTier
    if name == "CpuTieringSpec":
        from .disk.cpu import CpuTieringSpec

        return CpuTieringSpec
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
