"""The documents' examples run."""

import os
import pathlib

import examples

ROOT = pathlib.Path(__file__).parents[3]


def test_the_examples_of_the_readme_run() -> None:
    paged, foreign, managers = examples.run(ROOT / "engine/kvpy/README.md")
    assert paged["out"].any() and paged["chunks"].get_metrics().cached_chunks == 1
    assert foreign["layers"][0][6, :, :, :].any()
    assert managers["profiler"].summary()["prefill"]["count"] == 1


def test_the_page_of_the_project_answers_a_question() -> None:
    before = os.getcwd()
    os.chdir(ROOT)
    try:
        (names,) = examples.run(ROOT / "README.md", asks_servers=False)
    finally:
        os.chdir(before)
    assert names["answer"].text.strip() == "red"
    assert names["answer"].num_cached_tokens >= names["answer"].num_prompt_tokens - 3
