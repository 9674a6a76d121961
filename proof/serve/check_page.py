"""Checks the server's page in a headless Chromium, and takes a picture of it.

    python check_page.py [--kvc target/release/kvc] [--picture FILE.png]

A server over the built-in model answers questions about the demo's documents: new ones, the same ones again, and the same
ones in another order. Chromium then draws the page. What it shows must be what the answers said. A second server has keys:
its page asks for one. Chromium is the program `chromium` (Debian's package of this name).
"""

from __future__ import annotations

import argparse
import html.parser
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from served import PATIENCE, ROOT, SYSTEM, names, served, text_of

MARK = '<img src=x onerror="document.title=1">'
"""The name of a document that must be shown as text."""


def ask(url: str, order: list[str], question: str) -> dict[str, Any]:
    documents = [{"id": name, "text": text_of(name)} for name in order]
    documents[0]["id"] += MARK
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    body = json.dumps({"messages": messages, "documents": documents, "max_tokens": 4}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.load(answer)


def register(url: str, name: str, text: str, **more: Any) -> dict[str, Any]:
    body = json.dumps({"text": text, **more}).encode()
    request = urllib.request.Request(f"{url}/v1/documents/{name}", body, {"Content-Type": "application/json"}, method="PUT")
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.load(answer)


def until_pinned(url: str, names: list[str]) -> None:
    """Waits until the server has computed documents that were registered with a system prompt."""
    until = time.monotonic() + PATIENCE
    for name in names:
        while True:
            with urllib.request.urlopen(f"{url}/v1/documents/{name}", timeout=PATIENCE) as answer:
                if json.load(answer)["pinned"]:
                    break
            if time.monotonic() > until:
                raise SystemExit(f"{name} is not pinned")
            time.sleep(0.05)


def chromium(url: str, *options: str) -> str:
    """Draws a page, and returns its elements as they are after a few seconds."""
    with tempfile.TemporaryDirectory() as profile:
        command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        command += ["--window-size=1120,960", "--virtual-time-budget=4000", *options, url]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=2 * PATIENCE).stdout


class Drawn(html.parser.HTMLParser):
    """The parts of the drawn page that are checked."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text: list[str] = []
        self.titles: list[str] = []
        self.hidden: set[str] = set()
        self.tags: set[str] = set()
        self.rows: dict[str, list[list[str]]] = {}
        """The texts of the cells of each table, by the table's name."""
        self._table = ""
        self._silent = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        named = dict(attributes)
        self.tags.add(tag)
        self._silent += tag in {"script", "style"}
        if tag == "table":
            self._table = named.get("id") or ""
        elif tag == "tr":
            self.rows.setdefault(self._table, []).append([])
        elif tag in {"td", "th"}:
            self.rows[self._table][-1].append("")
        if title := named.get("title"):
            self.titles.append(title)
        if "hidden" in named and named.get("id"):
            self.hidden.add(named["id"] or "")

    def handle_endtag(self, tag: str) -> None:
        self._silent -= tag in {"script", "style"}
        if tag == "table":
            self._table = ""

    def handle_data(self, data: str) -> None:
        if not self._silent and data.strip():
            self.text.append(data.strip())
        if self._table:
            self.rows[self._table][-1][-1] += data.strip()


def kept(registered: list[dict[str, Any]]) -> list[list[str]]:
    """Returns whether each document is pinned, and how long it is kept, as the page says it."""
    return [["no", "60 min"] if one["expires_in_seconds"] else ["yes", "–"] for one in sorted(registered, key=lambda one: one["id"])]


def check(name: str, is_right: bool, shown: object) -> None:
    print(f"{'ok' if is_right else 'FAILED'}  {name}")
    if not is_right:
        raise SystemExit(f"{name}: {shown}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvc", default=str(ROOT / "target/release/kvc"))
    parser.add_argument("--picture", help="a file for a picture of the page")
    args = parser.parse_args()
    if shutil.which("chromium") is None:
        raise SystemExit("chromium is missing; install it, for example with `apt-get install chromium`")
    ordered = names()
    with tempfile.TemporaryDirectory() as disk, served(args.kvc, "--reuse-anyway", "--disk", disk) as url:
        orders = [ordered, ordered, ordered[::-1], ordered[2:] + ordered[:2]]
        answers = [ask(url, order, question) for order, question in zip(orders, ["alba ?", "bruno ?", "alba ?", "clara ?"], strict=True)]
        registered = [register(url, name, text_of(name), system=SYSTEM) for name in ordered[:2]]
        registered.append(register(url, "notice", f"{text_of(ordered[0])} {MARK}", ttl_seconds=3600))
        until_pinned(url, ordered[:2])
        page = Drawn(chromium(f"{url}/", "--dump-dom"))
        check("the page has loaded", page.hidden >= {"locked"} and "all" not in page.hidden, page.hidden)
        usage = [answer["usage"] for answer in answers]
        found = sum(one["prompt_tokens_details"]["cached_tokens"] for one in usage)
        total = sum(one["prompt_tokens"] for one in usage)
        check("it shows how many prompt tokens were found", f"{found:,} of {total:,}" in page.text, page.text)
        titles = [title for title in page.titles if " tokens, " in title]
        expected = []
        for answer in answers[::-1]:
            parts = answer["kv"]["parts"]
            expected += [(part["id"], part["tokens"], part["tokens"] if part["source"] == "cache" else 0) for part in parts]
        drawn = [title for title in titles if not title.startswith(("system prompt:", "question:"))]
        check("each document of each request is drawn", len(drawn) == len(expected), (drawn, expected))
        matches = (title.startswith(f"{name}: {tokens:,} tokens, {found:,} found") for title, (name, tokens, found) in zip(drawn, expected, strict=True))
        check("with its name and what was found of it", all(matches), (drawn, expected))
        first, later = drawn[-len(ordered) :], drawn[: -len(ordered)]
        check("new documents are new", all(title.endswith(", new") for title in first), first)
        check("found ones are found in any order", all(", 0 found" not in title for title in later), later)
        rows = [[one["id"], f"{one['tokens']:,}"] for one in sorted(registered, key=lambda one: one["id"])]
        library = page.rows.get("registered", [])[1:]
        check("registered documents are listed with their tokens", [row[:2] for row in library] == rows, library)
        check("those with a system prompt are pinned, and one expires", [row[3:] for row in library] == kept(registered), library)
        tiers = page.rows.get("tier", [])
        check("it shows the disk", "tiers" not in page.hidden and [row[0] for row in tiers] == ["tier", "disk"], tiers)
        check("names are shown as text", "img" not in page.tags and "1" not in page.text[:1], page.tags)
        if args.picture:
            chromium(f"{url}/", f"--screenshot={Path(args.picture).resolve()}")
            print(f"wrote {args.picture}")
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text("secret operator\n")
        with served(args.kvc, "--api-key-file", str(keys)) as url:
            page = Drawn(chromium(f"{url}/", "--dump-dom"))
            check("a server with keys asks for one", "locked" not in page.hidden and "all" in page.hidden, page.hidden)


if __name__ == "__main__":
    main()
