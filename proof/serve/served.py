"""A running server over the built-in model, and the demo's documents that it is asked about."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
DOCUMENTS = ROOT / "examples" / "documents"
SYSTEM = (ROOT / "examples" / "system.txt").read_text()
PATIENCE = 60


def names() -> list[str]:
    """Returns the names of five documents."""
    return sorted(path.stem for path in DOCUMENTS.glob("*.txt"))[:5]


def text_of(name: str) -> str:
    return (DOCUMENTS / f"{name}.txt").read_text()


@contextmanager
def served(kvc: str, *options: str) -> Iterator[str]:
    """Starts a server on a free port, and yields its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([kvc, "serve", "--port", str(port), "--log", "error", *options], stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=PATIENCE).close()
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > until:
                    raise SystemExit("kvc serve did not start") from None
                time.sleep(0.05)
        yield url
    finally:
        server.terminate()
        server.wait(PATIENCE)
