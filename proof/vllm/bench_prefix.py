"""Measures ordinary prompts inside vLLM on a CPU after its prefix cache was emptied: our tier and others.

    python bench_prefix.py MODEL [--rounds 5] [--processes 3]

A prompt of 2,592 tokens is asked once. Then vLLM's prefix cache is emptied (but not the connector's), and the
prompt is asked again with 32 different tokens at the end. Rows are vLLM without a connector, this project's
connector, and LMCache's server, if it is installed in this environment (`pip install --no-deps
lmcache==0.5.6`, and its requirements except CUDA). Each row has its own processes, which alternate with the
processes of other rows. Answers of 16 tokens must equal the ones that vLLM computes from scratch. The best
time over all rounds and processes counts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from typing import Any

PREFIX, LAST, BLOCK, ANSWER = 2560, 32, 32, 16
CLOSE = 1e-3
ENGINE = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": BLOCK,
    "max_model_len": 4096,
    "max_num_batched_tokens": 4096,
    "kv_cache_memory_bytes": 1 << 30,
    "distributed_executor_backend": "uni",
}
"""The settings of vLLM with which prompts are measured."""
TIMES = ("first_seconds", "again_seconds", "own_seconds")


def rows() -> dict[str, dict[str, Any]]:
    """Returns the connector of each row; `chunk` is the chunk size of LMCache's server."""
    made: dict[str, dict[str, Any]] = {
        "no connector": {},
        "kvcache": {
            "kv_connector": "ChunkConnector",
            "kv_connector_module_path": "kvcache.vllm",
            "kv_connector_extra_config": {"host_memory": "64MiB", "prefix_memory": "1GiB"},
        },
    }
    if importlib.util.find_spec("lmcache"):
        for chunk in (64, 256, 512):
            made[f"LMCache's server, chunks of {chunk}"] = {
                "kv_connector": "LMCacheMPConnector",
                "kv_connector_extra_config": {"lmcache.mp.mp_transfer_mode": "engine_driven"},
                "chunk": chunk,
            }
    return made


def hide_llvmlite() -> None:
    """Hides one of LMCache's libraries from vLLM. It has every attribute, which vLLM 0.32.0 mistakes for a
    kernel.
    """
    try:
        from llvmlite.binding import ffi
    except ImportError:
        return
    answer = ffi._lib_wrapper.__getattr__

    def known(self: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return answer(self, name)

    ffi._lib_wrapper.__getattr__ = known


def measure(model: str, config: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Measures one row in this process."""
    hide_llvmlite()
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    llm = LLM(
        model=model,
        seed=0,
        **ENGINE,
        kv_transfer_config=KVTransferConfig(kv_role="kv_both", **config) if config else None,
    )
    draw = random.Random(1)
    prefix = [draw.randrange(5, 40_000) for _ in range(PREFIX)]

    def end() -> list[int]:
        return [draw.randrange(5, 40_000) for _ in range(LAST)]

    checked = end()

    def ask(tokens: list[int], count: int = 1) -> tuple[float, Any]:
        logprobs = 0 if count > 1 else None
        sampling = SamplingParams(temperature=0.0, max_tokens=count, detokenize=False, ignore_eos=True, logprobs=logprobs)
        started = time.perf_counter()
        (out,) = llm.generate([{"prompt_token_ids": tokens}], [sampling], use_tqdm=False)
        seconds = time.perf_counter() - started
        # Wait for asynchronous stores to end, which frees their blocks.
        for _ in range(4):
            llm.llm_engine.step()
            time.sleep(0.03)
        return seconds, out

    def forget() -> None:
        for _ in range(40):
            if llm.reset_prefix_cache():
                return
            llm.llm_engine.step()
            time.sleep(0.03)
        raise RuntimeError("vLLM's prefix cache could not be emptied: something is held")

    ask([draw.randrange(5, 40_000) for _ in range(PREFIX)])  # the first is slower
    first, _ = ask(prefix + end())
    again, own, cached = [], [], []
    for _ in range(rounds):
        forget()
        seconds, out = ask(prefix + end())
        again.append(seconds)
        cached.append(out.num_cached_tokens)
        # Now vLLM's own cache has the prompt.
        own.append(ask(prefix + end())[0])
    forget()
    _, out = ask(prefix + checked, ANSWER)
    got = out.outputs[0]
    llm.llm_engine.engine_core.shutdown()
    return {
        "first_seconds": first,
        "again_seconds": min(again),
        "own_seconds": min(own),
        "cached_tokens": min(cached),
        "tokens": list(got.token_ids),
        "logprobs": [p[t].logprob for p, t in zip(got.logprobs, got.token_ids)],
    }


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def server(chunk: int, *more: str) -> tuple[subprocess.Popen[bytes], int]:
    """Starts LMCache's server, which shares memory with vLLM, with ``more`` options."""
    port = free_port()
    program = os.path.join(os.path.dirname(sys.executable), "lmcache")
    command = [program, "server", "--host", "127.0.0.1", "--port", str(port), "--http-host", "127.0.0.1"]
    command += ["--http-port", str(free_port()), "--chunk-size", str(chunk), "--l1-size-gb", "2", "--eviction-policy", "LRU"]
    command += ["--no-l1-use-lazy", "--supported-transfer-mode", "engine_driven", "--disable-observability"]
    command += ["--shm-name", f"bench_prefix_{os.getpid()}", *more]
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.time() + 120
    while time.time() < until and started.poll() is None:
        with socket.socket() as trying:
            if trying.connect_ex(("127.0.0.1", port)) == 0:
                return started, port
        time.sleep(0.2)
    started.kill()
    raise RuntimeError(f"{' '.join(command)} did not start")


def row(name: str, config: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Measures one row in a new process."""
    config, running = dict(config), None
    chunk = config.pop("chunk", None)
    if chunk is not None:
        running, port = server(chunk)
        config["kv_connector_extra_config"] |= {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0"}
    environment.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    command = [sys.executable, __file__, args.model, "--rounds", str(args.rounds), "--row", json.dumps(config)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    finally:
        if running is not None:
            running.send_signal(signal.SIGINT)
            running.wait(30)
    found = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
    if done.returncode or not found:
        raise SystemExit(f"{name}: vLLM ended with status {done.returncode}")
    return json.loads(found[-1][4:])


def better(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Combines the results of two processes for a row: the lowest times and hits. Their answers must be
    equal.
    """
    if one["tokens"] != other["tokens"]:
        raise SystemExit(f"two processes of a row answered differently: {one['tokens']} and {other['tokens']}")
    return {**one, **{name: min(one[name], other[name]) for name in (*TIMES, "cached_tokens")}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5, help="rounds in each process")
    parser.add_argument("--processes", type=int, default=3, help="processes of each row: some processes are slower throughout")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row is not None:
        print("ROW " + json.dumps(measure(args.model, json.loads(args.row), args.rounds)), flush=True)
        return
    found: dict[str, dict[str, Any]] = {}
    for turn in range(args.processes):
        for name, config in rows().items():
            print(f"{turn + 1} of {args.processes}: {name}", file=sys.stderr, flush=True)
            one = row(name, config, args)
            found[name] = better(found[name], one) if name in found else one
    print(f"{'':36} {'first':>9} {'again':>9} {'own cache':>9}  found")
    truth = found["no connector"]
    for name, one in found.items():
        apart = max(abs(a - b) for a, b in zip(one["logprobs"], truth["logprobs"]))
        wrong = "" if one["tokens"] == truth["tokens"] and apart <= CLOSE else "  ANOTHER ANSWER"
        times = " ".join(f"{one[which] * 1e3:6.0f} ms" for which in TIMES)
        print(f"{name:36} {times}  {one['cached_tokens']} tokens{wrong}")
    print(json.dumps({"model": args.model, "tokens": PREFIX + LAST, "rows": found}))


if __name__ == "__main__":
    main()
