"""The world of tiny-rag: short documents of facts, questions about one of them, and references.

A fact is "alba is red ."; a question is "alba ?" and its answer is "red". A *reference* is a fact
whose value is "same": it takes the value stated last before it. A reference is *local* when that
value is in the same document, and *cross* when it is in an earlier one, which a document that was
computed alone cannot know.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

_ONSETS = ["b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z"]
_VOWELS = ["a", "e", "i", "o", "u"]
_CODAS = ["l", "m", "n", "r", "s"]

VALUES = (
    "red blue green black white gold grey pink brown orange purple silver "
    "big small fast slow old young warm cold tall short happy sad rich poor strong weak calm loud "
    "sweet bitter"
).split()

SYSTEM_WORDS = (
    "you answer questions from short documents read the facts and reply with one word use only what "
    "is written here be brief helpful assistant a an of to in on for please give find each every know "
    "think say look tell all about it are your text notes list value name keep short clear"
).split()

# Words that are not single tokens, like the ones that people write before documents.
OTHER_WORDS = (
    "briefly system question using documents below above context following passages provided information "
    "respond concise accurate expert today language model task instructions based must should will can from "
    "with that this these those when where which who what why how please carefully best possible sources "
    "knowledge retrieve summarise explain user input output data search result page article says"
).split()

DEFAULT_SYSTEM = "you answer questions from short documents ."


def names() -> list[str]:
    """Returns 240 invented names such as "alba" or "doruna", which are the same on every machine."""
    rng = random.Random(20261120)
    taken = set(VALUES) | set(SYSTEM_WORDS) | {"same", "is"}
    out: list[str] = ["alba", "bora", "cedo", "dilan"]
    seen = set(out)
    while len(out) < 240:
        word = ""
        for _ in range(rng.choice([2, 2, 3])):
            word += rng.choice(_ONSETS) + rng.choice(_VOWELS)
        if rng.random() < 0.4:
            word += rng.choice(_CODAS)
        if word not in seen and word not in taken:
            seen.add(word)
            out.append(word)
    return out


NAMES = names()


@dataclass
class Fact:
    """One fact: its name, its value as written ("same" for a reference) and its actual value."""

    name: str
    written: str
    value: str
    kind: str  # "stated", "local" or "cross"


def documents(rng: random.Random, n_docs: int, facts: tuple[int, int], p_same: float) -> list[list[Fact]]:
    """Draws `n_docs` documents with `facts[0]` to `facts[1]` facts each. All facts have distinct names."""
    sizes = [rng.randint(*facts) for _ in range(n_docs)]
    picked = rng.sample(NAMES, sum(sizes))
    docs, last, at = [], None, 0
    for size in sizes:
        doc, stated_here = [], False
        for _ in range(size):
            name, at = picked[at], at + 1
            if last is not None and rng.random() < p_same:
                doc.append(Fact(name, "same", last, "local" if stated_here else "cross"))
            else:
                last = rng.choice(VALUES)
                stated_here = True
                doc.append(Fact(name, last, last, "stated"))
        docs.append(doc)
    return docs


def document_text(doc: list[Fact], stop: str = " .") -> str:
    """Returns a document as text, e.g. "alba is red . bora is same ."."""
    return " ".join(f"{f.name} is {f.written}{stop}" for f in doc)


def system_text(rng: random.Random) -> str:
    """Returns the default system prompt or a random one, to keep the model from depending on its words."""
    if rng.random() < 0.4:
        return DEFAULT_SYSTEM
    return " ".join(rng.choice(SYSTEM_WORDS) for _ in range(rng.randint(1, 14))) + rng.choice([" .", ".", ""])


def any_system_text(rng: random.Random) -> str:
    """Returns a system prompt like users write: known and unknown words, letters, digits, punctuation."""
    if rng.random() < 0.25:
        return system_text(rng)
    words = []
    for _ in range(rng.randint(1, 14)):
        kind = rng.random()
        if kind < 0.35:
            words.append(rng.choice(SYSTEM_WORDS))
        elif kind < 0.8:
            words.append(rng.choice(OTHER_WORDS))
        else:
            letters = "abcdefghijklmnopqrstuvwxyz0123456789-_'"
            words.append("".join(rng.choice(letters) for _ in range(rng.randint(1, 9))))
    return " ".join(words) + rng.choice([" .", ".", "", ":", " :", "!", ",", "\n", ' "'])
