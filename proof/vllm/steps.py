"""What the checks share that run a vLLM step by step."""

from __future__ import annotations

import itertools
from typing import Any

from check_connector import BLOCK, Checks, Host, token_bytes


class StepChecks(Checks):
    numbers = itertools.count()

    def host(self, blocks_of_memory: int = 128, **settings) -> Host:
        return Host(self.path, host_memory=blocks_of_memory * BLOCK * token_bytes(self.model.config, "float32"), **settings)

    def bounded(self, host: Host, *asked, most: int = 200) -> list:
        """Answers requests in at most ``most`` steps. Returns ``None`` for each request that has not ended."""
        names, outs = [self.add(host, *one) for one in asked], {}
        for _ in range(most):
            if len(outs) == len(names):
                break
            outs |= self.step(host)
        host.llm.llm_engine.abort_request([name for name in names if name not in outs])
        return [outs.get(name) for name in names]

    def add(self, host: Host, prompt: dict, sampling) -> str:
        """Adds a request and returns its name."""
        name = f"pressure-{next(self.numbers)}"
        host.llm.llm_engine.add_request(name, prompt, sampling)
        return name

    def step(self, host: Host) -> dict[str, Any]:
        """Runs a step, and returns the requests that have ended, by name."""
        return {out.request_id: out for out in host.llm.llm_engine.step() if out.finished}

    def rest(self, host: Host) -> dict[str, Any]:
        """Runs steps until every request has ended."""
        outs = {}
        while host.llm.llm_engine.has_unfinished_requests():
            outs |= self.step(host)
        return outs

    def told(self, host: Host, name: str) -> list[int] | None:
        """Returns the answer tokens of a request so far; ``None`` if it has ended."""
        # vLLM adds a suffix to the names of requests.
        own = [request for key, request in host.scheduler.requests.items() if key.startswith(name)]
        return list(own[0].output_token_ids) if own else None
