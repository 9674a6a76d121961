"""Runs the commands of ``docs/vllm.md`` from the first one to the last one, as written, including over HTTP. Run by the
slice `vllm-docs` of `cargo xtask deep`.

    python check_docs.py MODEL [--fresh]

MODEL is a folder with the model that the page names. The page's blocks are found by the second word of their fence, and
run in the page's order, in a home folder of their own. There, `~/vllm` is the environment that runs this program or,
with `--fresh`, is made by the page's first command, which takes a quarter of an hour. With `--fresh`, the chat also runs
in a client's environment, made by the page's commands for one. No slice passes `--fresh`, which downloads 2 GB: run it
by hand when the page's installation has changed. The model is in the cache of Hugging Face, so it is not downloaded. A free port is inserted, and the server gets the flags that the page gives for
small machines. Every check prints a line; the exit status is 1 if any of them fails. Needs Rust, bash, curl and jq.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/vllm.md"
SMALL = "--enforce-eager --max-model-len 4096 --kv-cache-memory-bytes 1073741824"
# The time to wait for the server to answer, in seconds.
PATIENCE = 900
# The environment of the commands. The page's block `settings` adds to it.
ENVIRONMENT = {**os.environ}
# The number of answers out of 40 that may differ between machines, because their kernels round in other ways.
CLOSE = 2


class Page:
    """The page's blocks, and the output that the page shows for them."""

    def __init__(self, port: int) -> None:
        text = PAGE.read_text()
        assert SMALL in text, f"the page does not have {SMALL}"
        text = re.sub(r"\b8000\b", str(port), text)
        self.blocks: dict[str, str] = {}
        self.printed: dict[str, str] = {}
        self.left: list[str] = []
        """The blocks that have not run yet, in order."""
        name = None
        for fence, block in re.findall(r"^```(.+?)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            if fence == "text" and name:
                self.printed[name] = block
            kind, _, name = fence.partition(" ")
            assert name or kind == "text", f"a block of {kind} has no name, so it is not run: {block[:60]}"
            if name:
                self.blocks[name] = block
                self.left.append(name)

        self.text = text

    def next(self, name: str) -> str:
        """Returns the next block, which has this name."""
        assert self.left.pop(0) == name, f"the block {name} is not next on the page"
        return self.blocks[name]

    def run(self, name: str) -> list[str]:
        """Runs the next block, which has this name, and returns the lines that it prints."""
        block = self.next(name)
        if not block.lstrip().startswith(("from ", "import ")):
            return output(["bash", "-euo", "pipefail", "-c", block])
        return python(block)


def go_home(home: Path, model: Path, name: str, *, fresh: bool) -> None:
    """Makes a home folder with an environment and a cached model of this name."""
    real = Path.home()
    ENVIRONMENT.update(
        HOME=str(home),
        HF_HOME=str(home / "huggingface"),
        HF_HUB_OFFLINE="1",
        RUSTUP_HOME=os.environ.get("RUSTUP_HOME", str(real / ".rustup")),
        CARGO_HOME=os.environ.get("CARGO_HOME", str(real / ".cargo")),
        PIP_CACHE_DIR=os.environ.get("PIP_CACHE_DIR", str(real / ".cache/pip")),
        VLLM_CPU_OMP_THREADS_BIND=os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto"),
    )
    # The page's commands find what they have installed, in the folder that the page names.
    ENVIRONMENT.pop("PYTHONPATH", None)
    ENVIRONMENT.pop("VLLM", None)
    if not fresh:
        (home / "vllm").symlink_to(sys.prefix)
    cached = home / "huggingface/hub" / f"models--{name.replace('/', '--')}"
    snapshot = cached / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text(snapshot.name)
    for file in model.iterdir():
        if file.is_file():
            (snapshot / file.name).symlink_to(file)


def adopt(block: str) -> None:
    """Runs a block that sets variables, and keeps them for later blocks."""
    done = subprocess.run(["bash", "-euc", f"{block}\nenv -0"], env=ENVIRONMENT, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    ENVIRONMENT.update(line.split("=", 1) for line in done.stdout.decode().split("\0") if "=" in line)


def output(command: list[str]) -> list[str]:
    # The program is looked up in the commands' environment, not in this one's.
    command = ["env", *command]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"exit status {done.returncode} of {command}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return [line for line in done.stdout.splitlines() if line.strip()]


def python(block: str, interpreter: str = "python") -> list[str]:
    """Runs a program, and returns the lines that it prints."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program.py"
        program.write_text(block)
        return output([interpreter, str(program)])


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


@contextmanager
def server(command: str, port: int):
    """Runs the server until the end of the `with` block. Waits until it answers."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            ["bash", "-c", f"exec env {command.strip()} {SMALL}"],
            env=ENVIRONMENT,
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            began = time.monotonic()
            while not answers(port):
                if process.poll() is not None or time.monotonic() - began > PATIENCE:
                    log.seek(0)
                    raise RuntimeError(f"the server does not answer: {log.read()[-6000:]}")
                time.sleep(1)
            print(f"ok      the server answers after {time.monotonic() - began:.0f} s", flush=True)
            yield
        finally:
            stop(process)


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://localhost:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def stop(process: subprocess.Popen[Any]) -> None:
    """Stops the server and the processes that it started."""
    for number, patience in ((signal.SIGTERM, 30), (signal.SIGKILL, 10)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


class Checks:
    def __init__(self, page: Page) -> None:
        self.page, self.failures = page, 0

    def say(self, what: str, fault: str | None) -> None:
        self.failures += fault is not None
        print(f"{'ok' if fault is None else 'FAILED':7} {what}{'' if fault is None else ': ' + fault}", flush=True)

    def equal(self, what: str, got: Any, expected: Any) -> None:
        self.say(what, None if got == expected else f"{got} instead of {expected}")

    def curl(self) -> None:
        answers = [json.loads(line) for line in self.page.run("curl")]
        self.reused("curl", [(one["cached"], one["chunks"], one["text"]) for one in answers])
        self.equal("the page shows it", answers, [json.loads(line) for line in self.page.printed["curl"].splitlines()])

    def reused(self, who: str, answers: list[tuple[int, dict[str, Any], str]]) -> None:
        """The second request reuses all tokens before the question, in another order."""
        self.equal(f"{who} asks twice", len(answers), 2)
        (cached, chunks, _), (again, chunks_again, text) = answers
        everything = chunks["chunk_tokens_reused"] + chunks["chunk_tokens_computed"]
        self.say(f"{who}: the documents have {everything} tokens", None if everything > 0 else "none")
        # vLLM's own cache may have a block that extends into the question.
        fault = None if min(cached, again) >= everything else f"{cached}, {again}"
        self.say(f"{who}: all of them are cached when the question runs", fault)
        self.equal(f"{who}: in another order all are reused", chunks_again, {"chunk_tokens_reused": everything, "chunk_tokens_computed": 0})
        first = answers[0][2]
        wrong = [one for one in (first, text) if "Lind" not in one or "Moss" in one]
        self.say(f"{who}: the answers are {first!r} and {text!r}", "they are wrong" if wrong else None)

    @staticmethod
    def printed(lines: list[str]) -> list[tuple[int, dict[str, int], str]]:
        """Parses the output of a Python block: a number, a dictionary, and the beginning of the text."""
        found = [re.match(r"(\d+) (\{.*?\}) (.*)", line) for line in lines]
        return [(int(line[1]), ast.literal_eval(line[2]), line[3]) for line in found if line]

    def client(self) -> list[tuple[int, dict[str, int], str]]:
        answers = self.printed(self.page.run("client"))
        self.reused("the openai client", answers)
        self.shown("client", answers)
        return answers

    def chat(self) -> None:
        answers = self.printed(self.page.run("chat"))
        self.reused("a chat", answers)
        self.shown("chat", answers)

    def content_parts(self) -> None:
        """The page says that the documents of a chat can be content parts."""
        asked = "    prompt = ChunkPrompt.of_chat(tokenizer, messages, documents, "
        texts = '[{"type": "text", "text": text} for text in [*documents, question]]'
        with_parts = f'    messages = [{{"role": "user", "content": {texts}}}]\n    prompt = ChunkPrompt.of_chat(tokenizer, messages, '
        block = self.page.blocks["chat"].replace(asked, with_parts).replace("\nada =", '\nquestion = messages[0]["content"]\nada =')
        assert with_parts in block, f"the page's chat does not have {asked}"
        self.reused("a chat with content parts", self.printed(python(block)))

    def template_with_documents(self) -> None:
        """The page says that a template that knows documents renders them itself, also from dictionaries."""
        block = self.page.blocks["chat"]
        template = (
            "{% for one in documents or [] %}Document {{ one.title }}: {{ one.text }}\n\n{% endfor %}"
            "{% for message in messages %}{{ message.content }}\n{% endfor %}Answer:"
        )
        known = f"tokenizer.chat_template = {template!r}\n"
        titled = '[{"title": text.split()[1], "text": text} for text in documents]'
        changed = block.replace("client = OpenAI", f"{known}client = OpenAI").replace("messages, documents,", f"messages, {titled},")
        assert known in changed and titled in changed, "the page's chat has another form"
        told = 'assert "Document harbour: " + ada in tokenizer.decode(prompt.token_ids)\n    answer ='
        answers = self.printed(python(changed.replace("answer =", told)))
        self.equal("a template that knows documents: two answers", len(answers), 2)
        (_, first, _), (_, second, _) = answers
        tokens = first["chunk_tokens_reused"] + first["chunk_tokens_computed"]
        expected = {"chunk_tokens_reused": tokens, "chunk_tokens_computed": 0}
        self.equal(f"its documents of {tokens} tokens are found in another order", second, expected)

    def documents_of_a_chat(self, port: int) -> None:
        """The page says that the server itself makes no chunks of the documents of a chat."""
        document = {"title": "", "text": "The market hall is led by Bo Lind."}
        parts = [{"type": "text", "text": text} for text in (document["text"], "Who leads the market hall?")]
        for what, more in (("documents", {"documents": [document]}), ("content parts", {"messages": [{"role": "user", "content": parts}]})):
            asked = {"messages": [{"role": "user", "content": "Who leads the market hall?"}], "max_tokens": 1, **more}
            asked["model"] = ENVIRONMENT["MODEL"]
            request = urllib.request.Request(
                f"http://localhost:{port}/v1/chat/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=300) as answer:
                said = json.load(answer)
            self.equal(f"{what} sent to the server are an ordinary chat", said.get("kv_transfer_params"), None)

    def client_alone(self, folder: Path) -> None:
        """The page's commands for a client's machine make an environment in which the chat runs."""
        wheel, install = (re.search(rf"`({start}[^`]*)`", self.page.text)[1] for start in ("pip wheel ", "pip install kvcache"))
        made = f"{wheel} -w {folder}/wheels && python -m venv {folder}/client && cd {folder}/wheels && {folder}/client/bin/{install}"
        output(["bash", "-euo", "pipefail", "-c", made])
        answers = self.printed(python(self.page.blocks["chat"], f"{folder}/client/bin/python"))
        # The documents are known by now.
        self.equal("a client's environment runs the chat", [text for *_, text in answers], [line.split("} ")[-1] for line in self.page.printed["chat"].splitlines()])

    def shown(self, name: str, answers: list[tuple[int, dict[str, Any], str]]) -> None:
        lines = [f"{cached} {chunks} {text}".rstrip() for cached, chunks, text in answers]
        self.equal("the page shows it", lines, [line.rstrip() for line in self.page.printed[name].splitlines()])

    def tier(self) -> None:
        answers = [json.loads(line) for line in self.page.run("tier")]
        self.equal("vLLM says that it has emptied its caches", answers[1::2], [{"success": True}] * 2)
        full, found = (answers[0]["prompt_tokens"] - 1) // 32 * 32, [one["cached"] for one in answers[::2]]
        self.equal("the tier brings back what vLLM has forgotten, until it is emptied", found, [0, full, 0])
        self.equal("the page shows it", answers, [json.loads(line) for line in self.page.printed["tier"].splitlines()])

    def pause(self) -> None:
        self.equal("vLLM pauses, and goes on", self.page.run("pause"), self.page.printed["pause"].splitlines())

    def disk(self, port: int) -> None:
        """A prompt is computed, and found after a restart."""
        command, found = self.page.next("disk"), []
        for number in range(2):
            with server(command, port):
                found += self.page.run("again") if number == 0 else output(["bash", "-euo", "pipefail", "-c", self.page.blocks["again"]])
        self.equal("the page shows what a restart finds", found, self.page.printed["again"].splitlines())

    def wrong(self) -> None:
        self.equal("wrong parts are named", self.page.run("wrong"), self.page.printed["wrong"].splitlines())

    def metrics(self) -> None:
        lines = self.page.run("metrics")
        hits = [float(line.split()[-1]) for line in lines]
        self.say(f"vLLM counts {hits} external hits", None if hits and hits[0] > 0 else "none")
        # Without a network, vLLM names the model by its folder.
        got, shown = (re.sub(r'model_name="[^"]*"', "", text) for text in ("\n".join(lines), self.page.printed["metrics"].strip()))
        self.equal("the page shows it", got, shown)

    def offline(self, over_http: list[tuple[int, dict[str, int], str]]) -> None:
        answers = self.printed(self.page.run("offline"))
        self.reused("LLM.generate", answers)
        self.shown("offline", answers)
        self.equal("and answers as the server does", [one[2] for one in answers], [one[2] for one in over_http])

    def check(self) -> None:
        """The page shows the whole output. Times and roundings differ, and with other kernels an answer or two."""
        print("\n".join(lines := self.page.run("check")), flush=True)
        got, shown = (masked(text) for text in ("\n".join(lines), self.page.printed["check"]))
        differ = [f"{one!r} instead of {other!r}" for one, other in itertools.zip_longest(got, shown) if one != other]
        self.say("the check of a model prints what the page shows, but for measured numbers", differ[0] if differ else None)
        got, shown = (right_answers(text) for text in ("\n".join(lines), self.page.printed["check"]))
        self.equal("it has the same rows", list(got), list(shown))
        far = {name: f"{got[name]} instead of {shown[name]}" for name in shown if abs(got.get(name, -9) - shown[name]) > CLOSE}
        self.say(f"the numbers of right answers are within {CLOSE} of the page's", f"{far}" if far or not shown else None)


def masked(text: str) -> list[str]:
    """Returns the words of a text, with a mark in place of each measured number: not of settings, and not of what was counted
    before any answer, such as "24 of 24 tokens". Without the warning that a setting saves no time, as on a machine that is
    busy with other work.
    """
    text = re.sub(r"\s+That\s+saves\s+no\s+time\s+here\..*?\(--notes\)\.", "", text, flags=re.DOTALL)
    kept, rest = [], []
    for line in text.splitlines():
        (kept if line.startswith("ok ") else rest).append(line)
    exact = [re.sub(r"by up to \S+", "by up to #", line) for line in kept]
    measured = re.sub(r"(?<![:\w.])\d[\d.,]*(e-\d+)?", "#", "\n".join(rest))
    return "\n".join([*exact, measured]).split()


def right_answers(text: str) -> dict[str, int]:
    """Returns the number of right answers in each row of the table, out of 40 questions."""
    return {name: int(count) for name, count in re.findall(r"^(\S[\w:. ]*?) {2,}(\d+) of 40 ", text, re.MULTILINE)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--fresh", action="store_true")
    args, port = parser.parse_args(), free_port()
    page = Page(port)
    checks = Checks(page)
    with tempfile.TemporaryDirectory() as home:
        name = re.search(r"MODEL=(\S+)", page.blocks["settings"])
        go_home(Path(home), args.model.resolve(), name[1], fresh=args.fresh)
        began = time.monotonic()
        page.run("install")
        print(f"ok      the environment is ready after {time.monotonic() - began:.0f} s", flush=True)
        adopt(page.next("settings"))
        with server(page.next("serve"), port):
            checks.curl()
            over_http = checks.client()
            checks.chat()
            checks.wrong()
            checks.metrics()
            checks.tier()
            checks.pause()
            # This is not on the page, so it must not change what the page prints.
            checks.content_parts()
            checks.template_with_documents()
            checks.documents_of_a_chat(port)
            if args.fresh:
                checks.client_alone(Path(home))
        checks.disk(port)
        checks.offline(over_http)
        checks.check()
    checks.equal("no block is left", page.left, [])
    sys.exit(f"{checks.failures} checks failed" if checks.failures else 0)


if __name__ == "__main__":
    main()
