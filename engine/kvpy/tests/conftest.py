"""Puts the fake of vLLM on the path: its real packages are too large for these tests."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent / "fake_vllm"))
