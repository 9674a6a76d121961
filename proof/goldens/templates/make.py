"""Writes the golden files for chat templates: what Hugging Face transformers and Jinja2 render.

    pip install transformers==5.24.0 jinja2==3.1.6
    python proof/goldens/templates/make.py engine/kvmodel/tests/goldens

chat_templates.json: templates/ holds 26 templates of our own. Each has the constructs of a common family
(whitespace control, namespaces, slices, loops with filters, macros, refusals, dates, tools, documents, parts,
reasoning, blocks of `generation`) with other texts. Each renders each conversation and each request below, up
to the model's answer or to the end of the answer's beginning. The clock is fixed at 2024-07-26 09:05:03. If a
template refuses a conversation, the golden is its refusal; if it fails, the golden is Jinja2's error.

jinja_expressions.json: the values of the expressions in expressions.py, numbers_and_texts.py, values.py and edges.py, as
texts, and the texts of the templates in statements.py, or Jinja2's errors. A text with an address in memory has no golden.
"""

import datetime
import json
import pathlib
import re
import sys

import jinja2
from transformers.utils import chat_template_utils

from edges import EDGES
from expressions import EXPRESSIONS, VARIABLES
from numbers_and_texts import NUMBERS_AND_TEXTS
from statements import STATEMENTS
from values import VALUES

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


def says(role):
    return lambda text: {"role": role, "content": text}


system, user, assistant = says("system"), says("user"), says("assistant")

CONVERSATIONS = [
    [user("Why is the sky blue?")],
    [system("Answer in one word."), user("Why is the sky blue?")],
    [system("  Be\nkind. \n"), user("  Hello \n\n"), assistant(" Hi!\n"), user("And now?\t")],
    [user("<reply>a</reply>"), assistant("<think>\nlong\nthought\n</think>\n\nshort"), user("<reply>b</reply>")],
    [user("a"), assistant("b"), user("c"), assistant("d"), user("e"), assistant("f"), user("g")],
    [user('Quotes "double", \'single\', a \\ and <b>tags</b> & {{ braces }} {% if %}')],
    [user("Grüße aus Köln, 你好, 😀\r\nsecond line"), assistant(""), user("")],
    [user("one"), user("two")],
    [system("first"), system("second"), user("third")],
    [assistant("I begin."), user("Do you?")],
]


def function(name, description, parameters):
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    function(
        "weather_at",
        "Tells the weather. It's \"live\" <now>",
        {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "A town, é or 你好"},
                "unit": {"type": "string", "enum": ["C", "F"], "description": "The unit", "default": "C"},
                "days": {"type": "array", "items": {"type": "integer"}, "description": "Which days"},
            },
            "required": ["place"],
        },
    ),
    function(
        "add",
        "Adds numbers",
        {
            "type": "object",
            "properties": {
                "z": {"type": "number", "description": " last "},
                "a": {"type": ["number", "null"], "description": "first", "nullable": True},
                "o": {"type": "object", "description": "more", "properties": {"p": {"type": "boolean"}}, "required": ["p"]},
            },
            "required": ["z", "a"],
        },
    ),
]
CALL = {"id": "call12345", "type": "function", "function": {"name": "weather_at", "arguments": {"place": "Köln", "days": [1, 2]}}}


def tool(text):
    return {"role": "tool", "tool_call_id": "call12345", "name": "weather_at", "content": text}


REQUESTS = [
    {"messages": [user("Why is the sky blue?")], "tools": TOOLS},
    {
        "messages": [
            system("Be brief."),
            user("How is the weather?"),
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "I look it up."},
            tool('{"t": 21.5}'),
            assistant("<think>\nwarm\n</think>\n\nIt is warm."),
            user("And tomorrow?"),
        ],
        "tools": TOOLS,
        "variables": {"enable_thinking": False, "date_string": "1 Jan 2030"},
    },
    {
        "messages": [user("What do the notes say?")],
        "documents": [
            {"title": "One", "text": "alba is red . bora is blue ."},
            {"doc_id": 7, "title": "Two", "text": "Grüße\nzweite Zeile", "n": 1.0},
        ],
        "variables": {"controls": {"length": "short", "citations": True}},
    },
    {
        "messages": [system("Be /no_think kind."), user("First"), assistant("Second."), user("Third")],
        "variables": {"reasoning_effort": "high", "builtin_tools": ["interpreter", "weather_at"], "thinking": True},
    },
    {"messages": [user("Write a poem."), assistant("Roses are red, ")]},
    {
        "messages": [
            {"role": "user", "content": "Call it"},
            {"role": "assistant", "content": "Sure.", "tool_calls": [CALL]},
            tool("cold"),
            tool("colder"),
        ],
        "tools": TOOLS[:1],
        "documents": [{"text": "none"}],
    },
]


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2024, 7, 26, 9, 5, 3)


def rendered(template, conversation, tools=None, documents=None, variables=None):
    messages = chat_template_utils._normalize_chat_messages(conversation)
    continued = messages[-1]["role"] == "assistant"
    try:
        (text,), _ = chat_template_utils.render_jinja_template(
            [messages],
            tools=tools,
            documents=documents,
            chat_template=template,
            add_generation_prompt=not continued,
            continue_final_message=continued,
            **{**SPECIAL_TOKENS, **(variables or {})},
        )
        return {"text": text}
    except jinja2.exceptions.TemplateSyntaxError:
        raise
    except (jinja2.exceptions.UndefinedError, jinja2.exceptions.SecurityError) as error:
        return {"failed": str(error)}
    except jinja2.exceptions.TemplateError as error:
        return {"refused": str(error)}
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        return {"failed": str(error)}


def text_of(template):
    try:
        text = chat_template_utils._compile_jinja_template(template).render(**VARIABLES)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}
    if re.search(r" at 0x[0-9a-f]+>", text):
        return {"failed": "the text has an address in memory"}
    if any("\ud800" <= c <= "\udfff" for c in text):
        return {"failed": "the text has half of a character"}
    return {"text": text}


def write(path, goldens):
    path.write_text(json.dumps(goldens, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def main(out):
    chat_template_utils.datetime = Clock
    out, folder = pathlib.Path(out), pathlib.Path(__file__).parent / "templates"
    templates = []
    for path in sorted(folder.glob("*.jinja")):
        # The newline at the end of the file is not part of the template.
        text = path.read_bytes().decode("utf-8").removesuffix("\n")
        conversations = [rendered(text, c) for c in CONVERSATIONS]
        requests = [
            rendered(text, r["messages"], r.get("tools"), r.get("documents"), r.get("variables")) for r in REQUESTS
        ]
        templates.append({"name": path.stem, "template": text, "rendered": conversations, "requested": requests})
    goldens = {"special_tokens": SPECIAL_TOKENS, "conversations": CONVERSATIONS, "requests": REQUESTS}
    write(out / "chat_templates.json", {**goldens, "templates": templates})
    every = EXPRESSIONS + NUMBERS_AND_TEXTS + VALUES + EDGES
    expressions = [{"expression": one, **text_of("{{ " + one + " }}")} for one in every]
    statements = [{"template": one, **text_of(one)} for one in STATEMENTS]
    goldens = {"variables": VARIABLES, "expressions": expressions, "templates": statements}
    write(out / "jinja_expressions.json", goldens)


if __name__ == "__main__":
    main(*sys.argv[1:])
