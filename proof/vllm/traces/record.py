"""Records what vLLM's KVCacheManager does, for kvcore to replay. README.md in this folder describes the
format.

    python -m venv venv && . venv/bin/activate
    pip install torch==2.15.0 transformers==5.23.0 numpy==2.4.6 cbor2==6.2.1 aiohttp blake3 cachetools cloudpickle \
        fastapi llguidance==1.9.1 msgspec openai==3.52.0 oss-harmony==0.0.11 partial-json-parser pillow \
        prometheus-client psutil py-cpuinfo pybase64 pyzmq requests uvloop xgrammar==0.2.8
    pip install --no-deps vllm==0.33.0
    python proof/vllm/traces/record.py kvcore/tests/traces

The second list is for importing the block manager, not for all of vLLM. Ignore pip's warnings about the rest:
no kernel is called, and no GPU is used. The committed files were made with Python 3.11 and the versions
above; another run produces the same bytes. No part of vLLM is stubbed or changed: four methods of the pool
are wrapped to see their arguments, which are compared with the KV events that vLLM publishes. Requests are
scheduled as in vLLM's scheduler (first come, first served), in a few lines below.
"""

from __future__ import annotations

import os

# Without PYTHONHASHSEED the chain starts at vLLM's fixed default seed. Events carry whole digests, not 64
# bits.
os.environ.pop("PYTHONHASHSEED", None)
os.environ.update(VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES="0", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")

import hashlib
import json
import pathlib
import random
import sys

import cbor2
import torch
import vllm
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_block_hash, get_request_block_hasher, hash_block_tokens, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

VLLM = "0.33.0"
MAX_MODEL_LEN = 4096
VOCABULARY = (24, 256, 65536, 151936)


def make_request(name, tokens, block_size, salt=None, lora=None, images=()):
    """A vLLM request. `lora` is (name, path); an image is (identifier, offset, length)."""
    return Request(
        request_id=str(name),
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(max_tokens=MAX_MODEL_LEN),
        pooling_params=None,
        arrival_time=0.0,
        cache_salt=salt,
        lora_request=LoRARequest(lora[0], 1, lora[1]) if lora else None,
        mm_features=[
            MultiModalFeatureSpec(data=None, modality="image", identifier=i, mm_position=PlaceholderRange(o, n))
            for i, o, n in images
        ],
        block_hasher=get_request_block_hasher(block_size, sha256_cbor),
    )


def some_tokens(rng, n):
    """Token IDs of every CBOR width, mostly the middle one."""
    return [rng.randrange(rng.choices(VOCABULARY, (1, 3, 8, 4))[0]) for _ in range(n)]


def next_token(tokens, flavour):
    """A stand-in for a model: a function of the whole context and `flavour`."""
    digest = hashlib.sha256(repr((flavour, tokens)).encode()).digest()
    return int.from_bytes(digest[:4], "little") % VOCABULARY[2 + digest[4] % 2]


class Recorder:
    """A KVCacheManager that turns every operation into an event."""

    def __init__(self, name, block_size, num_blocks, **header):
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.block_size = block_size
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            max_model_len=MAX_MODEL_LEN,
            scheduler_block_size=block_size,
            hash_block_size=block_size,
            enable_kv_cache_events=True,
        )
        self.pool = self.manager.block_pool
        assert self.pool.null_block.block_id == 0
        self.header = {
            "format": "vllm-kv-trace-1", "trace": name, "vllm": VLLM, "hash": "sha256_cbor",
            "none_hash_seed": kv_cache_utils.get_none_hash_seed(), "none_hash": kv_cache_utils.NONE_HASH.hex(),
            "block_size": block_size, "num_blocks": num_blocks, "null_block": 0, "max_model_len": MAX_MODEL_LEN,
            **header,
        }
        self.requests, self.unseen = {}, {}
        self.keys, self.events = [], []
        self.key_index = {}
        self.stored, self.evicted, self.given_back = [], [], []
        self.totals = dict.fromkeys(
            ("requests", "admitted", "admissions_failed", "admissions_with_hits", "hit_tokens", "hits_of_free_blocks",
             "hits_among_copies", "steps", "steps_failed", "preempted", "stored", "stored_twice", "evicted",
             "evicted_with_copy_left", "resets_done", "resets_refused"), 0)
        self._wrap()

    def _wrap(self):
        pool = self.pool
        evict, insert, free = pool._maybe_evict_cached_block, pool._insert_block_hash, pool.free_blocks

        def evicting(block):
            key = block.block_hash
            done = evict(block)
            if done:
                self.evicted.append((block.block_id, get_block_hash(key)))
                self.totals["evicted_with_copy_left"] += pool.cached_block_hash_to_block.get_one_block(key) is not None
            return done

        def inserting(key, block, num_tokens):
            assert block.block_hash is None
            self.totals["stored_twice"] += pool.cached_block_hash_to_block.get_one_block(key) is not None
            insert(key, block, num_tokens)
            self.stored.append((block.block_id, get_block_hash(key)))

        def freeing(blocks):
            blocks = list(blocks)
            self.given_back.extend(block.block_id for block in blocks)
            free(blocks)

        pool._maybe_evict_cached_block, pool._insert_block_hash, pool.free_blocks = evicting, inserting, freeing

    def key(self, digest):
        if digest not in self.key_index:
            self.key_index[digest] = len(self.keys)
            self.keys.append(digest.hex())
        return self.key_index[digest]

    def ids(self, name):
        return self.manager.get_block_ids(str(name))[0]

    def queue(self):
        return [
            [b.block_id, None if b.block_hash is None else self.key(get_block_hash(b.block_hash))]
            for b in self.pool.free_block_queue.get_all_free_blocks()
        ]

    def emit(self, op, **fields):
        # The wrappers' records must equal vLLM's events, in the same order.
        published = self.manager.take_events()
        stored = [h for e in published if isinstance(e, BlockStored) for h in e.block_hashes]
        removed = [h for e in published if isinstance(e, BlockRemoved) for h in e.block_hashes]
        assert stored == [h for _, h in self.stored] and removed == [h for _, h in self.evicted]
        assert any(isinstance(e, AllBlocksCleared) for e in published) == (op == "reset" and fields["done"])
        # Without KV connectors, free blocks without a key come before the ones with a key.
        keyless = [key is None for _, key in self.queue()]
        assert keyless == sorted(keyless, reverse=True)

        event = {"op": op, **fields}
        if self.evicted:
            event["evicted"] = [[block, self.key(h)] for block, h in self.evicted]
        if self.stored:
            event["stored"] = [[block, self.key(h)] for block, h in self.stored]
        event["free"] = self.pool.get_num_free_blocks()
        self.totals["stored"] += len(self.stored)
        self.totals["evicted"] += len(self.evicted)
        self.stored, self.evicted, self.given_back = [], [], []
        self.events.append(event)

    def request(self, name, tokens, salt=None, lora=None):
        self.requests[name] = make_request(name, tokens, self.block_size, salt, lora)
        self.unseen[name] = []
        self.totals["requests"] += 1
        extra = {k: v for k, v in (("salt", salt), ("lora", lora)) if v is not None}
        self.emit("request", req=name, tokens=list(tokens), **extra)
        return self.requests[name]

    def append(self, name, tokens):
        """Appends tokens to a request. They are recorded with its next event."""
        self.requests[name].append_output_token_ids(list(tokens))
        self.unseen[name].extend(tokens)

    def _appended(self, name):
        tokens, self.unseen[name] = self.unseen[name], []
        return tokens

    def admit(self, name, chunk=None, lookahead=0, must_fit=False):
        request = self.requests[name]
        assert request.num_computed_tokens == 0
        blocks, hit, boundary = self.manager.get_computed_blocks(request)
        assert boundary == 0
        hit_blocks = blocks.get_block_ids()[0]
        idle_hits = sum(self.pool.blocks[b].ref_cnt == 0 for b in hit_blocks)
        copies = sum(isinstance(self.pool.cached_block_hash_to_block._cache[self.pool.blocks[b].block_hash], dict)
                     for b in hit_blocks)
        new = request.num_tokens - hit
        new = new if chunk is None else min(new, chunk)
        done = self.manager.allocate_slots(
            request, new, num_new_computed_tokens=hit, new_computed_blocks=blocks, num_lookahead_tokens=lookahead,
            full_sequence_must_fit=must_fit, has_scheduled_reqs=False,
        ) is not None
        if done:
            request.num_computed_tokens = hit
            request.status = RequestStatus.RUNNING
        self.totals["admitted" if done else "admissions_failed"] += 1
        self.totals["admissions_with_hits"] += done and hit > 0
        self.totals["hit_tokens"] += hit * done
        self.totals["hits_of_free_blocks"] += idle_hits * done
        self.totals["hits_among_copies"] += copies * done
        extra = {"lookahead": lookahead} if lookahead else {}
        self.emit("admit", req=name, append=self._appended(name), hit=hit, hit_blocks=hit_blocks, new=new, **extra,
                  **({"must_fit": True} if must_fit else {}), blocks=self.ids(name) if done else None)
        return new if done else None

    def step(self, name, new, lookahead=0):
        request = self.requests[name]
        before = self.ids(name)
        done = self.manager.allocate_slots(request, new, num_lookahead_tokens=lookahead) is not None
        after = self.ids(name)
        assert after[: len(before)] == before
        self.totals["steps" if done else "steps_failed"] += 1
        self.emit("step", req=name, append=self._appended(name), computed=request.num_computed_tokens, new=new,
                  **({"lookahead": lookahead} if lookahead else {}), blocks=after[len(before):] if done else None)
        return done

    def free(self, name, op="free"):
        self.manager.free(self.requests[name])
        self.emit(op, req=name, blocks=self.given_back)
        if op == "free":
            del self.requests[name]

    def preempt(self, name):
        request = self.requests[name]
        self.totals["preempted"] += 1
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED
        self.free(name, "preempt")

    def reset(self):
        done = self.manager.reset_prefix_cache()
        self.totals["resets_done" if done else "resets_refused"] += 1
        self.emit("reset", done=done)
        return done

    def write(self, folder):
        # Blocks by key, oldest registration first, because a lookup returns the first.
        index = {}
        for key, blocks in self.pool.cached_block_hash_to_block._cache.items():
            index[self.key(get_block_hash(key))] = [blocks.block_id] if not isinstance(blocks, dict) else list(blocks)
        lines = [
            *(f'"{k}":{compact(v)}' for k, v in self.header.items()),
            '"totals":' + compact({"events": len(self.events), **self.totals}),
            '"events":[\n' + ",\n".join(compact(e) for e in self.events) + "\n]",
            '"end":' + compact({"queue": self.queue(), "index": sorted(index.items())}),
            '"keys":[\n' + ",\n".join(compact(k) for k in self.keys) + "\n]",
        ]
        write(folder / f"{self.header['trace']}.json", lines)
        return self.totals | {"events": len(self.events)}


class Scheduler:
    """Runs steps like vLLM's scheduler: running requests first, then admissions. The last request is
    preempted."""

    def __init__(self, recorder, rng, max_running, chunk=None, drafts=0, must_fit=False):
        self.rec, self.rng, self.max_running = recorder, rng, max_running
        self.chunk, self.drafts, self.must_fit = chunk, drafts, must_fit
        self.waiting, self.running, self.finished = [], [], {}
        self.left, self.flavour, self.count = {}, {}, 0

    def add(self, tokens, output, salt=None, lora=None, flavour=None):
        """Without a `flavour`, sampling is greedy, so equal prompts have equal answers."""
        name, self.count = self.count, self.count + 1
        self.rec.request(name, tokens, salt, lora)
        self.left[name], self.flavour[name] = output, flavour
        self.waiting.append(name)
        return name

    def step(self):
        rec, scheduled, preempted, at = self.rec, {}, False, 0
        while at < len(self.running):
            name = self.running[at]
            request = rec.requests[name]
            new = request.num_tokens - request.num_computed_tokens
            new = new if self.chunk is None else min(new, self.chunk)
            if new == 1 and self.drafts:
                new += self.rng.randint(0, self.drafts)
            while not (done := rec.step(name, new, self.drafts)):
                victim = self.running.pop()
                self.preempt(victim)
                preempted = True
                if victim == name:
                    break
            if not done:
                break
            scheduled[name] = new
            at += 1
        while not preempted and self.waiting and len(self.running) < self.max_running:
            name = self.waiting[0]
            new = rec.admit(name, self.chunk, self.drafts, self.must_fit)
            if new is None:
                assert self.running, "a request must fit into an empty pool"
                break
            self.running.append(self.waiting.pop(0))
            scheduled[name] = new
        for name, new in scheduled.items():
            self.sample(name, new)

    def sample(self, name, new):
        request = self.rec.requests[name]
        verified = min(new, request.num_tokens - request.num_computed_tokens)
        accepted = self.rng.randint(0, new - verified) if new > verified else 0
        request.num_computed_tokens += verified
        if request.num_computed_tokens < request.num_tokens:
            return
        request.num_computed_tokens += accepted
        for _ in range(min(accepted + 1, self.left[name])):
            self.rec.append(name, [next_token(list(request.all_token_ids), self.flavour[name])])
            self.left[name] -= 1
        if self.left[name] == 0:
            self.finished[name] = list(request.all_token_ids)
            self.running.remove(name)
            self.rec.free(name)

    def preempt(self, name):
        self.rec.preempt(name)
        self.waiting.insert(0, name)

    def drain(self):
        while self.waiting or self.running:
            self.step()


def shared_prefixes(folder):
    rng = random.Random(1)
    rec = Recorder("shared_prefixes", 16, 28, seed=1)
    sched = Scheduler(rec, rng, max_running=7)
    systems = [some_tokens(rng, n) for n in (48, 80, 37, 96)]
    prompts = []
    for i in range(46):
        kind = rng.random() if prompts else 1.0
        if kind < 0.5:  # again, alone or with more behind
            tokens = rng.choice(prompts[-6:])
            if kind < 0.2:
                tokens = tokens + some_tokens(rng, rng.randint(1, 12))
        else:
            system = rng.choice(systems)
            tail = rng.randint(1, 40)
            if rng.random() < 0.4:  # the prompt ends with a block
                tail += -(len(system) + tail) % 16
            tokens = system + some_tokens(rng, tail)
        prompts.append(tokens)
        sched.add(tokens, rng.randint(2, 22), flavour=rng.choice((None, i)))
        for _ in range(rng.randint(0, 2)):
            sched.step()
    sched.drain()
    return rec.write(folder)


def multi_turn(folder):
    rng = random.Random(2)
    rec = Recorder("multi_turn", 4, 60, seed=2)
    sched = Scheduler(rec, rng, max_running=4)
    history = {c: some_tokens(rng, 9) if c % 2 else [] for c in range(7)}
    turns, current = dict.fromkeys(history, 6), {}
    while turns or current:
        for c in [c for c, name in current.items() if name in sched.finished]:
            history[c] = sched.finished.pop(current.pop(c))
        idle = [c for c in turns if c not in current]
        if idle and rng.random() < 0.6:
            c = rng.choice(idle)
            history[c] = history[c] + some_tokens(rng, rng.randint(3, 11))
            current[c] = sched.add(history[c], rng.randint(2, 11))
            turns[c] -= 1
            if turns[c] == 0:
                del turns[c]
        sched.step()
    return rec.write(folder)


def churn(folder):
    rng = random.Random(3)
    rec = Recorder("churn", 4, 24, seed=3)
    sched = Scheduler(rec, rng, max_running=5)
    last = []
    for i in range(60):
        tokens = last if rng.random() < 0.08 else some_tokens(rng, rng.randint(1, 34))
        last = tokens = tokens or [7]
        sched.add(tokens, rng.randint(1, 9), flavour=i)
        for _ in range(rng.randint(0, 3)):
            sched.step()
    sched.drain()
    return rec.write(folder)


def salts(folder):
    rng = random.Random(4)
    rec = Recorder("salts", 4, 44, seed=4)
    sched = Scheduler(rec, rng, max_running=7)
    prompts = [some_tokens(rng, n) for n in (9, 16, 23, 31)]
    tenants = [None, None, "tenant-a", "tenant-a", "Mieter-ü"]
    adapters = [None, None, None, ("sql", "adapters/sql"), ("sql", "adapters/sql-2")]
    for _ in range(62):
        tokens = list(rng.choice(prompts))
        if rng.random() < 0.4:
            tokens = tokens + some_tokens(rng, rng.randint(1, 8))
        sched.add(tokens, rng.randint(1, 7), salt=rng.choice(tenants), lora=rng.choice(adapters))
        for _ in range(rng.randint(0, 2)):
            sched.step()
    sched.drain()
    return rec.write(folder)


def copies(folder):
    rng = random.Random(7)
    rec = Recorder("copies", 4, 36, seed=7)
    sched = Scheduler(rec, rng, max_running=6)
    prompts = [some_tokens(rng, n) for n in (8, 12, 16)]
    for _ in range(50):
        # Prompts of whole blocks: the last block is recomputed, so it exists twice. Later prompts continue
        # it.
        tokens = rng.choice(prompts)
        if rng.random() < 0.5:
            tokens = tokens + some_tokens(rng, rng.randint(1, 9))
        sched.add(tokens, rng.randint(1, 6))
        for _ in range(rng.randint(0, 1)):
            sched.step()
    sched.drain()
    return rec.write(folder)


def reset(folder):
    rng = random.Random(5)
    rec = Recorder("reset", 4, 28, seed=5)
    sched = Scheduler(rec, rng, max_running=4)
    prompts = [some_tokens(rng, n) for n in (8, 13, 20, 27, 33)]
    rec.reset()  # nothing is cached yet
    for i in range(60):
        sched.add(rng.choice(prompts) + some_tokens(rng, rng.randint(0, 5)), rng.randint(1, 8))
        for _ in range(rng.randint(0, 3)):
            sched.step()
        if i % 9 == 4:
            rec.reset()  # refused if a request holds a block
        if i % 20 == 9:
            sched.drain()
            assert rec.reset()
        if i % 20 == 19:
            # All running requests return to the queue, last one first. Then the reset succeeds.
            while sched.running:
                sched.preempt(sched.running.pop())
            assert rec.reset()
    sched.drain()
    return rec.write(folder)


def speculative(folder):
    rng = random.Random(6)
    rec = Recorder("speculative", 4, 28, seed=6)
    sched = Scheduler(rec, rng, max_running=6, chunk=10, drafts=3)
    prompts = [some_tokens(rng, n) for n in (12, 22, 30)]
    for i in range(46):
        sched.must_fit = rng.random() < 0.5
        tokens = rng.choice(prompts)[: rng.choice((8, 12, 40))] + some_tokens(rng, rng.randint(0, 14))
        sched.add(tokens, rng.randint(1, 18), flavour=rng.choice((None, None, i)))
        for _ in range(rng.randint(0, 2)):
            sched.step()
    sched.drain()
    return rec.write(folder)


def hash_vectors(folder):
    """Block hashes, with the exact bytes that go into them."""
    vectors, digests = [], {}

    def plain(value):
        if isinstance(value, bytes):
            return {"hex": value.hex()}
        return [plain(v) for v in value] if isinstance(value, tuple) else value

    def add(name, tokens, extra=None, parent=None, expect=None):
        parent = digests[parent] if isinstance(parent, str) else parent
        digest = hash_block_tokens(sha256_cbor, parent, tokens, extra)
        data = cbor2.dumps((parent or kv_cache_utils.NONE_HASH, tuple(tokens), extra), canonical=True)
        assert hashlib.sha256(data).digest() == digest and expect in (None, digest) and name not in digests
        digests[name] = digest
        vectors.append({"name": name, "parent": parent and parent.hex(), "tokens": list(tokens), "extra": plain(extra),
                        "cbor": data.hex(), "digest": digest.hex()})

    widths = [0, 1, 22, 23, 24, 25, 255, 256, 257, 65535, 65536, 65537, 2**31 - 1, 2**31, 2**32 - 1]
    for token in widths:
        add(f"token {token}", [token])
    add("no token", [])
    add("16 tokens of all widths", (widths + [151935])[:16])
    add("23 tokens", range(23))
    add("24 tokens", range(24))
    add("255 tokens", range(255))
    add("256 tokens", range(100, 356))
    add("256 wide tokens", range(65500, 65756))
    add("16 zeros", [0] * 16)
    add("chain 0", range(16))
    add("chain 1", range(16, 32), parent="chain 0")
    add("chain 2", range(32, 48), parent="chain 1")
    add("chain 1 after itself", range(16), parent="chain 0")
    add("parent of zeros", range(16), parent=bytes(32))
    add("parent of ff", range(16), parent=b"\xff" * 32)

    block = list(range(1000, 1016))
    salt, lora = ("cache_salt", "tenant-a"), ("lora", "sql", "adapters/sql")
    add("salt", block, (salt,))
    add("salt of 23 bytes", block, (("cache_salt", "s" * 23),))
    add("salt of 24 bytes", block, (("cache_salt", "s" * 24),))
    add("salt of 256 bytes", block, (("cache_salt", "s" * 256),))
    add("salt beyond ASCII", block, (("cache_salt", "Mieter-ü-租户"),))
    add("adapter", block, (lora,))
    add("adapter after a parent", block, (lora,), parent="adapter")
    add("image", block, (("mm", "9f2b" * 8, 3),))
    add("image begun in an earlier block", block, (("mm", "9f2b" * 8, -13),))
    add("image begun 300 tokens earlier", block, (("mm", "9f2b" * 8, -300),))
    add("two images", block, (("mm", "image-1", 0), ("mm", "image-2", 7)))
    add("adapter, image and salt", block, (lora, ("mm", "image-1", 5), salt))
    add("prompt embeddings", block, (("prompt_embeds", hashlib.sha256(b"embeddings").digest()),))
    add("one token of lookahead", block, (None, 42))
    add("salt and two tokens of lookahead", block, ((salt,), 42, 70000))
    add("salt without a tag, as before 0.31", block, ("tenant-a",))
    add("adapter without a tag and an image", block, ("sql", ("image-1", 5)))
    add("empty extra keys", block, ())

    # The same through a request whose blocks have different extra keys.
    tokens = list(range(500, 540))
    hashes = make_request("r", tokens, 8, "tenant-a", ("sql", "adapters/sql"), [("img", 5, 14)]).block_hashes
    extras = [(lora, ("mm", "img", 5), salt), (lora, ("mm", "img", -3)), (lora, ("mm", "img", -11)), (lora,), (lora,)]
    for i, (digest, extra) in enumerate(zip(hashes, extras, strict=True)):
        parent = f"block {i - 1} of a request" if i else None
        add(f"block {i} of a request", tokens[8 * i : 8 * i + 8], extra, parent=parent, expect=digest)
    assert make_request("r", tokens, 8, "").block_hashes == make_request("r", tokens, 8).block_hashes

    seeds = [{"seed": seed, "none_hash": sha256_cbor(seed).hex()} for seed in ("vllm-none-hash", "0", "42", "")]
    assert seeds[0]["none_hash"] == kv_cache_utils.NONE_HASH.hex()
    write(folder / "sha256_cbor.json", [
        '"format":"vllm-block-hash-1"', f'"vllm":"{VLLM}"', f'"none_hash":"{kv_cache_utils.NONE_HASH.hex()}"',
        '"seeds":[\n' + ",\n".join(compact(s) for s in seeds) + "\n]",
        '"vectors":[\n' + ",\n".join(compact(v) for v in vectors) + "\n]",
    ])
    return {"vectors": len(vectors)}


def compact(value):
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def write(path, lines):
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    json.loads(text)
    path.write_text(text, encoding="utf-8", newline="\n")


def main():
    assert vllm.__version__ == VLLM, vllm.__version__
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    init_none_hash(sha256_cbor)
    for make in (shared_prefixes, multi_turn, churn, salts, copies, reset, speculative, hash_vectors):
        print(make.__name__, make(folder))


if __name__ == "__main__":
    main()
