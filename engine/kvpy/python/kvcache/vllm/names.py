"""Names that no client can give: the salts and the request IDs of the connector's own.

vLLM finds blocks by tokens and salt, and publishes salts in its events. A client that could give a salt of the
connector would get blocks with chunks in them, or put its own where a request with chunks finds them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import secrets
from typing import Any

SPACE = "kvcache:"
"""The beginning of the connector's salts. A client's salt that begins like this is replaced."""


def new_secret() -> bytes:
    return secrets.token_bytes(32)


# Decision: docs/decisions/vllm.md#no-client-can-give-a-salt-of-the-connector
class Names:
    """The names of one process. They contain hashes with a key that never leaves the process."""

    def __init__(self) -> None:
        self.secret = new_secret()
        self.numbers = itertools.count()

    def _hash(self, *what: Any, size: int) -> str:
        return hashlib.blake2b(json.dumps(what).encode(), key=self.secret, digest_size=size).hexdigest()

    def salt(self, kind: str, *what: Any) -> str:
        """Returns the salt of everything that ``what`` describes. Different kinds have different salts."""
        return SPACE + self._hash(kind, *what, size=32)

    def fresh_salt(self) -> str:
        """Returns a salt that no other request has."""
        return self.salt("fresh", next(self.numbers))

    def request_id(self, kind: str) -> str:
        """Returns a new request ID."""
        number = next(self.numbers)
        return f"kvcache-{kind}-{number}-{self._hash(kind, number, size=8)}"

    def of_client(self, salt: str | None) -> str | None:
        """Returns a client's salt, or another one in its place if it begins like the connector's own."""
        return self.salt("client", salt) if salt is not None and salt.startswith(SPACE) else salt
