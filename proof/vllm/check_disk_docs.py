"""Runs the commands of ``docs/vllm-disk.md`` over HTTP: servers, a prompt, a restart, and the prompt again. Run by the
slice `vllm-docs` of `cargo xtask deep`.

    python check_disk_docs.py MODEL

As in ``check_docs.py``, a free port is inserted, and the server gets the flags for small machines. The folder of the
page is replaced by a temporary one. Needs bash, curl and jq.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import check_docs
from check_docs import Checks, Page, free_port, output, server

check_docs.PAGE = check_docs.PAGE.with_name("vllm-disk.md")
FOLDER = "~/kvcache-disk"


def metric(port: int, name: str) -> float:
    with urllib.request.urlopen(f"http://localhost:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


def run(page: Page, name: str) -> list[str]:
    """Runs a block as often as it is asked for, and returns the lines that it prints."""
    return output(["bash", "-euo", "pipefail", "-c", page.blocks[name]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    model, port = Path(parser.parse_args().model), free_port()
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    check_docs.ENVIRONMENT.update(MODEL=str(model.resolve() if model.exists() else model), PATH=programs)
    page = Page(port)
    blocks = re.findall(r"^```text\n(.*?)^```$", check_docs.PAGE.read_text(), re.DOTALL | re.MULTILINE)
    shown = [json.loads(block) for block in blocks]
    checks = Checks(page)
    # The connector first, then vLLM's own offloading, each computed, and found after a restart.
    for serve, ask, records, hits, expected in (
        ("connector", "documents", 3, 3, shown[:2]),
        ("serve", "letter", 18, 18, shown[2:]),
    ):
        restarted(checks, page, port, serve, ask, records, hits, expected)
    sys.exit(f"{checks.failures} checks failed" if checks.failures else 0)


def restarted(checks: Checks, page: Page, port: int, serve: str, ask: str, records: int, hits: int, shown: list[dict]) -> None:
    """Serves, asks, and does both again. ``records`` and ``hits`` are the numbers that vLLM must count."""
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        command = page.blocks[serve]
        checks.say(f"the page names {FOLDER}", None if FOLDER in command else "it does not")
        for number, expected in enumerate(shown):
            with server(command.replace(FOLDER, folder), port):
                began = time.monotonic()
                (line,) = run(page, ask)
                seconds.append(time.monotonic() - began)
                checks.equal("the page shows it", json.loads(line), expected)
                until = time.monotonic() + 60
                while metric(port, "vllm:kvcache_tier_records") < records and time.monotonic() < until:
                    if serve == "connector":
                        # vLLM reports what the disk has in the next step.
                        run(page, ask)
                    time.sleep(0.2)
                counted = [metric(port, f"vllm:kvcache_tier_{name}") for name in ("records", "hits_total")]
                checks.equal("the server counts what is on the disk, and what it has read", counted, [records, hits * number])
    checks.say(f"computed in {seconds[0]:.2f} s, found in {seconds[1]:.2f} s", None if seconds[1] < seconds[0] else "slower")


if __name__ == "__main__":
    main()
