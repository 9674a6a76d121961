"""Checks `kvc serve` with unmodified clients, its page in Chromium, and its times beside those of its engine alone.

    python run.py

The clients are installed into target/serve, in the versions of requirements.txt. `kvc` must have been built.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

from served import ROOT

HERE = Path(__file__).parent


def main() -> None:
    folder = ROOT / "target/serve"
    python = folder / "bin/python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    subprocess.run([python, "-m", "pip", "install", "-q", "-r", HERE / "requirements.txt"], check=True)
    for check in ("check_clients.py", "check_page.py", "check_times.py"):
        if subprocess.run([python, HERE / check], check=False).returncode:
            sys.exit(f"{check} failed")


if __name__ == "__main__":
    main()
