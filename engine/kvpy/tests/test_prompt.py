"""The parameters that a request uses to name its chunks."""

import subprocess
import sys

import pytest

from kvcache.vllm import prompt


def test_clients_need_no_vllm() -> None:
    program = "import sys; sys.modules['vllm'] = None; from kvcache.vllm import ChunkPrompt"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_parts_are_cut_by_lengths_or_by_a_separator() -> None:
    tokens = [1, 2, 9, 8, 3, 9, 8, 4, 5, 9, 8, 6]
    by_separator = prompt.plan_of({"chunk_separator": [9, 8]}, tokens)
    by_lengths = prompt.plan_of({"chunk_lengths": [4, 3, 4]}, tokens)
    assert by_separator == by_lengths
    assert (by_lengths.question_start, by_lengths.before(tokens), len(by_lengths.chunks)) == (11, [], 2)
    for other in ({"something": 1}, {1: 2, None: 3}, {}, None, [], "chunk_lengths"):
        assert prompt.plan_of(other, tokens) is None


def test_modes_determine_what_chunks_see_and_links_what_is_recomputed() -> None:
    def plan(mode: str, recompute: str = "none"):
        params = {"chunk_lengths": [3, 2, 4], "chunk_mode": mode, "chunk_recompute": recompute}
        params["chunk_decoys"] = [[70, 71], [80], [90]]
        return prompt.plan_of(params, list(range(12)))

    seen = [plan(mode).before(range(12)) for mode in ("alone", "with-system", "sink:2", "sink:9", "behind:2")]
    assert seen == [[], [0, 1, 2], [0, 1], [0, 1, 2], [0, 1, 2, 70, 71, 80]]
    runs = [(run.start, run.end) for run in plan("alone", "link:3").linked()]
    assert runs == [(3, 5), (5, 8)]
    assert [(run.start, run.end) for run in plan("with-system", "link:3").linked()] == [(5, 8)]
    assert plan("alone", "link:0").linked() == [] and plan("alone").linked() == []
    for mode in ("sink:2", "behind:1"):
        assert [(run.start, run.end) for run in plan(mode).apart()] == [(3, 5), (5, 9)]
    # The whole system prompt is everything before the first chunk.
    for mode in ("sink:3", "sink:9", "with-system"):
        assert [(run.start, run.end) for run in plan(mode, "link:3").linked()] == [(5, 8)]


def test_a_first_chunk_without_anything_before_it_is_not_recomputed() -> None:
    def plan(mode: str, recompute: str):
        params = {"chunk_lengths": [0, 5, 4], "chunk_mode": mode, "chunk_recompute": recompute, "chunk_decoys": [[70, 71]]}
        return prompt.plan_of(params, list(range(12)))

    assert [(run.start, run.end) for run in plan("alone", "link:3").linked()] == [(5, 8)]
    assert [(part.start, part.end) for part in plan("alone", "question:1").apart()] == [(5, 9)]
    assert [plan("alone", f"question:{share}").chosen_tokens() for share in ("0.2", "1")] == [2, 4]
    # A decoy is not part of the prompt, so the chunk must forget it.
    assert [(run.start, run.end) for run in plan("behind:1", "link:3").linked()] == [(0, 3), (5, 8)]


def test_a_share_counts_all_chunks_but_is_taken_from_chunks_that_have_not_seen_everything() -> None:
    def chosen(mode: str, recompute: str) -> int:
        params = {"chunk_lengths": [3, 5, 15], "chunk_mode": mode, "chunk_recompute": recompute}
        return prompt.plan_of(params, list(range(30))).chosen_tokens()

    assert [chosen("alone", how) for how in ("question:0.15", "question:0.21", "question:1", "question:0")] == [3, 5, 20, 0]
    assert [chosen("with-system", how) for how in ("question:0.15", "question:0.7", "question:0.8")] == [3, 14, 15]
    assert chosen("alone", "link:3") == chosen("alone", "none") == 0


@pytest.mark.parametrize("own", [{}, {"chunk_lengths": [3, 4]}])
def test_fields_of_other_connectors_are_left_to_them(own: dict) -> None:
    names = ["do_remote_decode", "do_remote_prefill", "remote_engine_id", "remote_block_ids", "remote_port", "transfer_id", "num_tokens"]
    params = {**dict.fromkeys(names, 1), "prompt_token_ids": [1] * 9, "prefix_report": True, 7: "x", **own}
    assert (prompt.plan_of(params, list(range(9))) is None) == (not own)
    # Alone, such names may mean anything.
    anything = {"lengths": [3], "recompute": True, "mode": "x", "length": 4, "separator": ",", "decoys": 2, "Recompute": "none"}
    assert own or prompt.plan_of(anything, list(range(9))) is None


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"chunk_length": [3, 4]}, "chunk_length is unknown; did you mean chunk_lengths"),
        ({"chunk_lengths": [3, 4], "chunk_recompte": "none"}, "chunk_recompte is unknown; did you mean chunk_recompute"),
        ({"Chunk_lengths": [3, 4]}, "Chunk_lengths is unknown; did you mean chunk_lengths"),
        ({"chnk_lengths": [3, 4]}, "chnk_lengths is unknown; did you mean chunk_lengths"),
        ({"hunk_separator": [99], "prefix_report": True}, "did you mean chunk_separator"),
        ({"chunk_lengths": [3, 4], "CHUNK_MODE": "sink:2"}, "did you mean chunk_mode"),
        ({"chunk_lengths": [3, 4], "recompute": "link:2"}, "did you mean chunk_recompute"),
        ({"lengths": [3, 4], "chunk_mode": "alone"}, "did you mean chunk_lengths"),
        ({"chunk_lengths": [3, 4], "chunkmode": "alone"}, "did you mean chunk_mode"),
        ({"chunk_lengths": [3, 4], "chunk_qqqqqqqqqqqq": 1}, "the known fields are chunk_lengths"),
        # The names of the arguments of ChunkPrompt.of.
        ({"chunk_lengths": [3, 4], "mode": "with-system"}, "mode is unknown; did you mean chunk_mode"),
        ({"chunk_lengths": [3, 4], "Mode": 7}, "Mode is unknown; did you mean chunk_mode"),
        ({"chunk_lengths": [3, 4], "recomp": "link:2"}, "recomp is unknown; did you mean chunk_recompute"),
        ({"chunk_lengths": [3, 4], "decoy": [[1]]}, "decoy is unknown; did you mean chunk_decoys"),
        ({"chunk_mode": "alone", "length": 3}, "length is unknown; did you mean chunk_lengths"),
        ({"chunk_lengths": [3, 4], "separators": [9]}, "separators is unknown; did you mean chunk_separator"),
        # Alone, but with a value that says what they mean.
        ({"length": [3, 4]}, "length is unknown; did you mean chunk_lengths"),
        ({"Lengths": (3, 4)}, "Lengths is unknown; did you mean chunk_lengths"),
        ({"mode": "with-system"}, "mode is unknown; did you mean chunk_mode"),
        ({"recompute": "question:0.5"}, "recompute is unknown; did you mean chunk_recompute"),
        ({"seperator": [9, 8]}, "seperator is unknown; did you mean chunk_separator"),
        ({"decoys": [[1, 2], [3]]}, "decoys is unknown; did you mean chunk_decoys"),
        ({"Chunks": [3, 4]}, "the field Chunks is unknown"),
        ({"chunk_lengths": [0, 4], "chunk_mode": "with-system"}, "with-system needs a system prompt"),
        ({"chunk_lengths": [0, 4], "chunk_mode": "sink:2"}, "sink:2 needs a system prompt"),
        ({"chunk_lengths": [-1, 4]}, "only the first one may be 0"),
        ({"chunk_lengths": [3, 9]}, "at least one token must be left for the question"),
        ({"chunk_lengths": [3]}, "of at least one chunk"),
        ({"chunk_lengths": [3, 0]}, "above 0"),
        ({"chunk_lengths": [3, True]}, "above 0"),
        ({"chunk_lengths": "3,4"}, "above 0"),
        ({"chunk_mode": "alone"}, "either"),
        ({"chunk_lengths": [3, 4], "chunk_separator": [1]}, "either"),
        ({"chunk_lengths": [3, 4], "chunk_mode": "sink:0"}, "chunk_mode"),
        ({"chunk_lengths": [3, 4], "chunk_mode": "behind:0"}, "chunk_mode"),
        ({"chunk_lengths": [3, 4], "chunk_mode": "slots:4"}, "chunk_mode"),
        ({"chunk_lengths": [3, 4], "chunk_mode": "behind:2", "chunk_decoys": [[1]]}, "behind:2 needs 2 chunk_decoys"),
        ({"chunk_lengths": [3, 4], "chunk_mode": "behind:1"}, "there are 0"),
        ({"chunk_lengths": [3, 4], "chunk_mode": "behind:1", "chunk_decoys": [[]]}, "none of them empty"),
        ({"chunk_lengths": [3, 4], "chunk_mode": "behind:1", "chunk_decoys": ["a note"]}, "list of token IDs"),
        ({"chunk_lengths": [3, 4], "chunk_recompute": "link"}, "chunk_recompute"),
        ({"chunk_lengths": [3, 4], "chunk_recompute": "question:1.2"}, "chunk_recompute"),
        ({"chunk_separator": "##"}, "token IDs"),
        ({"chunk_separator": [99]}, "occurs 0 times"),
    ],
)
def test_wrong_parts_are_refused(params: dict, reason: str) -> None:
    with pytest.raises(prompt.ChunkRequestError, match=reason):
        prompt.plan_of(params, list(range(12)))


def test_the_helper_tokenises_parts_separately() -> None:
    made = prompt.ChunkPrompt.of(lambda text: [ord(c) for c in text], "be brief. ", ["one. ", "two. "], "which?", mode="with-system")
    assert made.kv_transfer_params == {"chunk_lengths": [10, 5, 5], "chunk_mode": "with-system", "chunk_recompute": "none"}
    assert bytes(made.token_ids) == b"be brief. one. two. which?"
    decoys = ["three. ", "four. "]
    made = prompt.ChunkPrompt.of(lambda text: [ord(c) for c in text], "a", ["b"], "c", mode="behind:1", decoys=decoys)
    assert [bytes(decoy).decode() for decoy in made.kv_transfer_params["chunk_decoys"]] == decoys
    assert bytes(made.token_ids) == b"abc"
    with pytest.raises(prompt.ChunkRequestError):
        prompt.ChunkPrompt.of(lambda text: [ord(c) for c in text], "a", [""], "b")


def test_a_prompt_needs_no_system_prompt_where_chunks_do_not_see_one() -> None:
    def encode(text: str) -> list[int]:
        return [ord(c) for c in text]

    for system in (None, ""):
        made = prompt.ChunkPrompt.of(encode, system, ["one. ", "two. "], "which?")
        assert made.kv_transfer_params["chunk_lengths"] == [0, 5, 5] and bytes(made.token_ids) == b"one. two. which?"
        plan = prompt.plan_of(made.kv_transfer_params, made.token_ids)
        assert [(part.start, part.end) for part in plan.parts] == [(0, 5), (5, 10)] and plan.question_start == 10
        assert prompt.ChunkPrompt.of(encode, system, ["b"], "c", mode="behind:1", decoys=["d"]).token_ids
        with pytest.raises(prompt.ChunkRequestError, match="needs a system prompt"):
            prompt.ChunkPrompt.of(encode, system, ["one. "], "which?", mode="with-system")


@pytest.mark.parametrize(
    ("documents", "question", "reason"),
    [
        (["one", ""], "which?", "document 2 of 2 has no tokens: ''"),
        ([" "], "which?", "document 1 of 1 has no tokens: ' '"),
        (["one", None], "which?", "document 2 of 2 is None: it must be a text"),
        ([{"text": "one"}], "which?", "document 1 of 1 is {'text': 'one'}: it must be a text"),
        ("one", "which?", "documents is 'one': it must be a list of texts"),
        ([], "which?", "there are no documents"),
        (["one"], "", "the question has no tokens: ''"),
    ],
)
def test_errors_about_empty_parts_name_the_text(documents: list[str], question: str, reason: str) -> None:
    with pytest.raises(prompt.ChunkRequestError, match=reason):
        prompt.ChunkPrompt.of(lambda text: [ord(c) for c in text.strip()], "be brief. ", documents, question)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"system": 7}, "the system prompt is 7: it must be a text"),
        ({"system": ["be brief"]}, r"the system prompt is \['be brief'\]: it must be a text"),
        ({"question": 7}, "the question is 7: it must be a text"),
        ({"question": None}, "the question is None: it must be a text"),
        ({"decoys": "a note"}, "decoys is 'a note': it must be a list of texts"),
        ({"decoys": ["a note", 7]}, "decoy 2 of 2 is 7: it must be a text"),
        ({"mode": 7}, "chunk_mode is 7; use 'alone'"),
        ({"recompute": None}, "chunk_recompute is None; use 'none'"),
    ],
)
def test_arguments_that_are_no_texts_are_named(changed: dict, reason: str) -> None:
    given = {"system": "be brief. ", "documents": ["one. "], "question": "which?", "mode": "behind:1", "decoys": ["two. "], **changed}
    with pytest.raises(prompt.ChunkRequestError, match=reason):
        prompt.ChunkPrompt.of(lambda text: [ord(c) for c in text], **given)
