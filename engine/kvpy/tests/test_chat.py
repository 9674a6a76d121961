"""Chats are cut into parts by the model's own template, and a document has the same tokens wherever it is."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvcache.vllm import ChunkPrompt, ChunkRequestError
from kvcache.vllm.chat import chat_parts


class Tokenizer:
    """A tokenizer with one token per character, and a template."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def apply_chat_template(self, messages: list[dict], documents: Any = None, tokenize: bool = True, add_generation_prompt: bool = False) -> str:
        assert not tokenize and add_generation_prompt
        return self.render(messages, documents)

    def render(self, messages: list[dict], documents: Any) -> str:
        turns = "".join(f"<|{message['role']}|>{message['content'].strip()}<|end|>" for message in messages)
        return f"{turns}<|assistant|>"


class Titled(Tokenizer):
    """As in models that are trained with documents."""

    def render(self, messages: list[dict], documents: Any) -> str:
        known = "\n\n".join(f"Title: {one['title']}\n{one['text']}" for one in documents or ())
        return f"<|system|>Answer from the documents.\n\n{known}\n\n<|end|>" + super().render(messages, None)


class Numbered(Tokenizer):
    def render(self, messages: list[dict], documents: Any) -> str:
        known = "".join(f"<doc {number}>{one['text']}</doc>" for number, one in enumerate(documents or ()))
        return f"<|system|>{known}<|end|>" + super().render(messages, None)


class Tagged(Tokenizer):
    """The text between documents and the text after them begin and end like parts of the same special tokens."""

    def render(self, messages: list[dict], documents: Any) -> str:
        known = "".join(f"<|doc|>{one['text']}<|enddoc|>" for one in documents or ())
        return f"<|system|>{known}<|end|>" + super().render(messages, None)


class Twice(Tokenizer):
    def render(self, messages: list[dict], documents: Any) -> str:
        return super().render([*messages, messages[-1]], None)


def text_of(prompt: ChunkPrompt) -> str:
    return "".join(map(chr, prompt.token_ids))


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who leads the hall?"}]
ADA, BO, CY = "Ada Moss runs the office.", "Bo Lind leads the hall.", "Cy Roe mends nets."


@pytest.mark.parametrize("tokenizer", [Tokenizer(), Titled()])
@pytest.mark.parametrize("documents", [[ADA], [ADA, BO], [ADA, BO, CY], [{"title": "Ada", "text": ADA}, {"title": "Bo", "text": BO}]])
def test_parts_are_the_rendered_chat_and_documents_move_unchanged(tokenizer: Tokenizer, documents: list) -> None:
    before, texts, after = chat_parts(tokenizer, MESSAGES, documents)
    turned = chat_parts(tokenizer, MESSAGES, documents[::-1])
    assert turned == (before, texts[::-1], after)
    if isinstance(tokenizer, Titled):
        whole = [one if isinstance(one, dict) else {"title": "", "text": one} for one in documents]
        assert "".join((before, *texts, after)) == tokenizer.render(MESSAGES, whole)
    assert after.endswith("<|assistant|>") and "Who leads" in after and all(any(str(v) in text for text in texts) for v in (ADA,))


def test_a_template_that_numbers_documents_is_rendered_as_it_is() -> None:
    before, texts, after = chat_parts(Numbered(), MESSAGES, [ADA, BO, CY])
    assert before + "".join(texts) + after == Numbered().render(MESSAGES, [{"text": text} for text in (ADA, BO, CY)])
    assert all(own in text for own, text in zip((ADA, BO, CY), texts))


@pytest.mark.parametrize("tokenizer", [Tokenizer(), Titled(), Numbered(), Tagged()])
@pytest.mark.parametrize("documents", [[ADA], [ADA, BO], [ADA, BO, CY]])
def test_no_special_token_is_cut(tokenizer: Tokenizer, documents: list[str]) -> None:
    before, texts, after = chat_parts(tokenizer, MESSAGES, documents)
    parts = [before, *texts, after]
    special = re.compile(r"<\|\w+\|>|</?doc[ 0-9]*>")
    assert sum(len(special.findall(part)) for part in parts) == len(special.findall("".join(parts)))
    assert all(not re.sub(special, "", part).strip().startswith(("|", ">")) and "<" not in re.sub(special, "", part) for part in parts)


def test_content_parts_of_the_last_message_are_documents() -> None:
    parts = [{"type": "text", "text": text} for text in (ADA, BO, "Who leads the hall?")]
    made = chat_parts(Tokenizer(), [MESSAGES[0], {"role": "user", "content": parts}])
    assert made == chat_parts(Tokenizer(), MESSAGES, [ADA, BO])
    assert made[0] == "<|system|>Be brief.<|end|><|user|>" and made[1] == [ADA + "\n\n", BO + "\n\n"]
    assert made[2] == "Who leads the hall?<|end|><|assistant|>"


def test_the_prompt_of_a_chat_carries_its_tokens() -> None:
    prompt = ChunkPrompt.of_chat(Tokenizer(), MESSAGES, [ADA, BO], recompute="link:4")
    assert sum(prompt.kv_transfer_params["chunk_lengths"]) + len("Who leads the hall?<|end|><|assistant|>") == len(prompt.token_ids)
    assert prompt.chat_params == {**prompt.kv_transfer_params, "prompt_token_ids": prompt.token_ids}
    assert ADA in text_of(prompt) and "kvcache" not in text_of(prompt)


def asked(*parts: Any) -> list[dict]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": list(parts)}]


QUESTION = {"type": "text", "text": "Who leads the hall?"}


@pytest.mark.parametrize(
    ("messages", "documents", "reason"),
    [
        (asked({"type": "text"}, QUESTION), [], "part 1 of message 2 has no field 'text'"),
        (asked(QUESTION, {"type": "text", "text": None}), [], "part 2 of message 2 has the text None"),
        (asked({"type": "text", "text": 7}, QUESTION), [], "part 1 of message 2 has the text 7"),
        (asked({"text": ADA}, QUESTION), [], "part 1 of message 2 has no field 'type'"),
        (asked({}, QUESTION), [], "part 1 of message 2 has no field 'type'"),
        (asked({"type": "input_audio", "input_audio": {}}, QUESTION), [], "part 1 of message 2 has the type 'input_audio'"),
        (asked(None, QUESTION), [], "part 1 of message 2 is None: it must be a dictionary"),
        (asked([QUESTION], QUESTION), [], "part 1 of message 2 is .*: it must be a dictionary"),
        ([{"role": "user", "content": {"text": ADA}}], [BO], "the content of message 1 is .*: it must be a text or a list"),
        ([{"role": "user", "content": 7}], [BO], "the content of message 1 is 7"),
        ([{"role": "user"}], [BO], "the last message of the chat must be a question"),
        ([{"role": "user", "content": []}], [BO], "the last message of the chat must be a question"),
        ([{"content": "Who?"}], [BO], "the role of message 1 is None"),
        ([*MESSAGES, {"role": 1, "content": "Who?"}], [BO], "the role of message 3 is 1"),
        (["Who?"], [BO], "message 1 is 'Who\\?': it must be a dictionary"),
        ([None], [BO], "message 1 is None"),
        ("Who?", [BO], "messages is 'Who\\?': it must be a list"),
        (None, [BO], "messages is None"),
        (MESSAGES, [ADA, None], "document 2 is None: it must be a text"),
        (MESSAGES, [7], "document 1 is 7"),
        (MESSAGES, [[ADA]], "document 1 is .*: it must be a text"),
        (MESSAGES, [ADA, {}], "document 2 is {}: none of its fields has a text"),
        (MESSAGES, [{"text": None}], "document 1 is {'text': None}: none of its fields"),
        (MESSAGES, ADA, "documents is 'Ada Moss runs the office.': it must be a list"),
        (MESSAGES, {"text": ADA}, "documents is {'text'"),
        (MESSAGES, None, "the chat has no documents"),
    ],
)
@pytest.mark.parametrize("tokenizer", [Tokenizer(), Titled()])
def test_what_has_the_wrong_form_is_named(tokenizer: Tokenizer, messages: Any, documents: Any, reason: str) -> None:
    with pytest.raises(ChunkRequestError, match=reason):
        ChunkPrompt.of_chat(tokenizer, messages, documents)


def test_a_part_may_be_a_text_and_an_assistant_may_say_nothing() -> None:
    class Quiet(Tokenizer):
        def render(self, messages: list[dict], documents: Any) -> str:
            return super().render([{**one, "content": one["content"] or ""} for one in messages], documents)

    turns = [{"role": "assistant", "content": None}, {"role": "user", "content": [ADA, BO, QUESTION]}]
    assert chat_parts(Quiet(), turns)[1] == [ADA + "\n\n", BO + "\n\n"]


@pytest.mark.parametrize(
    ("tokenizer", "messages", "documents", "reason"),
    [
        (Tokenizer(), MESSAGES, [], "the chat has no documents"),
        (Tokenizer(), [], [ADA], "must be a question"),
        (Tokenizer(), [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], [], "image_url"),
        (Tokenizer(), [{"role": "user", "content": [{"type": "text", "text": ADA}, {"type": "text", "text": "?"}]}], [BO], "not both"),
        (Twice(), MESSAGES, [ADA, BO], "more than once"),
        (Tokenizer(), MESSAGES, [ADA + "kvcacheEnd0x"], "marks documents"),
    ],
)
def test_chats_that_cannot_be_cut_are_refused(tokenizer: Tokenizer, messages: list, documents: list, reason: str) -> None:
    with pytest.raises(ChunkRequestError, match=reason):
        chat_parts(tokenizer, messages, documents)
