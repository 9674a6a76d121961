"""Asks a running server with unmodified clients of other people.

    python check_clients.py [--kvc target/release/kvc] [--only openai,anthropic,…] [--record FILE]

The clients are those of OpenAI, Anthropic, Cohere, LangChain and LlamaIndex, in the versions of requirements.txt. The server has the
built-in model. Each client asks about the demo's documents, whole and streamed, and again with the documents in another order:
all their tokens must be found then, and the answer must be that of `kvc run`. Wrong requests must become the client's own
errors. A second server has the same model with a chat template that writes tools. The clients force it to call a tool and to
answer in JSON, because the model does neither by itself.

``--record`` writes the requests as the clients sent them, one a line, with the statuses of the answers. The tests of the crate
`kvserve` send them again (`engine/kvserve/tests/recorded.jsonl`), so that they need no clients.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from served import DOCUMENTS, ROOT, SYSTEM, names, served, text_of, with_tools
from tool_clients import TOOL_CLIENTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

QUESTION = "alba ?"
TOKENS = 8


class Asked:
    """The server, what it is asked, and what the answers must be."""

    def __init__(self, url: str, kvc: str) -> None:
        self.url, self.kvc = url, kvc
        self.names = names()
        self.answer = self.of_program()
        self.tokens = 0
        """The number of tokens of all documents, once an answer has told it."""

    def documents(self, turned: int = 0) -> list[dict[str, str]]:
        """Returns the documents, the first ``turned`` of them last."""
        order = self.names[turned:] + self.names[:turned]
        return [{"id": name, "text": text_of(name)} for name in order]

    def of_program(self) -> str:
        """Returns the answer of `kvc run`."""
        command = [self.kvc, "run", "--json", "--system", SYSTEM, "--prompt", QUESTION, "--max-new-tokens", str(TOKENS), "--chat"]
        command += [option for name in self.names for option in ("--document", str(DOCUMENTS / f"{name}.txt"))]
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)["text"]


def same(shown: object, expected: object, what: str) -> None:
    if shown != expected:
        raise AssertionError(f"{what}: {shown!r} instead of {expected!r}")


def at_least(shown: float, least: float, what: str) -> None:
    if shown < least:
        raise AssertionError(f"{what}: {shown} is below {least}")


def refused(error: type[Exception], call: Callable[[], object], *words: str) -> Exception:
    """Checks that a call raises the client's own error, whose message has some words."""
    try:
        call()
    except error as raised:
        for word in words:
            if word not in str(raised):
                raise AssertionError(f"{word!r} is missing in {raised}") from raised
        return raised
    raise AssertionError(f"{error.__name__} was not raised")


class OpenAi:
    """OpenAI's client: chats, completions and responses."""

    def __init__(self, asked: Asked) -> None:
        import openai

        self.library, self.asked = openai, asked
        self.client = openai.OpenAI(base_url=f"{asked.url}/v1", api_key="none", max_retries=0)
        self.model = self.client.models.list().data[0].id

    def settings(self, turned: int = 0) -> dict[str, Any]:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
        more = {"documents": self.asked.documents(turned)}
        return {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": TOKENS, "extra_body": more}

    def test_a_chat_and_the_same_documents_in_another_order(self) -> None:
        first = self.client.chat.completions.create(**self.settings())
        same(first.choices[0].message.content, self.asked.answer, "the answer of kvc run")
        same(first.choices[0].finish_reason, "stop", "the end")
        self.asked.tokens = sum(part["tokens"] for part in first.model_extra["kv"]["parts"])
        again = self.client.chat.completions.create(**self.settings(2))
        same(again.choices[0].message.content, self.asked.answer, "the answer with the documents in another order")
        sources = {part["source"] for part in again.model_extra["kv"]["parts"]}
        same(sources, {"cache"}, "where documents come from")
        at_least(again.usage.prompt_tokens_details.cached_tokens, self.asked.tokens, "cached tokens")

    def test_a_stream_has_the_same_text_and_its_usage(self) -> None:
        chunks = list(self.client.chat.completions.create(**self.settings(), stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        same(text, self.asked.answer, "the text")
        same([chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1], "stop", "the end")
        at_least(chunks[-1].usage.prompt_tokens_details.cached_tokens, self.asked.tokens, "cached tokens")

    def test_several_answers_seeds_and_log_probabilities(self) -> None:
        settings = {**self.settings(), "temperature": 1.2, "n": 3, "seed": 7, "logprobs": True, "top_logprobs": 2}
        ones, others = (self.client.chat.completions.create(**settings) for _ in range(2))
        same([one.message.content for one in ones.choices], [one.message.content for one in others.choices], "answers with a seed")
        same([one.index for one in ones.choices], [0, 1, 2], "indices")
        for choice in ones.choices:
            for token in choice.logprobs.content:
                same(len(token.top_logprobs), 2, "likeliest tokens")
                at_least(0.0, token.logprob, "a log-probability")

    def test_a_stop_string_ends_an_answer(self) -> None:
        # The built-in model answers with one word.
        stopped = self.client.chat.completions.create(**self.settings(), stop=[self.asked.answer[:2]])
        same((stopped.choices[0].message.content, stopped.choices[0].finish_reason), ("", "stop"), "a stopped answer")

    def test_completions(self) -> None:
        settings: dict[str, Any] = {"model": self.model, "prompt": "alba", "max_tokens": 5, "temperature": 0}
        whole = self.client.completions.create(**settings, echo=False)
        pieces = self.client.completions.create(**settings, stream=True)
        same("".join(piece.choices[0].text for piece in pieces), whole.choices[0].text, "a streamed completion")
        same(whole.usage.completion_tokens <= 5, True, "the limit of tokens")

    def test_responses(self) -> None:
        settings: dict[str, Any] = {"model": self.model, "instructions": SYSTEM, "input": QUESTION, "max_output_tokens": TOKENS}
        settings |= {"temperature": 0, "extra_body": {"documents": self.asked.documents(1)}}
        whole = self.client.responses.create(**settings)
        same((whole.output_text, whole.status), (self.asked.answer, "completed"), "a response")
        at_least(whole.usage.input_tokens_details.cached_tokens, self.asked.tokens, "cached tokens")
        with self.client.responses.stream(**settings) as stream:
            for _ in stream:
                pass
            same(stream.get_final_response().output_text, self.asked.answer, "a streamed response")

    def test_errors_are_the_clients_own(self) -> None:
        chat, errors = self.client.chat.completions.create, self.library
        refused(errors.NotFoundError, lambda: chat(**{**self.settings(), "model": "gpt-9"}), "gpt-9")
        refused(errors.BadRequestError, lambda: chat(**{**self.settings(), "temperature": -1}), "temperature")
        refused(errors.BadRequestError, lambda: chat(**self.settings(), top_p=7), "top_p")
        long = [{"role": "user", "content": "alba " * 20_000}]
        error = refused(errors.BadRequestError, lambda: chat(**{**self.settings(), "messages": long}))
        same(error.code, "context_length_exceeded", "the code")
        refused(errors.BadRequestError, lambda: self.client.responses.create(model=self.model, input="alba", previous_response_id="resp_1"), "previous_response_id")

    def test_many_at_once(self) -> None:
        async def ask() -> list[str | None]:
            async with self.library.AsyncOpenAI(base_url=f"{self.asked.url}/v1", api_key="none") as client:
                asked = (client.chat.completions.create(**self.settings(turned % 5)) for turned in range(24))
                return [one.choices[0].message.content for one in await asyncio.gather(*asked)]

        same(set(asyncio.run(ask())), {self.asked.answer}, "24 answers")


class Anthropic:
    """Anthropic's client: messages with documents and search results."""

    def __init__(self, asked: Asked) -> None:
        import anthropic

        self.library, self.asked = anthropic, asked
        self.client = anthropic.Anthropic(base_url=asked.url, api_key="none", max_retries=0)
        self.model = "tiny-rag"

    def settings(self, kind: str, turned: int = 0) -> dict[str, Any]:
        def block(one: dict[str, str]) -> dict[str, Any]:
            content = [{"type": "text", "text": one["text"]}]
            if kind == "search_result":
                return {"type": kind, "source": f"file:{one['id']}", "title": one["id"], "content": content}
            source = {"type": "text", "media_type": "text/plain", "data": one["text"]} if kind == "text" else {"type": "content", "content": content}
            return {"type": "document", "source": source, "title": one["id"]}

        content = [*(block(one) for one in self.asked.documents(turned)), {"type": "text", "text": QUESTION}]
        messages = [{"role": "user", "content": content}]
        # The client has no argument for the temperature any more.
        more = {"temperature": 0}
        return {"model": self.model, "system": SYSTEM, "messages": messages, "max_tokens": TOKENS, "extra_body": more}

    def test_documents_in_each_form_are_found_in_any_order(self) -> None:
        for turned, kind in enumerate(("text", "content", "search_result")):
            self.client.messages.create(**self.settings(kind))
            again = self.client.messages.create(**self.settings(kind, turned + 1))
            same(again.content[0].text, self.asked.answer, f"the answer behind {kind}")
            same(again.stop_reason, "end_turn", "the end")
            parts = again.model_extra["kv"]["parts"]
            same({part["source"] for part in parts}, {"cache"}, "where documents come from")
            at_least(again.usage.cache_read_input_tokens, sum(part["tokens"] for part in parts), "cached tokens")

    def test_a_stream_has_the_same_text(self) -> None:
        with self.client.messages.stream(**self.settings("search_result")) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        same((text, final.content[0].text), (self.asked.answer,) * 2, "the text")
        at_least(final.usage.output_tokens, 1, "answer tokens")

    def test_tokens_are_counted(self) -> None:
        settings = self.settings("text")
        counted = self.client.messages.count_tokens(**{name: settings[name] for name in ("model", "system", "messages")})
        usage = self.client.messages.create(**settings).usage
        every = usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
        same(counted.input_tokens, every, "counted tokens")

    def test_results_of_tools_are_documents(self) -> None:
        settings = self.settings("search_result")
        *results, question = settings["messages"][0]["content"]
        call = {"type": "tool_use", "id": "toolu_1", "name": "search", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": results}
        settings["messages"] = [{"role": "user", "content": "find"}, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result, question]}]
        parts = self.client.messages.create(**settings).model_extra["kv"]["parts"]
        same(len(parts), len(self.asked.names), "documents")

    def test_errors_are_the_clients_own(self) -> None:
        create, errors = self.client.messages.create, self.library
        refused(errors.NotFoundError, lambda: create(**{**self.settings("text"), "model": "claude-9"}), "claude-9")
        refused(errors.BadRequestError, lambda: create(**{**self.settings("text"), "extra_body": {"temperature": 3}}), "temperature")
        refused(errors.BadRequestError, lambda: create(**{**self.settings("text"), "max_tokens": -1}), "max_tokens")


class Cohere:
    """Cohere's client: chats with documents."""

    def __init__(self, asked: Asked) -> None:
        import cohere

        self.library, self.asked = cohere, asked
        self.client = cohere.ClientV2(base_url=asked.url, api_key="none")

    def settings(self, turned: int = 0) -> dict[str, Any]:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
        documents = [{"id": one["id"], "data": {"text": one["text"]}} for one in self.asked.documents(turned)]
        return {"model": "tiny-rag", "messages": messages, "documents": documents, "temperature": 0, "max_tokens": TOKENS}

    def test_documents_are_found_in_any_order(self) -> None:
        self.client.chat(**self.settings())
        again = self.client.chat(**self.settings(3))
        same((again.message.content[0].text, again.finish_reason), (self.asked.answer, "COMPLETE"), "the answer")
        at_least(again.usage.cached_tokens, self.asked.tokens, "cached tokens")

    def test_a_stream_has_the_same_text(self) -> None:
        events = list(self.client.chat_stream(**self.settings(1)))
        text = "".join(event.delta.message.content.text for event in events if event.type == "content-delta")
        same((text, events[-1].delta.finish_reason), (self.asked.answer, "COMPLETE"), "the stream")

    def test_errors_are_the_clients_own(self) -> None:
        from cohere.errors import BadRequestError, NotFoundError

        chat = self.client.chat
        refused(NotFoundError, lambda: chat(**{**self.settings(), "model": "command-z"}), "command-z")
        refused(BadRequestError, lambda: chat(**{**self.settings(), "temperature": 9}), "temperature")


class LangChain:
    """LangChain's chat model over OpenAI's API."""

    def __init__(self, asked: Asked) -> None:
        from langchain_core.messages import HumanMessage, SystemMessage
        from langchain_openai import ChatOpenAI

        self.asked = asked
        self.messages = [SystemMessage(SYSTEM), HumanMessage(QUESTION)]

        def model(turned: int) -> ChatOpenAI:
            more = {"documents": asked.documents(turned)}
            settings: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS, "extra_body": more}
            return ChatOpenAI(base_url=f"{asked.url}/v1", api_key="none", model="tiny-rag", **settings)

        self.model = model

    def test_invoke_and_stream_and_batch(self) -> None:
        answer = self.model(0).invoke(self.messages)
        same(answer.content, self.asked.answer, "the answer")
        again = self.model(3).invoke(self.messages)
        same(again.content, self.asked.answer, "the answer with the documents in another order")
        at_least(again.usage_metadata["input_token_details"]["cache_read"], self.asked.tokens, "cached tokens")
        same("".join(chunk.content for chunk in self.model(1).stream(self.messages)), self.asked.answer, "the stream")
        same({one.content for one in self.model(2).batch([self.messages] * 6)}, {self.asked.answer}, "a batch")


class LlamaIndex:
    """LlamaIndex's model over APIs like OpenAI's."""

    def __init__(self, asked: Asked) -> None:
        from llama_index.core.llms import ChatMessage
        from llama_index.llms.openai_like import OpenAILike

        self.asked = asked
        self.messages = [ChatMessage(role="system", content=SYSTEM), ChatMessage(role="user", content=QUESTION)]

        def model(turned: int) -> OpenAILike:
            more = {"extra_body": {"documents": asked.documents(turned)}}
            settings: dict[str, Any] = {"is_chat_model": True, "temperature": 0, "max_tokens": TOKENS, "additional_kwargs": more}
            return OpenAILike(api_base=f"{asked.url}/v1", api_key="none", model="tiny-rag", context_window=4096, **settings)

        self.model = model

    def test_chat_and_stream(self) -> None:
        answer = self.model(4).chat(self.messages)
        same(answer.message.content, self.asked.answer, "the answer")
        again = self.model(2).chat(self.messages)
        same(again.message.content, self.asked.answer, "the answer with the documents in another order")
        parts = again.raw.model_extra["kv"]["parts"]
        same({part["source"] for part in parts}, {"cache"}, "where documents come from")
        at_least(again.raw.usage.prompt_tokens_details.cached_tokens, sum(part["tokens"] for part in parts), "cached tokens")
        same("".join(piece.delta for piece in self.model(4).stream_chat(self.messages)), self.asked.answer, "the stream")


class Recorder:
    """Writes each request once, as it goes over the wire."""

    HEADERS = ("accept", "content-type", "anthropic-version", "x-client-name")

    def __init__(self) -> None:
        self.name = ""
        self.tools = False
        """True if the server's model has a template that writes tools."""
        self.lines: dict[str, str] = {}
        # The clients differ in the library that they send requests with.
        for library in ("httpx", "httpx2"):
            self._listen(importlib.import_module(library))

    def _listen(self, library: Any) -> None:
        send, send_async = library.Client.send, library.AsyncClient.send

        def sent(client: Any, request: Any, **settings: Any) -> Any:
            answer = send(client, request, **settings)
            self.add(request, answer.status_code)
            return answer

        async def sent_async(client: Any, request: Any, **settings: Any) -> Any:
            answer = await send_async(client, request, **settings)
            self.add(request, answer.status_code)
            return answer

        library.Client.send, library.AsyncClient.send = sent, sent_async

    def add(self, request: Any, status: int) -> None:
        body = request.content.decode()
        if len(body) > LONG:
            return
        headers = {name: request.headers[name] for name in self.HEADERS if name in request.headers}
        path = request.url.raw_path.decode()
        one = {"client": self.name, "status": status, "method": request.method, "path": path, "headers": headers, "body": body}
        one |= {"tools": True} if self.tools else {}
        self.lines.setdefault(json.dumps([self.name, path, body]), json.dumps(one, ensure_ascii=False))

    def write(self, path: str) -> None:
        Path(path).write_text("".join(f"{line}\n" for line in self.lines.values()))


LONG = 20_000
"""The number of bytes from which a request is not recorded."""

CLIENTS: dict[str, Callable[[Asked], object]] = {"openai": OpenAi, "anthropic": Anthropic, "cohere": Cohere, "langchain": LangChain, "llama-index": LlamaIndex}


def tests(client: object) -> Iterator[tuple[str, Callable[[], None]]]:
    for name, method in inspect.getmembers(client, inspect.ismethod):
        if name.startswith("test_"):
            yield name.removeprefix("test_").replace("_", " "), method


def run(clients: dict[str, Callable[[Any], object]], server: Any, recorder: Recorder | None) -> int:
    """Runs the tests of clients. Returns the number of those that failed."""
    failed = 0
    for name, client in clients.items():
        if recorder:
            recorder.name = name
        for test, call in tests(client(server)):
            try:
                call()
            except Exception as error:
                failed += 1
                print(f"FAILED  {name}: {test}: {type(error).__name__}: {error}")
            else:
                print(f"ok      {name}: {test}")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvc", default=str(ROOT / "target/release/kvc"))
    parser.add_argument("--only", default=",".join(CLIENTS), help="clients, with commas between them")
    parser.add_argument("--record", help="a file for the requests")
    args = parser.parse_args()
    recorder = Recorder() if args.record else None
    asked_for = args.only.split(",")
    with served(args.kvc, "--reuse-anyway") as url:
        asked = Asked(url, args.kvc)
        failed = run({name: CLIENTS[name] for name in asked_for}, asked, recorder)
    with TemporaryDirectory() as place, served(args.kvc, str(with_tools(Path(place)))) as url:
        if recorder:
            recorder.tools = True
        failed += run({name: client for name, client in TOOL_CLIENTS.items() if name in asked_for}, url, recorder)
    if recorder:
        recorder.write(args.record)
    if failed:
        sys.exit(f"{failed} failed")


if __name__ == "__main__":
    main()
