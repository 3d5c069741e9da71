"""Uploads in parts for stores that take an object only in one go: the parts wait on local disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from kvformat.storage.store import Buffer, StoreFault, TransportFault
from kvformat.storage.store_faults import fault_of

__all__ = ["SpooledUpload"]


class SpooledUpload:
    """Parts in files of a temporary directory, sent by :meth:`complete`.

    Memory stays flat. The disk holds the object and one more part; ``TMPDIR`` says where. Since everything is sent
    at the end, ``complete`` may take ``timeout_s`` for each part.

    Parameters
    ----------
    send
        Sends a file as the object, within a number of seconds.
    """

    def __init__(self, send: Callable[[Path, float], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._parts: dict[int, Path] = {}
        self._joined: Path | None = None
        try:
            self._directory = Path(tempfile.mkdtemp(prefix="kvformat-upload-"))
        except OSError as error:
            raise fault_of(error) from error

    def part(self, number: int, data: Buffer, *, timeout_s: float) -> None:  # noqa: ARG002 -- a local write
        """Keep it; the last of equal numbers counts."""
        try:
            fd, name = tempfile.mkstemp(dir=self._directory)
            with os.fdopen(fd, "wb") as file:
                file.write(data)
        except OSError as error:
            raise fault_of(error) from error
        with self._lock:
            before = self._parts.get(number)
            self._parts[number] = Path(name)
        if before is not None:
            before.unlink(missing_ok=True)

    def complete(self, *, timeout_s: float) -> None:
        """Join the parts and send them; may be repeated where it failed."""
        count = len(self._parts)
        try:
            if self._joined is None:
                self._joined = self._join()
            self._send(self._joined, timeout_s * max(count, 1))
        except StoreFault:
            raise
        except OSError as error:
            raise fault_of(error) from error
        self.abort(timeout_s=timeout_s)

    def abort(self, *, timeout_s: float) -> None:  # noqa: ARG002 -- a local removal
        """Remove the files."""
        with contextlib.suppress(OSError):
            shutil.rmtree(self._directory)

    def _join(self) -> Path:
        """Append the others to the first part, each removed once it is there."""
        with self._lock:
            numbers = sorted(self._parts)
            if numbers != list(range(1, len(numbers) + 1)):
                raise TransportFault(f"parts {numbers} are here, expected 1 to {numbers[-1]}")
            joined = self._directory / "joined"
            joined.touch()
            if numbers:
                self._parts[1].rename(joined)
            with joined.open("ab") as target:
                for number in numbers[1:]:
                    with self._parts[number].open("rb") as source:
                        shutil.copyfileobj(source, target, 1 << 20)
                    self._parts[number].unlink()
            return joined
