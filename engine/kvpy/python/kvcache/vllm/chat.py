"""Chats cut into parts: the model's own template renders the messages, and each document becomes a chunk.

The documents are marked, the template renders them, and the rendered text is cut at the marks. A template can put
text between documents. The spaces and line ends that follow each document belong to it, and so does the rest if it
precedes each document, so that a document has the same tokens wherever it is. Special tokens are never cut.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from .prompt import ChunkRequestError

BORDER = "\n\n"
"""Ends each document of a template that knows no documents."""
# Letters and digits, which no template changes.
BEGIN, END = "kvcacheBegin{}x", "kvcacheEnd{}x"

Document = str | dict[str, str]


def chat_parts(tokenizer: Any, messages: Sequence[dict[str, Any]], documents: Sequence[Document] = ()) -> tuple[str, list[str], str]:
    """Returns the text before the documents, the documents, and the text after them.

    Raises ``ChunkRequestError`` if there are no documents, or if the template does not render each one as it is.
    """
    messages, parts = _without_parts(messages)
    documents = _check_documents(documents)
    if parts and documents:
        raise ChunkRequestError("pass the documents either as content parts of the last message or as documents, not both")
    documents = documents or parts
    if not documents:
        raise ChunkRequestError("the chat has no documents; pass documents, or several content parts in the last message")
    if any(END.format("")[:-1] in str(one) or BEGIN.format("")[:-1] in str(one) for one in (messages, documents)):
        raise ChunkRequestError(f"the chat contains the text {BEGIN.format('')[:-1]!r} or {END.format('')[:-1]!r}, which marks documents")
    render = _template if not parts and _knows_documents(tokenizer, messages) else _in_message
    lead, trail = _borders(_cut(render(tokenizer, messages, [documents[0], documents[0]]), 2))
    before, texts, between = _cut(render(tokenizer, messages, documents), len(documents))
    gaps = [before, *between]
    cut = []
    for number, text in enumerate(texts):
        begins, ends = gaps[number].endswith(lead), gaps[number + 1].startswith(trail)
        if not begins or not ends:
            raise ChunkRequestError(f"the chat template renders document {number + 1} in a way of its own, so it cannot be found at other places")
        cut.append(f"{lead}{text}{trail}")
    for number, gap in enumerate(gaps[1:-1], start=1):
        if gap != trail + lead:
            # Such as a number, which stays with the document before it.
            cut[number - 1] += gap[len(trail) : len(gap) - len(lead)]
    return before[: len(before) - len(lead)], cut, gaps[-1][len(trail) :]


def _without_parts(messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Document]]:
    """Returns the messages with texts as contents, and the documents among the parts of the last one."""
    if not isinstance(messages, (list, tuple)):
        raise ChunkRequestError(f"messages is {messages!r}: it must be a list of messages")
    plain, documents = [], []
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise ChunkRequestError(f"message {number} is {message!r}: it must be a dictionary with a role and a content")
        if not isinstance(message.get("role"), str):
            raise ChunkRequestError(f"the role of message {number} is {message.get('role')!r}: it must be a text, such as 'user'")
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            texts = [_text_of(part, f"part {at} of message {number}") for at, part in enumerate(content, start=1)]
            if number == len(messages):
                documents, texts = list(texts[:-1]), texts[-1:]
            content = "".join(texts)
        elif not isinstance(content, (str, type(None))):
            raise ChunkRequestError(f"the content of message {number} is {content!r}: it must be a text or a list of parts")
        plain.append({**message, "content": content})
    if not plain or not plain[-1]["content"]:
        raise ChunkRequestError("the last message of the chat must be a question with a text")
    return plain, documents


def _text_of(part: Any, name: str) -> str:
    """Returns the text of a content part."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise ChunkRequestError(f"{name} is {part!r}: it must be a dictionary such as {{'type': 'text', 'text': 'a document'}}")
    if "type" not in part:
        raise ChunkRequestError(f"{name} has no field 'type'; the type of a document is 'text'")
    if part["type"] != "text":
        raise ChunkRequestError(f"{name} has the type {part['type']!r}; chunks are text")
    if not isinstance(part.get("text"), str):
        reason = f"has the text {part['text']!r}, which is not a text" if "text" in part else "has no field 'text'"
        raise ChunkRequestError(f"{name} {reason}")
    return part["text"]


def _check_documents(documents: Sequence[Document]) -> list[Document]:
    """Returns the documents as a list. Raises ``ChunkRequestError`` for one that is neither a text nor a dictionary with
    texts."""
    if documents is None:
        return []
    if not isinstance(documents, (list, tuple)):
        raise ChunkRequestError(f"documents is {documents!r}: it must be a list of texts or dictionaries")
    for number, one in enumerate(documents, start=1):
        if isinstance(one, dict):
            if not any(isinstance(text, str) and text for text in one.values()):
                raise ChunkRequestError(f"document {number} is {one!r}: none of its fields has a text")
        elif not isinstance(one, str):
            raise ChunkRequestError(f"document {number} is {one!r}: it must be a text, or a dictionary such as {{'title': '', 'text': 'a document'}}")
    return list(documents)


def _marked(document: Document, number: int) -> Any:
    begin, end = BEGIN.format(number), END.format(number)
    if isinstance(document, str):
        return f"{begin}{document}{end}"
    return {name: f"{begin}{text}{end}" if isinstance(text, str) else text for name, text in document.items()}


def _knows_documents(tokenizer: Any, messages: list[dict[str, Any]]) -> bool:
    """Returns true if the template renders documents itself."""
    return BEGIN.format(0) in _template(tokenizer, messages, ["a document"])


def _template(tokenizer: Any, messages: list[dict[str, Any]], documents: Sequence[Document]) -> str:
    """Renders documents by the template."""
    marked = [_marked(one if isinstance(one, dict) else {"title": "", "text": one}, i) for i, one in enumerate(documents)]
    return str(tokenizer.apply_chat_template(messages, documents=marked, tokenize=False, add_generation_prompt=True))


def _in_message(tokenizer: Any, messages: list[dict[str, Any]], documents: Sequence[Document]) -> str:
    """Renders documents at the beginning of the last message."""

    def text(document: Document) -> str:
        return document if isinstance(document, str) else BORDER.join(value for value in document.values() if isinstance(value, str))

    marked = "".join(f"{_marked(text(one).rstrip(), i)}{BORDER}" for i, one in enumerate(documents))
    last = {**messages[-1], "content": marked + messages[-1]["content"]}
    return str(tokenizer.apply_chat_template([*messages[:-1], last], tokenize=False, add_generation_prompt=True))


def _cut(text: str, count: int) -> tuple[str, list[str], list[str]]:
    """Returns the text before the documents, the documents, and the texts after each of them, without marks."""
    documents, after = [], []
    before, found, rest = text.partition(BEGIN.format(0))
    for number in range(count):
        begin, end, following = BEGIN.format(number), END.format(number), BEGIN.format(number + 1)
        own, follows, next_rest = rest.partition(following) if number + 1 < count else (rest, following, "")
        last = own.rfind(end)
        if not found or not follows or last < 0:
            raise ChunkRequestError(f"the chat template does not render document {number + 1}")
        documents.append(own[:last].replace(begin, "").replace(end, ""))
        after.append(own[last + len(end) :])
        rest = next_rest
    if any(mark.format("")[:-1] in one for mark in (BEGIN, END) for one in (before, *documents, *after)):
        raise ChunkRequestError("the chat template renders a document more than once")
    return before, documents, after


def _borders(cut: tuple[str, list[str], list[str]]) -> tuple[str, str]:
    """Returns the texts that precede and follow every document, from a chat with the same document twice."""
    before, _, (between, last) = cut
    common = os.path.commonprefix([between, last])
    # Only spaces and line ends: a longer text could end inside a special token.
    trail = common[: len(common) - len(common.lstrip())]
    lead = between[len(trail) :]
    return (lead if before.endswith(lead) else ""), trail
