"""A local directory on which chosen operations fail.

Example
-------
>>> files = FaultyFiles("write", nth=3, error=errno.ENOSPC)  # doctest: +SKIP
>>> with kvformat.create(location, filesystem=files, ...) as writer: ...  # doctest: +SKIP
"""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kvformat.errors import make_error
from kvformat.storage.faults import translate
from kvformat.storage.local_write import Buffer, LocalFiles
from kvformat.testing.recording import Kind

__all__ = ["FaultyFiles", "InterruptedFiles"]

_NO_LINKS = frozenset({errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP, errno.EMLINK})


class FaultyFiles(LocalFiles):
    """Lets one operation fail, or all of its kind from one on; everything else is done for real.

    Parameters
    ----------
    kind
        Kind of operation.
    nth
        Which of them, counted from 0 over all threads.
    error
        ``errno`` of the failure, for example ``errno.ENOSPC``.
    lasting
        Let those after it fail too, as on a disk that stays full.

    Attributes
    ----------
    calls
        Calls so far by kind, failed ones included.
    failed
        Paths of the operations that were made to fail.
    """

    def __init__(self, kind: Kind, *, nth: int, error: int, lasting: bool = False) -> None:
        self._kind = kind
        self._nth = nth
        self._error = error
        self._lasting = lasting
        self._lock = threading.Lock()
        self.calls: Counter[str] = Counter()
        self.failed: list[Path] = []

    def make_dir(self, path: Path) -> bool:
        """See :class:`LocalFiles`."""
        self._pass("make_dir", path)
        return super().make_dir(path)

    def create(self, path: Path) -> int:
        """See :class:`LocalFiles`."""
        self._pass("create", path)
        return super().create(path)

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int, path: Path) -> int:
        """See :class:`LocalFiles`; a write that fails has written the first half."""
        if self._fails("write", path):
            data = b"".join(bytes(buffer) for buffer in buffers)
            super().write(fd, [data[: len(data) // 2]], offset, path)
            raise translate(self._os_error(), path, needed_nbytes=len(data))
        return super().write(fd, buffers, offset, path)

    def sync(self, fd: int, path: Path) -> None:
        """See :class:`LocalFiles`; directories are counted apart, as ``sync_dir``."""
        kind: Kind = "sync_dir" if path.is_dir() else "sync"
        if self._fails(kind, path):
            raise make_error("E202", f"fsync failed ({os.strerror(self._error)})", path=path)
        super().sync(fd, path)

    def link(self, source: Path, target: Path) -> bool:
        """See :class:`LocalFiles`."""
        if self._fails("link", target):
            if self._error in _NO_LINKS:
                raise make_error("E201", f"no hard link could be made here ({os.strerror(self._error)})", path=target)
            raise translate(self._os_error(), target)
        return super().link(source, target)

    def unlink(self, path: Path) -> None:
        """See :class:`LocalFiles`."""
        self._pass("unlink", path)
        super().unlink(path)

    def remove_dir(self, path: Path) -> bool:
        """See :class:`LocalFiles`; False where it is made to fail."""
        if self._fails("remove_dir", path):
            return False
        return super().remove_dir(path)

    def _pass(self, kind: Kind, path: Path) -> None:
        if self._fails(kind, path):
            raise translate(self._os_error(), path)

    def _os_error(self) -> OSError:
        return OSError(self._error, os.strerror(self._error))

    def _fails(self, kind: Kind, path: Path) -> bool:
        with self._lock:
            number = self.calls[kind]
            self.calls[kind] += 1
            fails = kind == self._kind and (number == self._nth or (self._lasting and number > self._nth))
            if fails:
                self.failed.append(path)
            return fails


class InterruptedFiles(LocalFiles):
    """Raises ``KeyboardInterrupt`` after one operation of the main thread, which was done for real.

    A signal that comes during a system call has this effect: Python handles it when the call returns.

    Parameters
    ----------
    nth
        After which operation, counted from 0 over all kinds.

    Attributes
    ----------
    done
        Operations of the main thread so far.
    """

    def __init__(self, *, nth: int) -> None:
        self._nth = nth
        self.done: list[tuple[Kind, Path]] = []

    def make_dir(self, path: Path) -> bool:
        """See :class:`LocalFiles`."""
        made = super().make_dir(path)
        self._pass("make_dir", path)
        return made

    def create(self, path: Path) -> int:
        """See :class:`LocalFiles`."""
        fd = super().create(path)
        self._pass("create", path)
        return fd

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int, path: Path) -> int:
        """See :class:`LocalFiles`."""
        count = super().write(fd, buffers, offset, path)
        self._pass("write", path)
        return count

    def sync(self, fd: int, path: Path) -> None:
        """See :class:`LocalFiles`."""
        super().sync(fd, path)
        self._pass("sync_dir" if path.is_dir() else "sync", path)

    def link(self, source: Path, target: Path) -> bool:
        """See :class:`LocalFiles`."""
        made = super().link(source, target)
        self._pass("link", target)
        return made

    def unlink(self, path: Path) -> None:
        """See :class:`LocalFiles`."""
        super().unlink(path)
        self._pass("unlink", path)

    def remove_dir(self, path: Path) -> bool:
        """See :class:`LocalFiles`."""
        removed = super().remove_dir(path)
        self._pass("remove_dir", path)
        return removed

    def _pass(self, kind: Kind, path: Path) -> None:
        if threading.current_thread() is threading.main_thread():
            self.done.append((kind, path))
            if len(self.done) == self._nth + 1:
                raise KeyboardInterrupt
