"""llama.cpp's server as a peer: starts it on a free port, sends it requests over HTTP, and stops it."""

from __future__ import annotations

import json
import os
import pathlib
import urllib.request

from served import Served, free_port


class LlamaServer(Served):
    """A llama-server running on this machine, ready to answer."""

    def __init__(self, program: str, model: str, *options: str):
        port = free_port()
        command = [program, "-m", model, "--host", "127.0.0.1", "--port", str(port), "--cache-ram", "0", "--no-webui", *options]
        super().__init__("llama-server", command, port, pathlib.Path(os.devnull))

    def complete(self, **body) -> dict:
        """Returns the answer from `/completion`."""
        request = urllib.request.Request(
            self.url + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            return json.load(response)
