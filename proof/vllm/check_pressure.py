"""Checks the connector inside a real vLLM on a CPU under pressure: small limits, requests of several clients,
resets. Run by ``check_connector.py``.

``engine/kvpy/tests/test_pressure.py`` makes the same requests without vLLM.
"""

from __future__ import annotations

import itertools

from check_connector import BLOCK, Checks, Host, answer, token_bytes


class PressureChecks(Checks):
    numbers = itertools.count()

    def host(self, blocks_of_memory: int = 128, **settings) -> Host:
        return Host(self.path, host_memory=blocks_of_memory * BLOCK * token_bytes(self.model.config, "float32"), **settings)

    def bounded(self, host: Host, *asked, most: int = 200) -> list:
        """Answers requests in at most ``most`` steps. Returns ``None`` for each request that has not ended."""
        engine, names, outs = host.llm.llm_engine, [], {}
        for prompt, sampling in asked:
            name = f"pressure-{next(self.numbers)}"
            names.append(engine.add_request(name, prompt, sampling) or name)
        for _ in range(most):
            if len(outs) == len(names):
                break
            outs |= {out.request_id: out for out in engine.step() if out.finished}
        engine.abort_request([name for name in names if name not in outs], internal=True)
        return [outs.get(name) for name in names]

    def encoded_once(self, host: Host, order: list[int]) -> None:
        """Checks that the parts of these documents were computed once, and nothing else."""
        tokens, computed = sum(map(len, self.case.parts(order))), host.side.chunks.cache.get_metrics().tokens_computed
        self.say("every part is encoded once", None if computed == tokens else f"{computed} tokens instead of {tokens}")

    def few_pieces(self) -> None:
        """The index of chunks, or their memory, has room for less than the requests hold."""
        for what, settings in (
            ("one piece is kept", {"max_chunks": 1}),
            ("pieces of 16 tokens, one is kept", {"max_chunks": 1, "max_chunk_tokens": 16}),
            ("the memory is as large as the request", {"blocks_of_memory": 5}),
        ):
            host = self.host(**settings)
            (out,) = self.bounded(host, self.case.prompt([0, 1], "alone"))
            if out is None:
                self.say(f"{what}: the request ends", "it is never answered")
            else:
                self.same(f"{what}: the request ends", answer(out), self.expected([0, 1], "alone"))
            self.encoded_once(host, [0, 1])
            self.say("nothing stays held", host.nothing_held())
            host.close()

    def full_index(self) -> None:
        """Two requests hold more pieces together than are kept."""
        host = self.host(max_chunks=4)
        orders = ([0, 1], [2, 3])
        outs = self.bounded(host, *(self.case.prompt(order, "alone", count=20) for order in orders))
        for order, out in zip(orders, outs):
            if out is None:
                self.say(f"four pieces are kept, documents {order}", "the request is never answered")
            else:
                self.same(f"four pieces are kept, documents {order}", answer(out), self.expected(order, "alone", 20))
        self.encoded_once(host, [0, 1, 2, 3])
        self.say("nothing stays held", host.nothing_held())
        host.close()

    def forged_salts(self) -> None:
        """A client gives the salt of a request with chunks, which it has seen in vLLM's events."""
        host = self.host()
        name = host.llm.llm_engine.add_request("chunks", *self.case.prompt([0, 1], "alone")) or "chunks"
        salt = next(one.request.cache_salt for one in host.side.requests.values() if one.chunks is not None)
        while host.llm.llm_engine.has_unfinished_requests():
            host.llm.llm_engine.step()
        prompt, sampling = self.case.prompt([0, 1], "plain")
        (out,) = self.generate(host, ({**prompt, "cache_salt": salt}, sampling))
        self.same(f"an ordinary request with the salt of {name}", answer(out), self.expected([0, 1], "plain"))
        (out,) = self.generate(host, self.case.prompt([0, 1], "alone"))
        self.same("a request with chunks after it", answer(out), self.expected([0, 1], "alone"))
        secret = host.side.names.secret
        self.say("the salt shows no secret", "it does" if secret.hex() in salt else None)
        host.close()

    def holds_end(self) -> None:
        """Three requests generate at the same time, and the memory has room for one of them."""
        host = self.host(5)
        engine, orders, outs = host.llm.llm_engine, ([0, 1], [2], [3]), {}
        names = []
        for order in orders:
            name = f"holds-{next(self.numbers)}"
            names.append(engine.add_request(name, *self.case.prompt(order, "alone", count=40)) or name)
            for _ in range(10):
                outs |= {out.request_id: out for out in engine.step() if out.finished}
        running = len(host.scheduler.running)
        self.say("all three run", None if running == 3 else f"{running} do")
        while engine.has_unfinished_requests():
            outs |= {out.request_id: out for out in engine.step() if out.finished}
        for order, name in zip(orders, names):
            self.same(f"memory for one of three, documents {order}", answer(outs[name]), self.expected(order, "alone", 40))
        self.say("nothing stays held", host.nothing_held())
        host.close()

    def all(self) -> None:
        self.few_pieces()
        self.full_index()
        self.forged_salts()
        self.holds_end()
