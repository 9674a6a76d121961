"""The names that the connector imports from vLLM, for tests without vLLM. They hold data and do nothing.

vLLM's calls were recorded from a real one: see ``golden_calls.py`` and ``replay.py`` in the parent folder.
"""

from dataclasses import dataclass
from typing import Any

__version__ = "0.32.0"


@dataclass
class SamplingParams:
    max_tokens: int | None = 16
    temperature: float = 1.0
    detokenize: bool = True
    extra_args: dict[str, Any] | None = None
