"""Checks the tier for ordinary prompts inside a real vLLM on a CPU against transformers. Run by the slice
`vllm-prefix` of `cargo xtask deep`.

    python check_prefix.py MODEL … [--ranks 2]

vLLM has few blocks, so it evicts prompts and the tier must bring them back. Tokens must be the same, and
log-probabilities within 1e-3 in f32.
"""

from __future__ import annotations

import sys

from check_connector import Checks, Host, answer, arguments, token_bytes

from kvcache import KvCacheError
from vllm.distributed.kv_transfer import get_kv_transfer_group

SIZE = 32


def common(one: list[int], other: list[int]) -> int:
    """Returns the length of the beginning that two lists share."""
    return next((place for place, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


class PrefixChecks(Checks):
    def ask(self, host: Host, system: list[int], order: list[int], mode: str = "plain", **changes):
        """Asks a prompt with a different prefix and returns the output."""
        own, self.case.system = self.case.system, system
        try:
            prompt, sampling = self.case.prompt(order, mode)
            prompt.update(changes)
            (out,) = self.generate(host, (prompt, sampling))
            return out, self.expected(order, mode)
        finally:
            self.case.system = own

    def full_blocks(self, out) -> int:
        return (len(out.prompt_token_ids) - 1) // SIZE * SIZE

    def found(self, what: str, host: Host, system: list[int], order: list[int], **changes) -> None:
        """Asks a prompt again. Its full blocks must be found."""
        before = host.counter("vllm:external_prefix_cache_hits")
        out, expected = self.ask(host, system, order, **changes)
        self.same(what, answer(out), expected)
        hits, full = host.counter("vllm:external_prefix_cache_hits") - before, self.full_blocks(out)
        fault = None if hits == out.num_cached_tokens == full else f"{hits} hits, {out.num_cached_tokens} cached, of {full}"
        self.say(f"its {full} tokens in full blocks were found", fault)

    def evicted_by_vllm(self, host: Host) -> None:
        systems = [self.case.text(60) for _ in range(9)]
        for system in systems:
            out, expected = self.ask(host, system, [0, 2])
            self.same("computed and saved", answer(out), expected)
        for system in systems[:4]:
            self.found("evicted by vLLM and found again", host, system, [0, 2])
        host.llm.reset_prefix_cache()
        self.found("found after vLLM has forgotten everything", host, systems[0], [0, 2])
        self.found_behind_vllms_own(host, systems[0])

    def found_behind_vllms_own(self, host: Host, system: list[int]) -> None:
        """vLLM has the first blocks of a prompt, and the tier has the rest."""
        out, _ = self.ask(host, system, [0, 2])
        host.llm.reset_prefix_cache()
        short = {"prompt_token_ids": out.prompt_token_ids[: SIZE + 1]}
        self.generate(host, (short, self.case.prompt([0], "plain", count=1)[1]))
        before = host.counter("vllm:external_prefix_cache_hits")
        out, expected = self.ask(host, system, [0, 2])
        self.same("the beginning from vLLM, the rest from the tier", answer(out), expected)
        hits, rest = host.counter("vllm:external_prefix_cache_hits") - before, self.full_blocks(out) - SIZE
        self.say(f"{rest} tokens came from the tier", None if hits == rest else f"{hits} did")

    def shared_beginnings(self, host: Host) -> None:
        """Prompts that share beginnings, each asked when vLLM has forgotten everything. They are longer than a window."""
        system, asked = self.case.text(60), []
        for order in ([0, 1, 2], [0, 1, 3], [1, 0, 2], [0, 1, 2], [0, 2], [1, 0, 3]):
            host.llm.reset_prefix_cache()
            before = host.counter("vllm:external_prefix_cache_hits")
            out, expected = self.ask(host, system, order)
            self.same(f"a shared beginning, documents {order}", answer(out), expected)
            hits = host.counter("vllm:external_prefix_cache_hits") - before
            full = max((common(out.prompt_token_ids[:-1], other) for other in asked), default=0) // SIZE * SIZE
            self.say(f"{full} tokens were found", None if hits == out.num_cached_tokens == full else f"{hits} hits, {out.num_cached_tokens} cached")
            # vLLM has not computed the last token of an answer.
            asked.append([*out.prompt_token_ids, *out.outputs[0].token_ids[:-1]])

    def apart(self, host: Host) -> None:
        """Requests with salts or chunks share nothing."""
        system = self.case.text(60)
        for salt, hit in (("alice", False), ("alice", True), ("bob", False)):
            host.llm.reset_prefix_cache()
            out, expected = self.ask(host, system, [1, 2], cache_salt=salt)
            self.same(f"{salt} asks", answer(out), expected)
            self.say(f"{salt} {'finds' if hit else 'does not find'} it", None if bool(out.num_cached_tokens) == hit else f"{out.num_cached_tokens} tokens were found")
        system = self.case.text(60)
        if host.side.chunks.shape.no_chunks is not None:
            out, _ = self.ask(host, system, [1, 2], "alone")
            _, expected = self.ask(host, system, [1, 2])
            self.same("a request with chunks is answered without them", answer(out), expected)
            reason = (out.kv_transfer_params or {}).get("chunk_error")
            self.say(f"and is told why: {reason}", None if reason else "it is not")
            return
        out, expected = self.ask(host, system, [1, 2], "alone")
        self.same("a request with chunks", answer(out), expected)
        host.llm.reset_prefix_cache()
        out, expected = self.ask(host, system, [1, 2])
        self.same("an ordinary one of the same tokens finds nothing of it", answer(out), expected)
        self.say("and nothing was cached", None if out.num_cached_tokens == 0 else f"{out.num_cached_tokens} tokens were")

    def at_once(self, host: Host) -> None:
        orders = [[0, 1], [0, 2], [0, 1, 2], [3, 0], [3, 1], [0, 1]]
        for round_ in ("computed", "found"):
            host.llm.reset_prefix_cache()
            before = host.counter("vllm:external_prefix_cache_hits")
            outs = self.generate(host, *(self.case.prompt(order, "plain") for order in orders))
            for order, out in zip(orders, outs):
                self.same(f"six at once, {round_}, documents {order}", answer(out), self.expected(order, "plain"))
        hits = host.counter("vllm:external_prefix_cache_hits") - before
        self.say(f"{hits} tokens were found", None if hits > 0 else "none")

    def aborted_meanwhile(self, host: Host) -> None:
        engine, fault = host.llm.llm_engine, None
        for steps in range(7):
            host.llm.reset_prefix_cache()
            names = []
            for i, order in enumerate(([0, 1], [0, 2], [3, 0])):
                prompt, sampling = self.case.prompt(order, "plain", count=20)
                names.append(engine.add_request(f"abort-{steps}-{i}", prompt, sampling) or f"abort-{steps}-{i}")
            for _ in range(steps):
                engine.step()
            engine.abort_request(names, internal=True)
            fault = fault or host.nothing_held()
        self.say("aborted after 0 to 6 steps, nothing stays held", fault)

    def broken_copies(self, host: Host) -> None:
        worker = get_kv_transfer_group()._worker

        def broken(*_):
            raise KvCacheError("the disk is on fire")

        def with_arena(load, save, order, what):
            own = worker.prefixes
            worker.prefixes = type("Broken", (), {"load": staticmethod(load or own.load), "save": staticmethod(save or own.save)})
            try:
                host.llm.reset_prefix_cache()
                out, expected = self.ask(host, self.case.system, order)
            finally:
                worker.prefixes = own
            self.same(what, answer(out), expected)

        self.ask(host, self.case.system, [2, 1])
        with_arena(broken, None, [2, 1], "a copy that fails is computed by vLLM")
        with_arena(None, broken, [3, 2, 1], "a block that cannot be saved is not found later")
        self.say("nothing stays held", host.nothing_held())
        host.llm.reset_prefix_cache()
        out, expected = self.ask(host, self.case.system, [3, 2, 1])
        self.same("afterwards", answer(out), expected)

    def counts(self, host: Host) -> tuple[int, ...]:
        host.settled()
        return tuple(host.counter(f"vllm:kvcache_prefix_{name}") for name in ("tokens_found", "blocks_saved", "blocks_evicted"))

    def counted(self, host: Host) -> None:
        """The tier has nine blocks, and counts exactly what prompts find, save and take from others."""
        long, short = self.case.text(9 * SIZE + 1), self.case.text(2 * SIZE + 1)
        self.say("nothing is counted before the first request", None if self.counts(host) == (0, 0, 0) else f"{self.counts(host)}")
        for what, tokens, expected in (
            ("a prompt fills the tier", long, (0, 9, 0)),
            ("another one takes two blocks", short, (0, 11, 2)),
            ("it is found", short, (2 * SIZE, 11, 2)),
            ("seven blocks of the first are found, and two are saved again", long, (9 * SIZE, 13, 4)),
            ("all nine are found", long, (18 * SIZE, 13, 4)),
        ):
            self.asked(host, tokens)
            got = self.counts(host)
            self.say(f"{what}: {expected} tokens found, blocks saved and evicted", None if got == expected else f"{got} are counted")
        host.llm.reset_prefix_cache(reset_connector=True)
        got = self.counts(host)
        self.say("a reset evicts nothing", None if got == (18 * SIZE, 13, 4) else f"{got} are counted")

    def asked(self, host: Host, tokens: list[int], *, forgets: bool = True) -> int:
        """Asks a prompt, which vLLM itself has forgotten unless ``forgets`` is false. Returns the number of tokens found."""
        if forgets:
            host.llm.reset_prefix_cache()
        (out,) = self.generate(host, ({"prompt_token_ids": tokens}, self.case.prompt([0], "plain", count=1)[1]))
        return out.num_cached_tokens

    def renewed(self, host: Host) -> None:
        """A prompt that vLLM has in its own blocks is renewed in the tier, which has nine blocks, while others come and go."""
        hot = self.case.text(4 * SIZE + 1)
        self.asked(host, hot)
        before = host.counter("vllm:kvcache_prefix_tokens_found")
        for _ in range(4):
            self.asked(host, self.case.text(3 * SIZE + 1), forgets=False)
            own = self.asked(host, hot, forgets=False)
            self.say("vLLM has the prompt in its own blocks", None if own >= 3 * SIZE else f"it has {own} tokens")
        fault = None if self.counts(host)[0] == before else "tokens were copied in"
        self.say("the tier copies nothing in", fault)
        found = self.asked(host, hot)
        self.say("the tier still has all of it", None if found == 4 * SIZE else f"{found} tokens are found")

    def too_small(self, host: Host) -> None:
        """The tier has room for fewer blocks than the prompts have."""
        for i in range(8):
            out, expected = self.ask(host, self.case.text(60), [i % 4, (i + 1) % 4])
            self.same(f"more than the tier holds, {i}", answer(out), expected)
        host.side.prefixes.pool.check_invariants()
        evictions = host.side.prefixes.pool.counts()["evictions"]
        self.say(f"{evictions} blocks were evicted", None if evictions else "none was")
        self.say("nothing stays held", host.nothing_held())

    def leaves_from_its_end(self, host: Host) -> None:
        """A prompt takes all nine blocks of the tier, and another one takes two of them."""
        long = self.case.text(9 * SIZE + 1)
        self.asked(host, long)
        self.asked(host, self.case.text(2 * SIZE + 1))
        left = self.asked(host, long)
        self.say("a prompt leaves the tier from its end", None if left == 7 * SIZE else f"{left} of its tokens are found, and not {7 * SIZE}")


def main() -> None:
    args = arguments(__doc__)
    failures = 0
    for path in args.models:
        print(f"== {path}", flush=True)
        checks = PrefixChecks(path)
        host = Host(path, host_memory="64MiB", blocks=24 * checks.tables, prefix_memory="16MiB", ranks=args.ranks)
        checks.evicted_by_vllm(host)
        checks.shared_beginnings(host)
        checks.apart(host)
        checks.at_once(host)
        if args.ranks == 1:
            checks.aborted_meanwhile(host)
            checks.broken_copies(host)
        checks.say("nothing stays held", host.nothing_held())
        host.close()
        if args.ranks == 1:
            small = 9 * SIZE * token_bytes(checks.model.config, "float32")
            host = Host(path, host_memory="64MiB", blocks=24 * checks.tables, prefix_memory=small)
            checks.too_small(host)
            host.close()
            for policy in ("lru", "tiny-lfu", "s3-fifo", "priority"):
                host = Host(path, host_memory="64MiB", blocks=24 * checks.tables, prefix_memory=small, cache_policy=policy)
                checks.leaves_from_its_end(host)
                host.llm.reset_prefix_cache(reset_connector=True)
                if policy == "lru":
                    checks.renewed(host)
                host.close()
            host = Host(path, host_memory="64MiB", blocks=24 * checks.tables, prefix_memory=small)
            checks.counted(host)
            host.close()
            # Prompts take several steps, during which a window passes their first blocks.
            host = Host(path, host_memory="64MiB", blocks=24 * checks.tables, step_tokens=64, prefix_memory="16MiB")
            checks.shared_beginnings(host)
            checks.at_once(host)
            checks.say("nothing stays held", host.nothing_held())
            host.close()
        failures += checks.failures
    sys.exit(f"{failures} checks failed" if failures else 0)


if __name__ == "__main__":
    main()
