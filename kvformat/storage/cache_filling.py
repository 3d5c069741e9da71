"""One entry on its way into a cache: who makes it, who waits, and what is tried again."""

from __future__ import annotations

import gc
import os
import time
from typing import NamedTuple

from kvformat.errors import KVFormatError, make_error
from kvformat.storage.cache_entry import Busy, Entry, open_entry
from kvformat.storage.cache_folder import Folder
from kvformat.storage.cache_holders import let_go
from kvformat.storage.cache_ledger import LedgerBusy
from kvformat.storage.cache_part import InWork, Part, claim
from kvformat.storage.cache_room import Room
from kvformat.storage.local_read import FileIdentity
from kvformat.storage.obtaining import Check, Fill, Received
from kvformat.storage.store import Buffer

__all__ = ["Filling", "Patience"]

_FIRST_PAUSE_S = 0.0002
_LAST_PAUSE_S = 0.02
_ROOM_PAUSE_S = 0.005
_TRIES = 2


class Patience(NamedTuple):
    """How long a cache waits, before it is gone past.

    Attributes
    ----------
    room_s
        Until entries in use are given back that leave no room. Once that was in vain, it is not done for a while:
        a reader that wants too much at once would else wait for every record.
    crowded_s
        How long that while is.
    stall_s
        While another process makes an entry, and nothing of it is seen.
    proof_nbytes_per_s
        Speed at which such a process may prove what it fetched, which is not seen either.
    ledger_s
        For the ledger's lock.
    """

    room_s: float = 1.0
    crowded_s: float = 10.0
    stall_s: float = 30.0
    proof_nbytes_per_s: float = 2e8
    ledger_s: float = 30.0


class Filling:
    """A call of :meth:`~kvformat.storage.cache.Cache.obtain` that did not find what it trusts; parameters as there."""

    def __init__(
        self,
        folder: Folder,
        room: Room,
        patience: Patience,
        key: str,
        nbytes: int,
        *,
        path: str,
        fill: Fill,
        check: Check | None,
        use_mmap: bool,
        patient: bool = False,
    ) -> None:
        self._folder = folder
        self._room = room
        self._patience = patience
        self._key = key
        self._own = folder.entry(key)
        self._nbytes = nbytes
        self._path = path
        self._fill = fill
        self._check = check
        self._use_mmap = use_mmap
        self._patient = patient
        self._refusals = 0
        self._began = time.monotonic()
        self._seen: InWork | None = None
        self._since = 0.0
        self._pause = _FIRST_PAUSE_S

    def run(self, file: Entry | None, known: FileIdentity | None) -> Entry | None:
        """The entry, given what was found in its place; None where it has to be gone past the cache."""
        try:
            while True:
                if file is None:
                    part = claim(self._folder, self._key)
                    if isinstance(part, Part):
                        settled, file = self._make(part)
                        if settled:
                            return file
                    elif not self._wait(part):
                        return None
                elif (file.identity == known and file.identity.nbytes == self._nbytes) or self._accepts(file):
                    return file
                file = self._look()
        except (LedgerBusy, Busy):
            return None

    def _look(self) -> Entry | None:
        """What is there now."""
        while True:
            try:
                return open_entry(self._own, self._nbytes, self._path, use_mmap=self._use_mmap)
            except Busy:
                if not self._wait(None):
                    raise

    def _accepts(self, file: Entry) -> bool:
        """Prove an entry that is there; a damaged one is removed."""
        try:
            if file.identity.nbytes != self._nbytes:
                found = file.identity.nbytes
                raise make_error("E005", f"{found} bytes are cached, expected {self._nbytes}", path=file.own)
            if self._check is not None:
                self._check(file)
        except KVFormatError:
            self._room.remove(file, self._nbytes)
            self._refused()
            return False
        return True

    def _refused(self) -> None:
        """Count a refusal, inside the handler of its error: the last one is raised."""
        self._refusals += 1
        if self._refusals >= _TRIES:
            raise  # noqa: PLE0704 -- see above

    def _make(self, part: Part) -> tuple[bool, Entry | None]:
        """Fetch, prove and publish; whether that settles it, and the entry, None where there was no room."""
        published = False
        try:
            if os.path.lexists(self._own):  # published, before the part could be claimed
                return False, None
            if not self._reserve(part):
                return os.path.lexists(part.own), None  # where somebody removed the whole directory, begin anew
            part.allocate(self._nbytes, self._room.make)
            file = self._fetch(part)
            published = part.publish(self._own)
            return published, file if published else None
        finally:
            if not published:
                self._room.release(part.fd, part.own)
            part.close()

    def _reserve(self, part: Part) -> bool:
        deadline = self._began + self._patience.room_s
        pause = _ROOM_PAUSE_S
        while True:
            began = time.monotonic()
            if self._room.reserve(part.fd, self._nbytes, self._path):
                return True
            let_go(self._folder.path)  # what this process holds for later is no reason to do without a cache now
            if self._room.reserve(part.fd, self._nbytes, self._path):
                return True
            if not os.path.lexists(part.own):
                return False
            now = time.monotonic()
            if now >= deadline or (now < self._room.crowded_until and not self._patient):
                if now < deadline:
                    return False
                gc.collect()  # an error that was caught may hold, in a cycle, the record it is about
                if self._room.reserve(part.fd, self._nbytes, self._path):
                    return True
                self._room.crowded_until = now + self._patience.crowded_s
                return False
            time.sleep(min(max(pause, now - began), deadline - now))
            pause *= 2

    def _fetch(self, part: Part) -> Entry:
        while True:
            received = Received(self._nbytes, self._path)

            def write(offset: int, data: Buffer, received: Received = received) -> None:
                part.write(offset, received.take(offset, data))

            self._fill(write)
            received.check()
            file = part.file(self._own, self._path, use_mmap=self._use_mmap)
            try:
                if self._check is not None:
                    self._check(file)
            except KVFormatError:
                self._refused()
            else:
                return file

    def _wait(self, seen: InWork | None) -> bool:
        """Wait a little for another process; False once nothing was seen of it for too long."""
        now = time.monotonic()
        if seen != self._seen or not self._since:
            if seen is not None and seen.nbytes:  # it has room and works: that is no waiting for room
                self._began = now
            self._seen, self._since = seen, now
        elif now - self._since > self._patience.stall_s + self._nbytes / self._patience.proof_nbytes_per_s:
            return False
        time.sleep(self._pause)
        self._pause = min(1.5 * self._pause, _LAST_PAUSE_S)
        return True
