"""A request in the scheduler."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable
from typing import Any

BLOCK_SIZE = 32


def block_hashes(request: Request) -> list[bytes]:
    """Returns the hashes of new blocks. A hash covers all tokens up to the block's end, and the salt."""
    done, tokens = len(request.block_hashes), request.all_token_ids
    ends = range((done + 1) * BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)
    return [hashlib.sha256(repr((request.cache_salt, tokens[:end])).encode()).digest() for end in ends]


class RequestStatus(enum.Enum):
    WAITING = enum.auto()
    WAITING_FOR_REMOTE_KVS = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_ERROR = enum.auto()


class Request:
    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int] | None,
        sampling_params: Any,
        pooling_params: Any,
        client_index: int = 0,
        lora_request: Any = None,
        cache_salt: str | None = None,
        priority: int = 0,
        block_hasher: Callable[[Request], list[bytes]] | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.sampling_params = sampling_params
        self.pooling_params = pooling_params
        self.client_index = client_index
        self.lora_request = lora_request
        self.cache_salt = cache_salt
        self.priority = priority
        self.mm_features: list[Any] = []
        self.prompt_embeds: Any = None
        self.skip_reading_prefix_cache = False
        self.num_computed_tokens = 0
        self.status = RequestStatus.WAITING
        self.output_token_ids: list[int] = []
        extra = (sampling_params.extra_args if sampling_params else None) or {}
        self.kv_transfer_params: dict[str, Any] | None = extra.get("kv_transfer_params")
        self.block_hashes: list[bytes] = []
        self._block_hasher = block_hasher
        self.update_block_hashes()

    @property
    def all_token_ids(self) -> list[int]:
        return [*(self.prompt_token_ids or ()), *self.output_token_ids]

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def update_block_hashes(self) -> None:
        if self._block_hasher is not None:
            self.block_hashes.extend(self._block_hasher(self))
