"""llama.cpp's server as a peer: starts it on a free port, sends it requests over HTTP, and stops it."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import time
import urllib.request


class LlamaServer:
    """A llama-server running on this machine, ready to answer."""

    def __init__(self, program: str, model: str, *options: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [program, "-m", model, "--host", "127.0.0.1", "--port", str(port), "--cache-ram", "0", "--no-webui", *options],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for _ in range(600):
            try:
                urllib.request.urlopen(self.url + "/health", timeout=5).close()
                return
            except OSError:
                if self.process.poll() is not None:
                    raise RuntimeError(f"the server ended with {self.process.returncode}") from None
                time.sleep(0.1)
        raise RuntimeError("the server does not answer")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()

    def cpu(self) -> float:
        """Returns the processor time used so far, in seconds."""
        stat = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")

    def complete(self, **body) -> dict:
        """Returns the answer from `/completion`."""
        request = urllib.request.Request(
            self.url + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            return json.load(response)
