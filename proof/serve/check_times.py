"""Checks that the server takes at most three percent longer than the engine alone, with a published model.

    python check_times.py [--kvc target/release/kvc] [--model target/published/smollm2.gguf] [--requests 16,64] [--rounds 5]

`kvc bench serve --http` sends the same requests at once to the engine alone and to a server over the same model, in turn, and
compares the medians of the rounds. Nothing else may use the processor in the meantime.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from typing import Any

from served import ROOT

MOST = 1.03
"""The longest time through the server, as a multiple of the engine's."""


def measure(kvc: str, model: str, requests: int, rounds: int) -> dict[str, Any]:
    command = [kvc, "bench", "serve", "--http", "--json", "--model", model, "--requests", str(requests), "--rounds", str(rounds)]
    command += ["--prompt-tokens", "128", "--answer-tokens", "64"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvc", default=str(ROOT / "target/release/kvc"))
    parser.add_argument("--model", default=str(ROOT / "target/published/smollm2.gguf"))
    parser.add_argument("--requests", default="16,64", help="numbers of requests at once")
    parser.add_argument("--rounds", type=int, default=5, help="the number of rounds with each number of requests")
    args = parser.parse_args()
    print("| requests at once | engine alone | through the server | ratio | first token, alone | first token, server |")
    print("|---|---|---|---|---|---|")
    late = []
    for requests in map(int, args.requests.split(",")):
        result = measure(args.kvc, args.model, requests, args.rounds)
        engine, server = result["engine"], result["server"]
        times = " | ".join(f"{one['seconds']:.2f} s" for one in (engine, server))
        first = " | ".join(f"{one['ttft']['p50'] / 1e3:.2f} s" for one in (engine, server))
        print(f"| {requests} | {times} | {result['ratio']:.3f} | {first} |", flush=True)
        if engine["failed"] or server["failed"]:
            late.append(f"{requests} requests: {engine['failed']} failed in the engine, {server['failed']} through the server")
        if result["ratio"] > MOST:
            late.append(f"{requests} requests take {result['ratio']:.3f} times as long through the server; at most {MOST} is allowed")
    if late:
        raise SystemExit("\n".join(late))


if __name__ == "__main__":
    main()
