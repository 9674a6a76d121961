"""Checks that the server takes at most three percent longer than the engine alone.

    python check_times.py [--kvc target/release/kvc] [--model target/published/smollm2.gguf]

`kvc bench serve --http` sends the same requests at once to the engine alone and to a server over the same model, in turn, and
compares the medians of the rounds. A model of eight layers has short prompts, so that the engine alone does not gain by
computing them together. Nothing else may use the processor in the meantime.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from typing import Any

from served import ROOT

MOST = 1.03
"""The longest time through the server, as a multiple of the engine's."""


def measure(kvc: str, requests: int, rounds: int, options: list[str]) -> dict[str, Any]:
    command = [kvc, "bench", "serve", "--http", "--json", "--requests", str(requests), "--rounds", str(rounds), *options]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvc", default=str(ROOT / "target/release/kvc"))
    parser.add_argument("--model", default=str(ROOT / "target/published/smollm2.gguf"), help="a published model")
    args = parser.parse_args()
    models = {
        "`--size 8x1024 --prompt-tokens 32`": (["--size", "8x1024", "--prompt-tokens", "32"], {16: 9, 64: 5}),
        "SmolLM2-135M-Instruct": (["--model", args.model, "--prompt-tokens", "128"], {16: 3, 64: 1}),
    }
    print("| model | requests at once | engine alone | through the server | ratio | first token, alone | first token, server |")
    print("|---|---|---|---|---|---|---|")
    wrong = []
    for name, (options, runs) in models.items():
        for requests, rounds in runs.items():
            result = measure(args.kvc, requests, rounds, options)
            engine, server = result["engine"], result["server"]
            times = " | ".join(f"{one['seconds']:.2f} s" for one in (engine, server))
            first = " | ".join(f"{one['ttft']['p50'] / 1e3:.2f} s" for one in (engine, server))
            print(f"| {name} | {requests} | {times} | {result['ratio']:.3f} | {first} |", flush=True)
            if engine["failed"] or server["failed"]:
                wrong.append(f"{name}, {requests} requests: some failed")
            if result["ratio"] > MOST:
                wrong.append(f"{name}, {requests} requests: {result['ratio']:.3f} times as long through the server; at most {MOST} is allowed")
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
