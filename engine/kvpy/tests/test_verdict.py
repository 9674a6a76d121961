"""The verdict on a model, and the comparison of answers that it is based on."""

import pytest
from kvcache.vllm.gate.compare import Answer, compare
from kvcache.vllm.gate.verdict import (
    NOTHING_SAVED,
    ORDINARY,
    Finding,
    Limits,
    Paired,
    Row,
    as_json,
    caution,
    judge,
    table,
)


def row(recompute: str, right: int, seconds: float, asked: int = 100, **more: str) -> Row:
    return Row(recompute, [number < right for number in range(asked)], [0.25] * asked, [seconds] * asked, **more)


def some() -> list[Row]:
    return [row(ORDINARY, 60, 1.0), row("none", 40, 0.1), row("link:16", 58, 0.2), row("question:0.5", 60, 0.5)]


def test_the_cheapest_setting_within_the_limit_is_chosen() -> None:
    verdict = judge([Finding("exact")], some(), "alone", Limits())
    assert verdict.fit and verdict.recompute == "link:16"
    assert '"link:16"' in verdict.sentence and "5.0 times as fast" in verdict.sentence
    assert judge([], some(), "alone", Limits(loss=0.01)).recompute == "question:0.5"
    assert judge([], some(), "alone", Limits(loss=0.2)).recompute == "none"
    assert judge([], [some()[0], some()[3], some()[2]], "alone", Limits()).recompute == "link:16", "whatever the order"


def test_a_setting_that_saves_no_time_is_named_with_a_warning() -> None:
    rows = [some()[0], some()[1], row("question:0.5", 60, 1.25)]
    verdict = judge([], rows, "alone", Limits())
    assert verdict.recompute == "question:0.5"
    assert "0.8 times as fast" in verdict.sentence and verdict.sentence.endswith(NOTHING_SAVED)
    assert NOTHING_SAVED not in judge([], some(), "alone", Limits()).sentence


def test_a_setting_that_loses_too_much_or_is_refused_is_not_chosen() -> None:
    verdict = judge([], some()[:2], "alone", Limits())
    assert not verdict.fit and verdict.recompute is None and verdict.sentence.startswith("No setting suits this model")
    refused = [some()[0], row("link:16", 60, 0.1, refused="a sliding window")]
    assert not judge([], refused, "alone", Limits()).fit
    assert "a sliding window" in table(refused) and as_json(refused)[1]["refused"] == "a sliding window"


def test_a_fault_decides_and_too_few_right_answers_say_nothing() -> None:
    broken = judge([Finding("exact"), Finding("hits", "none was found")], [], "alone", Limits())
    assert not broken.fit and "hits: none was found" in broken.sentence
    few = judge([], [row(ORDINARY, 20, 1.0), row("none", 20, 0.1)], "alone", Limits())
    assert not few.fit and few.sentence.startswith("No verdict")


@pytest.mark.parametrize("asked", [1, 5, 10, 24])
def test_a_few_questions_recommend_nothing_however_they_are_answered(asked: int) -> None:
    rows = [row(ORDINARY, asked, 1.0, asked), row("none", asked, 0.1, asked), row("link:16", asked, 0.2, asked)]
    verdict = judge([], rows, "alone", Limits())
    assert not verdict.fit and verdict.recompute is None
    assert verdict.sentence.startswith(f"No verdict: {asked} questions show too little") and "Ask at least 25" in verdict.sentence
    enough = [row(ORDINARY, 25, 1.0, 25), row("none", 25, 0.1, 25)]
    assert judge([], enough, "alone", Limits()).recompute == "none"
    assert judge([], rows, "alone", Limits(loss=1.0)).recompute == "none", "any loss is accepted"


def test_bounds_equal_the_score_test() -> None:
    # If the strategies agree everywhere, the upper limit is z² / (n + z²).
    assert Paired(150, 0, 0).at_most() == pytest.approx(1.645**2 / (150 + 1.645**2), abs=1e-6)
    # Wald's limit is nearly the same for many questions.
    many = Paired(10_000, 2_000, 1_000)
    assert many.at_most() == pytest.approx(0.1 + 1.645 * ((0.3 - 0.01) / 10_000) ** 0.5, abs=1e-4)
    assert Paired(0, 0, 0).at_most() == 1.0 and Paired(5, 5, 0).at_most() > 0.999
    # `kvc tune` reports the same values for these counts.
    assert Paired(400, 12, 6).loss == 0.015 and 0.03 < Paired(400, 12, 6).at_most() < 0.04
    assert Paired.of([True, True, False, False], [True, False, True, False]) == Paired(4, 1, 1)
    assert "6.3 in a hundred" in caution(40)


def test_the_table_and_the_json_have_every_setting() -> None:
    lines = table(some()).splitlines()
    assert len(lines) == 5 and len({len(line) for line in lines}) == 1, lines
    assert lines[1].split() == ["ordinary", "attention", "60", "of", "100", "1000", "ms", "1.0"]
    assert lines[3].split()[:5] == ["link:16", "58", "of", "100", "2.0"]
    figures = as_json(some())[2]
    assert (figures["right"], figures["lost"], figures["gained"], figures["loss"]) == (58, 2, 0, 0.02)
    assert figures["times_as_fast"] == pytest.approx(5.0) and figures["divergence"] == 0.25


def test_answers_are_compared_up_to_a_near_tie_and_no_farther() -> None:
    reference = Answer([5, 6, 7], [-0.1, -0.7, -0.2], [2.0, 0.0005, 2.0])
    same = compare(Answer([5, 6, 7], [-0.1004, -0.7, -0.2]), reference)
    assert (same.compared, same.fault) == (3, None) and same.apart == pytest.approx(4e-4)
    tie = compare(Answer([5, 9, 1], [-0.1, -0.7004, -3.0]), reference)
    assert (tie.compared, tie.fault) == (1, None)


@pytest.mark.parametrize(
    ("tokens", "logprobs", "fault"),
    [
        ([9, 6, 7], [-0.1, -0.7, -0.2], "token 0 is 9 instead of 5"),
        ([5, 6, 7], [-0.1, -0.7, -0.21], "log-probability of token 2"),
        ([5, 6, 7], [-0.1, float("nan"), -0.2], "log-probability of token 1"),
        ([5, 9, 1], [-0.1, -0.8, -3.0], "log-probability of token 1"),
        ([5, 6], [-0.1, -0.7], "2 tokens instead of 3"),
    ],
)
def test_any_other_difference_is_a_fault(tokens: list[int], logprobs: list[float], fault: str) -> None:
    assert fault in compare(Answer(tokens, logprobs), Answer([5, 6, 7], [-0.1, -0.7, -0.2], [2.0, 0.0005, 2.0])).fault


def test_a_near_tie_at_the_first_token_is_no_success() -> None:
    assert "nothing to compare" in compare(Answer([9], [-0.7]), Answer([6], [-0.7], [0.0])).fault
