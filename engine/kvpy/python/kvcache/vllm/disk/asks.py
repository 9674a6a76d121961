"""The scheduler's side of the disk: what the workers are asked to fetch, and their answers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from ..orders import Answers, Fetch, Record, merged

Answered = Callable[[int, str | None], None]
"""Called with the number of a record when all workers have answered: with None if the record is in host memory, or with
the reason why it is not."""


@dataclass(eq=False)
class Ask:
    """Records that the workers were asked to fetch."""

    answered: Answered
    left: set[int] = field(default_factory=set)
    """The numbers of the records without an answer."""


class Asks:
    """The questions to the disks of all ranks. Every question is answered, because every worker has a deadline."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.numbers = itertools.count()
        self.orders: list[Fetch] = []
        self.used: list[tuple[bool, list[bytes]]] = []
        self.under_way: dict[str, Ask] = {}
        self.sums: Answers = {}

    def ask(self, records: list[Record], answered: Answered) -> None:
        """Has all workers fetch records, in the order in which they are needed."""
        name = f"fetch-{next(self.numbers)}"
        self.under_way[name] = Ask(answered, set(range(len(records))))
        self.orders.append(Fetch(name, records))

    def use(self, keys: list[bytes], *, of_prefix: bool) -> None:
        """Notes that a request has found these in host memory. The last one leaves the disk last."""
        if keys:
            self.used.append((of_prefix, keys))

    def take_used(self) -> list[tuple[bool, list[bytes]]]:
        taken, self.used = self.used, []
        return taken

    def take_orders(self) -> list[Fetch]:
        taken, self.orders = self.orders, []
        return taken

    def answer(self, answers: Answers) -> None:
        """Takes the answers of some workers. Nobody waits for those to questions before a reset."""
        self.sums = merged(self.sums, {name: one for name, one in answers.items() if name in self.under_way})
        for name in answers:
            ask = self.under_way.get(name)
            if ask is None:
                continue
            done = {number: reason for number, (count, reason) in self.sums[name].items() if count >= self.ranks}
            for number, reason in done.items():
                del self.sums[name][number]
                ask.left.discard(number)
                ask.answered(number, reason)
            if not ask.left:
                del self.sums[name], self.under_way[name]

    def reset(self) -> None:
        """Forgets all questions. Nobody waits for their answers any more."""
        self.orders.clear()
        self.used.clear()
        self.under_way.clear()
        self.sums.clear()
