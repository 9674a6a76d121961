"""Names of vLLM that the connector imports, for tests without vLLM: data holders, and nothing of what vLLM does.

The calls that vLLM makes are recorded from the real one: see ``golden_calls.py`` and ``replay.py`` beside this folder.
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
