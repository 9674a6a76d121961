"""Position-independent chunks inside vLLM, through its connector interface.

Start vLLM with ``KVTransferConfig(kv_connector="ChunkConnector", kv_connector_module_path="kvcache.vllm", kv_role="kv_both")``.
``python -m kvcache.vllm check MODEL`` says whether chunks are fit for a model. Clients that only build requests need no vLLM: it is
imported with ``ChunkConnector``.
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
