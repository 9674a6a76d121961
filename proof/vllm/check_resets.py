"""Checks resets of the connector inside a real vLLM on a CPU: new weights, pauses, sleep. Run by ``check_connector.py``.

``engine/kvpy/tests/test_resets.py`` makes the same requests without vLLM.
"""

from __future__ import annotations

import torch
from check_connector import Host, answer
from steps import StepChecks
from vllm.distributed.kv_transfer import get_kv_transfer_group


def worker():
    return get_kv_transfer_group()._worker


def change_weights(seed: int) -> None:
    """Loads new weights, so that attention and answers differ."""
    draw = torch.Generator().manual_seed(seed)
    for parameter in worker().recomputer.runner.model.parameters():
        if parameter.dim() == 1:
            parameter.data.mul_(0.6 + 0.9 * torch.rand(parameter.shape, generator=draw))


class ResetChecks(StepChecks):
    def resets(self) -> None:
        """New weights while a request with chunks is in any state: its answer goes on with the new ones."""
        host = self.host(prefix_memory="8MiB")
        engine = host.llm.llm_engine
        core = engine.engine_core.engine_core
        fault = None
        refused = 0
        for steps in range(1, 8):
            outs, modes = {}, {}
            for mode in ("alone", "plain"):
                modes[self.add(host, *self.case.prompt([0, 1], mode, count=12))] = mode
            for _ in range(steps):
                outs |= self.step(host)
            while True:
                before = {name: self.told(host, name) for name in modes}
                try:
                    core.pause_scheduler(mode="keep", clear_cache=True)
                    break
                except RuntimeError as error:
                    # While rows are being copied in, vLLM itself refuses, however often it is asked without a step.
                    if "remote KV transfer" not in str(error) or refused > 50:
                        raise
                    refused += 1
                core.resume_scheduler()
                outs |= self.step(host)
            change_weights(steps)
            core.resume_scheduler()
            outs |= self.rest(host)
            for name, old in before.items():
                if old is None:
                    continue
                got = list(outs[name].outputs[0].token_ids)
                prompt, sampling = self.case.prompt([0, 1], modes[name], count=12 - len(old))
                prompt["prompt_token_ids"] = [*prompt["prompt_token_ids"], *old]
                prompt["cache_salt"] = "apart"
                (fresh,) = self.generate(host, (prompt, sampling))
                right = [*old, *fresh.outputs[0].token_ids]
                fault = fault or (None if got == right else f"{modes[name]} after {steps} steps: {got} instead of {right}")
        self.say(f"seven pauses succeed, after {refused} that vLLM refused", None if refused > 0 else "none met a copy under way")
        self.say("answers go on with the new weights", fault)
        self.say("nothing stays held", host.nothing_held())
        host.close()

    def kept_from_others(self) -> None:
        """New weights without a preemption: a request goes on over its old blocks, and nobody else finds them."""
        host = self.host(prefix_memory="8MiB")
        for seed, mode in enumerate(("alone", "plain")):
            name = self.add(host, *self.case.prompt([0, 1], mode, count=80))
            while len(self.told(host, name)) < 4:
                self.step(host)
            kept = host.llm.reset_prefix_cache(reset_connector=True)
            self.say(f"{mode}: vLLM keeps its own cache", "it does not" if kept else None)
            change_weights(seed)
            said = list(self.rest(host)[name].outputs[0].token_ids)
            prompt, sampling = self.case.prompt([0, 1], mode, count=4)
            prompt["prompt_token_ids"] = [*prompt["prompt_token_ids"], *said]
            (fresh,) = self.generate(host, ({**prompt, "cache_salt": f"apart-{mode}"}, sampling))
            for where in ("once", "again", "from the tier"):
                if where == "from the tier":
                    host.llm.reset_prefix_cache()
                (out,) = self.generate(host, (prompt, sampling))
                self.same(f"{mode}: a conversation that goes on after it, {where}", answer(out), answer(fresh))
        self.say("nothing stays held", host.nothing_held())
        host.close()

    def idle(self) -> None:
        """vLLM is idle after a reset, and its metrics are right all the same."""
        host = self.host(prefix_memory="8MiB")
        for mode in ("alone", "plain"):
            self.generate(host, self.case.prompt([0, 1], mode))
        names = ("vllm:kvcache_chunk_memory_usage_perc", "vllm:kvcache_prefix_memory_usage_perc")

        def gauges() -> list[float]:
            return [one.value for name in names for one in host.llm.get_metrics() if one.name == name]

        before = gauges()
        self.say("vLLM says that it has reset its caches", None if host.llm.reset_prefix_cache(reset_connector=True) else "it does not")
        steps = 0
        # As vLLM's loop does.
        while host.scheduler.has_requests() and steps < 5:
            host.llm.llm_engine.step()
            steps += 1
        right = min(before) > 0 and steps == 1 and gauges() == [0.0, 0.0]
        self.say("the gauges follow a reset of an idle vLLM", None if right else f"{before}, then {gauges()} after {steps} steps")
        host.close()

    def choices(self) -> None:
        """A question that has chosen under old weights chooses anew: the same prompt is answered as in a fresh process."""
        if self.windowed:
            return
        asked, chosen, found = self.case.prompt([0, 1, 2], "alone", "question:0.5"), {}, {}
        for what in ("fresh", "reset", "paused"):
            host = self.host()
            core = host.llm.llm_engine.engine_core.engine_core
            if what != "fresh":
                self.generate(host, asked)
                chosen["old"] = list(worker().recomputer.choices.values())
            if what == "reset":
                self.say("the reset succeeds", None if host.llm.reset_prefix_cache(reset_connector=True) else "it does not")
            if what == "paused":
                core.pause_scheduler(mode="keep", clear_cache=True)
            change_weights(11)
            core.resume_scheduler()
            (out,) = self.generate(host, asked)
            found[what], chosen[what] = answer(out), list(worker().recomputer.choices.values())
            if what != "fresh":
                self.same(f"{what}, new weights: a question that was asked before, as in a fresh process", found[what], found["fresh"])
                fault = None if chosen[what] == chosen["fresh"] and len(chosen[what]) == 1 else f"{chosen[what]} instead of {chosen['fresh']}"
                self.say("it chooses the same tokens", fault)
                self.say("and other ones than under the old weights", None if chosen["old"] != chosen["fresh"] else "the check shows nothing")
            host.close()

    def sleeps(self) -> None:
        """vLLM sleeps while requests are in any state, and wakes up with new weights: nothing from before is found."""
        host = self.host(prefix_memory="8MiB")
        core = host.llm.llm_engine.engine_core.engine_core
        kinds, refused, fault = [("alone", "none"), ("plain", "none")], 0, None
        kinds += [] if self.windowed else [("alone", "question:0.5")]
        for steps in (0, 1, 2, 3, 5):
            names = [self.add(host, *self.case.prompt([0, 1], mode, again, 12)) for mode, again in kinds]
            for _ in range(steps):
                self.step(host)
            while True:
                try:
                    core.sleep(1, "abort")
                    break
                except RuntimeError as error:
                    # Rows are being copied in. A request that vLLM has aborted keeps its blocks until the copy ends.
                    if "KV cache" not in str(error) or refused > 50:
                        raise
                    refused += 1
                    core.resume_scheduler()
                    core.step()
            # vLLM's own front end has not been told of the aborts.
            host.llm.llm_engine.abort_request(names)
            counts = host.side.prefixes.pool.counts()
            left = host.side.chunks.cache.get_metrics().used_blocks + counts["total"] - counts["free"] + len(host.side.requests)
            fault = fault or (f"{left} blocks and requests are left after {steps} steps" if left else None)
            change_weights(20 + steps)
            core.wake_up()
            for mode, again in kinds:
                prompt, sampling = self.case.prompt([0, 1], mode, again)
                (fresh,) = self.generate(host, ({**prompt, "cache_salt": f"apart-{steps}-{mode}"}, sampling))
                (out,) = self.generate(host, (prompt, sampling))
                self.same(f"asleep after {steps} steps, {mode}, {again}", answer(out), answer(fresh))
        self.say(f"a sleeping vLLM has nothing in the connector, after {refused} times that it refused", fault)
        self.say("nothing stays held", host.nothing_held())
        host.close()

    def all(self) -> None:
        self.resets()
        self.kept_from_others()
        self.choices()
        self.sleeps()
        self.idle()
