"""The verdict on a model: which setting to use, based on how many right answers it loses compared with
ordinary attention.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcache._native import Paired


@dataclass(frozen=True)
class Finding:
    """A checked claim, with the problem if it does not hold."""

    what: str
    fault: str | None = None


@dataclass
class Row:
    """The answers with one setting. The first row is ordinary attention, named ``ORDINARY``."""

    recompute: str
    right: list[bool] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)
    """The divergences of the first token's distribution from ordinary attention's, in nats."""
    seconds: list[float] = field(default_factory=list)
    refused: str | None = None
    """Why the model cannot use this setting."""

    def mean_seconds(self) -> float:
        return sum(self.seconds) / max(1, len(self.seconds))

    def mean_divergence(self) -> float:
        return sum(self.divergences) / max(1, len(self.divergences))


ORDINARY = "ordinary attention"


@dataclass(frozen=True)
class Verdict:
    """The setting to use, if one is fit, and a sentence that explains it."""

    fit: bool
    recompute: str | None
    sentence: str


@dataclass(frozen=True)
class Limits:
    """The maximum loss, and what a verdict needs: a minimum share of right answers with ordinary attention, and
    enough questions.
    """

    loss: float = 0.02
    floor: float = 0.3
    bound: float = 0.1
    """The loss that a verdict must rule out (95 %, one-sided) if no answer at all is lost."""


NOTHING_SAVED = "That saves no time here. Measure again on an idle machine, or with more notes (--notes)."
"""What a verdict adds if the setting that it names is slower than ordinary attention."""


def judge(findings: Iterable[Finding], rows: Sequence[Row], mode: str, limits: Limits) -> Verdict:
    """Chooses the fastest setting to the first token whose loss of right answers is within the limit."""
    broken = [finding for finding in findings if finding.fault]
    if broken:
        return Verdict(False, None, f"Do not use chunks with this model: {broken[0].what}: {broken[0].fault}.")
    ordinary, ways = rows[0], [row for row in rows[1:] if row.refused is None]
    asked, right = len(ordinary.right), sum(ordinary.right)
    if right < limits.floor * asked or not asked:
        return Verdict(
            False,
            None,
            f"No verdict: ordinary attention answers only {right} of {asked} questions correctly, fewer than {limits.floor:.0%}. "
            "Use fewer notes per question, or a model that follows instructions.",
        )
    # Whoever accepts a larger loss needs fewer questions.
    clean, bound = Paired(asked, 0, 0).at_most(), max(limits.bound, limits.loss)
    if clean > bound:
        enough = next(count for count in itertools.count(asked) if Paired(count, 0, 0).at_most() <= bound)
        return Verdict(
            False,
            None,
            f"No verdict: {asked} questions show too little. Even if no answer is lost, a loss of {100 * clean:.1f} in a hundred cannot be "
            f"ruled out (95 %, one-sided). Ask at least {enough} with --questions.",
        )
    for row in sorted(ways, key=Row.mean_seconds):
        paired = Paired.of(ordinary.right, row.right)
        # Rounded as printed, so the verdict agrees with the table.
        if round(100 * paired.loss, 6) <= round(100 * limits.loss, 6):
            faster = ordinary.mean_seconds() / row.mean_seconds()
            saved = "" if faster > 1 else f" {NOTHING_SAVED}"
            return Verdict(
                True,
                row.recompute,
                f'Use chunk_recompute "{row.recompute}" with chunk_mode "{mode}": it is the cheapest setting that loses at most '
                f"{100 * limits.loss:g} of a hundred right answers here ({sum(row.right)} of {asked} right, ordinary attention {right}), "
                f"and the first token arrives {faster:.1f} times as fast.{saved}",
            )
    return Verdict(
        False,
        None,
        f"No setting suits this model: each loses more than {100 * limits.loss:g} of a hundred right answers with chunk_mode {mode!r}. "
        "Try the other mode, a larger share such as question:0.7, or --tolerance.",
    )


def caution(asked: int) -> str:
    """Returns a warning about the limited evidence from a small set of questions."""
    clean = Paired(asked, 0, 0).at_most()
    return (
        f"{asked} questions bound the loss only roughly: even if no answer is lost, "
        f"a loss of {100 * clean:.1f} in a hundred cannot be ruled out (95 %, one-sided; Tango, 1998). Ask more with --questions before you rely on the result, and also ask your own questions."
    )


def table(rows: Sequence[Row]) -> str:
    """Formats the rows for people."""
    lines = [("recomputed", "right", "points lost (at most)", "divergence", "first token", "times as fast")]
    ordinary = rows[0]
    for row in rows:
        if row.refused is not None:
            lines.append((row.recompute, "refused", row.refused, "", "", ""))
            continue
        lost = away = ""
        if row is not ordinary:
            paired = Paired.of(ordinary.right, row.right)
            lost = f"{100 * paired.loss:.1f} ({100 * paired.at_most():.1f})"
            away = f"{row.mean_divergence():.3f}"
        seconds = row.mean_seconds()
        faster = f"{ordinary.mean_seconds() / seconds:.1f}" if seconds else ""
        lines.append((row.recompute, f"{sum(row.right)} of {len(row.right)}", lost, away, f"{1e3 * seconds:.0f} ms", faster))
    wide = [max(len(line[at]) for line in lines if line[1] != "refused" or at < 2) for at in range(6)]

    def formatted(line: tuple[str, ...]) -> str:
        left = [0] if line[1] != "refused" else range(6)
        return "  ".join(cell.ljust(wide[at]) if at in left else cell.rjust(wide[at]) for at, cell in enumerate(line)).rstrip()

    return "\n".join(map(formatted, lines))


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns the table's figures as objects."""
    ordinary, out = rows[0], []
    for row in rows:
        if row.refused is not None:
            out.append({"recompute": row.recompute, "refused": row.refused})
            continue
        paired = Paired.of(ordinary.right, row.right)
        seconds = row.mean_seconds()
        out.append({
            "recompute": row.recompute,
            "right": sum(row.right),
            "asked": paired.asked,
            "lost": paired.lost,
            "gained": paired.gained,
            "loss": paired.loss,
            "loss_at_most": paired.at_most(),
            "divergence": row.mean_divergence(),
            "ttft_seconds": seconds,
            "times_as_fast": ordinary.mean_seconds() / seconds if seconds else None,
        })
    return out
