"""Writing a documents file, document by document: token ids go to disk as they come, the rest is kept in columns."""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kvformat.errors import make_error
from kvformat.extract.columns import HEADER_NBYTES, Written, write_columns
from kvformat.extract.documents.file import Documents, open_documents, temporary_documents
from kvformat.extract.documents.form import COLUMNS, TABLE, About
from kvformat.extract.documents.part_file import create_part, remove_leftovers
from kvformat.spec import canonical, limits
from kvformat.spec.context import Text
from kvformat.spec.document import MASKS, MEDIA_ENTRY_NBYTES, Document
from kvformat.spec.manifest import Skipped
from kvformat.storage.local_write import LocalFiles
from kvformat.write.folders import Folders

__all__ = ["DocumentsWriter"]

_BUFFERED_NBYTES = 1 << 20
_U32 = "I"


class DocumentsWriter:
    """Writes one documents file; a context manager that leaves nothing behind unless :meth:`finish` was called.

    Equal documents become one, with several names. Needs about 300 bytes of memory a document.

    Parameters
    ----------
    path
        Where the file goes, on a file system with hard links: it appears there whole, and nothing is overwritten.
        What killed writers of the same path left beside it is removed, except on network and FUSE mounts. Without a
        path, the file is a temporary one that is gone when nobody refers to it.
    folder
        Where a temporary file takes its space; the system's directory for them if not given.

    Raises
    ------
    StorageError
        E200, E203, E207.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        folder: str | os.PathLike[str] | None = None,
        files: LocalFiles | None = None,
    ) -> None:
        self._files = files or LocalFiles()
        self._target = None if path is None else Path(path)
        self._path, self._fd = self._create(folder)
        self._buffer = bytearray()
        self._inputs = 0  # items of the first column that were written or wait in the buffer
        self._records: dict[bytes, int] = {}
        self._names: set[str] = set()
        self._ordinal = 0
        self._tokens = array(_U32)
        self._rows = bytearray()
        self._masks = bytearray()
        self._prefix_length = array(_U32)
        self._digest = bytearray()
        self._media_end = array("Q")
        self._media = bytearray()
        self._name_document = array("Q")
        self._name_input = array("Q")
        self._name_end = array("Q")
        self._name_bytes = bytearray()
        self._sources: dict[bytes, str] = {}
        self._skipped: list[Skipped] = []
        self.num_tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def num_documents(self) -> int:
        """Documents so far, each counted once."""
        return len(self._tokens)

    @property
    def num_names(self) -> int:
        """Names so far."""
        return len(self._name_document)

    @property
    def nbytes(self) -> int:
        """Bytes of token ids and positions so far."""
        return 4 * self._inputs

    def add(self, name: str, document: Document, media_sources: Sequence[str | None] = ()) -> int:
        """Add a document under a name; returns its number, which is that of an equal one added before.

        Parameters
        ----------
        media_sources
            Of each of the document's media, the path or URL it can be loaded from; empty where none is known. Of
            several places of one digest the first is kept.

        Raises
        ------
        InputError
            E106, E107 for the name, E309 where sources do not fit the media.
        """
        if media_sources and len(media_sources) != len(document.media):
            message = f"{len(media_sources)} sources are given, and the document has {len(document.media)} media"
            raise make_error("E309", message, record=name)
        self._take(name)
        digest = document.digest
        number = self._records.setdefault(digest, len(self._tokens))
        if number == len(self._tokens):
            self._put(document, digest)
        for entry, source in zip(document.media, media_sources, strict=False):
            if source is not None:
                self._sources.setdefault(entry.digest, source)
        self._name_document.append(number)
        self._name_input.append(self._ordinal)
        self._name_bytes += name.encode()
        self._name_end.append(len(self._name_bytes))
        self._ordinal += 1
        return number

    def skip(self, name: str, reason: str) -> None:
        """Note that a document is left out, and why; E106, E107 for the name."""
        self._take(name)
        if not reason:
            raise make_error("E081", "a skipped document needs a reason", record=name)
        self._skipped.append(Skipped(input=self._ordinal, name=name, reason=reason))
        self._ordinal += 1

    def finish(self, text: Text | None = None) -> Documents:
        """Make the file durable under its name, and open it. An equal file that is there already is as good.

        Parameters
        ----------
        text
            How text became ids; empty where documents came as ids.

        Raises
        ------
        InputError
            E306 where no document was added.
        StorageError
            E200 to E203; E207 where another file is there.
        """
        if not self._tokens:
            raise make_error("E306", "there is no document to write; give at least one", path=self._target)
        if self._fd < 0:
            raise make_error("E115", "the documents file was finished or given up before", path=self._target)
        self._flush()
        about = canonical.encode(About(skipped=tuple(self._skipped), text=text or Text()))
        written = write_columns(
            self._files, self._fd, self._path, TABLE, COLUMNS, self._columns(about), streamed=self._inputs
        )
        if self._target is None:
            opened = temporary_documents(self._fd, str(self._path))
            self.close()
            return opened
        if not self._files.link(self._path, self._target):
            _compare(open_documents(self._target), written)
        self._files.sync_dir(self._target.parent)
        self.close()
        return open_documents(self._target)

    def close(self) -> None:
        """Give up what is not finished. More than once is harmless."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        try:
            if self._target is not None:
                self._files.unlink(self._path)
        finally:
            os.close(fd)

    def _create(self, folder: str | os.PathLike[str] | None) -> tuple[Path, int]:
        """A file of a name of its own; a temporary one loses it at once."""
        place = Path(folder or tempfile.gettempdir()) / "documents" if self._target is None else self._target
        Folders(self._files).make(place.parent)
        if self._target is not None:
            remove_leftovers(self._files, place)
        path, fd = create_part(self._files, place)
        if self._target is None:
            self._files.unlink(path)
        return path, fd

    def _take(self, name: str) -> None:
        try:
            nbytes = len(name.encode())
        except (AttributeError, UnicodeEncodeError):
            nbytes = 0
        if not 1 <= nbytes <= limits.MAX_NAME_NBYTES:
            raise make_error(
                "E106", f"a name is a string of 1 to {limits.MAX_NAME_NBYTES} bytes of UTF-8, found {name!r:.80}"
            )
        before = len(self._names)
        self._names.add(name)
        if len(self._names) == before:
            raise make_error("E107", "the name was given before", record=name)

    def _put(self, document: Document, digest: bytes) -> None:
        self._buffer += document.token_ids.data
        rows = 0
        if document.position_ids is not None:
            rows = len(document.position_ids)
            self._buffer += np.ascontiguousarray(document.position_ids, dtype="<i4").data.cast("B")
        self._inputs += document.num_tokens * (1 + rows)
        self.num_tokens += document.num_tokens
        self._tokens.append(document.num_tokens)
        self._rows.append(rows)
        self._masks.append(MASKS.index(document.mask))
        self._prefix_length.append(document.prefix_length)
        self._digest += digest
        for entry in document.media:
            self._media += entry.pack()
        self._media_end.append(len(self._media) // MEDIA_ENTRY_NBYTES)
        if len(self._buffer) >= _BUFFERED_NBYTES:
            self._flush()

    def _flush(self) -> None:
        if self._buffer:
            at = HEADER_NBYTES + 4 * self._inputs - len(self._buffer)
            self._files.write(self._fd, [self._buffer], at, self._path)
            self._buffer.clear()

    def _columns(self, about: bytes) -> dict[str, NDArray[Any]]:
        source_end = np.cumsum([len(_encoded(source)) for source in self._sources.values()], dtype=np.uint64)
        return {
            "tokens": _numbers(self._tokens, np.uint32),
            "position_rows": _numbers(self._rows, np.uint8),
            "mask": _numbers(self._masks, np.uint8),
            "prefix_length": _numbers(self._prefix_length, np.uint32),
            "digest": _numbers(self._digest, np.uint8).reshape(-1, 32),
            "media_end": _numbers(self._media_end, np.uint64),
            "media": _numbers(self._media, np.uint8).reshape(-1, MEDIA_ENTRY_NBYTES),
            "name_document": _numbers(self._name_document, np.uint64),
            "name_input": _numbers(self._name_input, np.uint64),
            "name_end": _numbers(self._name_end, np.uint64),
            "name_bytes": _numbers(self._name_bytes, np.uint8),
            "source_digest": _numbers(b"".join(self._sources), np.uint8).reshape(-1, 32),
            "source_end": source_end,
            "source_bytes": _numbers(b"".join(map(_encoded, self._sources.values())), np.uint8),
            "about": _numbers(about, np.uint8),
        }


def _compare(found: Documents, written: Written) -> None:
    """Refuse where what is there already is not what was to be written."""
    if found.proof != written:
        raise make_error("E207", "another documents file is here already; choose another location", path=found.path)
    found.check()


def _numbers(values: array[int] | bytearray | bytes, dtype: Any) -> NDArray[Any]:
    return np.frombuffer(values, dtype=dtype)


def _encoded(source: str) -> bytes:
    return source.encode("utf-8", "surrogateescape")  # a path may hold any bytes
