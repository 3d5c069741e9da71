"""Bytes appended to a file in large pieces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvformat.storage.local_write import Buffer, LocalFiles

__all__ = ["Appender"]

# A piece the page cache takes as large folios: written in half the time of pieces of 100 kB, and read faster while it
# is there. More gains nothing.
_PIECE_NBYTES = 4 << 20


class Appender:
    """Appends to a file from a given offset on, in pieces that end at multiples of their size.

    What is appended is copied or written before :meth:`append` returns. It is in the file after :meth:`flush`.

    Attributes
    ----------
    offset
        Where the next byte appended will be in the file.
    """

    def __init__(self, files: LocalFiles, fd: int, path: Path, offset: int) -> None:
        self._files = files
        self._fd = fd
        self._path = path
        self._piece = memoryview(bytearray(_PIECE_NBYTES))
        self._start = offset
        self.offset = offset

    def append(self, buffers: Sequence[Buffer]) -> int:
        """Append all buffers one behind the other; returns their bytes."""
        before = self.offset
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            while view.nbytes:
                view = view[self._take(view) :]
        return self.offset - before

    def flush(self) -> None:
        """Write what is not in the file yet."""
        pending = self.offset - self._start
        if pending:
            at = self._start % _PIECE_NBYTES
            self._files.write(self._fd, [self._piece[at : at + pending]], self._start, self._path)
            self._start = self.offset

    def _take(self, view: memoryview) -> int:
        """Take the first bytes of a view: up to the end of the piece, or as many whole pieces as it has."""
        at = self.offset % _PIECE_NBYTES
        if at == 0 and view.nbytes >= _PIECE_NBYTES:
            count = view.nbytes // _PIECE_NBYTES * _PIECE_NBYTES
            self._files.write(self._fd, [view[:count]], self.offset, self._path)
            self.offset += count
            self._start = self.offset
            return count
        count = min(view.nbytes, _PIECE_NBYTES - at)
        self._piece[at : at + count] = view[:count]
        self.offset += count
        if at + count == _PIECE_NBYTES:
            self.flush()
        return count
