"""A running server over the built-in model, and the demo's documents that it is asked about."""

from __future__ import annotations

import json
import shutil
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
TINY = ROOT / "models" / "tiny-rag"
TEMPLATE = ROOT / "engine" / "kvserve" / "tests" / "tools_template.jinja"


def names() -> list[str]:
    """Returns the names of five documents."""
    return sorted(path.stem for path in DOCUMENTS.glob("*.txt"))[:5]


def text_of(name: str) -> str:
    return (DOCUMENTS / f"{name}.txt").read_text()


def with_tools(place: Path) -> Path:
    """Copies the built-in model into a folder, with a chat template that writes tools."""
    folder = place / TINY.name
    shutil.copytree(TINY, folder)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE.read_text()}))
    return folder


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
