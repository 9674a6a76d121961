"""Programs that are killed while they store something."""

from __future__ import annotations

import signal
import subprocess
import sys


def killed_after(program: str, lines: int) -> int:
    """Runs a Python program that prints ``ready`` and then numbers. Kills it after this many numbers, and returns the last
    one."""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline().strip() == "ready"
    last = [int(process.stdout.readline()) for _ in range(lines)][-1]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return last
