"""A cache of fetched bytes on a local disk, shared by all processes of a node.

An entry is named by what determines its content, fetched once for all processes, proved before it is used, pinned
while it is, and dropped when room is needed and it was used longest ago. Nothing survives a kill that a later process
would trust or trip over: locks go with their process, what was not finished has another name, and the count of bytes
can only be too high until it is put right.

::

    DIR/kvformat-cache-1               marks the directory, with the version of this layout
    DIR/ledger                         bytes taken, see cache_ledger
    DIR/entries/HASH/KEY.entry         finished; locked shared while a process uses it
    DIR/parts/HASH-KEY.part            in the making; locked by who makes it
    DIR/parts/HASH-KEY~RANDOM.part     the same where files cannot be locked
"""

from __future__ import annotations

import os

from kvformat.storage.cache_entry import Busy, open_entry
from kvformat.storage.cache_filling import Filling, Patience
from kvformat.storage.cache_folder import Folder
from kvformat.storage.cache_options import CacheOptions
from kvformat.storage.cache_room import Room
from kvformat.storage.local_read import FileIdentity, OpenFile
from kvformat.storage.obtaining import Check, Fill, Memory, Write

__all__ = ["Cache", "CacheOptions", "Check", "Fill", "Memory", "Write"]


class Cache:
    """A cache. It holds no file open, and so works on after a fork; it pickles to its options.

    Parameters
    ----------
    options
        See :class:`CacheOptions`.

    Raises
    ------
    StorageError
        E211 where the directory is another's; E207 where it may not be written; E200, E203.
    """

    def __init__(self, options: CacheOptions) -> None:
        self.options = options
        self._patience = Patience()
        self._folder = Folder(options.dir)
        self._folder.prepare()
        self._room = Room(
            self._folder,
            max_nbytes=options.max_nbytes,
            min_free_nbytes=options.min_free_nbytes,
            timeout_s=self._patience.ledger_s,
        )
        self._room.tidy()

    def __reduce__(self) -> tuple[type[Cache], tuple[CacheOptions]]:
        return type(self), (self.options,)

    def seems_to_hold(self, key: str, nbytes: int) -> bool:
        """Whether an entry of this key and size is there, by the looks of it: a hint for what to fetch together."""
        try:
            return os.stat(self._folder.entry(key), follow_symlinks=False).st_size == nbytes
        except OSError:
            return False

    def obtain(
        self,
        key: str,
        nbytes: int,
        *,
        path: str,
        fill: Fill,
        check: Check | None,
        known: FileIdentity | None = None,
        use_mmap: bool = True,
        patient: bool = False,
    ) -> OpenFile | None:
        """An open file of exactly ``nbytes`` bytes that passed ``check``, pinned as long as it or its mapping lives.

        None where it has to be gone past the cache: all there is room for is in use, too little of the file system is
        free, or the process that is about to fetch the same does not get on.

        Parameters
        ----------
        key
            What determines the bytes: 1 to 200 of the characters ``0-9 a-z A-Z . _ -``.
        path, fill, check, known, use_mmap
            See :meth:`~kvformat.storage.obtaining.Obtainer.obtain`. What is found is proved like what is fetched,
            unless it is ``known``, and fetched once where it is damaged.
        patient
            Wait for room even where that was in vain lately.

        Raises
        ------
        KVFormatError
            What ``fill`` raises, and what ``check`` raises the second time; E005 where ``fill`` did not bring all
            bytes; E200 where the file system is full, E210 where ``max_nbytes`` is below ``nbytes``, E211 where a file
            of somebody else stands in the entry's place; E203, E204, E207.
        """
        own = self._folder.entry(key)
        try:
            file = open_entry(own, nbytes, path, use_mmap=use_mmap)
        except Busy:
            file = None
        if file is not None and file.identity == known and file.identity.nbytes == nbytes:
            return file
        filling = Filling(
            self._folder,
            self._room,
            self._patience,
            key,
            nbytes,
            path=path,
            fill=fill,
            check=check,
            use_mmap=use_mmap,
            patient=patient,
        )
        return filling.run(file, known)
