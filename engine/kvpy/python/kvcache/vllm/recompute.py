"""Recomputes tokens of chunks with the host's own model and everything before them in sight.

Each run of tokens is a row of a batch whose query ends at the end of the run: to the host's attention, it
looks like a request that has computed everything before the run. Keys and values are written to the request's
own blocks.

The question chooses tokens by its own attention: it is computed once over the unchanged keys, and its softmax
weights are summed for each token over rows, heads, and all layers but the first third. This happens in blocks of its
own, because the request's blocks have room only for the tokens of the step, and some of them may hold recomputed
tokens already. Choices are kept, so that a request that vLLM has preempted need not choose again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from kvcache import ForeignCache

from .layout import keys_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from .orders import Again


# The maximum number of questions whose choices are kept.
CHOICES = 256
# The maximum number of attention weights that are in memory at once, for all heads.
WEIGHTS = 1 << 24


class Recomputer:
    """A worker's model, which recomputes tokens."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        runner: Any,
        layers: list[str],
        caches: list[torch.Tensor],
        order: str,
        block_size: int,
        load: Callable[[ForeignCache, list[Any]], None],
    ) -> None:
        self.config = vllm_config
        self.runner = runner
        self.layers = layers
        self.caches = caches
        self.order = order
        self.block_size = block_size
        self.load = load
        """Copies stored rows to a cache."""
        self.choices: OrderedDict[bytes, list[tuple[int, int]]] = OrderedDict()

    def run(self, again: Again) -> None:
        """Recomputes an order's runs, or the tokens in them that the question chooses."""
        runs = again.runs if again.chosen is None else self.kept_choice(again)
        runs = [(max(start, again.first), end) for start, end in runs if end > again.first]
        if runs:
            self.forward(again.tokens, again.table, runs)

    def forget(self) -> None:
        """Forgets what questions chose."""
        self.choices.clear()

    # Decision: docs/decisions/vllm.md#tokens-are-recomputed-as-if-they-were-requests
    def forward(self, tokens: list[int], table: list[int], runs: list[tuple[int, int]]) -> None:
        """Runs the model over the tokens of ``runs``, given as pairs of start and end."""
        device, size = self.runner.device, self.block_size

        def ints(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        places = torch.cat([torch.arange(start, end) for start, end in runs])
        slots = torch.tensor(table)[places // size] * size + places % size
        positions, slot_mapping = places.to(device), slots.to(device)
        starts = [0]
        for start, end in runs:
            starts.append(starts[-1] + end - start)
        ends = [end for _, end in runs]
        common = CommonAttentionMetadata(
            query_start_loc=ints(starts),
            query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32),
            seq_lens=ints(ends),
            num_reqs=len(runs),
            num_actual_tokens=len(places),
            max_query_len=max(end - start for start, end in runs),
            max_seq_len=max(ends),
            block_table_tensor=ints(table).expand(len(runs), -1).contiguous(),
            slot_mapping=slot_mapping,
            positions=positions,
            is_prefilling=torch.ones(len(runs), dtype=torch.bool),
            seq_lens_cpu_upper_bound=torch.tensor(ends, dtype=torch.int32),
        )
        metadata, mapping = {}, {}
        for group in self.runner.attn_groups[0]:
            built = group.get_metadata_builder().build(0, common)
            for name in group.layer_names:
                metadata[name], mapping[name] = built, slot_mapping
        with set_forward_context(metadata, self.config, num_tokens=len(places), slot_mapping=mapping):
            self.runner.model(
                input_ids=ints(tokens)[positions],
                positions=positions,
                intermediate_tensors=None,
                inputs_embeds=None,
            )

    # Decision: docs/decisions/vllm.md#a-question-chooses-before-its-request-has-blocks
    def kept_choice(self, again: Again) -> list[tuple[int, int]]:
        """Returns the runs that the question chose when its blocks were computed. If it has not, chooses
        now.
        """
        # All ranks see the same requests in the same order, so they all forget the same choices.
        chosen = self.choices.pop(again.key, None)
        self.choices[again.key] = self.chosen(again) if chosen is None else chosen
        if len(self.choices) > CHOICES:
            self.choices.popitem(last=False)
        return self.choices[again.key]

    def chosen(self, again: Again) -> list[tuple[int, int]]:
        """Returns the runs of tokens that the question attends to most."""
        among = torch.tensor([place for start, end in again.runs for place in range(start, end)])
        if again.chosen >= len(among):
            return again.runs
        weights = self.weights(again)[among]
        # For equal weights, the earlier token comes first, on all ranks and in every process.
        best = torch.argsort(weights, descending=True, stable=True)[: again.chosen]
        places = sorted(among[best].tolist())
        runs: list[tuple[int, int]] = []
        for place in places:
            if runs and runs[-1][1] == place:
                runs[-1] = (runs[-1][0], place + 1)
            else:
                runs.append((place, place + 1))
        return runs

    def weights(self, again: Again) -> torch.Tensor:
        """Computes the question over the unchanged keys. Returns its attention to each token before it.
        """
        start, end = again.question_start, len(again.tokens)
        context = self.config.compilation_config.static_forward_context
        first = len(self.layers) // 3
        blocks = torch.arange(-(-end // self.block_size))
        scratch = [torch.zeros((len(blocks), *cache.shape[1:]), dtype=cache.dtype) for cache in self.caches]
        self.load(ForeignCache.interleaved(scratch, self.order, "cpu"), again.rows)
        sums = torch.zeros(start)
        queries: dict[int, torch.Tensor] = {}

        def note(number: int):
            def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                query = args[0] if args else kwargs["query"]
                queries[number] = query.detach().float().clone()

            return hook

        wanted = range(first, len(self.layers))
        hooks = [context[self.layers[i]].register_forward_pre_hook(note(i), with_kwargs=True) for i in wanted]
        own = [context[name].kv_cache for name in self.layers]
        try:
            for name, cache in zip(self.layers, scratch):
                context[name].kv_cache = cache
            self.forward(again.tokens, blocks.tolist(), [(start, end)])
        finally:
            for name, cache in zip(self.layers, own):
                context[name].kv_cache = cache
            for hook in hooks:
                hook.remove()
        for number, query in queries.items():
            module = context[self.layers[number]]
            keys = keys_of(scratch[number], blocks, self.order)[:end].float()
            heads, kv_heads, dim = module.num_heads, module.num_kv_heads, module.head_size
            rows = query[: end - start].view(end - start, kv_heads, heads // kv_heads, dim)
            sums += attention(rows, keys, start, module.impl.scale)
        return tensor_model_parallel_all_reduce(sums)


def attention(rows: torch.Tensor, keys: torch.Tensor, start: int, scale: float) -> torch.Tensor:
    """Returns the attention to each of the first ``start`` keys ``[tokens, kv_heads, head_dim]``, summed over all heads
    and over the queries ``[queries, kv_heads, heads, head_dim]``, which belong to the tokens from ``start`` on.

    The weights of a few queries are in memory at once, however long the question is.
    """
    count, kv_heads, heads, _ = rows.shape
    sums = torch.zeros(start)
    step = max(1, WEIGHTS // (kv_heads * heads * len(keys)))
    for first in range(0, count, step):
        some = rows[first : first + step]
        logits = torch.einsum("qghd,tgd->ghqt", some, keys) * scale
        places = torch.arange(start + first, start + first + len(some))
        logits.masked_fill_(torch.arange(len(keys))[None] > places[:, None], float("-inf"))
        sums += logits.softmax(-1)[..., :start].sum((0, 1, 2))
    return sums
