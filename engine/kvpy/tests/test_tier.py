"""The tier for ordinary prompts under pressure: which blocks leave, and what is found."""

from __future__ import annotations

import itertools
import random

import pytest
from fake_engine import ROW, SIZE, Engine, context
from roomy import Roomy
from test_pressure import nothing_held

from kvcache import BlockPool, BlockTable, KvCacheError, prefix_keys

ROOMY = Roomy()
BLOCK = SIZE * ROW
POLICIES = ["lru", "tiny-lfu", "s3-fifo", "priority"]


def engine_of(monkeypatch: pytest.MonkeyPatch, tier: int, policy: str = "lru", **settings: object) -> Engine:
    """Returns an engine with a tier of this many blocks."""
    return Engine(monkeypatch, prefix_memory=tier * BLOCK, cache_policy=policy, **settings)


def found(engine: Engine, name: str, tokens: list[int]) -> int:
    """Asks a prompt when the engine itself has nothing, and returns the number of tokens found in the tier."""
    engine.kv_cache_manager.reset()
    before = engine.side.prefixes.tokens_found
    engine.ask(name, tokens, count=1)
    engine.run(50)
    answer = engine.answers[name][0]
    assert answer == ROOMY.answer(tokens, 1, context(engine.weights, None, {}), None)
    return engine.side.prefixes.tokens_found - before


def nothing_lost(engine: Engine, prompts: list[list[int]]) -> None:
    """Checks that every block in the tier can be found from the beginning of a prompt."""
    tier, reachable = engine.side.prefixes, set()
    root = tier.roots.of(type("Plain", (), {"lora_request": None, "cache_salt": None}))
    for tokens in prompts:
        hold = tier.pool.lookup(prefix_keys(root, tokens, SIZE))
        reachable.update(hold.ids)
        hold.release()
    counts = tier.pool.counts()
    assert counts["total"] - counts["free"] - counts["mutable"] == len(reachable), "blocks are kept that nothing finds"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("step_tokens", [SIZE, 256])
def test_a_prompt_leaves_from_its_end(policy: str, step_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(monkeypatch, 8, policy, step_tokens=step_tokens)
    first, second = list(range(10, 10 + 8 * SIZE)), list(range(200, 200 + 2 * SIZE))
    for name, tokens in (("first", first), ("second", second)):
        engine.ask(name, tokens, count=1)
        engine.run(50)
    nothing_lost(engine, [first, second])
    assert engine.side.prefixes.pool.counts()["evictions"] == 2
    assert found(engine, "again", [*first, 3]) == 6 * SIZE


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("blocks", [40, 512])
def test_every_block_in_the_tier_is_found_under_random_traffic(policy: str, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts share beginnings, answers continue prompts, and vLLM has few or many blocks of its own."""
    engine = engine_of(monkeypatch, 24, policy, blocks=blocks, step_tokens=64)
    draw, prompts = random.Random(7), []
    for number in range(120):
        beginning = list(range(10, 10 + SIZE * draw.randrange(1, 6)))
        tokens = [*beginning, *(draw.choice([100, 200, 300]) + n for n in range(draw.randrange(1, 40)))]
        engine.ask(f"{number}", tokens, count=draw.choice([1, 12]))
        prompts.append(tokens)
        if number % 3 == 0:
            engine.run(300)
            if draw.random() < 0.3:
                engine.kv_cache_manager.reset()
            nothing_lost(engine, [[*tokens, *engine.answers[f"{n}"][0]] for n, tokens in enumerate(prompts)])
    engine.run(300)
    for number, tokens in enumerate(prompts):
        count = len(engine.answers[f"{number}"][0])
        assert engine.answers[f"{number}"][0] == ROOMY.answer(tokens, count, context(0, None, {}), None)
    assert engine.side.prefixes.tokens_found > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("step_tokens", [SIZE, 3 * SIZE, 256])
@pytest.mark.parametrize("failed", range(4))
def test_a_block_does_not_outlive_one_before_it_that_could_not_be_saved(failed: int, step_tokens: int, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks are saved in one step or in several, and the block with the index ``failed`` is not. A later step that fills
    a block saves it again."""
    engine, saves = engine_of(monkeypatch, 12, policy, step_tokens=step_tokens), itertools.count()
    engine.failing_saves = lambda: next(saves) == failed
    tokens = list(range(10, 10 + 4 * SIZE + 1))
    engine.ask("first", tokens, count=1)
    engine.run(50)
    assert next(saves) > failed, "a save has failed"
    of_step = step_tokens // SIZE
    kept = failed if failed // of_step == 3 // of_step else 4
    assert engine.side.prefixes.pool.counts()["cached"] == kept
    nothing_lost(engine, [tokens])
    assert [found(engine, name, tokens) for name in ("again", "then")] == [kept * SIZE, 4 * SIZE]
    nothing_held(engine)


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_that_could_not_be_saved_leave_nothing_behind_them(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random prompts that share beginnings, of which every fifth block is not saved."""
    engine, draw, prompts = engine_of(monkeypatch, 30, policy, step_tokens=64), random.Random(5), []
    failed: list[bool] = []

    def fails() -> bool:
        failed.append(draw.random() < 0.2)
        return failed[-1]

    engine.failing_saves = fails
    for number in range(60):
        tokens = [*range(10, 10 + SIZE * draw.randrange(1, 6)), *(draw.choice([100, 200]) + n for n in range(draw.randrange(1, 40)))]
        engine.ask(f"{number}", tokens, count=draw.choice([1, 12]))
        prompts.append(tokens)
        if number % 3 == 0:
            engine.run(300)
            engine.kv_cache_manager.reset()
            nothing_lost(engine, [[*tokens, *engine.answers[f"{n}"][0]] for n, tokens in enumerate(prompts)])
    engine.run(300)
    for number, tokens in enumerate(prompts):
        count = len(engine.answers[f"{number}"][0])
        assert engine.answers[f"{number}"][0] == ROOMY.answer(tokens, count, context(0, None, {}), None)
    assert sum(failed) > 10 and engine.side.prefixes.tokens_found > 0
    nothing_held(engine)


def test_a_hit_in_the_engines_own_cache_renews_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(monkeypatch, 12)
    hot = list(range(10, 10 + 4 * SIZE))
    engine.ask("hot", [*hot, 3], count=1)
    engine.run(50)
    for number in range(6):
        engine.ask(f"cold-{number}", list(range(100 + 40 * number, 100 + 40 * number + 3 * SIZE)), count=1)
        engine.run(50)
        # The engine has the whole prompt, so nothing is copied.
        engine.ask(f"hot-{number}", [*hot, 3], count=1)
        engine.run(50)
    assert engine.side.prefixes.tokens_found == 0 and engine.side.prefixes.pool.counts()["evictions"] > 6
    assert engine.side.prefixes.blocks_saved == 4 + 6 * 3, "the prompt left, and was saved again"
    assert found(engine, "again", [*hot, 3]) == 4 * SIZE


def test_a_prompt_larger_than_the_tier_keeps_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(monkeypatch, 5, step_tokens=16)
    tokens = list(range(10, 10 + 12 * SIZE))
    engine.ask("long", tokens, count=1)
    engine.run(50)
    assert found(engine, "again", tokens) == 5 * SIZE
    nothing_lost(engine, [tokens])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pool_evicts_chains_from_their_ends(policy: str) -> None:
    pool = BlockPool(8, policy=policy)
    keys = [bytes([n]) * 32 for n in range(8)]
    for number, key in enumerate(keys):
        pool.allocate(1).register([key], keys[number - 1] if number else None).release()
    held = pool.allocate(3)
    assert pool.cached_prefix(keys) == 5
    held.release()


@pytest.mark.parametrize("policy", POLICIES)
def test_tables_leave_no_block_that_is_not_found(policy: str) -> None:
    """Tables find the beginning of a prompt, share the rest block by block, and are released in any order."""
    draw = random.Random(11)
    pool = BlockPool(24, policy=policy)
    prompts = [prefix_keys(bytes(32), [*range(4 * (2 + n)), *range(100 * n, 100 * n + 40)], 4)[:12] for n in range(1, 7)]
    held: list[BlockTable] = []
    for number in range(600):
        keys = draw.choice(prompts)[: draw.randrange(1, 13)]
        found = pool.lookup(keys)
        table = BlockTable(pool, 4, prefix=found) if len(found) else BlockTable(pool, 4)
        try:
            for index in range(len(table.block_ids), len(keys)):
                table.grow(4)
                table.share_full([keys[index]], keys[index - 1] if index else None)
        except KvCacheError:
            pass
        held.append(table)
        if draw.random() < 0.3:
            held.append(table.fork())
        while len(held) > draw.randrange(3):
            held.pop(draw.randrange(len(held))).release()
        for _ in range(draw.randrange(3)):
            pool.lookup(draw.choice(prompts)[: draw.randrange(1, 13)]).release()
        reachable = set()
        for keys in prompts:
            hold = pool.lookup(keys)
            reachable.update(hold.ids)
            hold.release()
        counts = pool.counts()
        assert counts["cached"] + counts["shared"] == len(reachable), f"round {number}: blocks are kept that nothing finds"
        pool.check_invariants()
    assert pool.counts()["evictions"] > 100


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("step_tokens", [SIZE, 64])
@pytest.mark.parametrize("tier", [1, 5, 12])
def test_a_prompt_larger_than_the_tier_is_not_looked_up_in_every_step(
    tier: int, step_tokens: int, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, lookups = engine_of(monkeypatch, tier, policy, step_tokens=step_tokens), []
    pool = engine.side.prefixes.pool
    engine.side.prefixes.pool = Watched(pool, lookups)
    tokens = list(range(10, 10 + 16 * SIZE))
    engine.ask("long", tokens, count=60)
    engine.run(200)
    assert len(lookups) <= tier + 3, f"{len(lookups)} lookups for {tier} blocks in {engine.steps} steps"
    assert pool.counts()["cached"] == tier
    engine.side.prefixes.pool = pool
    assert found(engine, "again", tokens) == tier * SIZE


class Watched:
    """A pool that notes its lookups."""

    def __init__(self, pool: BlockPool, lookups: list[int]) -> None:
        self.pool, self.lookups = pool, lookups

    def lookup(self, keys: list[bytes]) -> object:
        self.lookups.append(len(keys))
        return self.pool.lookup(keys)

    def __getattr__(self, name: str) -> object:
        return getattr(self.pool, name)


def test_a_long_prompt_goes_on_being_saved_when_others_have_left_room(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(monkeypatch, 6, step_tokens=64)
    other = engine.side.prefixes.pool.allocate(4)
    tokens = list(range(10, 10 + 3 * SIZE))
    engine.ask("long", tokens, count=5 * SIZE)
    for _ in range(10):
        engine.step()
    assert engine.side.prefixes.pool.counts()["cached"] == 2
    other.release()
    engine.run(100)
    assert engine.side.prefixes.pool.counts()["cached"] == 6


class Router:
    """A router's view of the tier, from events: the tokens of each block, by hash."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.blocks = engine, {}

    def follow(self) -> None:
        for event in self.engine.connector.take_events():
            assert event.medium == "CPU" and event.group_idx == 0
            if type(event).__name__ == "BlockStored":
                (block,) = event.block_hashes
                assert block not in self.blocks and (event.parent_block_hash is None or event.parent_block_hash in self.blocks)
                assert len(event.token_ids) == event.block_size == SIZE and event.extra_keys is None
                self.blocks[block] = event.token_ids
            else:
                for block in event.block_hashes:
                    del self.blocks[block]


@pytest.mark.parametrize("policy", POLICIES)
def test_events_of_the_tier_follow_its_blocks(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(monkeypatch, 12, policy, has_events=True, blocks=60)
    router, draw = Router(engine), random.Random(3)
    for number in range(60):
        tokens = [*range(10, 10 + SIZE * draw.randrange(1, 6)), *(draw.choice([100, 300]) + n for n in range(draw.randrange(1, 40)))]
        engine.ask(f"{number}", tokens, count=draw.choice([1, 12]), salt=draw.choice([None, "alice"]))
        engine.ask(f"{number}-chunks", tokens, chunk_lengths=[3, 4])
        for _ in range(50):
            engine.step()
            router.follow()
            assert len(router.blocks) == engine.side.prefixes.pool.counts()["cached"], "nothing is held between steps"
        if number == 40:
            engine.reset()
            router.follow()
            assert not router.blocks
    assert router.blocks and not engine.requests
    engine.reset()
    engine.run(5)
    assert not engine.has_requests()
    router.follow()
    assert not router.blocks, "an idle vLLM tells routers of a reset"
    engine.ask("after", list(range(10, 10 + SIZE)), count=2)
    engine.run(50)
    router.follow()
    found = {tuple(tokens) for tokens in router.blocks.values()}
    assert tuple(range(10, 10 + SIZE)) in found


def test_a_host_without_events_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(monkeypatch, 12)
    engine.ask("one", list(range(10, 60)))
    engine.run(50)
    assert list(engine.connector.take_events()) == [] and engine.side.prefixes.pool.take_events() == []
    assert list(Engine(monkeypatch).connector.take_events()) == []
