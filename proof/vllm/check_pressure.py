"""Checks the connector inside a real vLLM on a CPU under pressure: small limits, and requests of several
clients. Run by ``check_connector.py``.

``engine/kvpy/tests/test_pressure.py`` makes the same requests without vLLM.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import tempfile
from pathlib import Path

import torch
from check_connector import BLOCK, Case, Host, answer, random_tokens, token_bytes
from safetensors.torch import save_file
from steps import StepChecks
from tiny import SIZE
from transformers import GPT2Config, GPT2LMHeadModel, Gemma3ForCausalLM, Gemma3TextConfig, MambaConfig, MambaForCausalLM
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest

from kvcache.vllm import recompute


class PressureChecks(StepChecks):
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
        """A client gives the salt of a request with chunks, which it has seen in vLLM's events, or one that it could guess."""
        host = self.host()
        self.add(host, *self.case.prompt([0, 1], "alone"))
        seen = next(one.request.cache_salt for one in host.side.requests.values() if one.chunks is not None)
        self.rest(host)
        ends = list(itertools.accumulate(map(len, self.case.parts([0, 1]))))
        described = json.dumps(["kvcache chunks v2", None, "alone", "none", ends, []])
        hashed = "kvcache:" + hashlib.sha256(described.encode()).hexdigest()
        prompt, sampling = self.case.prompt([0, 1], "plain")
        for what, salt in (("seen", seen), ("beginning", "kvcache:"), ("zeros", "kvcache:" + "0" * 64), ("hash", hashed), ("number", "kvcache-mixed-0")):
            (out,) = self.generate(host, ({**prompt, "cache_salt": salt}, sampling))
            self.same(f"salts ({what}): an ordinary request with the salt of one with chunks", answer(out), self.expected([0, 1], "plain"))
            (out,) = self.generate(host, self.case.prompt([0, 1], "alone"))
            self.same("a request with chunks after it", answer(out), self.expected([0, 1], "alone"))
            # Now the ordinary request comes first, and vLLM looks for its blocks when the one with chunks arrives.
            host.llm.reset_prefix_cache()
            (out,) = self.generate(host, ({**prompt, "cache_salt": salt}, sampling))
            self.same("an ordinary request before any with chunks", answer(out), self.expected([0, 1], "plain"))
            (out,) = self.generate(host, self.case.prompt([0, 1], "alone"))
            self.same("a request with chunks finds nothing of it", answer(out), self.expected([0, 1], "alone"))
        host.close()

    def forged_ids(self) -> None:
        """A client gives IDs of the connector's own requests: of one that has ended, of one that runs, and one that it could guess."""
        host = self.host()
        self.add(host, *self.case.prompt([0], "alone"))
        ended = next(name for name in host.scheduler.requests if "encode" in name)
        self.rest(host)
        first = self.add(host, *self.case.prompt([1, 2], "alone"))
        running = next(name for name in host.scheduler.requests if "encode" in name)
        names = {name: order for name, order in ((ended, [3]), (running, [2, 3]), ("kvcache-encode-0", [3, 1]), ("kvcache-prefix-0", [0, 2]))}
        for name, order in names.items():
            host.llm.llm_engine.add_request(name, *self.case.prompt(order, "alone"))
        outs = self.rest(host)
        self.same("a request whose encodes have IDs that a client gives", answer(outs[first]), self.expected([1, 2], "alone"))
        for name, order in names.items():
            self.same(f"the ID {name.rpartition('-')[0]}-…", answer(outs[name]), self.expected(order, "alone"))
        self.say("nothing stays held", host.nothing_held())
        host.close()

    def tenants(self) -> None:
        """Clients with different salts, and clients without one, reuse nothing of each other."""
        host = self.host()
        tokens = sum(map(len, self.case.parts([0, 1])))
        prompt, sampling = self.case.prompt([0, 1], "alone")
        for salt, reused in (("alice", 0), ("alice", tokens), ("bob", 0), (None, 0), ("bob", tokens), (None, tokens), ("alice", tokens)):
            host.llm.reset_prefix_cache()
            (out,) = self.generate(host, ({**prompt, "cache_salt": salt} if salt else prompt, sampling))
            self.same(f"chunks of {salt}", answer(out), self.expected([0, 1], "alone"))
            got = out.kv_transfer_params["chunk_tokens_reused"]
            self.say(f"{reused} of its {tokens} tokens are reused", None if got == reused else f"{got} are")
        host.close()

    def blocks_of_events(self, batches: list, known: set) -> tuple[int, int, str | None]:
        """Follows the tier's events as a router does, with the blocks that it ``known``. Returns the number of blocks stored
        and removed, and what is wrong."""
        stored = removed = 0
        fault = None
        for event in (event for batch in batches for event in batch.events if getattr(event, "medium", None) == MEDIUM_CPU):
            blocks = set(event.block_hashes)
            if isinstance(event, BlockStored):
                fault = fault or ("a block is stored twice" if known & blocks else None)
                known |= blocks
                stored += len(blocks)
            elif isinstance(event, BlockRemoved):
                fault = fault or (None if blocks <= known else "a block is removed that was never stored")
                known -= blocks
                removed += len(blocks)
        batches.clear()
        return stored, removed, fault

    def events_of_removal(self) -> None:
        """Routers are told which blocks leave the tier, because others need their room, and in a reset."""
        if self.model.config.model_type != "llama":
            return
        published = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        small = 9 * BLOCK * token_bytes(self.model.config, "float32")
        host, batches, known = self.host(prefix_memory=small, options={"kv_events_config": published}), [], set()
        host.scheduler.kv_event_publisher.publish = batches.append
        counts = host.side.prefixes.pool.counts
        for what, blocks, expected in (("a prompt fills the tier", 9, (9, 0)), ("another one takes room", 2, (2, 2)), ("and another", 4, (4, 4))):
            _, sampling = self.case.prompt([0], "plain", count=1)
            self.generate(host, ({"prompt_token_ids": self.case.text(blocks * BLOCK + 1)}, sampling))
            host.nothing_held()
            stored, removed, fault = self.blocks_of_events(batches, known)
            fault = fault or (None if (stored, removed) == expected and len(known) == counts()["cached"] else f"{stored}, {removed}, {len(known)} known")
            self.say(f"{what}: {expected[0]} blocks are stored and {expected[1]} removed", fault)
        host.llm.reset_prefix_cache(reset_connector=True)
        host.nothing_held()
        stored, removed, fault = self.blocks_of_events(batches, known)
        self.say("a reset removes all nine", fault or (None if (stored, removed, known) == (0, 9, set()) else f"{stored} stored, {removed} removed"))
        host.close()

    def events(self) -> None:
        """Routers are told of the tier's blocks, and of nothing from which a salt of the connector could be made."""
        if self.model.config.model_type != "llama":
            return
        published = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        host, batches = self.host(prefix_memory="8MiB", options={"kv_events_config": published}), []
        host.scheduler.kv_event_publisher.publish = batches.append
        for mode in ("alone", "plain", "alone"):
            self.generate(host, self.case.prompt([0, 1], mode))
            host.llm.reset_prefix_cache()
        events, secret = [event for batch in batches for event in batch.events], host.side.names.secret
        told = repr(events)
        stored, removed, fault = self.blocks_of_events(batches, set())
        expected = len(self.case.prompt([0, 1], "plain")[0]["prompt_token_ids"]) // BLOCK
        # The answer fills a block, too.
        fault = fault or (None if stored > expected > 0 == removed else f"{stored} instead of {expected}, and {removed} removed")
        self.say("routers are told of the tier's blocks", fault)
        # vLLM publishes the salts themselves, so the check would see a secret in them.
        self.say("vLLM's events show the salts of the connector", None if "kvcache:" in told else "they do not, so the next check shows nothing")
        forms = (repr(secret)[2:-1], secret.hex(), base64.b64encode(secret).decode()[:40])
        self.say("they show no secret", None if not any(form in told for form in forms) else "they do")
        host.close()

    def holds_end(self) -> None:
        """Three requests generate at the same time, and the memory has room for one of them."""
        host = self.host(5)
        orders, names, outs = ([0, 1], [2], [3]), [], {}
        for order in orders:
            names.append(self.add(host, *self.case.prompt(order, "alone", count=60)))
            for _ in range(10):
                outs |= self.step(host)
        running = len(host.scheduler.running)
        self.say("all three run", None if running == 3 else f"{running} do")
        outs |= self.rest(host)
        for order, name in zip(orders, names):
            self.same(f"memory for one of three, documents {order}", answer(outs[name]), self.expected(order, "alone", 60))
        self.say("nothing stays held", host.nothing_held())
        host.close()

    def own_blocks(self) -> None:
        """vLLM has the rows of all chunks, or of some, and the host memory has lost them."""
        host = self.host()
        cache = host.side.chunks.cache
        for order, again in (([0, 1], "none"), ([2, 3], "link:8"), ([3, 0], "question:0.5")):
            if self.windowed and again != "none":
                continue
            (first,) = self.generate(host, self.case.prompt(order, "alone", again))
            while cache.evict_lru():
                pass
            before = cache.get_metrics().insertions
            (out,) = self.generate(host, self.case.prompt(order, "alone", again))
            self.same(f"{again}: vLLM's own blocks", answer(out), answer(first))
            # Without the rest of the block before the question, the last document is needed.
            made, tokens = cache.get_metrics().insertions - before, sum(map(len, self.case.parts(order)))
            most = 0 if tokens % BLOCK == 0 else 3 if again.startswith("question") else 1
            self.say(f"{again}: no more than {most} of 3 parts is encoded again", None if made <= most else f"{made} are")
        host.close()

    def slices(self) -> None:
        """The attention of a long question is computed in slices, and its memory is limited."""
        if self.windowed:
            return
        whole = recompute.WEIGHTS
        own, self.case.question = self.case.question, self.case.text(70)
        found, sizes = [], []
        for limit in (whole, 4000, 1):
            host, recompute.WEIGHTS = self.host(), limit
            (out,) = self.generate(host, self.case.prompt([0, 1, 2], "alone", "question:0.3"))
            found.append(answer(out))
            host.close()
        recompute.WEIGHTS = whole
        for what, got in zip(("a few queries", "one query"), found[1:]):
            self.same(f"a question in slices of {what}", got, found[0])
        rows, keys = torch.randn(33, 2, 3, 8), torch.randn(133, 2, 8)
        logits = torch.einsum("qghd,tgd->ghqt", rows, keys) * 0.3
        logits.masked_fill_(torch.arange(133)[None] > torch.arange(100, 133)[:, None], float("-inf"))
        right = logits.softmax(-1)[..., :100].sum((0, 1, 2))
        for limit in (1, 2 * 3 * 133 * 5, whole):
            recompute.WEIGHTS = limit
            sizes.append((recompute.attention(rows, keys, 100, 0.3) - right).abs().max().item())
        recompute.WEIGHTS = whole
        self.say(f"slices add up to the whole attention, within {max(sizes):.0e}", None if max(sizes) < 1e-4 else "they do not")
        host = self.host(question_memory=4 * BLOCK * token_bytes(self.model.config, "float32"))
        (out,) = self.generate(host, self.case.prompt([0, 1], "alone", "question:0.3"))
        self.case.question = own
        reason = (out.kv_transfer_params or {}).get("chunk_error", "")
        named = "raise question_memory" in reason and f"at most {4 * BLOCK} tokens" in reason
        self.say(f"a prompt that is too long for its question is told: {reason}", None if named else "it is not")
        host.close()

    def chosen(self) -> None:
        """A question chooses beside other requests, which leave room for a few of its tokens, as it does alone."""
        if self.windowed:
            return
        own, self.case.question = self.case.question, self.case.text(80)
        found = []
        for others in (False, True):
            host = self.host()
            name, outs = self.add(host, *self.case.prompt([0, 1, 2], "alone", "question:0.3")), {}
            for _ in range(12):
                if others:
                    _, sampling = self.case.prompt([0], "plain", count=1)
                    self.add(host, {"prompt_token_ids": self.case.text(252)}, sampling)
                outs |= self.step(host)
            outs |= self.rest(host)
            found.append(answer(outs[name]))
            host.close()
        self.case.question = own
        self.same("a question beside other requests chooses as it does alone", found[1], found[0])

    def counted(self) -> None:
        """Counters are sums of what answers say, and what was asked."""
        host, tokens = self.host(), sum(map(len, self.case.parts([0, 1])))

        def counts() -> tuple[int, int]:
            return tuple(host.counter(f"vllm:kvcache_chunk_tokens_{what}") for what in ("reused", "computed"))

        for what, order, expected in (("cold", [0, 1], (0, tokens)), ("warm", [1, 0], (tokens, 0)), ("twice", [2, 2], None)):
            before = counts()
            (out,) = self.generate(host, self.case.prompt(order, "alone"))
            one = len(self.case.documents[2])
            expected = expected or (len(self.case.system) + one, one)
            said = tuple(out.kv_transfer_params[f"chunk_tokens_{name}"] for name in ("reused", "computed"))
            grown = tuple(after - old for after, old in zip(counts(), before))
            self.say(f"{what}: {said} tokens reused and computed", None if said == grown == expected else f"counted {grown}, asked {expected}")
        before = counts()
        for steps in range(1, 7):
            name = self.add(host, *self.case.prompt([0, 3], "alone", count=40))
            for _ in range(steps):
                self.step(host)
            host.llm.llm_engine.abort_request([name])
            self.rest(host)
            host.llm.reset_prefix_cache(reset_connector=True)
        host.nothing_held()
        self.say("aborted requests are counted nowhere", None if counts() == before else f"{counts()} after {before}")
        host.close()
        self.counted_evictions()
        self.counted_refusals()

    def counted_evictions(self) -> None:
        """The memory has five blocks: the system prompt has one, and the documents have two, two, three and three."""
        host = self.host(5)
        for document, expected in ((0, 0), (1, 0), (2, 2), (2, 2), (0, 3), (1, 3), (2, 5)):
            host.llm.reset_prefix_cache()
            self.generate(host, self.case.prompt([document], "alone"))
            host.settled()
            got = host.counter("vllm:kvcache_chunk_evictions")
            self.say(f"document {document}: {expected} pieces were evicted so far", None if got == expected else f"{got} are counted")
        host.close()

    def counted_refusals(self) -> None:
        host = self.host()
        wrong = ({"chunk_lengths": [21, 400]}, {"chunk_lengths": [21]}, {"chunk_mode": "sideways"}, {})
        for number, changes in enumerate(wrong, start=1):
            (out,) = self.generate(host, self.case.prompt([0, 1], "alone", **changes))
            host.settled()
            expected, got = min(number, 3), host.counter("vllm:kvcache_chunk_requests_refused")
            self.say(f"{expected} requests were refused so far", None if got == expected else f"{got} are counted")
        host.close()

    def adapters(self) -> None:
        """An adapter is replaced by another one in place."""
        if self.model.config.model_type != "llama":
            return
        with tempfile.TemporaryDirectory() as folder:
            found = {}
            for case in ("replaced", "fresh"):
                host = self.host(options={"enable_lora": True, "max_lora_rank": 8})
                for seed in (1, 2) if case == "replaced" else (2,):
                    self.write_adapter(Path(folder), seed)
                    lora = LoRARequest("adapter", 1, folder, load_inplace=True)
                    host.llm.llm_engine.add_lora(lora)
                    prompt, sampling = self.case.prompt([0, 1], "alone")
                    (out,) = host.llm.generate([prompt], [sampling], lora_request=lora, use_tqdm=False)
                    found[case, seed] = answer(out)
                host.close()
        self.same("an adapter that was replaced in place", found["replaced", 2], found["fresh", 2])
        differs = found["replaced", 1].tokens != found["replaced", 2].tokens
        self.say("the two adapters answer differently", None if differs else "they do not, so the check above shows nothing")

    def write_adapter(self, folder: Path, seed: int) -> None:
        config, draw = self.model.config, torch.Generator().manual_seed(seed)
        size, rows = config.hidden_size, {"q_proj": config.num_attention_heads, "v_proj": config.num_key_value_heads}
        tensors = {}
        for layer in range(config.num_hidden_layers):
            for name, heads in rows.items():
                at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
                tensors[f"{at}.lora_A.weight"] = torch.randn(4, size, generator=draw) * 0.3
                tensors[f"{at}.lora_B.weight"] = torch.randn(heads * config.head_dim, 4, generator=draw) * 0.3
        save_file(tensors, folder / "adapter_model.safetensors")
        described = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(rows), "bias": "none"}
        (folder / "adapter_config.json").write_text(json.dumps(described))

    def several_kinds(self) -> None:
        """Gemma 3 has layers with and without a window, and a rotary embedding of its own for each kind. With vLLM's flag,
        all of its layers have one table of blocks, and tokens can be recomputed.
        """
        if self.model.config.model_type != "llama":
            return
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(3)
            window = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}
            shape = {**SIZE, "num_hidden_layers": 4, "head_dim": 32, "query_pre_attn_scalar": 32, **window}
            Gemma3ForCausalLM(Gemma3TextConfig(**shape)).save_pretrained(folder)
            gemma = PressureChecks(folder)
            host = gemma.host(options={"disable_hybrid_kv_cache_manager": True}, prefix_memory="64MiB")
            for order in ([0, 1, 2], [2, 0, 1]):
                (out,) = gemma.generate(host, gemma.case.prompt(order, "alone"))
                gemma.same(f"Gemma 3, documents {order}", answer(out), gemma.expected(order, "alone"))
                said = out.kv_transfer_params
                gemma.say("they are reused", None if order[0] == 0 or not said["chunk_tokens_computed"] else f"{said}")
            (out,) = gemma.generate(host, gemma.case.prompt([1, 2, 0], "alone", "link:1000"))
            gemma.same("Gemma 3, every token linked", answer(out), gemma.expected([1, 2, 0], "plain"))
            for where in ("computed", "from the tier"):
                (out,) = gemma.generate(host, gemma.case.prompt([2, 1], "plain"))
                gemma.same(f"Gemma 3, an ordinary prompt, {where}", answer(out), gemma.expected([2, 1], "plain"))
                host.llm.reset_prefix_cache()
            gemma.say("it was found in the tier", None if out.num_cached_tokens else "it was not")
            gemma.say("nothing stays held", host.nothing_held())
            host.close()
            self.failures += gemma.failures

    def tier_alone(self) -> None:
        """GPT-2 has the number of its layers under a name of its own, and no rotary embeddings: it gets the tier, and no memory
        for chunks."""
        if self.model.config.model_type != "llama":
            return
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(4)
            shape = {"vocab_size": SIZE["vocab_size"], "n_positions": 512, "n_embd": 128, "n_layer": 3, "n_head": 4}
            model = GPT2LMHeadModel(GPT2Config(**shape, initializer_range=0.12, bos_token_id=1, eos_token_id=2)).eval()
            model.save_pretrained(folder)
            # More than a machine has.
            host = Host(folder, host_memory="1000TiB", prefix_memory="8MiB")
            case = Case(random_tokens(SIZE["vocab_size"]))
            for mode, where in (("plain", "computed"), ("plain", "from the tier"), ("alone", "without its chunks")):
                prompt, sampling = case.prompt([0, 1], mode)
                tokens = prompt["prompt_token_ids"]
                (out,) = self.generate(host, (prompt, sampling))
                got = list(out.outputs[0].token_ids)
                right = model.generate(torch.tensor([tokens]), max_new_tokens=len(got), do_sample=False, eos_token_id=None)
                expected = right[0, len(tokens) :].tolist()
                self.say(f"GPT-2, {where}: the tokens of transformers", None if got == expected else f"{got} instead of {expected}")
                found = (len(tokens) - 1) // BLOCK * BLOCK if where != "computed" else 0
                self.say(f"{found} tokens are found", None if out.num_cached_tokens == found else f"{out.num_cached_tokens} are")
                host.llm.reset_prefix_cache()
            said = (out.kv_transfer_params or {}).get("chunk_error", "")
            self.say(f"a request with chunks is told: {said}", None if "chunks are not supported for this model" in said else "it is not")
            host.close()

    def unsupported(self) -> None:
        """A model whose layers have states in place of keys and values is refused by name."""
        if self.model.config.model_type != "llama":
            return
        with tempfile.TemporaryDirectory() as folder:
            shape = {"vocab_size": 512, "hidden_size": 64, "state_size": 8, "num_hidden_layers": 2}
            MambaForCausalLM(MambaConfig(**shape)).save_pretrained(folder)
            try:
                Host(folder, host_memory="16MiB", prefix_memory="16MiB")
                reason = "nothing"
            except Exception as error:
                reason = f"{error}"
            named = "layers of the kind MambaSpec" in reason and "use a model with ordinary attention" in reason
            self.say("layers with states are refused by name", None if named else f"{reason} was said")

    def all(self) -> None:
        self.few_pieces()
        self.full_index()
        self.forged_salts()
        self.forged_ids()
        self.tenants()
        self.events()
        self.events_of_removal()
        self.holds_end()
        self.own_blocks()
        self.chosen()
        self.slices()
        self.counted()
        self.adapters()
        self.several_kinds()
        self.tier_alone()
        self.unsupported()
