"""Runs the commands of ``docs/vllm-disk.md`` over HTTP: a server, a prompt, a restart, and the prompt again. Run by the
slice `vllm-docs` of `cargo xtask deep`.

    python check_disk_docs.py MODEL

As in ``check_docs.py``, a free port is inserted, and the server gets the flags for small machines. The folder of the
page is replaced by a temporary one. Needs bash, curl and jq.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import check_docs
from check_docs import Checks, Page, free_port, server

check_docs.PAGE = check_docs.PAGE.with_name("vllm-disk.md")
FOLDER = "~/kvcache-disk"


def metric(port: int, name: str) -> float:
    with urllib.request.urlopen(f"http://localhost:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    model, port = Path(parser.parse_args().model), free_port()
    page = Page(str(model.resolve() if model.exists() else model), port)
    shown = [json.loads(block) for block in check_docs.re.findall(r"^```text\n(.*?)^```$", check_docs.PAGE.read_text(), check_docs.re.DOTALL | check_docs.re.MULTILINE)]
    checks, seconds = Checks(page), []
    with tempfile.TemporaryDirectory() as folder:
        command = page.blocks["serve"]
        checks.say(f"the page names {FOLDER}", None if FOLDER in command else "it does not")
        for expected in shown:
            with server(command.replace(FOLDER, folder), port):
                began = time.monotonic()
                (line,) = page.run("letter")
                seconds.append(time.monotonic() - began)
                checks.equal("the page shows it", json.loads(line), expected)
                until = time.monotonic() + 60
                while metric(port, "vllm:kvcache_tier_records") < 18 and time.monotonic() < until:
                    time.sleep(0.2)
                records, hits = (metric(port, f"vllm:kvcache_tier_{name}") for name in ("records", "hits_total"))
                checks.equal("the server counts the blocks on the disk, and those that it has read", [records, hits], [18, expected["cached"] // 32])
    checks.say(f"computed in {seconds[0]:.2f} s, found in {seconds[1]:.2f} s", None if seconds[1] < seconds[0] else "slower")
    sys.exit(f"{checks.failures} checks failed" if checks.failures else 0)


if __name__ == "__main__":
    main()
