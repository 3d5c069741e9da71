"""A file of a dataset, fetched into a local file and proved there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from kvformat.errors import KVFormatError, make_error
from kvformat.storage.local_read import LocalReader, OpenFile
from kvformat.storage.local_write import LocalFiles
from kvformat.storage.readers import Reader
from kvformat.storage.remote import Remote
from kvformat.storage.store import Buffer
from kvformat.transfer.contents import Item
from kvformat.write.shard import hash_file

__all__ = ["digest_error", "fetch", "local_digest", "remote_digest"]

_BLOCK = 1 << 20
_WINDOW = 8  # requests that a digest of an object keeps under way

Advance = Callable[[int], None]


def fetch(reader: Reader, item: Item, files: LocalFiles, fd: int, path: Path, advance: Advance) -> None:
    """Write a file of a dataset into a new local file, and prove it.

    From an object store, one that comes with another digest is fetched once more.

    Parameters
    ----------
    fd, path
        The local file: its descriptor, and its path for messages.
    advance
        Told the bytes written; what it raises ends the fetch.

    Raises
    ------
    KVFormatError
        E002, E003, E005 of the source; E006, E077 where its content is another; E200, E203 of the local file.
    """
    if isinstance(reader, LocalReader):
        source = reader.open(item.name, nbytes=item.nbytes, use_mmap=False)

        def keep(offset: int, block: memoryview) -> None:
            files.write(fd, [block], offset, path)
            advance(len(block))

        found = local_digest(source, item, keep)
    else:
        reader.open(item.name, nbytes=item.nbytes, ranged=True)  # E002, E005: bytes beyond would go unnoticed
        found = _download(reader.remote, item, files, fd, path, advance)
        if found != item.sha256:
            found = _download(reader.remote, item, files, fd, path, advance)
    if found != item.sha256:
        raise digest_error(item, found, reader.path(item.name))


def _download(remote: Remote, item: Item, files: LocalFiles, fd: int, path: Path, advance: Advance) -> str:
    def write(offset: int, data: Buffer) -> None:
        files.write(fd, [data], offset, path)
        advance(len(data))

    remote.fetch(item.name, [(0, item.nbytes)], write)
    return hash_file(fd, path).hex()


def local_digest(file: OpenFile, item: Item, take: Callable[[int, memoryview], None]) -> str:
    """SHA-256 of an open local file, in hexadecimal.

    ``take`` gets what was hashed, block by block: offset, and bytes that are good until it returns. It may raise.
    """
    digest = hashlib.sha256()
    block = memoryview(bytearray(min(_BLOCK, item.nbytes)))  # one for all: fresh memory costs as much as reading
    for offset in range(0, item.nbytes, _BLOCK):
        view = block[: item.nbytes - offset]
        file.read_into(view, offset)
        digest.update(view)
        take(offset, view)
    return digest.hexdigest()


def remote_digest(remote: Remote, item: Item, check: Callable[[], None]) -> str:
    """SHA-256 of an object, in hexadecimal, a few requests at a time in memory.

    ``check`` is called now and then, and may raise.
    """
    digest = hashlib.sha256()
    window = _WINDOW * remote.options.request_nbytes
    into = bytearray(min(window, item.nbytes))
    for offset in range(0, item.nbytes, window):
        view = memoryview(into)[: min(window, item.nbytes - offset)]

        def write(at: int, data: Buffer, view: memoryview = view, offset: int = offset) -> None:
            view[at - offset : at - offset + len(data)] = data

        remote.fetch(item.name, [(offset, len(view))], write)
        digest.update(view)
        check()
    return digest.hexdigest()


def digest_error(item: Item, found: str, path: str) -> KVFormatError:
    """The E006 or E077 of a file of the source."""
    what = "the shard's" if item.code == "E077" else "the file's"
    return make_error(
        item.code, f"{what} SHA-256 is {found}, expected {item.sha256}: restore it, and copy again", path=path
    )
