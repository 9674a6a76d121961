"""The parts that a request names, and a helper that builds such requests.

A request names its parts in ``kv_transfer_params``, in Python as
``SamplingParams(extra_args={"kv_transfer_params": …})`` and over HTTP in the body:

- ``chunk_lengths``: the number of tokens of the system prompt, which may be 0, then of each chunk. The rest is
  the question.
- ``chunk_separator``: instead, the IDs of the tokens that end the system prompt and each chunk. They are part
  of the text that they end.
- ``chunk_mode``: the tokens that a chunk sees while it is computed: ``"alone"`` (only its own, the default),
  ``"with-system"`` (also the system prompt), ``"sink:K"`` (also the first K tokens of the system prompt) or
  ``"behind:N"`` (also the system prompt and the first N of ``chunk_decoys``).
- ``chunk_decoys``: the token IDs of each decoy, for ``"behind:N"``. Decoys are not part of the prompt: only the
  chunks see them, never the question.
- ``chunk_recompute``: the tokens of chunks that are recomputed with everything before them in sight:
  ``"none"`` (the default), ``"link:K"`` (the first K of each chunk) or ``"question:R"`` (the share R of all
  chunk tokens, the ones that the question attends to most). The first chunk is not recomputed if there is no
  system prompt, or if the chunk saw all of it: it has already seen everything before it.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvcache import BUILT_IN_DECOYS

NAMES = ("chunk_lengths", "chunk_separator", "chunk_mode", "chunk_decoys", "chunk_recompute")
NEAR, VERY_NEAR = 0.6, 0.8
"""How similar a field must be to one of ``NAMES`` to be a misspelling of it, from 0 to 1: beside fields of chunks, and alone."""
SHORT = {name.removeprefix("chunk_"): name for name in NAMES}
"""The fields by the names that the arguments of ``ChunkPrompt.of`` have. Clients write these by mistake."""
MODE = r"alone|with-system|(sink|behind):[1-9]\d*"
RECOMPUTE = r"none|link:\d+|question:(0(\.\d+)?|1(\.0+)?)"


class ChunkRequestError(ValueError):
    """A request whose parts are missing or inconsistent."""


@dataclass(frozen=True)
class Part:
    """Tokens ``start`` to ``end`` of a prompt."""

    start: int
    end: int

    @property
    def tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class ChunkPlan:
    """The parts of a prompt, and the settings for its chunks."""

    system: Part
    chunks: tuple[Part, ...]
    mode: str
    recompute: str
    decoys: tuple[int, ...] = ()
    """The tokens of the decoys that a chunk sees, one decoy after another."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The system prompt, if there is one, and the chunks."""
        return (self.system, *self.chunks) if self.system.tokens > 0 else self.chunks

    @property
    def question_start(self) -> int:
        return self.chunks[-1].end

    def before(self, prompt: Sequence[int]) -> list[int]:
        """Returns the tokens that a chunk sees before its own: tokens of the system prompt, then the
        decoys.
        """
        return [*prompt[: self._seen_system()], *self.decoys]

    def _seen_system(self) -> int:
        """Returns the number of tokens of the system prompt that a chunk sees."""
        if self.mode == "alone":
            return 0
        if self.mode.startswith("sink:"):
            return min(int(self.mode.split(":")[1]), self.system.tokens)
        return self.system.tokens

    def apart(self) -> tuple[Part, ...]:
        """Returns the chunks that did not see everything before them when they were computed."""
        saw_everything = not self.decoys and self._seen_system() == self.system.tokens
        return self.chunks[1:] if saw_everything else self.chunks

    def linked(self) -> list[Part]:
        """Returns the runs of tokens that ``link:K`` recomputes, in order."""
        if not self.recompute.startswith("link:"):
            return []
        count = int(self.recompute.split(":")[1])
        runs = [Part(c.start, min(c.end, c.start + count)) for c in self.apart()]
        return [run for run in runs if run.tokens > 0]

    def chosen_tokens(self) -> int:
        """Returns the number of tokens that ``question:R`` recomputes: the share R of all chunk tokens, but
        at most the tokens of ``apart``.
        """
        if not self.recompute.startswith("question:"):
            return 0
        among, everything = (sum(part.tokens for part in parts) for parts in (self.apart(), self.chunks))
        # A product such as 0.15 * 20 is slightly above 3.
        return min(among, math.ceil(float(self.recompute.split(":")[1]) * everything - 1e-9))


def plan_of(params: dict[str, Any] | None, prompt: Sequence[int]) -> ChunkPlan | None:
    """Returns the parts of a prompt; None for a request without chunks.

    Raises ``ChunkRequestError`` for inconsistent parts.
    """
    if not isinstance(params, dict):
        return None
    names = [name for name in params if isinstance(name, str)]
    has_own = any(name.lower().startswith("chunk") for name in names)
    for name in names:
        if name in NAMES:
            continue
        meant = _meant(name, params[name], has_own=has_own)
        if meant is not None or name.lower().startswith("chunk"):
            hint = f"did you mean {meant}?" if meant is not None else f"the known fields are {', '.join(NAMES)}"
            raise ChunkRequestError(f"the field {name} is unknown; {hint}")
    if not has_own:
        return None
    mode = params.get("chunk_mode", "alone")
    recompute = params.get("chunk_recompute", "none")
    if not (isinstance(mode, str) and re.fullmatch(MODE, mode)):
        raise ChunkRequestError(f"chunk_mode is {mode!r}; use 'alone', 'with-system', 'sink:K' or 'behind:N'")
    if not (isinstance(recompute, str) and re.fullmatch(RECOMPUTE, recompute)):
        raise ChunkRequestError(
            f"chunk_recompute is {recompute!r}; use 'none', 'link:K' or 'question:R' with a fraction R from 0 to 1"
        )
    lengths, separator = params.get("chunk_lengths"), params.get("chunk_separator")
    if (lengths is None) == (separator is None):
        raise ChunkRequestError("pass either chunk_lengths or chunk_separator")
    if lengths is None:
        lengths = _cut(prompt, separator)
    if not (isinstance(lengths, (list, tuple)) and all(type(n) is int and n > 0 for n in lengths[1:]) and _is_length(lengths[:1])):
        raise ChunkRequestError(f"chunk_lengths is {lengths!r}: it must be a list of numbers above 0; only the first one may be 0")
    if len(lengths) < 2:
        raise ChunkRequestError("chunk_lengths needs the length of the system prompt and of at least one chunk")
    if sum(lengths) >= len(prompt):
        raise ChunkRequestError(
            f"the parts have {sum(lengths)} tokens and the prompt has {len(prompt)}; at least one token must be left for the question"
        )
    if lengths[0] == 0 and (mode == "with-system" or mode.startswith("sink:")):
        raise ChunkRequestError(f"chunk_mode {mode} needs a system prompt, and chunk_lengths begins with 0; use 'alone', or pass one")
    parts, start = [], 0
    for length in lengths:
        parts.append(Part(start, start + length))
        start += length
    return ChunkPlan(parts[0], tuple(parts[1:]), mode, recompute, _seen_decoys(mode, params.get("chunk_decoys", ())))


def _meant(name: str, value: Any, *, has_own: bool) -> str | None:
    """Returns the field that a client meant by an unknown one; None for a field that may be for another connector.
    ``has_own`` is true beside fields of chunks.
    """
    near = difflib.get_close_matches(name.lower(), NAMES, n=1, cutoff=NEAR if has_own else VERY_NEAR)
    if near:
        return near[0]
    short = difflib.get_close_matches(name.lower(), SHORT, n=1, cutoff=VERY_NEAR)
    if not short:
        return None
    meant = SHORT[short[0]]
    # Alone, such a name may mean anything, but not with such a value.
    return meant if has_own or _is_value(meant, value) else None


def _is_value(name: str, value: Any) -> bool:
    """Returns true for a value that hardly any field but this one has."""
    if name == "chunk_mode":
        return isinstance(value, str) and re.fullmatch(MODE, value) is not None
    if name == "chunk_recompute":
        return isinstance(value, str) and value != "none" and re.fullmatch(RECOMPUTE, value) is not None
    if not isinstance(value, (list, tuple)):
        return False
    if name == "chunk_decoys":
        return len(value) > 0 and all(_are_tokens(decoy) for decoy in value)
    return _are_tokens(value) and len(value) >= (2 if name == "chunk_lengths" else 1)


# Decision: docs/decisions/vllm.md#decoys-come-with-the-request-and-leave-no-gap
def _seen_decoys(mode: str, decoys: Any) -> tuple[int, ...]:
    """Returns the tokens of the decoys that a chunk sees."""
    if not (isinstance(decoys, (list, tuple)) and all(_are_tokens(decoy) for decoy in decoys)):
        raise ChunkRequestError("chunk_decoys must be a list with a list of token IDs for each decoy, none of them empty")
    if not mode.startswith("behind:"):
        return ()
    needed = int(mode.split(":")[1])
    if len(decoys) < needed:
        raise ChunkRequestError(f"{mode} needs {needed} chunk_decoys, and there are {len(decoys)}; pass more, or use a smaller number")
    return tuple(token for decoy in decoys[:needed] for token in decoy)


def _is_length(value: Sequence[Any]) -> bool:
    """Returns true for a list without a number, or with one that is 0 or above."""
    return all(type(n) is int and n >= 0 for n in value)


def _are_tokens(value: Any) -> bool:
    """Returns true for a list of token IDs that is not empty."""
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(type(token) is int and token >= 0 for token in value)


def _cut(prompt: Sequence[int], separator: Any) -> list[int]:
    """Returns the length of each part that ends with the separator."""
    if not _are_tokens(separator):
        raise ChunkRequestError("chunk_separator must be a list of token IDs")
    ends, width, at = [], len(separator), 0
    separator = list(separator)
    while at + width <= len(prompt):
        if list(prompt[at : at + width]) == separator:
            at += width
            ends.append(at)
        else:
            at += 1
    if len(ends) < 2:
        raise ChunkRequestError(
            f"the separator {separator} occurs {len(ends)} times in the prompt, but must occur at least twice: "
            "after the system prompt and after a chunk. "
            "The tokenizer may have merged it with neighbouring text; tokenize each part separately"
        )
    return [end - start for start, end in zip([0, *ends], ends)]


@dataclass(frozen=True)
class ChunkPrompt:
    """A prompt in parts that are tokenised separately, for ``LLM.generate`` and the HTTP interface.

    >>> prompt = ChunkPrompt.of(lambda text: [ord(c) for c in text], "be brief. ", ["one. ", "two. "], "which?")
    >>> prompt.kv_transfer_params["chunk_lengths"]
    [10, 5, 5]
    >>> len(prompt.token_ids)
    26

    Over HTTP, pass ``token_ids`` as the prompt of a completion, or ``chat_params`` with the messages of a chat.
    """

    token_ids: list[int]
    kv_transfer_params: dict[str, Any]

    @classmethod
    def of(
        cls,
        encode: Callable[[str], list[int]],
        system: str | None,
        documents: Sequence[str],
        question: str,
        *,
        mode: str = "alone",
        recompute: str = "none",
        decoys: Sequence[str] = BUILT_IN_DECOYS,
    ) -> ChunkPrompt:
        """Tokenises the parts with ``encode``, such as ``lambda text: tokenizer.encode(text,
        add_special_tokens=False)``. ``system`` may be ``None`` or empty with the modes ``alone`` and ``behind:N``.

        Raises ``ChunkRequestError`` for parts that are empty or have no tokens.

        ``decoys`` are texts for the mode ``behind:N``, by default built-in ones. Decoys of the same form as
        the documents keep the most answers.
        """
        if not isinstance(documents, (list, tuple)):
            raise ChunkRequestError(f"documents is {documents!r}: it must be a list of texts")
        if not isinstance(decoys, (list, tuple)):
            raise ChunkRequestError(f"decoys is {decoys!r}: it must be a list of texts")
        named = [("the system prompt", "" if system is None else system), ("the question", question)]
        for what, texts in (("document", documents), ("decoy", decoys)):
            named += [(f"{what} {number} of {len(texts)}", text) for number, text in enumerate(texts, start=1)]
        for what, text in named:
            if not isinstance(text, str):
                raise ChunkRequestError(f"{what} is {text!r}: it must be a text")
        parts = [list(encode(text)) if text else [] for text in (system, *documents, question)]
        for number, (text, part) in enumerate(zip(documents, parts[1:]), start=1):
            if not part:
                raise ChunkRequestError(f"document {number} of {len(documents)} has no tokens: {text!r}; leave it out")
        if not documents:
            raise ChunkRequestError("there are no documents; pass at least one, or send an ordinary request")
        if not parts[-1]:
            raise ChunkRequestError(f"the question has no tokens: {question!r}; at least one token must follow the documents")
        tokens = [token for part in parts for token in part]
        params = {
            "chunk_lengths": [len(part) for part in parts[:-1]],
            "chunk_mode": mode,
            "chunk_recompute": recompute,
        }
        if isinstance(mode, str) and mode.startswith("behind:"):
            params["chunk_decoys"] = [list(encode(decoy)) for decoy in decoys]
        plan_of(params, tokens)
        return cls(tokens, params)

    @classmethod
    def of_chat(cls, tokenizer: Any, messages: Sequence[dict[str, Any]], documents: Sequence[Any] = (), **settings: Any) -> ChunkPrompt:
        """Puts a chat into the template of a transformers tokenizer, and cuts it into parts; see ``chat.py``.

        The documents are ``documents`` (texts, or dictionaries as in ``apply_chat_template``), or all content parts
        of the last message except its last one. ``settings`` are the ones of ``of``.
        """
        from .chat import chat_parts

        def encode(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False))

        return cls.of(encode, *chat_parts(tokenizer, messages, documents), **settings)

    @property
    def chat_params(self) -> dict[str, Any]:
        """``kv_transfer_params`` for ``/v1/chat/completions``. vLLM takes the tokens instead of rendering the
        messages."""
        return {**self.kv_transfer_params, "prompt_token_ids": self.token_ids}

    def sampling_params(self, **settings: Any) -> Any:
        """Returns vLLM's ``SamplingParams`` with these settings and the parameters that name the chunks."""
        from vllm import SamplingParams

        extra = dict(settings.pop("extra_args", None) or {})
        return SamplingParams(extra_args={**extra, "kv_transfer_params": self.kv_transfer_params}, **settings)
