"""Reading a dataset from an object store: whole files through a cache or memory, and parts of shards."""

from __future__ import annotations

import warnings

from kvformat.errors import KVFormatWarning, make_error
from kvformat.storage.cache import Cache
from kvformat.storage.cache_holders import Holder, register
from kvformat.storage.cache_options import CacheOptions
from kvformat.storage.local_read import FileIdentity, OpenFile, sha256_of
from kvformat.storage.obtaining import Check, Fill, Memory
from kvformat.storage.remote import Remote

__all__ = ["RangedFile", "RemoteReader"]


class RemoteReader:
    """Files below one URL, with the face of :class:`~kvformat.storage.local_read.LocalReader`.

    Parameters
    ----------
    remote
        Where the files are.
    cache
        Where files are kept that were fetched and proved; None for memory, in which they last as long as they are
        used.
    use_mmap
        Map cached files instead of reading them.
    verify
        Prove whole files whose digest is given before they are used.

    Attributes
    ----------
    unit
        What the cache holds of shards: ``auto``, ``record`` or ``shard``; ``record`` without a cache.
    """

    is_remote = True
    """Then :meth:`open` proves a file by the digest it is given, and what differs may have been damaged on the way."""

    def __init__(
        self, remote: Remote, *, cache: CacheOptions | None = None, use_mmap: bool = True, verify: bool = True
    ) -> None:
        self.remote = remote
        self.location = remote.url
        self.use_mmap = use_mmap
        self.unit = "record" if cache is None else cache.unit
        self._verify = verify
        self._options = cache
        self._cache = None if cache is None else Cache(cache)
        self._memory = Memory()
        self._warned = False

    @property
    def cache_nbytes(self) -> int | None:
        """Most bytes of the cache; None without one: then no other process finds what this one fetched."""
        return None if self._options is None else self._options.max_nbytes

    @property
    def is_bypassed(self) -> bool:
        """Whether the cache had no room once, and something was read into memory instead."""
        return self._warned

    def held_by(self, holder: Holder) -> None:
        """Have a holder of open files let go of them where the cache needs room."""
        if self._options is not None:
            register(self._options.dir, holder)

    def path(self, name: str) -> str:
        """Full URL of a file, for messages."""
        return self.remote.path(name)

    def read(self, name: str, *, nbytes: int | None = None, max_nbytes: int | None = None) -> bytes:
        """A whole small file, past the cache; E002, E004, E005; E203, E207, E208."""
        return self.remote.read(name, nbytes=nbytes, max_nbytes=max_nbytes)

    def walk(self) -> list[str]:
        """All objects below the URL, sorted; for verification, never for reading."""
        return sorted(found.name for found in self.remote.list())

    def open(
        self,
        name: str,
        *,
        nbytes: int | None = None,
        sha256: str | None = None,
        code: str = "E006",
        use_mmap: bool | None = None,
        ranged: bool = False,
        required: bool = False,
        known: FileIdentity | None = None,
    ) -> OpenFile:
        """A whole file, fetched once.

        Parameters
        ----------
        nbytes
            Size it must have.
        sha256
            Digest it must have, in hexadecimal: what is fetched, or found in the cache, is proved by it. One that
            differs is fetched once more.
        code
            Code of the error where it differs again.
        use_mmap
            As for the class.
        ranged
            Fetch nothing now, but each range when it is read. Size and presence are asked for.
        required
            Refuse to take memory for it where the cache has no room.
        known
            As for :meth:`obtain`.

        Raises
        ------
        KVFormatError
            E002 missing, E005 another size, E006 another digest; E203, E207, E208; E210.
        """
        path = self.path(name)
        if ranged or nbytes is None:
            found = self.remote.stat(name)
            if found is None:
                raise make_error("E002", "the object is missing: restore it from a copy of the dataset", path=path)
            if nbytes is not None and found.nbytes != nbytes:
                raise make_error("E005", f"{found.nbytes} bytes, expected {nbytes}: restore the object", path=path)
            nbytes = found.nbytes
        if ranged:
            return RangedFile(self.remote, name, nbytes)
        size = nbytes

        def check(file: OpenFile) -> None:
            digest = sha256_of(file, size).hex()
            if digest != sha256:
                message = f"the SHA-256 is {digest}, expected {sha256}: restore the object"
                raise make_error(code, message, path=path)

        return self.obtain(
            sha256,
            size,
            path=path,
            fill=lambda write: self.remote.fetch(name, [(0, size)], write),
            check=check if self._verify and sha256 is not None else None,
            known=known,
            use_mmap=use_mmap,
            required=required,
            patient=required,
        )

    def seems_to_hold(self, key: str, nbytes: int) -> bool:
        """Whether :meth:`obtain` will probably find it in the cache."""
        return self._cache is not None and self._cache.seems_to_hold(key, nbytes)

    def obtain(
        self,
        key: str | None,
        nbytes: int,
        *,
        path: str,
        fill: Fill,
        check: Check | None,
        known: FileIdentity | None = None,
        use_mmap: bool | None = None,
        required: bool = False,
        patient: bool = False,
    ) -> OpenFile:
        """Bytes that are fetched and proved once, from the cache or in memory.

        Parameters
        ----------
        key
            What determines them; None keeps them out of the cache.
        fill
            Fetches them.
        check
            Proves them; what it refuses is fetched once more.
        known
            Identity of what was proved before, and needs not to be again.
        required
            Refuse to go past the cache.
        patient
            Wait for room in it even where that was in vain lately.

        Raises
        ------
        KVFormatError
            Of ``fill``; of ``check``, where it refuses twice; E200, E207, E210 of the cache.
        """
        mapped = self.use_mmap if use_mmap is None else use_mmap
        if self._cache is not None and key is not None:
            found = self._cache.obtain(
                key, nbytes, path=path, fill=fill, check=check, known=known, use_mmap=mapped, patient=patient
            )
            if found is not None:
                return found
            self._bypassed(nbytes, path, required=required)
        return self._memory.obtain("", nbytes, path=path, fill=fill, check=check)

    def _bypassed(self, nbytes: int, path: str, *, required: bool) -> None:
        assert self._options is not None
        message = (
            f"the cache in {self._options.dir} has no room for {nbytes:,} bytes beside what is in use now, of at most "
            f"{self._options.max_nbytes:,}: raise max_nbytes, free space on its file system, or let fewer processes "
            "share it"
        )
        if required:
            raise make_error("E210", message, path=path)
        if not self._warned:
            self._warned = True
            warnings.warn(
                KVFormatWarning(f"{message}; until then it is read past the cache", code="W005", path=path),
                stacklevel=2,
            )


class RangedFile(OpenFile):
    """A file of which every range is fetched when it is read."""

    __slots__ = ("_name", "_remote")

    def __init__(self, remote: Remote, name: str, nbytes: int) -> None:
        super().__init__(-1, remote.path(name), FileIdentity(0, 0, nbytes, 0, 0), None)
        self._remote = remote
        self._name = name

    def read_into(self, into: memoryview, offset: int) -> None:
        """Fill ``into`` from ``offset``; E005 where the file ends before."""
        end = offset + len(into)
        if end > self.identity.nbytes:
            raise make_error("E005", f"bytes {offset}..{end} are beyond the file", path=self.path)

        if len(into):
            self._remote.read_into(self._name, offset, into)

    def is_current(self) -> bool:
        """Nothing vouches for an object that is not held."""
        return False
