"""Position-independent chunks inside vLLM, through its connector interface.

Start vLLM with ``KVTransferConfig(kv_connector="ChunkConnector", kv_connector_module_path="kvcache.vllm",
kv_role="kv_both")``. ``python -m kvcache.vllm check MODEL`` tests whether a model works with chunks. Clients
that only build requests need no vLLM, which is imported on the first use of ``ChunkConnector``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .prompt import ChunkPrompt, ChunkRequestError

if TYPE_CHECKING:
    from .connector import ChunkConnector

__all__ = ["ChunkConnector", "ChunkPrompt", "ChunkRequestError"]


def __getattr__(name: str) -> Any:
    if name == "ChunkConnector":
        from .connector import ChunkConnector

        return ChunkConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
