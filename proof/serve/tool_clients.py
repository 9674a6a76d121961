"""Clients that make a model call a tool, and answer in JSON.

Each test asks for a colour and a number of coats of paint, whose schema the answer must match.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from collections.abc import Callable

MODEL = "tiny-rag"
QUESTION = "alba ?"
ROOM = 1500
"""The number of tokens in which every forced answer ends."""


class Paint(BaseModel):
    """Paints the harbour."""

    model_config = ConfigDict(extra="forbid")

    colour: Literal["red", "blue"]
    coats: Literal[1, 2, 3]


PARAMETERS = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "coats": {"type": "integer", "minimum": 1, "maximum": 3}},
    "required": ["colour", "coats"],
    "additionalProperties": False,
}
FUNCTION = {"name": "paint", "description": "Paints the harbour.", "parameters": PARAMETERS}


def painted(given: object) -> Paint:
    """Checks what a client got by the schema."""
    return Paint.model_validate_json(given) if isinstance(given, str) else Paint.model_validate(given)


def check(truth: bool, shown: object) -> None:
    if not truth:
        raise AssertionError(shown)


class OpenAi:
    """OpenAI's client: chats and responses."""

    def __init__(self, url: str) -> None:
        import openai

        self.library = openai
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.messages: list[Any] = [{"role": "user", "content": QUESTION}]
        self.settings: dict[str, Any] = {"model": MODEL, "messages": self.messages, "max_completion_tokens": ROOM, "temperature": 0}
        self.tools: list[Any] = [{"type": "function", "function": FUNCTION}]

    def test_a_chat_calls_a_tool_and_gets_its_result(self) -> None:
        named: Any = {"type": "function", "function": {"name": "paint"}}
        create = self.client.chat.completions.create
        for choice in ("required", named):
            answer = create(**self.settings, tools=self.tools, tool_choice=choice, parallel_tool_calls=False).choices[0]
            check(answer.finish_reason == "tool_calls" and answer.message.content is None, answer)
            (call,) = answer.message.tool_calls
            check(call.function.name == "paint", call)
            painted(call.function.arguments)
            result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
            again = {**self.settings, "messages": [*self.messages, answer.message, result]}
            check(bool(create(**again, tools=self.tools, tool_choice=choice).choices[0].message.tool_calls), "no second call")

    def test_a_streamed_chat_calls_a_tool(self) -> None:
        with self.client.chat.completions.stream(**self.settings, tools=self.tools, tool_choice="required") as stream:
            kinds = {event.type for event in stream}
            answer = stream.get_final_completion().choices[0]
        check("tool_calls.function.arguments.done" in kinds and not answer.message.content, kinds)
        check(answer.finish_reason == "tool_calls" and bool(answer.message.tool_calls), answer)
        for call in answer.message.tool_calls:
            painted(call.function.arguments)

    def test_a_chat_is_parsed(self) -> None:
        parse = self.client.chat.completions.parse
        check(isinstance(parse(**self.settings, response_format=Paint).choices[0].message.parsed, Paint), "no model")
        tool = self.library.pydantic_function_tool(Paint, name="paint")
        calls = parse(**self.settings, tools=[tool], tool_choice="required").choices[0].message.tool_calls
        check(all(isinstance(call.function.parsed_arguments, Paint) for call in calls) and bool(calls), calls)

    def test_a_response_calls_a_function_and_is_parsed(self) -> None:
        settings: dict[str, Any] = {"model": MODEL, "input": QUESTION, "max_output_tokens": ROOM, "temperature": 0}
        tools: list[Any] = [{"type": "function", **FUNCTION, "strict": True}]
        forced = {**settings, "tools": tools, "tool_choice": "required"}
        answer = self.client.responses.create(**forced)
        check(bool(answer.output) and all(item.type == "function_call" for item in answer.output), answer)
        for item in answer.output:
            painted(item.arguments)
        with self.client.responses.stream(**forced) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        check("response.function_call_arguments.done" in kinds and "response.output_text.delta" not in kinds, kinds)
        for item in final.output:
            painted(item.arguments)
        results = [{"type": "function_call_output", "call_id": item.call_id, "output": "done"} for item in answer.output]
        history = [{"role": "user", "content": QUESTION}, *answer.output, *results]
        check(self.client.responses.create(**{**forced, "input": history}).output[0].type == "function_call", "no second call")
        check(isinstance(self.client.responses.parse(**settings, text_format=Paint).output_parsed, Paint), "no model")

    def test_errors_are_the_clients_own(self) -> None:
        create = self.client.chat.completions.create
        impossible: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "colour"}}}
        for more in ({"response_format": impossible}, {"tools": [{"type": "function", "function": {"name": ""}}]}):
            try:
                create(**self.settings, **more)
            except self.library.BadRequestError as error:
                check(next(iter(more)) in (error.param or ""), error)
            else:
                raise AssertionError("the request was not refused")


class Anthropic:
    """Anthropic's client: messages."""

    def __init__(self, url: str) -> None:
        import anthropic

        self.client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        self.settings: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": ROOM}
        tool = {"name": "paint", "description": FUNCTION["description"], "input_schema": PARAMETERS}
        self.tools: dict[str, Any] = {"tools": [tool], "tool_choice": {"type": "any"}}

    def test_a_message_uses_a_tool_and_gets_its_result(self) -> None:
        answer = self.client.messages.create(**self.settings, **self.tools)
        check(answer.stop_reason == "tool_use" and {block.type for block in answer.content} == {"tool_use"}, answer)
        results = []
        for block in answer.content:
            painted(block.input)
            results.append({"type": "tool_result", "tool_use_id": block.id, "content": "done"})
        turns = [*self.settings["messages"], {"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
        again = self.client.messages.create(**{**self.settings, "messages": turns}, **self.tools)
        check(again.stop_reason == "tool_use", again)

    def test_a_streamed_message_uses_a_tool(self) -> None:
        with self.client.messages.stream(**self.settings, **self.tools) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_message()
        check("input_json" in kinds and "text" not in kinds and final.stop_reason == "tool_use", kinds)
        for block in final.content:
            painted(block.input)

    def test_a_message_is_parsed(self) -> None:
        parsed = self.client.messages.parse(**self.settings, output_format=Paint).parsed_output
        check(isinstance(parsed, Paint), parsed)


class Cohere:
    """Cohere's client: chats."""

    def __init__(self, url: str) -> None:
        import cohere

        self.client = cohere.ClientV2(base_url=url, api_key="none")
        messages = [{"role": "user", "content": QUESTION}]
        self.settings: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": ROOM, "seed": 1}
        self.tools: dict[str, Any] = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "REQUIRED"}

    def test_a_chat_calls_a_tool(self) -> None:
        answer = self.client.chat(**self.settings, **self.tools)
        check(answer.finish_reason == "TOOL_CALL" and bool(answer.message.tool_calls), answer)
        for call in answer.message.tool_calls:
            painted(call.function.arguments)
        events = list(self.client.chat_stream(**self.settings, **self.tools))
        deltas = [event.delta.message.tool_calls.function.arguments for event in events if event.type == "tool-call-delta"]
        check(deltas == [call.function.arguments for call in answer.message.tool_calls], deltas)

    def test_a_chat_answers_in_json(self) -> None:
        answer = self.client.chat(**self.settings, response_format={"type": "json_object", "json_schema": PARAMETERS})
        painted(answer.message.content[0].text)


class LangChain:
    """LangChain's chat model over OpenAI's API."""

    def __init__(self, url: str) -> None:
        from langchain_openai import ChatOpenAI

        settings: dict[str, Any] = {"temperature": 0, "max_tokens": ROOM}
        self.model = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=MODEL, **settings)

    def test_tools_are_bound(self) -> None:
        bound = self.model.bind_tools([Paint], tool_choice="required", strict=True)
        calls = bound.invoke(QUESTION).tool_calls
        check(bool(calls) and all(call["name"] == "Paint" for call in calls), calls)
        for call in calls:
            painted(call["args"])
        whole = None
        for chunk in bound.stream(QUESTION):
            whole = chunk if whole is None else whole + chunk
        check(json.dumps([call["args"] for call in whole.tool_calls]) == json.dumps([call["args"] for call in calls]), whole)

    def test_output_is_structured(self) -> None:
        for method in ("json_schema", "function_calling"):
            # Only strict schemas forbid other fields, which the small model would add without end.
            structured = self.model.with_structured_output(Paint, method=method, strict=True)
            check(isinstance(structured.invoke(QUESTION), Paint), method)


TOOL_CLIENTS: dict[str, Callable[[str], object]] = {"openai": OpenAi, "anthropic": Anthropic, "cohere": Cohere, "langchain": LangChain}
