"""Checks the connector inside a real vLLM on a CPU against transformers. Run by the slice `vllm` of `cargo
xtask deep`.

    python check_connector.py MODEL …

Answers must have the tokens of the reference, and log-probabilities within 1e-3 in f32. Texts are notes if
the model has a tokenizer, otherwise random tokens. Every check prints a line; the exit status is 1 if any of
them fails.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter as Counts
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# One core per rank. Otherwise, vLLM wants one memory node per rank.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0|1" if "--ranks" in sys.argv else "auto")

import torch
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.metrics.reader import Counter

import kvcache.vllm.chunks as side
from kvcache import KvCacheError
from kvcache.vllm.gate import reference
from kvcache.vllm.gate.compare import CLOSE, Answer, compare
from kvcache.vllm.gate.local import BLOCK, divergence, token_bytes
from kvcache.vllm.gate.questions import prose
from kvcache.vllm.prefix import Prefixes

COUNT = 6


class Host:
    """vLLM with the connector, in this process."""

    def __init__(
        self,
        path: str,
        *,
        host_memory: int | str,
        blocks: int = 256,
        step_tokens: int = 256,
        ranks: int = 1,
        options: dict | None = None,
        **settings,
    ) -> None:
        self.path = path
        self.llm = LLM(
            model=path,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            block_size=BLOCK,
            max_model_len=512,
            max_num_batched_tokens=step_tokens,
            # Divergences need the whole distribution.
            max_logprobs=-1,
            num_gpu_blocks_override=blocks,
            kv_cache_memory_bytes=256 << 20,
            distributed_executor_backend="uni" if ranks == 1 else "mp",
            tensor_parallel_size=ranks,
            disable_log_stats=False,
            kv_transfer_config=KVTransferConfig(
                kv_connector="ChunkConnector",
                kv_connector_module_path="kvcache.vllm",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={"host_memory": host_memory, **settings},
            ),
            **(options or {}),
        )

    @property
    def scheduler(self):
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def side(self):
        return self.scheduler.connector._scheduler

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()

    def counter(self, name: str) -> int:
        return sum(m.value for m in self.llm.get_metrics() if isinstance(m, Counter) and m.name == name)

    def settled(self) -> None:
        """Runs steps without requests, after which everything that has ended is reported."""
        for _ in range(8):
            self.llm.llm_engine.step()

    def nothing_held(self) -> str | None:
        """Returns what is still held while no request runs, or None if nothing is."""
        self.settled()
        side = self.side
        if side.requests or side.saving or side.loads:
            return f"requests {side.requests}, saves {side.saving}, loads {side.loads}"
        if isinstance(side.prefixes, Prefixes):
            counts = side.prefixes.pool.counts()
            if side.prefixes.saving or counts["mutable"] or counts["shared"]:
                return f"blocks of prefixes: {counts}, {side.prefixes.saving}"
        if self.scheduler.kv_cache_manager.usage != 0:
            return f"{self.scheduler.kv_cache_manager.usage} of vLLM's blocks"
        try:
            side.chunks.cache.check_invariants()
        except KvCacheError as error:
            return str(error)
        side.chunks.cache.clear_cache()
        used = side.chunks.cache.get_metrics().used_blocks
        return f"{used} blocks of chunks" if used else None


def random_tokens(vocab: int) -> Iterator[int]:
    draw = random.Random(7)
    while True:
        yield draw.randrange(5, vocab)


def tokens_of_notes(path: str) -> Iterator[int]:
    tokenizer = AutoTokenizer.from_pretrained(path)
    return itertools.chain.from_iterable(tokenizer.encode(note, add_special_tokens=False) for note in prose(7))


class Case:
    """Documents, a system prompt and a question, all cut from an endless text."""

    def __init__(self, tokens: Iterator[int]) -> None:
        self.tokens = tokens
        self.system, self.question = self.text(21), self.text(9)
        self.documents = [self.text(40 + 13 * i) for i in range(4)]
        self.decoys = [self.text(20), self.text(33)]

    def text(self, count: int) -> list[int]:
        return list(itertools.islice(self.tokens, count))

    def parts(self, order: list[int]) -> list[list[int]]:
        return [self.system, *(self.documents[i] for i in order)]

    def prompt(self, order: list[int], mode: str, recompute: str = "none", count: int = COUNT, **changes):
        parts = self.parts(order)
        tokens = [t for part in parts for t in part] + self.question
        params = {
            "chunk_lengths": [len(p) for p in parts],
            "chunk_mode": mode,
            "chunk_recompute": recompute,
            "chunk_decoys": self.decoys,
            **changes,
        }
        extra = None if mode == "plain" else {"kv_transfer_params": params}
        sampling = SamplingParams(
            temperature=0.0, max_tokens=count, logprobs=0, detokenize=False, ignore_eos=True, extra_args=extra
        )
        return {"prompt_token_ids": tokens}, sampling


def answer(out) -> Answer:
    got = out.outputs[0]
    return Answer(list(got.token_ids), [p[t].logprob for p, t in zip(got.logprobs, got.token_ids)])


STORED = "STORED"
"""The beginning of the line by which a child says that it has stored everything."""


def store_until_killed(host, tokens: list[int], usage, **extra) -> None:
    """Asks a prompt, says when it is stored, and waits to be killed."""
    sampling = SamplingParams(max_tokens=2, temperature=0.0, detokenize=False, **extra)
    host.llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
    host.settle()
    print(STORED, usage()["records"], flush=True)
    time.sleep(600)


class Checks:
    def __init__(self, path: str) -> None:
        self.path, self.failures = path, 0
        self.model = reference.load(path)
        self.vocab = self.model.config.vocab_size
        self.case = Case(tokens_of_notes(path) if (Path(path) / "tokenizer.json").is_file() else random_tokens(self.vocab))
        self.known: dict[tuple, Answer] = {}

    def say(self, what: str, fault: str | None) -> None:
        self.failures += fault is not None
        print(f"{'ok' if fault is None else 'FAILED':7} {what}{'' if fault is None else ': ' + fault}", flush=True)

    def same(self, what: str, got: Answer, expected: Answer) -> None:
        result = compare(got, expected)
        self.say(f"{what}: {result.words}", result.fault)

    def expected(self, order: list[int], mode: str, count: int = COUNT) -> Answer:
        parts, question = self.case.parts(order), self.case.question
        key = (mode, count, *map(tuple, parts), tuple(question))
        if key not in self.known:
            if mode in ("alone", "plain"):
                of = {"alone": reference.alone, "plain": reference.plain}[mode]
                self.known[key] = of(self.model, parts, question, count)
            else:
                decoys = self.case.decoys if mode == "behind:2" else []
                before = [token for part in (parts[0], *decoys) for token in part]
                self.known[key] = reference.after(self.model, before, parts, question, count)
        return self.known[key]

    def killed(self, program: str, what: str, *given: object) -> None:
        """Has ``program`` store ``what`` in another process, as its ``--child`` with these arguments. Checks that a second
        process gets an error, and kills the first one."""
        asked = [sys.executable, program, self.path, "--child", json.dumps(given)]
        child = subprocess.Popen(asked, stdout=subprocess.PIPE, text=True)
        said = next((line for line in child.stdout if line.startswith(STORED)), None)
        self.say(f"another process has stored {what}", None if said else "it has not")
        refused = subprocess.run(asked, capture_output=True, text=True, check=False)
        clear = "in use by another process; give each process its own folder" in refused.stdout + refused.stderr
        self.say("a second process on the folder gets a clear error", None if clear and refused.returncode else refused.stderr[-500:])
        child.send_signal(signal.SIGKILL)
        child.wait()

    def generate(self, host: Host, *asked):
        prompts, sampling = zip(*asked)
        return host.llm.generate(list(prompts), list(sampling), use_tqdm=False)

    # The checks.

    def orders(self, host: Host) -> None:
        for order in ([0, 1, 2, 3], [2, 0, 3, 1], [3, 3, 1]):
            for mode in ("alone", "with-system", "behind:2"):
                before = host.counter("vllm:external_prefix_cache_hits")
                (out,) = self.generate(host, self.case.prompt(order, mode))
                self.same(f"{mode}, documents {order}", answer(out), self.expected(order, mode))
                tokens = sum(map(len, self.case.parts(order)))
                hits = host.counter("vllm:external_prefix_cache_hits") - before
                fault = None if out.num_cached_tokens == tokens == hits else f"{out.num_cached_tokens}, {hits} of {tokens}"
                self.say("all their tokens are external hits", fault)

    @property
    def windowed(self) -> bool:
        return bool(getattr(self.model.config, "sliding_window", None))

    @property
    def tables(self) -> int:
        """The number of vLLM's tables of blocks for the model's layers. vLLM divides the layers of each kind into groups of
        the same size, which is the number of layers of the rarest kind, or of the most frequent kind if the numbers are close.
        """
        counts = Counts(getattr(self.model.config, "layer_types", None) or ["one"]).values()
        size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
        return sum(-(-count // size) for count in counts)

    def linked(self, host: Host) -> None:
        if self.windowed:
            (out,) = self.generate(host, self.case.prompt([1, 2, 0], "alone", "link:8"))
            self.same("behind a window nothing is linked", answer(out), self.expected([1, 2, 0], "plain"))
            reason = (out.kv_transfer_params or {}).get("chunk_error")
            self.say(f"and the request is told: {reason}", None if reason else "it is not")
            return
        (out,) = self.generate(host, self.case.prompt([1, 2, 0], "alone", "link:1000"))
        self.same("linking every token is full attention", answer(out), self.expected([1, 2, 0], "plain"))
        (out,) = self.generate(host, self.case.prompt([1, 2, 0], "with-system", "link:1000"))
        self.same("so it is for chunks that saw the system prompt", answer(out), self.expected([1, 2, 0], "plain"))
        (out,) = self.generate(host, self.case.prompt([1, 2, 0], "behind:2", "link:1000"))
        self.same("and for chunks that saw decoys", answer(out), self.expected([1, 2, 0], "plain"))
        (out,) = self.generate(host, self.case.prompt([1, 2, 0], "alone", "link:0"))
        self.same("linking none is reuse as it is", answer(out), self.expected([1, 2, 0], "alone"))
        (out,) = self.generate(host, self.case.prompt([1, 2, 0], "alone", "question:1"))
        self.same("so is a question that chooses everything full attention", answer(out), self.expected([1, 2, 0], "plain"))
        (out,) = self.generate(host, self.case.prompt([1, 2, 0], "alone", "question:0"))
        self.same("and one that chooses nothing reuse as it is", answer(out), self.expected([1, 2, 0], "alone"))
        (once,) = self.generate(host, self.case.prompt([1, 2, 0], "alone", "question:0.5"))
        (again,) = self.generate(host, self.case.prompt([1, 2, 0], "alone", "question:0.5"))
        self.same("a question that is asked again is answered as before", answer(again), answer(once))
        self.nearer(host)

    def nearer(self, host: Host) -> None:
        """Recomputing the tokens that the question chooses brings the first token nearer to full attention.
        """
        parts = self.case.parts([1, 2, 0])
        full = reference.first(self.model, parts, self.case.question)

        def away(recompute: str) -> float:
            prompt, sampling = self.case.prompt([1, 2, 0], "alone", recompute, 1)
            sampling.logprobs = self.vocab
            (out,) = self.generate(host, (prompt, sampling))
            got = torch.tensor([out.outputs[0].logprobs[0][token].logprob for token in range(self.vocab)], dtype=full.dtype)
            return divergence(full, got)

        none, half, most = away("none"), away("question:0.5"), away("question:0.9")
        self.say(
            f"divergence from full attention: none {none:.3f}, half chosen {half:.3f}, nine of ten {most:.3f}",
            None if most < none else "choosing did not help",
        )

    def salts(self, host: Host) -> None:
        self.generate(host, self.case.prompt([0, 2], "alone"))
        (out,) = self.generate(host, self.case.prompt([0, 2], "plain"))
        self.same("a plain request after it is untouched", answer(out), self.expected([0, 2], "plain"))
        own, side.set_salt = side.set_salt, lambda request, salt: None
        try:
            self.generate(host, self.case.prompt([1, 3], "alone"))
            (out,) = self.generate(host, self.case.prompt([1, 3], "plain"))
        finally:
            side.set_salt = own
        got, expected = answer(out), self.expected([1, 3], "plain")
        leaked = got.tokens != expected.tokens or max(abs(a - b) for a, b in zip(got.logprobs, expected.logprobs)) > CLOSE
        self.say("without a salt of its own it would be another one", None if leaked else "nothing leaked")

    def together(self, host: Host) -> None:
        host.side.chunks.cache.clear_cache()
        host.llm.reset_prefix_cache()
        before = host.side.chunks.cache.get_metrics().insertions
        orders = [[0, 1], [1, 0], [2, 1], [3, 0, 2], [1, 2, 3], [0, 3]]
        outs = self.generate(host, *(self.case.prompt(order, "alone") for order in orders))
        for order, out in zip(orders, outs):
            self.same(f"six at once, documents {order}", answer(out), self.expected(order, "alone"))
        made = host.side.chunks.cache.get_metrics().insertions - before
        self.say("chunks that both lack are encoded once", None if made == 5 else f"{made} encodes instead of 5")

    def aborted(self, host: Host) -> None:
        engine = host.llm.llm_engine
        fault = None
        for steps in range(9):
            host.side.chunks.cache.clear_cache()
            host.llm.reset_prefix_cache()
            names = []
            for i, order in enumerate(([0, 1], [1, 2], [3, 0])):
                prompt, sampling = self.case.prompt(order, "alone", count=20)
                names.append(engine.add_request(f"abort-{steps}-{i}", prompt, sampling))
            for _ in range(steps):
                engine.step()
            engine.abort_request([name or f"abort-{steps}-{i}" for i, name in enumerate(names)], internal=True)
            fault = fault or host.nothing_held()
        self.say("aborted after 0 to 8 steps, nothing stays held", fault)
        (out,) = self.generate(host, self.case.prompt([1, 3], "alone"))
        self.same("afterwards", answer(out), self.expected([1, 3], "alone"))

    def broken(self, host: Host) -> None:
        worker = get_kv_transfer_group()._worker
        own = worker.arena

        class Broken:
            save = own.save

            @staticmethod
            def load(*_):
                raise KvCacheError("the disk is on fire")

        for recompute in ("none", "link:4"):
            self.case.question = self.case.text(9)
            worker.arena = Broken()
            try:
                (out,) = self.generate(host, self.case.prompt([3, 1, 0], "alone", recompute))
            finally:
                worker.arena = own
            self.same("a copy that fails is computed by vLLM", answer(out), self.expected([3, 1, 0], "plain"))
        (out,) = self.generate(host, self.case.prompt([0, 3, 1], "alone"))
        self.same("afterwards", answer(out), self.expected([0, 3, 1], "alone"))

    def refused(self, host: Host) -> None:
        for wrong, named in (
            ({"chunk_lengths": [21, 400]}, "the parts have 421 tokens and the prompt has 123"),
            ({"chunk_lengths": [21]}, "of at least one chunk"),
            ({"chunk_lengths": None}, "pass either chunk_lengths or chunk_separator"),
            ({"chunk_mode": "sideways"}, "chunk_mode is 'sideways'; use 'alone'"),
            ({"chunk_lengths": None, "chunk_separator": [999999]}, "occurs 0 times in the prompt"),
            ({"Mode": "with-system"}, "the field Mode is unknown; did you mean chunk_mode?"),
        ):
            (out,) = self.generate(host, self.case.prompt([0, 1], "alone", **wrong))
            self.same(f"{wrong} is answered without chunks", answer(out), self.expected([0, 1], "plain"))
            reason = (out.kv_transfer_params or {}).get("chunk_error", "")
            self.say(f"and says why: {reason}", None if named in reason else f"it does not say {named}")

    def without_system(self, host: Host) -> None:
        """A prompt of documents alone, which also move to its beginning."""
        own, self.case.system = self.case.system, []
        for order in ([0, 1], [1, 0], [3, 1, 2]):
            (out,) = self.generate(host, self.case.prompt(order, "alone"))
            self.same(f"no system prompt, documents {order}", answer(out), self.expected(order, "alone"))
        said, tokens = out.kv_transfer_params, sum(map(len, self.case.parts([3, 1, 2])))
        self.say(f"all {tokens} tokens are chunks: {said}", None if said["chunk_tokens_reused"] + said["chunk_tokens_computed"] == tokens else "they are not")
        (out,) = self.generate(host, self.case.prompt([1, 0], "alone"))
        self.say("and found again", None if out.kv_transfer_params["chunk_tokens_computed"] == 0 else f"{out.kv_transfer_params}")
        self.case.system = own

    def preempted(self, host: Host) -> None:
        before = host.counter("vllm:num_preemptions")
        orders = [[0, 1], [1, 0], [2, 1], [3, 0]]
        outs = self.generate(host, *(self.case.prompt(order, "alone", count=60) for order in orders))
        for order, out in zip(orders, outs):
            self.same(f"in too few blocks, documents {order}", answer(out), self.expected(order, "alone", 60))
        times = host.counter("vllm:num_preemptions") - before
        self.say(f"requests were preempted {times} times", None if times or self.windowed else "none did")
        self.say("nothing stays held", host.nothing_held())

    def short_of_memory(self, host: Host) -> None:
        (out,) = self.generate(host, self.case.prompt([3, 2], "alone"))
        self.same("an arena too small for a chunk", answer(out), self.expected([3, 2], "plain"))
        reason = (out.kv_transfer_params or {}).get("chunk_error", "")
        named = "tokens of host memory, which holds 64; raise host_memory" in reason
        self.say(f"says so: {reason}", None if named else "it does not")
        self.say("nothing stays held", host.nothing_held())

    def evicted(self, host: Host) -> None:
        for i in range(12):
            self.case.documents[3] = self.case.text(60)
            (out,) = self.generate(host, self.case.prompt([3, i % 3], "alone"))
            if i % 4 == 3:
                self.same("more documents than fit, one after another", answer(out), self.expected([3, i % 3], "alone"))
        evictions = host.side.chunks.cache.get_metrics().evictions
        self.say(f"{evictions} were evicted", None if evictions else "none was")
        self.say("nothing stays held", host.nothing_held())


def arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--ranks", type=int, default=1, help="number of ranks of tensor parallelism to check")
    return parser.parse_args()


def main() -> None:
    args = arguments(__doc__)
    failures = 0
    for path in args.models:
        print(f"== {path}", flush=True)
        checks = Checks(path)
        of_block = BLOCK * token_bytes(checks.model.config, "float32")
        host = Host(path, host_memory=128 * of_block, ranks=args.ranks)
        first = [checks.orders, checks.linked, checks.together]
        if args.ranks == 1:
            first = [*first, checks.without_system, checks.salts, checks.aborted, checks.broken, checks.refused]
        for check in first:
            check(host)
        checks.say("nothing stays held", host.nothing_held())
        host.close()
        for check, blocks, memory in (
            (checks.preempted, 20, 200),
            (checks.short_of_memory, 256, 2),
            (checks.evicted, 256, 9),
        ):
            if args.ranks == 1:
                host = Host(path, blocks=blocks * checks.tables, host_memory=memory * of_block)
                check(host)
                host.close()
        failures += checks.failures
        if args.ranks == 1:
            from check_pressure import PressureChecks
            from check_resets import ResetChecks

            for more in (PressureChecks(path), ResetChecks(path)):
                more.all()
                failures += more.failures
    sys.exit(f"{failures} checks failed" if failures else 0)


if __name__ == "__main__":
    main()
