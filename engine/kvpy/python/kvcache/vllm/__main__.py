"""``python -m kvcache.vllm``: commands for users of the connector."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .host import UnsupportedHostError
from .prompt import ChunkRequestError, plan_of
from .gate.questions import note_decoys
from .gate.verdict import Limits, as_json, caution, judge, table

WIDTH = 118

CHECK = """Check whether a model works with chunks.

The model runs inside vLLM on this machine, on CPUs. Three things are checked, in this order:

  exactness  reuse gives the same tokens and log-probabilities as transformers with the chunk mask (in float32)
  hits       all document tokens are found when the documents come in a different order, and other requests are unaffected
  answers    questions about invented notes are answered as well as with ordinary attention

The exit status is 0 if a setting is fit, 1 if none is, and 2 if the check could not run."""

EXAMPLES = """examples:
  python -m kvcache.vllm check FOLDER                     all settings, 40 questions about two notes each
  python -m kvcache.vllm check FOLDER --notes 4 --questions 200 --mode with-system
  python -m kvcache.vllm check FOLDER --recompute link:8 --recompute question:0.3 --json

Each question takes a few times as long as the model needs to read its notes. For a small model on a laptop, the check
takes minutes."""


def parser() -> argparse.ArgumentParser:
    """Returns the command-line parser."""
    whole = argparse.ArgumentParser(prog="python -m kvcache.vllm", description="Chunks inside vLLM.")
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    check = commands.add_parser(
        "check",
        help="check whether a model works with chunks",
        description=CHECK,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.add_argument("model", metavar="MODEL", help="folder with config.json, weights and a tokenizer, as written by transformers")
    check.add_argument(
        "--questions",
        type=above_0,
        default=40,
        metavar="N",
        help="number of questions (default: 40); with more questions, the bound on the loss is tighter",
    )
    check.add_argument("--notes", type=int, default=2, metavar="N", help="number of notes per question, 2 to 20 (default: 2)")
    check.add_argument(
        "--recompute",
        action="append",
        metavar="HOW",
        help="value of chunk_recompute to try: none, link:K or question:R; may be repeated "
        "(default: none, link:16, link:32, link:64 and question:0.5)",
    )
    check.add_argument(
        "--mode",
        type=mode,
        metavar="MODE",
        default="alone",
        help="tokens that a chunk sees: only its own (alone), also the system prompt (with-system), or also the system prompt "
        "and N decoys, which are notes of the same form (behind:N) (default: alone)",
    )
    check.add_argument(
        "--tolerance", type=float, default=2.0, metavar="POINTS", help="maximum loss, in right answers per hundred questions (default: 2)"
    )
    check.add_argument(
        "--floor",
        type=float,
        default=30.0,
        metavar="PERCENT",
        help="minimum right answers per hundred questions with ordinary attention for a loss to be judged (default: 30)",
    )
    check.add_argument("--seed", type=int, default=1, metavar="N", help="random seed for the questions (default: 1)")
    check.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="element type used to answer the questions (default: float32)",
    )
    check.add_argument(
        "--max-len",
        type=above_0,
        metavar="TOKENS",
        help="maximum length of a prompt with its answer (default: 4096, or the model's maximum if that is smaller)",
    )
    check.add_argument("--host-memory", default="1GiB", metavar="SIZE", help="memory for chunks (default: 1GiB)")
    check.add_argument("--json", action="store_true", help="print the results as JSON instead of a table")
    return whole


def mode(text: str) -> str:
    if not re.fullmatch(r"alone|with-system|behind:[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text} is not alone, with-system or behind:N")
    most = len(note_decoys())
    if text.startswith("behind:") and int(text[7:]) > most:
        raise argparse.ArgumentTypeError(f"{text} needs more than the {most} decoys that there are")
    return text


def above_0(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not above 0")
    return number


@contextmanager
def quiet() -> Iterator[None]:
    """Redirects libraries' output to standard error, to keep standard output for the result."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def say(what: str) -> None:
    print(f"check: {what}", file=sys.stderr, flush=True)


def run_check(args: argparse.Namespace) -> int:
    """Runs the check and returns the exit status."""
    folder = Path(args.model)
    if not (folder / "config.json").is_file():
        raise CommandError(f"{folder} has no config.json: pass a model's folder; `hf download NAME --local-dir FOLDER` downloads one")
    for recompute in args.recompute or ():
        try:
            plan_of({"chunk_lengths": [1, 1], "chunk_recompute": recompute}, [0, 0, 0])
        except ChunkRequestError as error:
            raise CommandError(f"--recompute: {error}") from error
    with quiet():
        try:
            from .gate.check import CheckError, Options, check
        except ModuleNotFoundError as error:
            raise CommandError(
                f"the Python module {error.name!r} is missing: install vLLM and transformers into this environment "
                "(`proof/vllm/install.sh FOLDER` in the repository creates such an environment)"
            ) from error
        more = {"recompute": tuple(args.recompute)} if args.recompute else {}
        options = Options(
            model=str(folder),
            questions=args.questions,
            notes=args.notes,
            mode=args.mode,
            seed=args.seed,
            dtype=args.dtype,
            max_len=args.max_len,
            host_memory=args.host_memory,
            **more,
        )
        try:
            findings, rows = check(options, say)
        except UnsupportedHostError as error:
            raise CommandError(f"{folder} is not supported: {error}") from error
        except (CheckError, ValueError, OSError) as error:
            raise CommandError(str(error)) from error
    verdict = judge(findings, rows, args.mode, Limits(args.tolerance / 100, args.floor / 100))
    if args.json:
        said = {
            "model": args.model,
            "dtype": args.dtype,
            "mode": args.mode,
            "notes": args.notes,
            "findings": [{"what": finding.what, "fault": finding.fault} for finding in findings],
            "rows": as_json(rows) if rows else [],
            "fit": verdict.fit,
            "recompute": verdict.recompute,
            "verdict": verdict.sentence,
        }
        print(json.dumps(said))
        return 0 if verdict.fit else 1
    for finding in findings:
        print(f"ok      {finding.what}" if finding.fault is None else f"FAILED  {finding.what}: {finding.fault}")
    if rows:
        asked = len(rows[0].right)
        print(f"\n{asked} questions about {args.notes} notes each, cached before in a different order, {args.mode}, {args.dtype}:\n")
        print(table(rows))
        print(
            "\nPoints lost, per hundred questions: the ones that only ordinary attention answered correctly, minus the ones that only\n"
            "this setting answered correctly; in brackets, the largest loss that the answers do not rule out. Divergence is between\n"
            "the first token's distribution and ordinary attention's, in nats. Times are averages.\n"
        )
        print(textwrap.fill(caution(asked), WIDTH))
    print(f"\n{textwrap.fill(verdict.sentence, WIDTH)}")
    return 0 if verdict.fit else 1


class CommandError(Exception):
    """An error with advice for the user."""


def main() -> None:
    args = parser().parse_args()
    try:
        status = run_check(args)
    except CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 2
    sys.stdout.flush()
    sys.exit(status)


if __name__ == "__main__":
    main()
