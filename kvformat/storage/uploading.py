"""Making objects whose names are their contents': in parts, confirmed, and never in place of another content."""

from __future__ import annotations

import contextlib
import hashlib
import os
import zlib
from collections.abc import Callable
from typing import Protocol

from kvformat.errors import make_error
from kvformat.storage.faults import translated
from kvformat.storage.fetching import countdown, fetch
from kvformat.storage.operation import Task
from kvformat.storage.ranges import plan_parts
from kvformat.storage.session import Session
from kvformat.storage.store import (
    Buffer,
    ExpiredFault,
    MissingFault,
    Stat,
    Store,
    StoreFault,
    TransportFault,
    Upload,
)

__all__ = ["Content", "FileContent", "MemoryContent", "Uploading"]

_LEAST_PART = 5 << 20  # of S3, the last part excepted
_MOST_PARTS = 10_000


class Content(Protocol):
    """What is uploaded."""

    nbytes: int

    def read(self, start: int, nbytes: int) -> Buffer:
        """Bytes of it; called from several threads."""


class MemoryContent:
    """Bytes."""

    def __init__(self, data: Buffer) -> None:
        self._data = memoryview(data).cast("B")
        self.nbytes = len(self._data)

    def read(self, start: int, nbytes: int) -> Buffer:
        """A view."""
        return self._data[start : start + nbytes]


class FileContent:
    """An open file; of it only the parts under way are in memory."""

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self._path = path
        self.nbytes = os.fstat(fd).st_size

    def read(self, start: int, nbytes: int) -> Buffer:
        """E005 where the file ends before."""
        pieces: list[bytes] = []
        done = 0
        with translated(self._path):
            while done < nbytes:
                piece = os.pread(self._fd, nbytes - done, start + done)
                if not piece:
                    raise make_error(
                        "E005", f"the file ends at {start + done}, it had {self.nbytes} bytes", path=self._path
                    )
                pieces.append(piece)
                done += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class Uploading:
    """One object.

    What arrived is confirmed without moving it again. A store that says the CRC-32 of each part it got (S3, and most
    that speak its protocol) costs 0.15 CPU seconds a GB for that; one that says the MD5 of the object (the ETag: of
    the body, or of the parts' MD5s) 1.2. Both are computed in the threads that send, without the interpreter's lock.
    What says neither, or an ETag of another kind, as for objects under a key of their own, is read back, which costs
    as much of the network as sending.

    Parameters
    ----------
    path
        Of the object, for messages.
    progress
        Told the bytes of each part that was sent, in the calling thread.
    """

    def __init__(
        self,
        session: Session,
        name: str,
        content: Content,
        *,
        request_nbytes: int,
        path: str,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._session = session
        self._name = name
        self._content = content
        self._request_nbytes = request_nbytes
        self._path = path
        self._progress = progress
        self._told = 0
        self._deadline = session.deadline()
        self._parts = plan_parts(
            content.nbytes, part_nbytes=max(request_nbytes, _LEAST_PART), most_parts=_MOST_PARTS
        ) or [(0, 0)]
        self._md5s: list[bytes | None] = [None] * len(self._parts)
        self._crc32s: set[int] = set()
        self._damaged: set[int] = set()

    def run(self) -> None:
        """Make it and confirm it, or confirm the one that is there.

        Raises
        ------
        KVFormatError
            E113 where another content is there; E212 where what arrived differs, twice.
        StoreFault
            What could not be mended.
        """
        found = self._stat()
        if found is not None and found.nbytes != self._content.nbytes:
            found = self._stat()  # the page of a proxy has a size as well
        if found is not None:
            self._require_equal(found)
        else:
            self._send()
            if (difference := self._difference()) is not None:  # perhaps damaged on the way
                self._send()
                difference = self._difference()
            if difference is not None:
                raise make_error(
                    "E212",
                    f"{difference}, after two uploads: check the store, then remove this object",
                    path=self._path,
                )
        self._tell(self._content.nbytes - self._told)

    # -- what is there --------------------------------------------------------------------------------------------

    def _stat(self) -> Stat | None:
        """Size and ETag. An object is empty once it was read: no byte of it will prove that it is there."""
        try:
            found: Stat = self._session.ask(
                lambda store, timeout_s: store.stat(self._name, timeout_s=timeout_s), self._deadline
            )
            if found.nbytes:
                return found
            data: bytes = self._session.ask(
                lambda store, timeout_s: store.get_all(self._name, max_nbytes=0, timeout_s=timeout_s), self._deadline
            )
        except MissingFault:
            return None
        return found._replace(nbytes=len(data))

    def _require_equal(self, found: Stat) -> None:
        nbytes = self._content.nbytes
        differing = None if found.nbytes == nbytes else f"{found.nbytes} bytes are there, {nbytes} were to be uploaded"
        if differing is None and not self._is_equal():
            differing = "another content of the same size is there"
        if differing is not None:
            raise make_error(
                "E113",
                f"{differing}: nothing was replaced. Remove that object where nobody uses it, or choose another place",
                path=self._path,
            )

    def _difference(self) -> str | None:
        """What is wrong with the object that was made."""
        found, nbytes = self._stat(), self._content.nbytes
        if found is None:
            return f"no object is there, expected {nbytes} bytes"
        if found.nbytes != nbytes:
            return f"{found.nbytes} bytes are there, expected {nbytes}"
        if len(self._crc32s) == len(self._parts) or (found.etag is not None and found.etag == self._etag()):
            return None
        if not self._is_equal():
            return f"the {nbytes} bytes that are there are others"
        self._session.says_md5 = False
        return None

    def _etag(self) -> str | None:
        md5s = [md5 for md5 in self._md5s if md5 is not None]
        if len(md5s) < len(self._parts):
            return None
        if len(md5s) == 1:
            return md5s[0].hex()
        return f"{_md5(b''.join(md5s)).hex()}-{len(md5s)}"

    def _is_equal(self) -> bool:
        """Read it back and compare; what differs once more, in case it was damaged on the way."""
        wanted = [(0, self._content.nbytes)]
        for _ in range(2):
            differing: list[tuple[int, int]] = []

            def compare(start: int, data: Buffer, into: list[tuple[int, int]] = differing) -> None:
                nbytes = len(data)
                if memoryview(self._content.read(start, nbytes)) != data:
                    into.append((start, nbytes))

            fetch(
                self._session,
                self._name,
                wanted,
                compare,
                request_nbytes=self._request_nbytes,
                deadline=self._deadline,
                path=self._path,
            )
            if not differing:
                return True
            wanted = differing
        return False

    # -- sending --------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        if len(self._parts) == 1:
            self._session.ask(self._put, self._deadline, nbytes=self._content.nbytes)
            self._sent(0)
            return
        opened: list[Store] = []
        try:
            self._send_parts(opened)
        except ExpiredFault:  # the upload belongs to the client that began it
            self._session.renew(opened[-1])
            self._send_parts(opened)

    def _put(self, store: Store, timeout_s: float) -> None:
        data = self._content.read(*self._parts[0])
        self._keep_md5(0, data)
        store.put(self._name, data, timeout_s=timeout_s)

    def _send_parts(self, opened: list[Store]) -> None:
        begun: list[Upload] = []

        def begin(store: Store, timeout_s: float) -> Upload:
            opened.append(store)
            return store.begin(self._name, timeout_s=timeout_s)

        def part(place: int) -> Callable[[Store, float], None]:
            return lambda _, timeout_s: self._send_part(begun[0], place, timeout_s)

        try:
            begun.append(self._session.ask(begin, self._deadline))
            tasks = [
                Task(part(place), lambda _: None, nbytes, renews=False)
                for place, (_, nbytes) in enumerate(self._parts)
            ]
            self._session.run(tasks, self._deadline, answered=self._sent, settle=True)
            self._session.ask(self._completion(begun[0]), self._deadline, renews=False)
        except BaseException:
            if begun:
                self._abort(begun[0])
            raise

    def _completion(self, upload: Upload) -> Callable[[Store, float], None]:
        tried = False

        def complete(store: Store, timeout_s: float) -> None:
            nonlocal tried
            left = countdown(timeout_s)
            if tried:  # an upload that is complete does not exist any more
                with contextlib.suppress(MissingFault):
                    if store.stat(self._name, timeout_s=left()).nbytes == self._content.nbytes:
                        return
            tried = True
            try:
                upload.complete(timeout_s=left())
            except MissingFault as fault:
                raise StoreFault("the upload is gone: somebody aborted it, or its time was up") from fault

        return complete

    def _abort(self, upload: Upload) -> None:
        """Free what was sent; where that fails, the rules of the bucket will."""
        with contextlib.suppress(Exception):
            self._session.ask(
                lambda _, timeout_s: upload.abort(timeout_s=timeout_s), self._session.last_words(), renews=False
            )

    def _send_part(self, upload: Upload, place: int, timeout_s: float) -> None:
        """Send a part. What the store says it got is compared at once; where it says nothing, the MD5 is kept."""
        data = self._content.read(*self._parts[place])
        stated = upload.part(place + 1, data, timeout_s=timeout_s)
        if stated is None:
            self._crc32s.discard(place)
            self._keep_md5(place, data)
        elif stated == zlib.crc32(data):
            self._crc32s.add(place)
        else:
            what = f"part {place + 1} arrived with the CRC-32 {stated:08x}, expected {zlib.crc32(data):08x}"
            if place in self._damaged:
                raise make_error("E212", f"{what}, twice: check network and store", path=self._path)
            self._damaged.add(place)  # perhaps on the way
            raise TransportFault(what)

    def _keep_md5(self, place: int, data: Buffer) -> None:
        if self._session.says_md5 and self._md5s[place] is None:
            self._md5s[place] = _md5(data)

    def _sent(self, place: int) -> None:
        self._deadline.renew()
        self._tell(self._parts[place][1])

    def _tell(self, nbytes: int) -> None:
        nbytes = min(nbytes, self._content.nbytes - self._told)  # a second upload is not progress
        if self._progress is not None and nbytes > 0:
            self._told += nbytes
            self._progress(nbytes)


def _md5(data: Buffer) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()
