"""The gate of a model: checks that chunks are exact inside vLLM and that all are found, and asks questions
with and without them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from . import reference
from .chat import Chat, end_tokens
from .compare import Answer, compare
from ..host import UnsupportedHostError, ropes_of
from .local import LocalEngine, divergence
from ..prompt import ChunkPrompt, plan_of
from .questions import NoteQuestion, note_questions
from .verdict import ORDINARY, Finding, Row

MODES = ("alone", "with-system", "behind:3")
# The number of prompts to check for exactness, and the number of tokens in each answer.
SAMPLES, COUNT = 2, 12
MAX_LEN = 4096
# The maximum number of tokens in an answer: enough for a sentence with the fact.
ANSWER = 32

Progress = Callable[[str], None]


class CheckError(RuntimeError):
    """An error: the model cannot be checked. The message gives the reason and a
    remedy."""


@dataclass(frozen=True)
class Options:
    """Settings of a check."""

    model: str
    questions: int = 40
    notes: int = 2
    recompute: tuple[str, ...] = ("none", "link:16", "link:32", "link:64", "question:0.5")
    mode: str = "alone"
    seed: int = 1
    dtype: str = "float32"
    max_len: int | None = None
    """The maximum number of tokens in a prompt and its answer together; by default ``MAX_LEN``, or the
    model's positions if they are fewer.
    """
    host_memory: str = "1GiB"


@dataclass(frozen=True)
class Expected:
    """The answers that transformers gives to a question, in each mode and with ordinary attention."""

    question: NoteQuestion
    chunks: dict[str, Answer]
    plain: Answer


def check(options: Options, progress: Progress) -> tuple[list[Finding], list[Row]]:
    """Checks a model. The rows are empty if reuse is not exact.

    Raises ``CheckError``, ``UnsupportedHostError`` for a model that the connector rejects, and vLLM's own
    errors.
    """
    config = AutoConfig.from_pretrained(options.model).get_text_config()
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    except (OSError, ValueError) as error:
        raise CheckError(f"{options.model} has no tokenizer that transformers can read, but the questions need one") from error
    chat = Chat(tokenizer)
    asked = note_questions(options.seed, options.questions, options.notes)
    options = replace(options, max_len=_max_len(options, config, chat, asked))
    # Check this before loading: transformers runs models that the connector rejects.
    ropes_of(config, options.max_len)
    progress("transformers computes the reference answers")
    expected = references(options.model, chat, asked[:SAMPLES])
    progress("vLLM starts")
    # Exactness is checked in f32, even if questions are answered in another type.
    with started(options, config, "float32") as engine:
        progress("exactness")
        findings = exactness(engine, chat, expected)
        if options.dtype == "float32" and not any(finding.fault for finding in findings):
            return findings, answers(engine, chat, asked, options, progress)
    if any(finding.fault for finding in findings):
        return findings, []
    progress(f"vLLM starts again in {options.dtype}")
    with started(options, config, options.dtype) as engine:
        return findings, answers(engine, chat, asked, options, progress)


def _max_len(options: Options, config: Any, chat: Chat, asked: Sequence[NoteQuestion]) -> int:
    """Returns vLLM's ``max_model_len``. Raises ``CheckError`` if a question with its answer is longer."""
    positions = getattr(config, "max_position_embeddings", MAX_LEN)
    most = options.max_len or min(MAX_LEN, positions)
    if most > positions:
        raise CheckError(f"--max-len is {most}, but the model has only {positions} positions; use --max-len {positions}")
    longest = ANSWER + max(len(chat.prompt(question, _order(question)).token_ids) for question in asked)
    if longest > most:
        raise CheckError(f"prompts and their answers have up to {longest} tokens, more than {most}; raise --max-len, or use fewer --notes")
    return most


@contextmanager
def started(options: Options, config: Any, dtype: str) -> Iterator[LocalEngine]:
    """Runs vLLM for the duration of a block. Raises ``CheckError`` if vLLM itself rejects the model."""
    try:
        engine = LocalEngine(options.model, config, dtype=dtype, max_len=options.max_len, host_memory=options.host_memory)
    except UnsupportedHostError:
        raise
    except Exception as error:
        raise CheckError(f"vLLM cannot run {options.model}: {type(error).__name__}: {error}") from error
    try:
        yield engine
    finally:
        engine.close()


def references(model: str, chat: Chat, asked: Sequence[NoteQuestion]) -> list[Expected]:
    """Computes answers with transformers, then frees its model."""
    loaded, out = reference.load(model), []
    for question in asked:
        parts, text = cut(chat.prompt(question, _order(question)))
        chunks = {"alone": reference.alone(loaded, parts, text, COUNT)}
        for mode in MODES[1:]:
            prompt = chat.prompt(question, _order(question), mode)
            before = plan_of(prompt.kv_transfer_params, prompt.token_ids).before(prompt.token_ids)
            chunks[mode] = reference.after(loaded, before, parts, text, COUNT)
        out.append(Expected(question, chunks, reference.plain(loaded, parts, text, COUNT)))
    del loaded
    gc.collect()
    return out


def cut(prompt: ChunkPrompt) -> tuple[list[list[int]], list[int]]:
    """Returns the tokens of each part (the system prompt and the chunks), and the tokens of the question."""
    parts, at = [], 0
    for length in prompt.kv_transfer_params["chunk_lengths"]:
        parts.append(prompt.token_ids[at : at + length])
        at += length
    return parts, prompt.token_ids[at:]


def _order(question: NoteQuestion) -> list[int]:
    return list(range(len(question.notes)))


def seen_before(engine: LocalEngine, chat: Chat, question: NoteQuestion, mode: str) -> None:
    """Caches a question's notes, in a different order from the question's prompt."""
    order = _order(question)
    prompt = chat.prompt(question, order[1:] + order[:1], mode)
    out = engine.ask(prompt.token_ids, prompt.kv_transfer_params, 1)
    if "chunk_error" in out.params:
        raise CheckError(f"chunks cannot be kept: {out.params['chunk_error']} (--host-memory)")


def exactness(engine: LocalEngine, chat: Chat, expected: Sequence[Expected]) -> list[Finding]:
    """Compares answers with transformers' answers, and counts the tokens that were found in the cache."""
    findings = []
    for mode in MODES:
        compared, apart, found, faults, missed = 0, 0.0, 0, [], []
        for one in expected:
            seen_before(engine, chat, one.question, mode)
            prompt, before = chat.prompt(one.question, _order(one.question), mode), engine.hits()
            out = engine.ask(prompt.token_ids, prompt.kv_transfer_params, COUNT, logprobs=True)
            result = compare(out.answer, one.chunks[mode])
            compared, apart = compared + result.compared, max(apart, result.apart)
            faults += [result.fault] if result.fault else []
            lengths = prompt.kv_transfer_params["chunk_lengths"]
            hits, chunks = engine.hits() - before, sum(lengths[1:])
            # vLLM itself may have found the system prompt.
            if hits < chunks or out.cached_tokens != sum(lengths) or out.params.get("chunk_tokens_computed") != 0:
                missed.append(f"{hits} of {chunks} chunk tokens are hits, and {out.cached_tokens} of {sum(lengths)} were cached")
            found += chunks
        what = f"{mode}: {compared} of {len(expected) * COUNT} tokens compared with transformers, log-probabilities differ by up to {apart:.0e}"
        findings.append(Finding(what, faults[0] if faults else None))
        findings.append(Finding(f"{mode}: all {found} chunk tokens are hits in a different order", missed[0] if missed else None))
    faults = []
    for one in expected:
        prompt = chat.prompt(one.question, _order(one.question))
        out = engine.ask(prompt.token_ids, None, COUNT, logprobs=True)
        faults += [fault] if (fault := compare(out.answer, one.plain).fault) else []
    findings.append(Finding("a request without chunks is not changed by earlier requests with chunks", faults[0] if faults else None))
    return findings


def answers(
    engine: LocalEngine, chat: Chat, asked: Sequence[NoteQuestion], options: Options, progress: Progress
) -> list[Row]:
    """Asks all questions with ordinary attention and with each setting."""
    rows = [Row(ORDINARY), *(Row(recompute) for recompute in options.recompute)]
    stop = end_tokens(Path(options.model), chat.tokenizer)
    for number, question in enumerate(asked):
        progress(f"question {number + 1} of {len(asked)}")
        full, again = None, []
        for row in rows:
            if row.refused is not None:
                continue
            ordinary = row is rows[0]
            prompt = chat.prompt(question, _order(question), options.mode, "none" if ordinary else row.recompute)
            params = None if ordinary else prompt.kv_transfer_params
            out = engine.ask(prompt.token_ids, params, 1)
            if "chunk_error" in out.params:
                row.refused = out.params["chunk_error"]
                continue
            if not ordinary and out.params["chunk_tokens_computed"]:
                raise CheckError("a question's notes do not fit into the memory for chunks; raise --host-memory")
            if full is None:
                full = out.first
                # After the ordinary request, which must find no chunk data in vLLM's own cache.
                seen_before(engine, chat, question, options.mode)
            row.divergences.append(divergence(full, out.first))
            row.seconds.append(out.seconds)
            again.append((row, (prompt.token_ids, params)))
        # Ask for the full answers in one batch: vLLM's own cache now has each setting's version of the
        # prompt.
        texts = engine.texts([request for _, request in again], ANSWER, stop)
        for (row, _), tokens in zip(again, texts):
            row.right.append(question.is_right(chat.decode(tokens)))
    return rows
