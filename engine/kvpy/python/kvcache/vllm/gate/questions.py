"""Questions about notes on invented firms. No model has heard of the firms, so every answer comes from the
notes.

``kvc tune`` asks the same questions. Equal seeds give equal questions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kvcache._native import NoteQuestion, note_decoys, note_questions

MOST_NOTES = 20

__all__ = ["NoteQuestion", "note_decoys", "note_questions", "prose"]


def prose(seed: int) -> Iterator[str]:
    """Yields an endless stream of notes. Each ends with an empty line."""
    for number in itertools.count(1000 * seed):
        (question,) = note_questions(number, 1, MOST_NOTES)
        yield from (note + "\n\n" for note in question.notes)
