"""Signal handlers, and objects of the caller, that use an `LLM` while it works or raise errors."""

import contextlib
import gc
import pathlib
import signal
import types
from collections.abc import Callable, Iterator, Sequence

import kvcache
import pytest

MODEL = pathlib.Path(__file__).parents[3] / "models/tiny-rag"
PROMPT = "you answer questions ## alba is red . ## cedo is blue . bora is same . ## bora ?"
OTHER = "you answer questions ## cedo is blue . bora is same . ## alba is red . ## alba ?"
ASK: list[dict[str, object]] = [{"role": "user", "content": "alba is red . alba ?"}]
LONG = kvcache.SamplingParams(max_tokens=500, ignore_eos=True)
SHORT = kvcache.SamplingParams(max_tokens=2, ignore_eos=True)
CONFIG = kvcache.ChunkCacheConfig(chunk_separator="##", memory_share=0.5)

# What an operation or a handler does with a model.
Use = Callable[[kvcache.LLM], object]


def on_disk(folder: pathlib.Path) -> kvcache.LLM:
    return kvcache.LLM(MODEL, chunk_cache_config=CONFIG, disk=folder, disk_limit=8 << 20, disk_loads="always")


@pytest.fixture
def llm(tmp_path: pathlib.Path) -> kvcache.LLM:
    return on_disk(tmp_path / "disk")


@contextlib.contextmanager
def alarm(handler: Callable[[], object]) -> Iterator[Callable[[float], None]]:
    """Calls `handler` at the signal of a timer. Yields a function that starts the timer."""

    def called(_number: int, _frame: types.FrameType | None) -> None:
        handler()

    before = signal.signal(signal.SIGALRM, called)
    try:
        yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds) and None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def answers_well(llm: kvcache.LLM) -> bool:
    (answer,) = llm.generate(OTHER)
    return answer.text.strip() == "red"


def close_disk(llm: kvcache.LLM) -> None:
    llm.generate(PROMPT)
    llm.close_disk()


OPERATIONS: dict[str, Use] = {
    "generate": lambda llm: llm.generate([PROMPT] * 4, LONG),
    "chat": lambda llm: llm.chat([ASK] * 4, LONG),
    "close_disk": close_disk,
    "wrong prompts": lambda llm: llm.generate([PROMPT, [10_000_000], "a ## ## b"], LONG),
}
HANDLERS: dict[str, Use] = {
    "generate": answers_well,
    "chat": lambda llm: llm.chat(ASK, SHORT),
    "close_disk": lambda llm: llm.close_disk(),
    "statistics": lambda llm: (llm.get_chunk_cache_stats(), llm.get_disk_stats(), llm.disk_prometheus()),
    "a wrong prompt": lambda llm: llm.generate(["a ## ## b", [10_000_000]]),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("handler", HANDLERS)
def test_a_signal_handler_may_use_the_model(llm: kvcache.LLM, operation: str, handler: str) -> None:
    seen: list[object] = []
    with alarm(lambda: seen.append(HANDLERS[handler](llm))) as start:
        while len(seen) < 2:
            start(0.004)
            OPERATIONS[operation](llm)
    assert handler != "generate" or all(seen)
    assert answers_well(llm)


def test_answers_are_whole_although_a_signal_handler_used_the_model(llm: kvcache.LLM) -> None:
    seen: list[bool] = []
    with alarm(lambda: seen.append(answers_well(llm))) as start:
        start(0.005)
        answers = llm.generate([PROMPT] * 4, LONG)
    assert seen == [True]
    assert [len(getattr(answer, "token_ids", [])) for answer in answers] == [500] * 4


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_signal_handler_may_drop_the_model_that_works(tmp_path: pathlib.Path, operation: str) -> None:
    holder = [on_disk(tmp_path)]
    with alarm(holder.clear) as start:
        while holder:
            start(0.002)
            OPERATIONS[operation](holder[0])
    # The file on the disk has no other user any more.
    gc.collect()
    assert answers_well(on_disk(tmp_path))


def test_a_model_is_dropped_while_signals_arrive(tmp_path: pathlib.Path) -> None:
    other = kvcache.LLM(MODEL, chunk_cache_config=CONFIG)
    seen: list[bool] = []
    with alarm(lambda: seen.append(answers_well(other))) as start:
        while len(seen) < 3:
            llm = on_disk(tmp_path)
            llm.generate(PROMPT)
            start(0.0005)
            # Dropping waits until what was saved is on the disk.
            del llm
    assert all(seen) and answers_well(on_disk(tmp_path))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_signal_handler_that_raises_ends_the_operation(llm: kvcache.LLM, operation: str) -> None:
    def handler() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise KeyboardInterrupt

    with alarm(handler) as start, pytest.raises(KeyboardInterrupt):
        while True:
            start(0.004)
            OPERATIONS[operation](llm)
    assert answers_well(llm)
    stats = llm.get_chunk_cache_stats()
    assert stats.used_blocks <= stats.total_blocks


class Hostile:
    """Behaves as a list, uses the model whenever an element is read, and raises an error at the last one."""

    def __init__(self, llm: kvcache.LLM, items: Sequence[object]) -> None:
        self.llm, self.items = llm, items

    def __len__(self) -> int:
        assert answers_well(self.llm)
        return len(self.items)

    def __getitem__(self, at: int) -> object:
        assert answers_well(self.llm)
        if at == len(self.items):
            raise LookupError("no more")
        return self.items[at]

    def __iter__(self) -> Iterator[object]:
        for item in self.items:
            assert answers_well(self.llm)
            yield item
        raise LookupError("no more")


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate(Hostile(llm, [PROMPT, OTHER])),
        lambda llm: llm.generate([Hostile(llm, [1, 2])]),
        lambda llm: llm.generate([PROMPT, OTHER], Hostile(llm, [LONG, LONG])),
        lambda llm: llm.chat(Hostile(llm, ASK)),
        lambda llm: llm.chat(ASK, template_args={"tools": Hostile(llm, [1])}),
    ],
)
def test_objects_may_use_the_model_and_raise(llm: kvcache.LLM, call: Use) -> None:
    used = (answers_well(llm), llm.get_chunk_cache_stats().used_blocks)
    with pytest.raises((LookupError, TypeError, ValueError, kvcache.KvCacheError)):
        call(llm)
    assert (answers_well(llm), llm.get_chunk_cache_stats().used_blocks) == used
