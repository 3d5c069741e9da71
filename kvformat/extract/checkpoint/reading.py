"""Reading ranges of files, and counting what was read."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvformat.errors import KVFormatError, make_error

__all__ = ["CountedFiles", "in_threads", "unreadable"]

_THREADS = 4
_READ_NBYTES = 1 << 30  # Linux ends a single read at 2 GiB

_Item = TypeVar("_Item")


class CountedFiles:
    """Regular files, opened when first read from and closed together; several threads may read at once.

    Attributes
    ----------
    nbytes
        Bytes the operating system was asked for and gave.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._lock = threading.Lock()
        self._open: dict[Path, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close what is open."""
        with self._lock:
            while self._open:
                os.close(self._open.popitem()[1])

    def size(self, path: Path) -> int:
        """Bytes of a file.

        Raises
        ------
        InputError
            E308 where it is missing, or no regular file.
        StorageError
            E203, E207.
        """
        try:
            return os.fstat(self._descriptor(path)).st_size
        except OSError as error:
            raise unreadable(error, path) from error

    def read(self, path: Path, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """A range of a file; errors as :meth:`size`, and E308 where the file ends before."""
        buffer = np.empty(nbytes, dtype=np.uint8)
        self.read_into(path, offset, buffer)
        return buffer

    def read_into(self, path: Path, offset: int, buffer: NDArray[np.uint8]) -> None:
        """Fill ``buffer`` (uint8, contiguous) from ``offset`` on; errors as :meth:`read`."""
        view = buffer.data
        done = 0
        while done < view.nbytes:
            try:
                got = os.preadv(self._descriptor(path), [view[done : done + _READ_NBYTES]], offset + done)
            except OSError as error:
                raise unreadable(error, path) from error
            if not got:
                raise make_error(
                    "E308",
                    f"the file ends at byte {offset + done:,}, expected {offset + view.nbytes:,} or more: it is cut "
                    "short; restore it from another copy",
                    path=path,
                )
            done += got
            with self._lock:
                self.nbytes += got

    def _descriptor(self, path: Path) -> int:
        with self._lock:
            found = self._open.get(path)
            if found is None:
                found = _opened(path)
                self._open[path] = found
            return found


def in_threads(work: Callable[[_Item], None], items: Sequence[_Item]) -> None:
    """Do ``work`` for each item, a few at once, in order of their start; the first error ends it."""
    with ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="checkpoint") as pool:
        running = [pool.submit(work, item) for item in items]
        try:
            for one in running:
                one.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def unreadable(error: OSError, path: Path) -> KVFormatError:
    """E207 where the process may not read the file, E203 for any other reason the system gives."""
    code = "E207" if isinstance(error, PermissionError) else "E203"
    return make_error(code, f"it cannot be read: {error.strerror or error}", path=path)


def _opened(path: Path) -> int:
    try:
        # Opening a named pipe that nobody writes to would wait for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise make_error(
            "E308",
            "the checkpoint names this file, which is missing: copy it here, or take another checkpoint",
            path=path,
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise make_error("E308", "this is no regular file", path=path)
    return descriptor
