"""Questions about notes, and their prompts."""

import json
import pathlib
import re

import pytest
from kvcache.vllm.gate import chat, questions


def test_equal_seeds_give_equal_questions_and_each_answer_is_in_one_note() -> None:
    asked = questions.note_questions(3, 60, 4)
    assert asked == questions.note_questions(3, 60, 4) != questions.note_questions(4, 60, 4)
    for question in asked:
        assert len(question.notes) == 4 and question.is_right(f"It is {question.answer}.")
        whole = re.compile(rf"\b{re.escape(question.answer)}\b")
        assert len([note for note in question.notes if whole.search(note)]) == 1, question
    assert len({question.text.split()[0] for question in asked}) > 3, "all facts are asked for"


@pytest.mark.parametrize("notes", [1, questions.MOST_NOTES + 1])
def test_a_question_has_two_notes_at_least_and_one_for_each_town_at_most(notes: int) -> None:
    with pytest.raises(ValueError, match=f"2 to {questions.MOST_NOTES}"):
        questions.note_questions(1, 1, notes)


def test_prose_goes_on_without_end() -> None:
    notes = questions.prose(1)
    some = [next(notes) for _ in range(50)]
    assert len(set(some)) == 50 and all(note.endswith(chat.BORDER) for note in some)


class Words:
    """A tokenizer with one token per character."""

    bos_token, bos_token_id, eos_token_id = "^", ord("^"), 2

    def __init__(self, template: str | None, begins: bool = True) -> None:
        self.chat_template, self.begins = template, begins

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [*([self.bos_token_id] if add_special_tokens and self.begins else []), *map(ord, text)]

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, tokens))

    def apply_chat_template(self, messages: list[dict], **settings: bool) -> str:
        assert settings["add_generation_prompt"] and not settings["tokenize"] and not settings["enable_thinking"]
        return self.chat_template.replace("{}", messages[0]["content"])


def test_a_prompt_is_the_template_around_the_system_prompt_the_notes_and_the_question() -> None:
    put, question = chat.Chat(Words("<user>{}<end><model>")), questions.note_questions(1, 1, 3)[0]
    prompt = put.prompt(question, [2, 0, 1], "with-system", "link:16")
    system = f"<user>{question.system}\n\n"
    notes = [question.notes[number] + "\n\n" for number in (2, 0, 1)]
    assert put.decode(prompt.token_ids) == f"{system}{''.join(notes)}{question.text}<end><model>"
    assert prompt.kv_transfer_params["chunk_lengths"] == [len(system), *map(len, notes)]
    assert prompt.kv_transfer_params["chunk_mode"] == "with-system" and prompt.kv_transfer_params["chunk_recompute"] == "link:16"


def test_without_a_template_the_prompt_begins_as_the_tokenizer_does() -> None:
    assert chat.frame(Words(None)) == ("^", "\nAnswer:")
    assert chat.frame(Words(None, begins=False)) == ("", "\nAnswer:")


@pytest.mark.parametrize("template", ["<user>", "{} and {}"])
def test_a_template_that_does_not_write_the_message_once_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match="exactly once"):
        chat.frame(Words(template))


def test_answers_end_where_the_tokenizer_or_a_file_of_the_model_says(tmp_path: pathlib.Path) -> None:
    assert chat.end_tokens(tmp_path, Words(None)) == [2]
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert chat.end_tokens(tmp_path, Words(None)) == [2, 7]
