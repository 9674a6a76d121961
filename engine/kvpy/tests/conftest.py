"""Puts a fake vLLM on the path: the real packages are too large for these tests."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent / "fake_vllm"))
