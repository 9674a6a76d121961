"""Questions in a model's chat template, cut into parts that are tokenised separately."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..prompt import ChunkPrompt
from .questions import NoteQuestion, note_decoys

# Ends the system prompt and each note. It counts as part of the text that it ends, so a note has the same
# tokens wherever it is.
BORDER = "\n\n"
MARK = "<the message>"


class Chat:
    """Puts questions into the chat template of a transformers tokenizer, or into plain text if it has none.

    The template puts nothing between the notes, because the system prompt and all notes are one message.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.before, self.after = frame(tokenizer)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def prompt(self, question: NoteQuestion, order: Sequence[int], mode: str = "alone", recompute: str = "none") -> ChunkPrompt:
        """Returns the prompt of a question, with its notes in ``order``."""
        return ChunkPrompt.of(
            self.encode,
            f"{self.before}{question.system}{BORDER}",
            [question.notes[number] + BORDER for number in order],
            f"{question.text}{self.after}",
            mode=mode,
            recompute=recompute,
            decoys=[decoy + BORDER for decoy in note_decoys()],
        )


def frame(tokenizer: Any) -> tuple[str, str]:
    """Returns the template's text before and after a user's message. Raises ``ValueError`` for a template
    that does not contain the message once.
    """
    if not getattr(tokenizer, "chat_template", None):
        begins = tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]
        return (tokenizer.bos_token if begins else ""), "\nAnswer:"
    message = [{"role": "user", "content": MARK}]
    # Turn off thinking for models that think before they answer.
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    before, found, after = text.partition(MARK)
    if not found or MARK in after:
        raise ValueError("the chat template does not render the user's message exactly once")
    return before, after


def end_tokens(folder: Path, tokenizer: Any) -> list[int]:
    """Returns the tokens that end an answer, from the tokenizer and the model's files."""
    ends = {tokenizer.eos_token_id}
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        token = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        ends.update(token if isinstance(token, list) else [token])
    return sorted(end for end in ends if end is not None)
