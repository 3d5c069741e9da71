"""Getting bytes that are named by their content: fetched, proved, and held as an open file."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Protocol, cast

import numpy as np

from kvformat.errors import KVFormatError, make_error
from kvformat.storage.faults import translated
from kvformat.storage.local_read import FileIdentity, OpenFile
from kvformat.storage.regions import Region, Regions
from kvformat.storage.store import Buffer

__all__ = ["Check", "Fill", "Memory", "MemoryFile", "Obtainer", "Received", "Write"]

_KEPT_NBYTES = 512 << 20

Write = Callable[[int, Buffer], memoryview | None]
"""Takes (offset in the entry, bytes), and gives the bytes where they stand now, if that is memory of this process.

May be called from several threads, once for each byte.
"""

Fill = Callable[[Write], None]
"""Fetches all bytes of an entry from its origin. Once it returned or raised, it writes no more."""

Check = Callable[[OpenFile], None]
"""Raises a KVFormatError where the content is not what it must be."""


class Obtainer(Protocol):
    """Whatever gives out open files of fetched bytes."""

    def obtain(
        self,
        key: str,
        nbytes: int,
        *,
        path: str,
        fill: Fill,
        check: Check | None,
        known: FileIdentity | None = None,
        use_mmap: bool = True,
    ) -> OpenFile | None:
        """An open file of exactly ``nbytes`` bytes that passed ``check``, or None where it cannot be held.

        Parameters
        ----------
        key
            What determines the bytes: a digest, and which part of what it names.
        path
            URL of the origin, for messages.
        fill
            See :data:`Fill`. Called again, once, where ``check`` refuses what it fetched.
        check
            See :data:`Check`.
        known
            Identity of a file that passed ``check`` before: that very file is not checked again.
        use_mmap
            Map the file instead of reading ranges.

        Raises
        ------
        KVFormatError
            What ``fill`` raises, and what ``check`` raises the second time; E005 where ``fill`` did not bring all
            bytes.
        """


class Received:
    """Counts what a :data:`Fill` brings, and holds it to the size that was asked for."""

    def __init__(self, nbytes: int, path: str) -> None:
        self._nbytes = nbytes
        self._path = path
        self._parts: list[int] = []  # appending is atomic, adding is not

    def take(self, offset: int, data: Buffer) -> memoryview:
        """The bytes that are to be placed at ``offset``."""
        view = memoryview(data).cast("B")
        end = offset + len(view)
        if offset < 0 or end > self._nbytes:
            raise make_error("E005", f"bytes {offset}..{end} came, expected {self._nbytes} in all", path=self._path)
        self._parts.append(len(view))
        return view

    def check(self) -> None:
        """E005 where the bytes that came are not as many as were asked for."""
        total = sum(self._parts)
        if total != self._nbytes:
            raise make_error("E005", f"{total} bytes came, expected {self._nbytes}: try again", path=self._path)


class MemoryFile(OpenFile):
    """Fetched bytes in memory of this process, with the face of a file. Nobody else writes to them."""

    __slots__ = ()

    def read_into(self, into: memoryview, offset: int) -> None:
        """Fill ``into`` from ``offset``; E005 where the file ends before."""
        if self.mapped is not None:
            super().read_into(into, offset)
        elif len(into):
            raise make_error("E005", "the file is empty", path=self.path)

    def is_current(self) -> bool:
        """Always."""
        return True


class Memory:
    """Fetches into memory, which lasts as long as something refers to it, and then is used again."""

    def __init__(self) -> None:
        self._regions = Regions(_KEPT_NBYTES)

    def obtain(
        self,
        key: str,  # noqa: ARG002 -- nothing is kept under it
        nbytes: int,
        *,
        path: str,
        fill: Fill,
        check: Check | None,
        known: FileIdentity | None = None,  # noqa: ARG002 -- what is fetched anew is not known
        use_mmap: bool = True,  # noqa: ARG002 -- it is memory
    ) -> OpenFile:
        """See :meth:`Obtainer.obtain`; there is always a file, and its identity is no other's.

        Raises
        ------
        KVFormatError
            As there; E204 where there is no memory.
        """
        # No other's, in no process: identities travel between them.
        identity = FileIdentity(0, int.from_bytes(os.urandom(7), "little"), nbytes, 0, 0)
        mapped = self._take(nbytes, path) if nbytes else None
        # A region is used like a mapping: as a buffer with advice.
        file = MemoryFile(-1, path, identity, cast("mmap.mmap | None", mapped))
        into = np.empty(0, np.uint8) if mapped is None else mapped
        for last in (False, True):
            received = Received(nbytes, path)

            def write(offset: int, data: Buffer, received: Received = received) -> memoryview:
                view = received.take(offset, data)
                held = into[offset : offset + len(view)]
                # Unlike a memoryview's, this copy lets other threads run.
                np.copyto(held, np.frombuffer(view, dtype=np.uint8))
                return held.data

            fill(write)
            received.check()
            try:
                if check is not None:
                    check(file)
                break
            except KVFormatError:
                if last:
                    raise
        return file

    def _take(self, nbytes: int, path: str) -> Region:
        with translated(path):
            return self._regions.take(nbytes)
