"""Questions about notes on invented firms. No model knows the firms, so that every answer comes from the notes.

All notes of a question are of one kind, so that each is a distractor of the others. Equal seeds give equal questions.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

SYSTEM = "Answer the question from the notes below. Give only the answer, in a few words."
MOST_NOTES = 20

STEMS = (
    "Nor Hel Cald Bren Vost Tam Ald Quill Fen Mar Thorn Wex Dray Lun Ost Pell Sev Garr Ing Kest Rul Yar Zem Hask"
).split()
ENDINGS = "vane brook well mark ford dale stead worth mere ley ridge more".split()
FORMS = "Works Mills Instruments Foods Marine Textiles".split()
CITIES = (
    "Port Vell, Aldermoor, Kesterby, Santa Rima, Lowen, Grauburg, Oldhaven, Miravale, Tarn Head, Sollum, Brackwater, Vintry, "
    "Eastmere, Dunholt, Pellegrino Bay, Oskby, Rillton, Cape Hallow, Marsden Cross, Ythan"
).split(", ")
PRODUCTS = (
    "bicycle chains, wool blankets, canned sardines, weather balloons, church organs, olive oil, ship propellers, paper bags, "
    "microscopes, rubber boots, harpsichords, tea kettles, garden tools, sailcloth, pocket watches, ice cream, rope ladders, "
    "stage lamps, chess sets, copper wire"
).split(", ")
FIRST = "Marta Ivo Selma Anton Greta Pavel Nadia Oscar Livia Hugo Elsa Boris Clara Emil Rosa Victor".split()
LAST = (
    "Lindqvist Okafor Barros Hartmann Novak Petrov Singh Moreau Tanaka Fischer Costa Duval Keller Adeyemi Santos Weiss"
).split()

# Sentences that say nothing that is asked.
FILLERS = (
    "The canteen is open to visitors on Fridays.",
    "A small museum next to the gate shows old machines.",
    "The firm sponsors the rowing club of the town.",
    "Its delivery vans are painted green and white.",
    "Most of the roof is covered with solar panels.",
    "Apprentices are taken on every autumn.",
    "The main hall burned down once and was rebuilt in brick.",
    "Guided tours have to be booked a week ahead.",
    "A brass band made up of workers plays in summer.",
    "The catalogue appears twice a year.",
)

# The question for each fact, and sentences that say it.
FACTS = {
    "founded": (
        "In which year was {firm} founded?",
        ("{firm} was founded in {it}.", "The history of {firm} began in {it}.", "Since {it}, {firm} has been in business."),
    ),
    "city": (
        "In which town is {firm} based?",
        ("{firm} is based in {it}.", "The head office of {firm} stands in {it}.", "You will find {firm} in {it}."),
    ),
    "product": (
        "What does {firm} make?",
        ("{firm} makes {it}.", "The main product of {firm} is {it}.", "It is {it} that {firm} is known for."),
    ),
    "staff": (
        "How many people work at {firm}?",
        ("{firm} employs {it} people.", "There are {it} employees at {firm}.", "The staff of {firm} numbers {it}."),
    ),
    "director": (
        "Who leads {firm}?",
        ("{firm} is led by {it}.", "The director of {firm} is {it}.", "At the head of {firm} stands {it}."),
    ),
}


@dataclass(frozen=True)
class Question:
    """A question about a fact in one of some notes."""

    notes: tuple[str, ...]
    text: str
    answer: str

    def is_right(self, said: str) -> bool:
        """Returns true if the answer stands in what was said, in whole words. Case does not count, nor do commas in numbers."""
        given, right = words(said), words(self.answer)
        return any(given[at : at + len(right)] == right for at in range(len(given) - len(right) + 1))


def words(text: str) -> list[str]:
    """Returns the words of a text, in small letters."""
    return re.findall(r"\w+", re.sub(r"(?<=\d),(?=\d{3}\b)", "", text).lower())


def questions(seed: int, count: int, notes: int) -> list[Question]:
    """Draws questions of ``notes`` notes each, at least 2 and at most ``MOST_NOTES``."""
    if not 2 <= notes <= MOST_NOTES:
        raise ValueError(f"{notes} notes: a question has 2 to {MOST_NOTES}")
    draw = random.Random(seed)
    return [_question(draw, notes) for _ in range(count)]


def prose(seed: int) -> Iterator[str]:
    """Writes notes without end, each ended by an empty line."""
    draw = random.Random(seed)
    while True:
        for name, facts in _firms(draw, MOST_NOTES):
            yield _note(draw, name, facts) + "\n\n"


def _question(draw: random.Random, notes: int) -> Question:
    firms = _firms(draw, notes)
    name, facts = draw.choice(firms)
    fact = draw.choice(list(FACTS))
    texts = tuple(_note(draw, *firm) for firm in firms)
    return Question(texts, FACTS[fact][0].format(firm=name), facts[fact])


def _firms(draw: random.Random, count: int) -> list[tuple[str, dict[str, str]]]:
    """Draws firms that have nothing in common."""
    people = draw.sample([f"{first} {last}" for first in FIRST for last in LAST], count)
    taken = zip(
        draw.sample(STEMS, count),
        draw.sample(range(1850, 2015), count),
        draw.sample(CITIES, count),
        draw.sample(PRODUCTS, count),
        draw.sample(range(100, 1000), count),
        people,
    )
    firms = []
    for stem, founded, city, product, staff, director in taken:
        name = f"{stem}{draw.choice(ENDINGS)} {draw.choice(FORMS)}"
        facts = {"founded": str(founded), "city": city, "product": product, "staff": str(staff), "director": director}
        firms.append((name, facts))
    return firms


def _note(draw: random.Random, name: str, facts: dict[str, str]) -> str:
    """Writes the facts in any order, in any wording, among sentences that say nothing."""
    sentences = [draw.choice(FACTS[fact][1]).format(firm=name, it=it) for fact, it in facts.items()]
    sentences += draw.sample(FILLERS, 3)
    draw.shuffle(sentences)
    return " ".join(sentences)
