"""Tokens of chunks that are computed again, by the host's own model, with everything before them in sight.

Each run of tokens is a row of a batch whose query ends where the run does: to the host's attention it looks like a request that has
computed what stands before it. Keys and values are written to the request's own blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def recompute(
    vllm_config: VllmConfig,
    runner: Any,
    runs: list[tuple[int, list[int]]],
    table: list[int],
    block_size: int,
) -> None:
    """Runs the model over ``runs``, each the position of its first token and its tokens, of a request with the blocks ``table``."""
    device = runner.device
    tokens = [token for _, run in runs for token in run]
    positions = [start + i for start, run in runs for i in range(len(run))]
    ends = [start + len(run) for start, run in runs]
    starts = [0]
    for _, run in runs:
        starts.append(starts[-1] + len(run))
    slots = [table[p // block_size] * block_size + p % block_size for p in positions]

    def ints(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    slot_mapping = ints(slots, torch.int64)
    common = CommonAttentionMetadata(
        query_start_loc=ints(starts),
        query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32),
        seq_lens=ints(ends),
        num_reqs=len(runs),
        num_actual_tokens=len(tokens),
        max_query_len=max(len(run) for _, run in runs),
        max_seq_len=max(ends),
        block_table_tensor=ints([table] * len(runs)),
        slot_mapping=slot_mapping,
        positions=ints(positions, torch.int64),
        is_prefilling=torch.ones(len(runs), dtype=torch.bool),
        seq_lens_cpu_upper_bound=torch.tensor(ends, dtype=torch.int32),
    )
    metadata, mapping = {}, {}
    for group in runner.attn_groups[0]:
        built = group.get_metadata_builder().build(0, common)
        for name in group.layer_names:
            metadata[name], mapping[name] = built, slot_mapping
    with set_forward_context(metadata, vllm_config, num_tokens=len(tokens), slot_mapping=mapping):
        runner.model(
            input_ids=ints(tokens),
            positions=ints(positions, torch.int64),
            intermediate_tensors=None,
            inputs_embeds=None,
        )
