"""Runs vLLM with the connector in this process, to check answers and measure the time to first token."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# vLLM reads these on import. The engine must run in this process, because its logits are read.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.metrics.reader import Counter

from .compare import Answer

WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}
BLOCK = 32
HITS = "vllm:external_prefix_cache_hits"


@dataclass(frozen=True)
class Asked:
    """The outcome of one request."""

    answer: Answer
    seconds: float
    """The time to the first token."""
    first: torch.Tensor
    """The log-probabilities of all tokens in the vocabulary for the answer's first token."""
    cached_tokens: int
    params: dict[str, Any]
    """The counts of tokens reused and computed, or why the request was answered without chunks."""


def token_bytes(config: Any, dtype: str) -> int:
    """Returns the size of a token's keys and values in bytes, for a transformers configuration."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * dim * WIDTHS[dtype]


def sampling(params: dict[str, Any] | None, count: int, stop: Sequence[int] = (), *, logprobs: bool = False) -> SamplingParams:
    """Returns the settings of a greedy request. ``params`` names its chunks."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=count,
        logprobs=0 if logprobs else None,
        detokenize=False,
        ignore_eos=True,
        stop_token_ids=list(stop),
        extra_args=None if params is None else {"kv_transfer_params": params},
    )


# Decision: docs/decisions/vllm.md#a-model-is-checked-in-vllms-process
class LocalEngine:
    """vLLM with the connector. Reports each request's time to first token, and the distribution of that
    token."""

    def __init__(self, model: str, config: Any, *, dtype: str, max_len: int, host_memory: str | int) -> None:
        """Starts vLLM with the model in a folder. Raises ``UnsupportedHostError`` if the connector rejects
        the model."""
        self.llm = LLM(
            model=model,
            skip_tokenizer_init=True,
            dtype=dtype,
            enforce_eager=True,
            block_size=BLOCK,
            max_model_len=max_len,
            # A prompt is computed in a single step, and a step ends before the next one begins.
            max_num_batched_tokens=max_len,
            async_scheduling=False,
            # Room for a prompt with its encodes, and for the blocks of a few earlier prompts.
            kv_cache_memory_bytes=4 * max_len * token_bytes(config, dtype),
            distributed_executor_backend="uni",
            disable_log_stats=False,
            kv_transfer_config=KVTransferConfig(
                kv_connector="ChunkConnector",
                kv_connector_module_path="kvcache.vllm",
                kv_role="kv_both",
                kv_connector_extra_config={"host_memory": host_memory},
            ),
        )
        self.logits: list[torch.Tensor] = []
        self.model = get_kv_transfer_group()._worker.recomputer.runner.model
        computed = self.model.compute_logits

        def kept(*args: Any, **kwargs: Any) -> torch.Tensor:
            logits = computed(*args, **kwargs)
            self.logits.append(logits.detach().clone())
            return logits

        self.model.compute_logits = kept

    def ask(self, tokens: Sequence[int], params: dict[str, Any] | None, count: int, *, logprobs: bool = False) -> Asked:
        """Asks for ``count`` greedy tokens; with ``params``, the prompt's chunks are reused."""
        engine = self.llm.llm_engine
        first, seconds, last = None, 0.0, None
        started = time.perf_counter()
        engine.add_request("asked", {"prompt_token_ids": list(tokens)}, sampling(params, count, logprobs=logprobs))
        while engine.has_unfinished_requests():
            for out in engine.step():
                last = out
                if first is None and out.outputs[0].token_ids:
                    seconds = time.perf_counter() - started
                    first = torch.log_softmax(self.logits[-1][-1].double(), -1)
            # Keep only the logits of one step.
            self.logits.clear()
        got = last.outputs[0]
        probs = [at[token].logprob for at, token in zip(got.logprobs, got.token_ids)] if logprobs else []
        return Asked(
            Answer(list(got.token_ids), probs), seconds, first, last.num_cached_tokens or 0, last.kv_transfer_params or {}
        )

    def texts(self, asked: Sequence[tuple[Sequence[int], dict[str, Any] | None]], count: int, stop: Sequence[int]) -> list[list[int]]:
        """Answers requests in one batch, each with up to ``count`` greedy tokens."""
        prompts = [{"prompt_token_ids": list(tokens)} for tokens, _ in asked]
        outs = self.llm.generate(prompts, [sampling(params, count, stop) for _, params in asked], use_tqdm=False)
        self.logits.clear()
        return [list(out.outputs[0].token_ids) for out in outs]

    def hits(self) -> int:
        """Returns the number of tokens that vLLM has counted as external hits."""
        return sum(metric.value for metric in self.llm.get_metrics() if isinstance(metric, Counter) and metric.name == HITS)

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.model.compute_logits
        del self.llm, self.model
        gc.collect()


def divergence(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Returns the Kullback-Leibler divergence of a distribution from a reference, in nats. Both are
    log-probabilities."""
    return float((reference.exp() * (reference - other)).sum())
