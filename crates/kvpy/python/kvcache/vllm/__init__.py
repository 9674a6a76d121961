"""Position-independent chunks inside vLLM, through its connector interface.

Start vLLM with ``KVTransferConfig(kv_connector="ChunkConnector", kv_connector_module_path="kvcache.vllm", kv_role="kv_both")``.
"""

from .connector import ChunkConnector
from .prompt import ChunkPrompt, ChunkRequestError

__all__ = ["ChunkConnector", "ChunkPrompt", "ChunkRequestError"]
