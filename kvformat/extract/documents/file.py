"""Documents files: documents by number, with names and digests, mapped when read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvformat.errors import KVFormatError, make_error
from kvformat.extract.columns import HEADER_NBYTES, ColumnsFile, Written
from kvformat.extract.documents.form import COLUMNS, TABLE, document_sum
from kvformat.extract.documents.keeping import keep
from kvformat.extract.documents.sound import about_of, check_counts, first_places
from kvformat.spec.document import MASKS, MEDIA_ENTRY_NBYTES, Document, unpack_media
from kvformat.storage.faults import translated
from kvformat.storage.local_read import FileIdentity, LocalReader, OpenFile, map_file
from kvformat.storage.local_write import LocalFiles
from kvformat.storage.mounts import prefers_pread

__all__ = ["Documents", "open_documents", "temporary_documents"]

_REMEDY = "restore the documents file, or make it again"
_ENTRY = MEDIA_ENTRY_NBYTES
_BLOCK_NBYTES = 8 << 20


class Documents:
    """A documents file, open. Documents are numbered in the order in which they came first.

    Inputs are numbered from 0 as the source had them; each is a name of a document, or was skipped. Made by
    :func:`open_documents` and by :class:`~kvformat.extract.documents.writer.DocumentsWriter`.

    Parameters
    ----------
    file
        The file, mapped where it may be.
    bulk
        The same one, not mapped: for reading all of it, which would fill memory with pages of a mapping.

    Attributes
    ----------
    text
        How text became token ids.
    skipped
        Inputs that were left out, in order, each with the reason.
    num_tokens
        Tokens of each document: uint32 ``[documents]``.
    digests
        uint8 ``[documents, 32]``.
    name_document, name_input
        Of each name, its document and its input: uint64 ``[names]``, in the order of the inputs.

    Raises
    ------
    DamageError
        E307 where it is not as it was written.
    """

    def __init__(self, file: OpenFile, bulk: OpenFile) -> None:
        self._bulk = bulk
        self._columns = columns = ColumnsFile(file, TABLE, COLUMNS, what=_REMEDY)
        arrays = columns.arrays
        about = about_of(columns)
        self.text = about.text
        self.skipped = about.skipped
        self.num_tokens: NDArray[np.uint32] = arrays["tokens"]
        self.position_rows: NDArray[np.uint8] = arrays["position_rows"]
        self.masks: NDArray[np.uint8] = arrays["mask"]
        self.digests: NDArray[np.uint8] = arrays["digest"]
        self.name_document: NDArray[np.uint64] = arrays["name_document"]
        self.name_input: NDArray[np.uint64] = arrays["name_input"]
        self._prefix_length: NDArray[np.uint32] = arrays["prefix_length"]
        self._media_end: NDArray[np.uint64] = arrays["media_end"]
        self._name_end: NDArray[np.uint64] = arrays["name_end"]
        self._digest_bytes = self.digests.reshape(-1).data
        self._name_bytes = arrays["name_bytes"].data
        self._media = arrays["media"].reshape(-1).data
        check_counts(columns)
        sizes = self.num_tokens.astype(np.uint64) * (self.position_rows.astype(np.uint64) + np.uint64(1))
        self._end: NDArray[np.uint64] = np.cumsum(sizes, dtype=np.uint64)
        self._first_place = first_places(columns, self._end)
        sources = arrays["source_digest"].reshape(-1).data
        self._sources = {bytes(sources[at : at + 32]): at // 32 for at in range(0, len(sources), 32)}

    @property
    def path(self) -> str:
        """Of the file."""
        return self._columns.path

    @property
    def proof(self) -> Written:
        """What proves everything in the file: the digest of its header, and its size."""
        return self._columns.proof

    def __len__(self) -> int:
        """Number of documents, each counted once."""
        return len(self.num_tokens)

    @property
    def num_names(self) -> int:
        """Number of names."""
        return len(self.name_document)

    @property
    def num_inputs(self) -> int:
        """Number of inputs, those that were skipped included."""
        return self.num_names + len(self.skipped)

    @property
    def names_nbytes(self) -> int:
        """Bytes of all names together."""
        return len(self._name_bytes)

    def num_media(self) -> NDArray[np.uint64]:
        """Media of each document: uint64 ``[documents]``."""
        return np.diff(self._media_end, prepend=np.uint64(0))

    def digest(self, number: int) -> bytes:
        """Digest of a document, 32 bytes."""
        return bytes(self._digest_bytes[number * 32 : number * 32 + 32])

    def first_name(self, number: int) -> str:
        """The first name of a document."""
        try:
            return self.name(int(self._first_place[number])).decode()
        except UnicodeDecodeError:
            self._columns.refuse(f"a name of document {number} is not UTF-8")

    def name(self, place: int) -> bytes:
        """UTF-8 of the name at a place among the names."""
        return bytes(self._name_bytes[int(self._name_end[place - 1]) if place else 0 : int(self._name_end[place])])

    def names(self, places: NDArray[np.uint64] | NDArray[np.intp]) -> Iterator[bytes]:
        """UTF-8 of the names at many places."""
        begins = np.concatenate((np.zeros(1, dtype=np.uint64), self._name_end[:-1]))
        for begin, end in zip(begins[places].tolist(), self._name_end[places].tolist(), strict=True):
            yield bytes(self._name_bytes[begin:end])

    def document(self, number: int) -> Document:
        """A document. Its arrays are views of the file, where that is mapped, and not to be written to.

        Raises
        ------
        DamageError
            E307 where it is not as it was written.
        """
        tokens, rows = int(self.num_tokens[number]), int(self.position_rows[number])
        begin = int(self._end[number - 1]) if number else 0
        raw = self._columns.read("inputs", 4 * begin, 4 * tokens * (1 + rows))
        mask, prefix = int(self.masks[number]), int(self._prefix_length[number])
        media = self._media[
            _ENTRY * int(self._media_end[number - 1] if number else 0) : _ENTRY * int(self._media_end[number])
        ]
        self._prove(number, document_sum(tokens, raw, mask=mask, prefix_length=prefix, rows=rows, media=media))
        values = np.frombuffer(raw, dtype="<i4")
        return Document(
            token_ids=values[:tokens],
            position_ids=values[tokens:].reshape(rows, tokens) if rows else None,
            mask=MASKS[mask],
            prefix_length=prefix,
            media=unpack_media(np.frombuffer(media, dtype=np.uint8).reshape(-1, _ENTRY)),
        )

    def media_source(self, digest: bytes) -> str | None:
        """Path or URL of the media whose entry has this digest; None where none was given."""
        at = self._sources.get(digest)
        if at is None:
            return None
        ends = self._columns.arrays["source_end"]
        data: bytes = self._columns.arrays["source_bytes"][int(ends[at - 1]) if at else 0 : int(ends[at])].tobytes()
        return data.decode("utf-8", "surrogateescape")

    def check(self, *, vocab_size: int | None = None) -> None:
        """Read everything once, in order and past the mapping, and prove every document.

        Parameters
        ----------
        vocab_size
            Ids must be below.

        Raises
        ------
        DamageError
            E307 where a document is not as it was written.
        InputError
            E300 for an id beyond the vocabulary.
        """
        number = begin = 0
        while number < len(self):
            last = int(np.searchsorted(self._end, np.uint64(begin + _BLOCK_NBYTES // 4), side="right"))
            last = max(last, number + 1)
            end = int(self._end[last - 1])
            block = self._bulk.read(HEADER_NBYTES + 4 * begin, 4 * (end - begin))
            self._check_block(slice(number, last), block, vocab_size)
            number, begin = last, end

    def save(self, files: LocalFiles, path: Path) -> None:
        """Give the file another name, where it has one and that is on the same file system, or copy it. Durable."""
        keep(self._bulk, files, path)

    def _check_block(self, part: slice, block: memoryview, vocab_size: int | None) -> None:
        columns = (self.num_tokens, self.position_rows, self.masks, self._prefix_length, self._media_end)
        at, media_at = 0, int(self._media_end[part.start - 1]) if part.start else 0
        beyond = vocab_size is not None and bool((np.frombuffer(block, dtype="<i4") >= vocab_size).any())
        rest = zip(*(column[part].tolist() for column in columns), strict=True)
        for number, (tokens, rows, mask, prefix, media_end) in enumerate(rest, part.start):
            raw = block[at : at + 4 * tokens * (1 + rows)]
            media = self._media[_ENTRY * media_at : _ENTRY * media_end]
            at, media_at = at + len(raw), media_end
            self._prove(number, document_sum(tokens, raw, mask=mask, prefix_length=prefix, rows=rows, media=media))
            if beyond:
                self._check_ids(number, np.frombuffer(raw[: 4 * tokens], dtype="<i4"), vocab_size or 0)

    def _check_ids(self, number: int, ids: NDArray[np.int32], vocab_size: int) -> None:
        if ids.max() >= vocab_size:
            raise make_error(
                "E300",
                f"document {number}: token id {ids.max()} is beyond the model's vocabulary of {vocab_size}",
                path=self.path,
                record=self.first_name(number),
            )

    def _prove(self, number: int, found: bytes) -> None:
        if found != self._digest_bytes[number * 32 : number * 32 + 32]:
            self._columns.refuse(f"document {number} ({self.first_name(number)!r}) is not as it was written")


def open_documents(path: str | os.PathLike[str]) -> Documents:
    """Open a documents file: check everything but the inputs, each of which is proved when it is read.

    Parameters
    ----------
    path
        Local path of the file (``*.kvdocs``). It stays mapped, or open, as long as what is returned is used.

    Returns
    -------
    Documents
        Its documents by number, with names and digests.

    Raises
    ------
    DamageError
        E307 where it is damaged, cut short, or none of ours; E002, E003 where there is no such file.
    StorageError
        E203, E204, E207 where it cannot be read or mapped.
    """
    path = Path(path)
    try:
        file, bulk = (
            LocalReader(path.parent, use_mmap=use_mmap, or_read=True).open(path.name)
            for use_mmap in (not prefers_pread(path), False)
        )
    except KVFormatError as error:
        if error.code != "E002":
            raise
        message = "no documents file is there: make one with `kvformat documents`"
        raise make_error("E002", message, path=path) from error
    if file.identity != bulk.identity:
        raise make_error("E307", f"it was replaced or written to meanwhile; {_REMEDY}", path=path)
    return Documents(file, bulk)


def temporary_documents(fd: int, path: str) -> Documents:
    """Documents of a file that has no name any more, by a descriptor of it that stays the caller's.

    Parameters
    ----------
    path
        For messages.
    """
    with translated(path):
        status = os.fstat(fd)
        identity = FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        bulk = OpenFile(os.dup(fd), path, identity, None)
        try:
            return Documents(OpenFile(-1, path, identity, map_file(fd, status.st_size)), bulk)
        except OSError:
            return Documents(bulk, bulk)
