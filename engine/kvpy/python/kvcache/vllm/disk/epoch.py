"""Epochs of records: a reset begins one, and nothing of an earlier one is found any more.

The epoch is a part of the name of every record. That of the next process is in a file beside the records.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading

from vllm.logger import init_logger

logger = init_logger("vllm.kvcache")


class Epoch:
    """The epoch of the records with one identity in a folder."""

    def __init__(self, folder: str, identity: str) -> None:
        self.path = os.path.join(folder, f"epoch-{hashlib.sha256(identity.encode()).hexdigest()[:16]}")
        self.current = self._read()
        """A part of the names of the records that this process stores and finds. Empty before the first reset."""

    def _read(self) -> bytes:
        try:
            with open(self.path, "rb") as file:
                return hashlib.sha256(file.read()).digest()[:16]
        except FileNotFoundError:
            return b""

    def forget(self, deadline: float) -> None:
        """Begins an epoch in this process, and another one for the next process. Waits up to ``deadline`` seconds until
        the latter is on the disk.

        The weights of this process may have been replaced, and the next process may load others, so neither finds what
        the other stores after this call.
        """
        self.current = secrets.token_bytes(16)
        ended: list[str] = []
        writing = threading.Thread(target=self._write, args=(ended,), daemon=True)
        writing.start()
        writing.join(deadline)
        if ended != ["written"]:
            why = ended[0] if ended else f"the disk did not answer in {deadline} s"
            logger.error(
                "the reset could not be written to %s (%s): remove the folder of the disk before the next start, which would "
                "otherwise find what was stored before the reset",
                self.path,
                why,
            )

    def _write(self, ended: list[str]) -> None:
        written = f"{self.path}.new"
        try:
            with open(written, "wb") as file:
                file.write(secrets.token_bytes(16))
                file.flush()
                os.fsync(file.fileno())
            os.replace(written, self.path)
            folder = os.open(os.path.dirname(self.path), os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
            ended.append("written")
        except OSError as error:
            ended.append(str(error))
