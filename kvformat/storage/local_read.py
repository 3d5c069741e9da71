"""Reading a dataset from a local directory: whole files, ranges, and mappings."""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvformat.errors import make_error
from kvformat.storage.faults import translated

__all__ = ["FileIdentity", "LocalReader", "OpenFile", "map_file", "sha256_of"]

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_MAX_READ = 1 << 30
_HASH_BLOCK = 1 << 20


class FileIdentity(NamedTuple):
    """What a file was when it was opened; another value means another file, or that it was written to.

    Programs can set ``mtime_ns`` back, and copies often do; ``ctime_ns`` they cannot.
    """

    device: int
    inode: int
    nbytes: int
    mtime_ns: int
    ctime_ns: int


class OpenFile:
    """An open file of the dataset: mapped, or read by ranges. Closes when nothing refers to it.

    Attributes
    ----------
    mapped
        The mapping, or None where the file is read by ranges. It is private and copy-on-write where the system
        allows that, so that views are writable for libraries that insist, and the file is never written.
    identity
        See :class:`FileIdentity`.
    """

    __slots__ = ("_fd", "identity", "mapped", "path")

    def __init__(self, fd: int, path: str, identity: FileIdentity, mapped: mmap.mmap | None) -> None:
        self._fd = fd
        self.path = path
        self.identity = identity
        self.mapped = mapped

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Exactly ``nbytes`` bytes from ``offset``: a view of the mapping, or bytes read."""
        if self.mapped is not None:
            if offset + nbytes > len(self.mapped):
                raise make_error("E005", f"bytes {offset}..{offset + nbytes} are beyond the file", path=self.path)
            return memoryview(self.mapped)[offset : offset + nbytes]
        into = bytearray(nbytes)
        self.read_into(memoryview(into), offset)
        return memoryview(into)

    def read_into(self, into: memoryview, offset: int) -> None:
        """Fill ``into`` from ``offset``; E005 where the file ends before."""
        if self.mapped is not None:
            end = offset + len(into)
            if end > self.identity.nbytes:
                raise make_error("E005", f"bytes {offset}..{end} are beyond the file", path=self.path)
            into[:] = memoryview(self.mapped)[offset:end]
            return
        done = 0
        with translated(self.path):
            while done < len(into):
                count = os.preadv(self._fd, [into[done : done + _MAX_READ]], offset + done)
                if count == 0:
                    raise make_error(
                        "E005", f"the file ends at {offset + done}, expected {offset + len(into)}", path=self.path
                    )
                done += count

    def is_current(self) -> bool:
        """Whether its path still leads to this very file, and the file was not written to since it was opened."""
        try:
            return _identity(os.stat(self.path, follow_symlinks=False)) == self.identity
        except OSError:
            return False

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # Bound here: a file that is still open when the interpreter ends may find the globals of this module gone.
        if self._fd >= 0:
            close(self._fd)
            self._fd = -1


class LocalReader:
    """Files under one directory.

    Attributes
    ----------
    location
        The directory, as a string.

    Parameters
    ----------
    root
        Directory of the dataset.
    use_mmap
        Map files instead of reading ranges.
    or_read
        Read ranges of a file that the system refuses to map.
    """

    is_remote = False

    def __init__(self, root: str | os.PathLike[str], *, use_mmap: bool, or_read: bool = False) -> None:
        self.root = Path(root)
        self.location = str(self.root)
        self.use_mmap = use_mmap
        self._or_read = or_read

    def path(self, name: str) -> str:
        """Full path of a file, for messages."""
        return str(self.root / name)

    def open(
        self,
        name: str,
        *,
        nbytes: int | None = None,
        sha256: str | None = None,  # noqa: ARG002 -- files at hand are proved by who reads them
        use_mmap: bool | None = None,
        ranged: bool = False,  # noqa: ARG002 -- nothing is fetched here anyway
    ) -> OpenFile:
        """Open a regular file and check its size before anything is mapped.

        Raises
        ------
        KVFormatError
            E002 missing, E003 not a regular file, E005 another size, E204 no more descriptors or mappings.
        """
        path = self.path(name)
        with translated(path):
            fd = os.open(path, _FLAGS)
            try:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    raise make_error("E003", "not a regular file", path=path)
                if nbytes is not None and status.st_size != nbytes:
                    raise make_error("E005", f"{status.st_size} bytes, expected {nbytes}: restore the file", path=path)
                mapped = None
                if (self.use_mmap if use_mmap is None else use_mmap) and status.st_size:
                    try:
                        mapped = map_file(fd, status.st_size)
                    except OSError:
                        if not self._or_read:
                            raise
            except BaseException:
                os.close(fd)
                raise
        if mapped is not None:
            os.close(fd)  # the mapping holds a descriptor of its own
            fd = -1
        return OpenFile(fd, path, _identity(status), mapped)

    def read(self, name: str, *, nbytes: int | None = None, max_nbytes: int | None = None) -> bytes:
        """A whole file; E004 where it is larger than ``max_nbytes``."""
        file = self.open(name, nbytes=nbytes, use_mmap=False)
        size = file.identity.nbytes
        if max_nbytes is not None and size > max_nbytes:
            raise make_error("E004", f"{size} bytes, at most {max_nbytes} are allowed", path=file.path)
        return bytes(file.read(0, size))

    def walk(self) -> list[str]:
        """All files and links below the root, as relative paths, sorted. Staging appears as its one directory."""
        found = []
        for folder, folders, files in os.walk(self.root):
            folders.sort()
            relative = Path(folder).relative_to(self.root)
            links = [name for name in folders if (Path(folder) / name).is_symlink()]
            found += [(relative / name).as_posix() for name in [*files, *links]]
        return sorted(found)


def sha256_of(file: OpenFile, nbytes: int, progress: Callable[[int], None] | None = None) -> bytes:
    """SHA-256 of the first ``nbytes`` bytes, block by block; ``progress`` is told the size of each block."""
    digest = hashlib.sha256()
    for offset in range(0, nbytes, _HASH_BLOCK):
        block = file.read(offset, min(_HASH_BLOCK, nbytes - offset))
        digest.update(block)
        if progress is not None:
            progress(len(block))
    return digest.digest()


def _identity(status: os.stat_result) -> FileIdentity:
    return FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def map_file(fd: int, nbytes: int) -> mmap.mmap:
    """A private copy-on-write mapping of a file, or a read-only one where the system refuses that."""
    try:
        return mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE | _NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError:
        return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
