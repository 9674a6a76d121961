"""Writes the golden file for the classes and mappings of characters: what Python's `str` says of each of them.

    python3.11 proof/goldens/templates/unicode.py engine/kvmodel/tests/goldens

Each range of a class is its first and last characters as one text, or one character. Each entry of a mapping is a
character followed by its text, and characters that stay as they are have none. The file has the characters of
Unicode 14, which Python 3.11 knows.
"""

import json
import pathlib
import sys
import unicodedata

CLASSES = {
    "assigned": lambda c: unicodedata.category(c) not in ("Cn", "Cs"),
    **{name: getattr(str, name) for name in ("isalnum", "isalpha", "isdecimal", "isdigit", "islower")},
    **{name: getattr(str, name) for name in ("isnumeric", "isprintable", "isspace", "istitle", "isupper")},
    "lines": lambda c: len(f"a{c}b".splitlines()) == 2,
    "quoted": lambda c: len(repr(c)) == 3,
}
MAPPINGS = ("casefold", "lower", "title", "upper")


def characters():
    return (chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)


def ranges(holds):
    found = []
    for c in filter(holds, characters()):
        if found and ord(found[-1][-1]) + 1 == ord(c):
            found[-1] = found[-1][0] + c
        else:
            found.append(c)
    return found


def main(out):
    classes = {name: ranges(holds) for name, holds in CLASSES.items()}
    mappings = {}
    for name in MAPPINGS:
        mapping = getattr(str, name)
        mappings[name] = [c + mapping(c) for c in characters() if mapping(c) != c]
    goldens = {"unicode": unicodedata.unidata_version, "classes": classes, "mappings": mappings}
    path = pathlib.Path(out) / "python_unicode.json"
    path.write_text(json.dumps(goldens, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
