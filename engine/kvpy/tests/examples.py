"""Runs documents' Python blocks unchanged, in the current folder: ``python examples.py README.md …``.

Before a block that asks a server, the document's command that starts the server is run.
"""

from __future__ import annotations

import contextlib
import pathlib
import re
import signal
import subprocess
import sys
import time
import urllib.request
from typing import Any

SERVER = "http://127.0.0.1:8000"
START = "cargo run --release -p kvcli -- serve"
PATIENCE = 900
"""The number of seconds in which the server must be built and start."""


def blocks(document: pathlib.Path) -> list[str]:
    """Returns the Python blocks of a document."""
    return re.findall(r"^```python\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)


@contextlib.contextmanager
def served(document: pathlib.Path) -> Any:
    """Runs the document's command that starts a server, until the caller is done."""
    command = next(line for line in document.read_text().splitlines() if line.startswith(START))
    with subprocess.Popen(command.split()) as server:
        until = time.monotonic() + PATIENCE
        try:
            while True:
                try:
                    urllib.request.urlopen(f"{SERVER}/health", timeout=5).close()
                    break
                except OSError:
                    if server.poll() is not None or time.monotonic() > until:
                        sys.exit(f"{command} did not start")
                    time.sleep(0.1)
            yield
        finally:
            server.send_signal(signal.SIGTERM)


def run(document: pathlib.Path, *, asks_servers: bool = True) -> list[dict[str, Any]]:
    """Runs the blocks of a document, and returns the names that each of them defines. Without ``asks_servers``, leaves out
    the blocks that ask a server.
    """
    made: list[dict[str, Any]] = []
    for number, block in enumerate(blocks(document), 1):
        if SERVER in block and not asks_servers:
            continue
        names: dict[str, Any] = {"__name__": "__main__"}
        with served(document) if SERVER in block else contextlib.nullcontext():
            exec(compile(block, f"{document}, example {number}", "exec"), names)
        made.append(names)
    return made


if __name__ == "__main__":
    for name in sys.argv[1:]:
        count = len(run(pathlib.Path(name)))
        print(f"{name}: {count} examples ran")
        if count == 0:
            sys.exit(f"{name} has no Python example")
