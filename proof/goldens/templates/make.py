"""Writes the golden file for chat templates: conversations rendered by Hugging Face transformers.

    pip install transformers==5.24.0 jinja2==3.1.6
    python proof/goldens/templates/make.py engine/kvmodel/tests/goldens/chat_templates.json

templates/ holds ten templates of our own. Each has the constructs of a common family (whitespace control,
namespaces, slices, loops with filters, macros, refusals, dates, blocks of `generation`) with other texts.
Each renders each conversation below, up to the model's answer. The clock is fixed at 2024-07-26 09:05:03. If
a template refuses a conversation, the golden is its refusal.
"""

import datetime
import json
import pathlib
import sys

import jinja2
from transformers.utils import chat_template_utils

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


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2024, 7, 26, 9, 5, 3)


def rendered(template, conversation):
    try:
        (text,), _ = chat_template_utils.render_jinja_template(
            [conversation], chat_template=template, add_generation_prompt=True, **SPECIAL_TOKENS
        )
        return {"text": text}
    except jinja2.exceptions.TemplateSyntaxError:
        raise
    except jinja2.exceptions.TemplateError as error:
        return {"refused": str(error)}


def main(out):
    chat_template_utils.datetime = Clock
    folder = pathlib.Path(__file__).parent / "templates"
    templates = []
    for path in sorted(folder.glob("*.jinja")):
        # The newline at the end of the file is not part of the template.
        text = path.read_text(encoding="utf-8").removesuffix("\n")
        templates.append(
            {"name": path.stem, "template": text, "rendered": [rendered(text, c) for c in CONVERSATIONS]}
        )
    goldens = {"special_tokens": SPECIAL_TOKENS, "conversations": CONVERSATIONS, "templates": templates}
    pathlib.Path(out).write_text(json.dumps(goldens, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
