"""`kvcache.LLM` with the built-in model of the repository."""

import json
import pathlib
import shutil
import threading
from collections.abc import Sequence
from typing import Any

import kvcache
import pytest

MODEL = pathlib.Path(__file__).parents[3] / "models/tiny-rag"
PROMPT = "you answer questions ## alba is red . ## cedo is blue . bora is same . ## bora ?"
OTHER = "you answer questions ## cedo is blue . bora is same . ## alba is red . ## alba ?"


@pytest.fixture(scope="module")
def llm() -> kvcache.LLM:
    return kvcache.LLM(MODEL, chunk_cache_config=kvcache.ChunkCacheConfig(chunk_separator="##", memory_share=0.5))


def test_documents_are_found_in_another_order(llm: kvcache.LLM) -> None:
    (first,) = llm.generate(PROMPT)
    before = llm.get_chunk_cache_stats()
    (other,) = llm.generate([OTHER])
    stats = llm.get_chunk_cache_stats()
    assert (first.text.strip(), other.text.strip()) == ("blue", "red")
    assert (before.miss_count, stats.hit_count - before.hit_count, stats.miss_count) == (2, 2, 2)
    assert stats.cached_chunks == 2 and stats.hit_rate == 0.5 and 0 < stats.used_blocks <= stats.total_blocks
    assert other.num_cached_tokens > other.num_prompt_tokens // 2 and other.finish_reason == "stop" and other.ttft > 0
    assert "hit_count=2" in repr(stats)


def test_prompts_are_answered_together_and_in_parts(llm: kvcache.LLM) -> None:
    texts = [PROMPT, OTHER, PROMPT, OTHER]
    answers = [answer.text.strip() for answer in llm.generate(texts)]
    assert answers == ["blue", "red", "blue", "red"]
    limits = [kvcache.SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 2, 3, 4)]
    assert [len(answer.token_ids) for answer in llm.generate(texts, limits)] == [1, 2, 3, 4]
    (stopped,) = llm.generate(PROMPT, kvcache.SamplingParams(stop=["ue"]))
    assert stopped.text.strip() in ("bl", "") and stopped.finish_reason == "stop"
    (ids,) = llm.generate(kvcache.ChunkedPrompt([3, 4], [[5, 6], [7, 8]], [9]), kvcache.SamplingParams(max_tokens=2))
    assert ids.num_prompt_tokens == 7
    (plain,) = llm.generate([5, 6, 7])
    assert plain.num_prompt_tokens == 3


def test_without_a_chunk_cache_prompts_are_ordinary() -> None:
    baseline = kvcache.LLM(MODEL, enable_chunk_cache=False)
    (answer,) = baseline.generate(PROMPT)
    assert answer.text.strip() == "blue" and baseline.get_chunk_cache_stats().lookup_count == 0
    default = kvcache.LLM(MODEL)
    (answer,) = default.generate(PROMPT)
    (again,) = default.generate(OTHER)
    assert again.num_recomputed_tokens > 0 and (answer.text.strip(), again.text.strip()) == ("blue", "red")


def test_activations_may_be_rounded() -> None:
    """The built-in model is in f32, whose products are never rounded."""
    (answer,) = kvcache.LLM(MODEL, compute="int8").generate(PROMPT)
    assert answer.text.strip() == "blue"
    with pytest.raises(kvcache.KvCacheError, match="compute type \"bf8\"; use exact, bf16 or int8"):
        kvcache.LLM(MODEL, compute="bf8")


def test_documents_are_computed_behind_decoys() -> None:
    config = kvcache.ChunkCacheConfig(
        chunk_separator="##", compute_mode="behind:2", position_strategy="sequential", memory_share=0.5
    )
    llm = kvcache.LLM(MODEL, chunk_cache_config=config, decoys=["moda is green .", "vugu is small ."])
    answers = [llm.generate(prompt)[0] for prompt in (PROMPT, OTHER)]
    assert [answer.text.strip() for answer in answers] == ["blue", "red"] and llm.get_chunk_cache_stats().hit_count == 2
    few = kvcache.LLM(MODEL, chunk_cache_config=config, decoys=["moda is green ."])
    with pytest.raises(kvcache.KvCacheError, match="needs 2 decoys, and there are 1"):
        few.generate(PROMPT)
    own = kvcache.ChunkedPrompt([3, 4], [[5, 6], [7, 8]], [9], decoys=[[10, 11], [12]])
    plan = own.positions("behind:2", "sequential")
    assert own.decoys == [[10, 11], [12]] and own.get_total_tokens() == 7
    assert [(place.stored_start, place.used_start) for place in plan.chunks] == [(5, 2), (5, 4)]
    (answer,) = few.generate(own, kvcache.SamplingParams(max_tokens=2))
    assert answer.num_prompt_tokens == 7


TEMPLATE = (
    "{% for m in messages %}{{ m.content }} {% endfor %}{% for t in tools or [] %}{{ t.name }} {% endfor %}"
    "{% if add_generation_prompt %}{{ more or '' }}{% endif %}"
)


def test_conversations_and_variables_reach_the_template(tmp_path: pathlib.Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        (tmp_path / "model" / name).unlink(missing_ok=True)
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    llm = kvcache.LLM(tmp_path / "model", enable_chunk_cache=False)
    one = kvcache.SamplingParams(max_tokens=2)

    def count(text: str) -> int:
        return llm.generate(text, one)[0].num_prompt_tokens

    begin = count("alba") - 1  # A raw prompt begins with the tokenizer's own special tokens.
    ask = [{"role": "user", "content": [{"type": "text", "text": "alba is red ."}]}]
    tools = {"tools": [{"name": "bora"}], "more": "cedo ?"}
    (answer,) = llm.chat(ask, one)
    assert answer.num_prompt_tokens == count("alba is red .") - begin
    (answer,) = llm.chat(ask, one, template_args=tools)
    assert answer.num_prompt_tokens == count("alba is red . bora cedo ?") - begin
    (answer,) = llm.generate("alba is red .", one, chat=True, template_args=tools)
    assert answer.num_prompt_tokens == count("alba is red . bora cedo ?") - begin
    begun, tool = {"role": "assistant", "content": "bora"}, {"role": "tool", "content": None}
    both = llm.chat([ask, [*ask, tool, begun]], one, template_args={"more": "cedo ?"})
    assert [answer.num_prompt_tokens for answer in both] == [
        count("alba is red . cedo ?") - begin,
        count("alba is red . bora") - begin,
    ]
    with pytest.raises(TypeError, match="messages must be a list"):
        llm.chat(5)
    with pytest.raises(kvcache.KvCacheError, match="the last message, 1, has the role system"):
        llm.chat([{"role": "system", "content": "a"}])
    with pytest.raises(kvcache.KvCacheError, match="the conversation itself"):
        llm.chat(ask, template_args={"messages": []})
    with pytest.raises(ValueError, match="only with chat=True"):
        llm.generate("a", template_args={"more": 1})


def test_threads_take_turns(llm: kvcache.LLM) -> None:
    answers: list[str] = []

    def ask(text: str) -> None:
        answers.extend(answer.text.strip() for answer in llm.generate(text))

    threads = [threading.Thread(target=ask, args=(PROMPT,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == ["blue"] * 4


def test_wrong_requests_are_refused_and_hold_nothing(llm: kvcache.LLM) -> None:
    llm.generate(PROMPT)
    used = llm.get_chunk_cache_stats().used_blocks
    with pytest.raises(FileNotFoundError, match="no such model"):
        kvcache.LLM("/nowhere")
    with pytest.raises(TypeError, match="a prompt must be"):
        llm.generate([3.5])
    with pytest.raises(ValueError, match="2 sampling_params for 1 prompts"):
        llm.generate(PROMPT, [kvcache.SamplingParams()] * 2)
    with pytest.raises(kvcache.KvCacheError) as error:
        llm.generate([10_000_000])
    assert error.value.kind == "TokenOutOfVocabulary"
    with pytest.raises(kvcache.KvCacheError, match="top.p"):
        llm.generate(PROMPT, kvcache.SamplingParams(temperature=1.0, top_p=-0.5))
    with pytest.raises(kvcache.KvCacheError, match="empty"):
        llm.generate("a ## ## b")
    assert llm.get_chunk_cache_stats().used_blocks == used
    (answer,) = llm.generate(PROMPT)
    assert answer.text.strip() == "blue"


def test_a_prompt_that_fails_costs_the_others_nothing(llm: kvcache.LLM) -> None:
    used = llm.get_chunk_cache_stats().used_blocks
    wrong: list[str | Sequence[int] | kvcache.ChunkedPrompt] = [[10_000_000], "a ## ## b", [3] * 100_000]
    answers = llm.generate([PROMPT, *wrong, OTHER])
    failed = answers[1:4]
    assert [isinstance(error, kvcache.KvCacheError) for error in failed] == [True] * 3
    assert getattr(failed[0], "kind") == "TokenOutOfVocabulary" and "empty" in str(failed[1])
    texts = [answer.text.strip() for answer in (answers[0], answers[4]) if isinstance(answer, kvcache.RequestOutput)]
    assert texts == ["blue", "red"]
    assert llm.get_chunk_cache_stats().used_blocks == used
    for alone in wrong:
        with pytest.raises(kvcache.KvCacheError):
            llm.generate(alone)


def test_an_answer_that_outgrows_the_memory_is_kept() -> None:
    small = kvcache.LLM(MODEL, enable_chunk_cache=False, kv_cache_memory_bytes=1 << 20)
    settings = kvcache.SamplingParams(max_tokens=100_000, ignore_eos=True)
    (answer,) = small.generate(PROMPT, settings)
    assert answer.finish_reason == "length" and 0 < len(answer.token_ids) < 100_000


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": float("nan")},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("inf")},
        {"stop": [""]},
    ],
)
def test_settings_out_of_range_are_refused_when_they_are_made(setting: dict[str, object]) -> None:
    with pytest.raises(kvcache.KvCacheError, match=next(iter(setting))):
        kvcache.SamplingParams(**setting)  # type: ignore[arg-type]


def on_disk(folder: pathlib.Path, **settings: Any) -> kvcache.LLM:
    config = kvcache.ChunkCacheConfig(chunk_separator="##", memory_share=0.5)
    return kvcache.LLM(MODEL, chunk_cache_config=config, disk=folder, disk_limit=8 << 20, disk_loads="always", **settings)


def test_answers_have_the_form_that_is_asked_for(llm: kvcache.LLM) -> None:
    usual, other = (kvcache.SamplingParams(regex=f" ({words})") for words in ("red|blue", "red|green"))
    answers = llm.generate([PROMPT, PROMPT, PROMPT], [usual, other, kvcache.SamplingParams()])
    assert [answer.text for answer in answers[::2]] == [" blue", " blue"]
    assert answers[1].text in (" red", " green") and answers[1].finish_reason == "stop"
    schema = {"enum": [7, [], True]}
    for given in (schema, json.dumps(schema)):
        params = kvcache.SamplingParams(json_schema=given, temperature=1.5)
        assert params.json_schema is not None and json.loads(params.json_schema) == schema
        (answer,) = llm.generate(PROMPT, params)
        assert json.loads(answer.text) in schema["enum"]
    (letters,) = llm.generate(PROMPT, kvcache.SamplingParams(grammar='start: " red" " red"'))
    assert letters.text == " red red"
    for wrong, words in [
        (kvcache.SamplingParams(json_schema="{"), "not JSON"),
        (kvcache.SamplingParams(json_schema={"type": "colour"}), "colour"),
        (kvcache.SamplingParams(regex="("), "constraint"),
        (kvcache.SamplingParams(regex="a", ignore_eos=True), "where an answer may end"),
    ]:
        with pytest.raises(kvcache.KvCacheError, match=words):
            llm.generate(PROMPT, wrong)
    with pytest.raises(ValueError, match="only one of"):
        kvcache.SamplingParams(regex="a", grammar="b")
    assert llm.generate(PROMPT)[0].text == " blue"


def test_documents_outlive_the_program_on_a_disk(tmp_path: pathlib.Path) -> None:
    first = on_disk(tmp_path)
    (answer,) = first.generate(PROMPT)
    assert answer.text.strip() == "blue" and answer.missed == ["new", "new"]
    with pytest.raises(kvcache.KvCacheError, match="in use by another process"):
        on_disk(tmp_path)
    first.close_disk()
    assert first.get_disk_stats() is None and first.disk_prometheus() == ""
    second = on_disk(tmp_path, disk_policy="tiny-lfu", disk_memory=4 << 20)
    (again,) = second.generate(OTHER)
    assert again.text.strip() == "red" and again.missed == [None, None]
    stats = second.get_disk_stats()
    assert stats is not None and stats["hits"] >= 2 and stats["records"] >= 2 and stats["damaged"] == 0
    assert (stats["save_errors"], stats["write_deadline_exceeded"]) == (0, 0)
    assert 0 < stats["memory_bytes"] <= stats["memory_limit_bytes"] == 4 << 20
    assert f'kv_tier_hits_total{{tier="disk"}} {float(stats["hits"])}' in second.disk_prometheus()


def test_a_prompt_goes_to_a_file_and_back(tmp_path: pathlib.Path) -> None:
    config = kvcache.ChunkCacheConfig(chunk_separator="##", memory_share=0.5)
    first, second = (kvcache.LLM(MODEL, chunk_cache_config=config) for _ in range(2))
    file = tmp_path / "prompt.kv"
    (computed,) = first.generate(PROMPT)
    saved = first.save_prompt(PROMPT, file)
    assert saved["tokens"] > 0 and saved["bytes"] == file.stat().st_size
    assert second.restore_prompt(file) == {"tokens": saved["tokens"], "no_room": 0, "differs": 0}
    (found,) = second.generate(PROMPT)
    assert found.token_ids == computed.token_ids
    assert found.missed == [None, None] and computed.missed == ["new", "new"]
    other = kvcache.LLM(MODEL, chunk_cache_config=config, dtype_name="bfloat16")
    with pytest.raises(kvcache.KvCacheError, match="another model, tokenizer or format"):
        other.restore_prompt(file)
    file.write_bytes(b"x")
    with pytest.raises(kvcache.KvCacheError, match="contains no records"):
        second.restore_prompt(file)
    with pytest.raises(kvcache.KvCacheError, match="cannot create"):
        first.save_prompt(PROMPT, tmp_path / "none" / "prompt.kv")


def test_a_folder_that_cannot_be_a_disk_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(kvcache.KvCacheError, match="is not a folder"):
        kvcache.LLM(MODEL, disk=tmp_path / "file")
    with pytest.raises(kvcache.KvCacheError, match="too small for a disk tier"):
        kvcache.LLM(MODEL, disk=tmp_path, disk_limit=1000)
    with pytest.raises(ValueError, match='use "faster" or "always"'):
        kvcache.LLM(MODEL, disk=tmp_path, disk_loads="never")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="disk_policy"):
        kvcache.LLM(MODEL, disk=tmp_path, disk_policy="random")  # type: ignore[arg-type]
