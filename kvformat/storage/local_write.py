"""The few operations by which a writer changes a local directory.

Everything a writer does to the disk goes through one :class:`LocalFiles`, so that a test can record the operations,
lose what was not synced, and see what a reader would find.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from kvformat.errors import make_error
from kvformat.storage.faults import translate, translated

__all__ = ["LocalFiles"]

_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK, errno.EINVAL})
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_MAX_BUFFERS = 512
_MAX_WRITE = 1 << 30

Buffer = bytes | bytearray | memoryview


class LocalFiles:
    """Mutations of a local file system. Paths are absolute or relative to the process."""

    def make_dir(self, path: Path) -> bool:
        """Create a directory; False where it exists. Its parent must exist."""
        with translated(path):
            try:
                path.mkdir()
            except FileExistsError:
                if not path.is_dir():
                    raise make_error("E207", "a file stands where a directory is needed", path=path) from None
                return False
        return True

    def create(self, path: Path) -> int:
        """Create a file that does not exist and return its descriptor; FileExistsError passes through."""
        try:
            return os.open(path, _CREATE, 0o666)
        except FileExistsError:
            raise
        except OSError as error:
            raise translate(error, path) from error

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int, path: Path) -> int:
        """Write all buffers one behind the other from ``offset``; returns the bytes written."""
        views = [memoryview(buffer) for buffer in buffers]
        total = sum([view.nbytes for view in views])
        try:
            # As a rule one call does it.
            if len(views) > _MAX_BUFFERS or total > _MAX_WRITE or os.pwritev(fd, views, offset) != total:
                _write_parts(fd, views, offset)
        except OSError as error:
            raise translate(error, path, needed_nbytes=total) from error
        return total

    def sync(self, fd: int, path: Path) -> None:
        """Make a file's content durable. A failure is final: the kernel may have dropped the pages."""
        try:
            os.fsync(fd)
        except OSError as error:
            raise make_error(
                "E202", f"fsync failed ({error.strerror}): the data may be lost, write again", path=path
            ) from error

    def sync_dir(self, path: Path) -> None:
        """Make a directory's entries durable."""
        with translated(path):
            fd = os.open(path, _DIRECTORY)
        try:
            self.sync(fd, path)
        finally:
            os.close(fd)

    def link(self, source: Path, target: Path) -> bool:
        """Give a file a second name; False where the name is taken.

        Raises
        ------
        StorageError
            E201 where the file system has no hard links.
        """
        try:
            os.link(source, target, follow_symlinks=False)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno in _NO_LINKS:
                raise make_error(
                    "E201",
                    f"no hard link could be made here ({error.strerror}): write to a local disk and copy the dataset",
                    path=target,
                ) from error
            raise translate(error, target) from error
        return True

    def unlink(self, path: Path) -> None:
        """Remove a file, where it exists."""
        with translated(path):
            path.unlink(missing_ok=True)

    def remove_dir(self, path: Path) -> bool:
        """Remove a directory, where it exists and is empty."""
        try:
            path.rmdir()
        except OSError:
            return False
        return True

    def create_file(self, path: Path, data: bytes) -> None:
        """Create a durable file with this content (its directory entry is not synced)."""
        fd = self.create(path)
        try:
            self.write(fd, [data], 0, path)
            self.sync(fd, path)
        finally:
            os.close(fd)


def _write_parts(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write all buffers in as many calls as it takes, each of which may write less than it was given."""
    views = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
    while views:
        batch, size = [], 0
        for view in views[:_MAX_BUFFERS]:
            batch.append(view[: _MAX_WRITE - size])
            size += len(batch[-1])
            if size >= _MAX_WRITE:
                break
        count = os.pwritev(fd, batch, offset)
        offset += count
        while count:
            if count >= len(views[0]):
                count -= len(views.pop(0))
            else:
                views[0] = views[0][count:]
                count = 0
