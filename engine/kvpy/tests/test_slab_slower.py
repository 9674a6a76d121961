"""``SlabTier`` loads what the disk delivers before it is computed, and a request hardly ever waits in vain."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from fake_offloading import Offloading, key
from fake_tier import Disk, HangingSlab, disk, hang  # noqa: F401
from slow_disk import Throttled

from kvcache.vllm.disk.prefill import RELIED_ON, FirstSteps, PrefillRate

KEYS = [key(number) for number in range(40)]
SECONDS = 10.0
"""The time to compute the forty blocks, 16 tokens each."""


def computed(host: Offloading, keys: list[bytes], seconds: float) -> None:
    """Has vLLM compute blocks in the first step of a request, and store them."""
    context = host.request(keys)
    schedule(host, context.req_id)
    host.tier._first_steps.steps[context.req_id].began -= seconds
    schedule(host)
    host.store(keys, context)
    schedule(host)


def schedule(host: Offloading, *new: str) -> None:
    """Begins a step."""
    host.tier.on_schedule_end(SimpleNamespace(new_req_ids=new, preempted_req_ids=()))


def load(host: Offloading, keys: list[bytes] = KEYS) -> tuple[int, float]:
    """Loads what a new request finds. Returns the number of blocks, and the seconds."""
    context = host.request(keys)
    began = time.monotonic()
    return len(host.load(keys, context)), time.monotonic() - began


def test_blocks_that_are_computed_sooner_are_not_loaded(disk: Disk) -> None:
    host = disk.start()
    computed(host, KEYS, 2.0)
    slab = host.tier._slab
    assert load(host)[0] == 40, "the disk has read nothing yet, so it is tried"
    hits = slab.usage()["hits"]

    class Slow:
        expected = staticmethod(lambda size: 10.0)

        def __getattr__(self, name: str) -> Any:
            return getattr(slab, name)

    host.tier._slab = host.tier._jobs.slab = Slow()
    context = host.request(KEYS)
    assert host.load(KEYS, context) == []
    usage = host.tier.usage()
    assert (usage["loads_skipped_slower"], usage["hits"], usage["loads_failed"]) == (40, hits, 40)
    assert host.load(KEYS, context) == [] and host.tier.usage()["loads_skipped_slower"] == 40, "it computes the blocks"
    # One of so many is tried all the same, because the disk may have become faster.
    found = [load(host)[0] for _ in range(20)]
    assert found == [0] * 14 + [40] + [0] * 5


@pytest.mark.parametrize(("loads", "found"), [("if-faster", 0), ("always", 40)])
def test_everything_is_loaded_on_request(disk: Disk, loads: str, found: int) -> None:
    host = disk.start(loads=loads)
    computed(host, KEYS, 2.0)
    assert load(host)[0] == 40
    slab = host.tier._slab
    host.tier._slab = host.tier._jobs.slab = SimpleNamespace(**{name: getattr(slab, name) for name in dir(slab) if name[0] != "_"})
    host.tier._slab.expected = lambda size: 10.0
    assert load(host)[0] == found


@pytest.mark.parametrize(("seconds", "found"), [(0.01, 40), (0.1, 40), (0.5, 0)])
def test_a_slow_disk_costs_at_most_a_twentieth(disk: Disk, seconds: float, found: int) -> None:
    """Forty blocks take ten seconds to compute, and the disk needs ``seconds`` seconds for each."""
    host = disk.start(read_deadline=60)
    computed(host, KEYS, SECONDS)
    host = disk.restart(read_deadline=60)
    host.tier._slab = host.tier._jobs.slab = Throttled(host.tier._slab, seconds)
    loaded, waited = load(host)
    assert loaded == found or (found == 0 and loaded <= 2), "what has arrived is used"
    assert waited < 40 * seconds + 1 if found else waited < SECONDS / 20 + 1


def test_what_was_stored_by_another_process_is_known_from_the_start(disk: Disk) -> None:
    """After a restart, nothing has been measured yet."""
    computed(disk.start(), KEYS, SECONDS)
    host = disk.restart(read_deadline=60)
    hanging = hang(host)
    loaded, waited = load(host)
    assert loaded == 0 and hanging.given_up == 40 and RELIED_ON * SECONDS / 20 <= waited < SECONDS / 2
    assert not host.tier._jobs.loads.reads.rest.is_resting(), "the disk has had less time than its deadline"


def test_a_request_waits_longer_if_it_lacks_more(disk: Disk) -> None:
    """The disk has a quarter of what the request lacks, and it may lose a twentieth of the whole."""
    computed(disk.start(), KEYS[:10], SECONDS / 4)
    host = disk.restart(read_deadline=60)
    computed(host, [key(number) for number in range(100, 180)], 2 * SECONDS)
    hang(host)
    context = host.request(KEYS)
    began = time.monotonic()
    assert host.load(KEYS[:10], context) == []
    assert SECONDS / 20 <= time.monotonic() - began < SECONDS / 5


def test_a_load_that_hangs_does_not_hold_up_another(disk: Disk) -> None:
    host = disk.start(read_deadline=1.0)
    host.store(KEYS[:10])

    class Part(HangingSlab):
        def begin_load(self, name: bytes) -> Any:
            return super().begin_load(name) if name == KEYS[0] else self.own.begin_load(name)

    host.tier._slab = host.tier._jobs.slab = Part(host.tier._slab)
    slow, fast = host.submit_load(KEYS[:3]), host.submit_load(KEYS[3:10], first=3)
    assert host.wait(fast).success and slow not in host.results
    result = host.wait(slow)
    assert not result.success and set(result.successful_keys) == set(KEYS[1:3]), "what has arrived is used"


class Clock:
    """The steps of vLLM, with their times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, under_way: int) -> None:
        self.now, self.rate = 100.0, PrefillRate()
        monkeypatch.setattr("kvcache.vllm.disk.prefill.time.monotonic", lambda: self.now)
        self.steps = FirstSteps(self.rate, under_way)

    def step(self, *new: str, after: float = 0.0) -> None:
        """Begins a step, so many seconds after the one before."""
        self.now += after
        self.steps.step(new)


def test_steps_are_measured_by_the_blocks_that_they_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 1)
    rate, stored = clock.rate, clock.steps.stored
    clock.step("a", "b")
    # The next step takes much longer, and vLLM tells of the blocks only after it.
    clock.step("c", after=2.0)
    clock.now += 50.0
    assert sum(stored("a", [200, 0, 400])) == pytest.approx(2.0), "the first blocks of a process are measured by themselves"
    assert rate.cost(100) == 0.0
    assert stored("b", [1400]) == pytest.approx([1.4])
    clock.step()
    assert rate.cost(100) == pytest.approx(0.1)
    # A block that is full after many steps of one token says nothing about a prefill.
    assert stored("a", [100]) == pytest.approx([0.1])
    clock.step()
    assert rate.cost(100) == pytest.approx(0.1)
    # A request whose blocks all were known is forgotten.
    for _ in range(FirstSteps.LONGEST):
        clock.step()
    assert not clock.steps.steps


def test_steps_that_overlap_are_measured_to_their_own_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 2)
    clock.step("a")
    # vLLM begins a step while the one before is still running.
    clock.step(after=0.001)
    clock.step("b", after=3.999)
    # A short step takes longer per token.
    clock.rate.measured(64, 1.0)
    assert clock.steps.stored("a", [2000]) == pytest.approx([4.0])
    clock.step(after=9.0)
    assert 0.2 < clock.rate.cost(100) < 0.24


def test_a_request_that_waits_when_vllm_ends_fails_at_once(disk: Disk) -> None:
    host = disk.start(read_deadline=60)
    host.store(KEYS[:3])
    hang(host)
    number = host.submit_load(KEYS[:3])
    began = time.monotonic()
    host.tier._jobs.close()
    assert time.monotonic() - began < 10 and not host.wait(number).success
