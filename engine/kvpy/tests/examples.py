"""Runs documents' Python blocks unchanged, in the current folder: ``python examples.py README.md …``.
"""

from __future__ import annotations

import pathlib
import re
import sys
from typing import Any


def blocks(document: pathlib.Path) -> list[str]:
    """Returns the Python blocks of a document."""
    return re.findall(r"^```python\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)


def run(document: pathlib.Path) -> list[dict[str, Any]]:
    """Runs the blocks of a document, and returns the names that each of them defines."""
    made: list[dict[str, Any]] = []
    for number, block in enumerate(blocks(document), 1):
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(block, f"{document}, example {number}", "exec"), names)
        made.append(names)
    return made


if __name__ == "__main__":
    for name in sys.argv[1:]:
        count = len(run(pathlib.Path(name)))
        print(f"{name}: {count} examples ran")
        if count == 0:
            sys.exit(f"{name} has no Python example")
