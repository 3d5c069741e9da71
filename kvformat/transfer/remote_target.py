"""An object store that gets a copy: every file proved before it is uploaded, confirmed there, the root last."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

from kvformat.errors import KVFormatError, make_error
from kvformat.spec.paths import ROOT, STAGING
from kvformat.storage.faults import translated
from kvformat.storage.local_read import LocalReader
from kvformat.storage.local_write import LocalFiles
from kvformat.storage.readers import Reader
from kvformat.storage.remote import Remote
from kvformat.transfer.contents import Contents, Item
from kvformat.transfer.drafts import digest_error, fetch, local_digest, remote_digest
from kvformat.transfer.tally import Share
from kvformat.write.spool import Spool, SpoolFiles

__all__ = ["RemoteTarget"]


class RemoteTarget:
    """Objects below a URL, used as a context.

    Parameters
    ----------
    remote
        Where they go.
    contents
        What is copied there.
    spool
        Local directory below which files wait that come from another object store; None for a local source.
    files
        Operations that change that directory.
    """

    def __init__(
        self, remote: Remote, contents: Contents, *, spool: Path | None, files: LocalFiles | None = None
    ) -> None:
        self._remote = remote
        self._contents = contents
        self._base = spool
        self._files = files or SpoolFiles()
        self._spool: Spool | None = None
        self._numbers = count()

    def __enter__(self) -> Self:
        self._remote.require_create(f"{STAGING}/")
        if self._base is not None:
            self._spool = self._new_spool(self._base)
        return self

    def _new_spool(self, base: Path) -> Spool:
        return Spool.create(self._files, base, self._remote.url, self._contents.id[:16])

    def sweep(self) -> None:
        """Remove what killed copies left in the spool."""
        if self._base is not None and self._base.is_dir():
            with contextlib.suppress(KVFormatError):  # no reason to call a complete copy a failure
                self._new_spool(self._base).remove()  # who makes one removes those of the dead first

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._spool is not None:
            self._spool.remove()

    def require_space(self, items: Sequence[Item], threads: int) -> None:
        """E200 where the spool has no room for the largest files, as many as wait at once.

        What an object store has room for, nobody tells.
        """
        if self._spool is None:
            return
        needed = sum(sorted((item.nbytes for item in items), reverse=True)[:threads])
        with translated(self._spool.path):
            free = shutil.disk_usage(self._spool.path).free
        if free < needed:
            raise make_error(
                "E200",
                f"up to {needed:,} bytes wait here at once, {free:,} are free: lower `threads`, free space, or choose "
                "another place for the spool",
                path=self._spool.path,
            )

    def place(self, source: Reader, item: Item, share: Share) -> bool:
        """Upload a file, proved before and confirmed afterwards; False where it is there already, which is proved.

        Raises
        ------
        KVFormatError
            As :func:`~kvformat.transfer.drafts.fetch`; E113 where another content has its name; those of
            :meth:`Remote.put_file <kvformat.storage.remote.Remote.put_file>`.
        """
        known = self._remote.stat(item.name)
        if known is not None and known.nbytes != item.nbytes:
            known = self._remote.stat(item.name)  # the page of a proxy has a size as well
        if known is not None and known.nbytes != item.nbytes:
            raise self._foreign(item)
        if isinstance(source, LocalReader):
            self._upload_local(source, item, share, there=known is not None)
        elif known is not None and item.nbytes:  # of an empty one, there is nothing to prove but that it is there
            # Twice: what differs may have been damaged on the way.
            if all(remote_digest(self._remote, item, share.check) != item.sha256 for _ in range(2)):
                raise self._foreign(item)
        else:
            with self._draft() as (fd, path):
                fetch(source, item, self._files, fd, path, lambda _nbytes: share.check())
                self._remote.put_file(item.name, path, progress=share.add)
        return known is None

    def _upload_local(self, source: LocalReader, item: Item, share: Share, *, there: bool) -> None:
        file = source.open(item.name, nbytes=item.nbytes, use_mmap=False)
        found = local_digest(file, item, lambda *_: share.check())
        if found != item.sha256:
            raise digest_error(item, found, file.path)
        self._remote.put_file(item.name, Path(file.path), progress=share.add)
        if not file.is_current():  # what was uploaded need not be what was proved
            if not there:
                self._remote.delete(item.name)
            raise make_error("E007", "the file was replaced or written to meanwhile: copy again", path=file.path)

    @contextlib.contextmanager
    def _draft(self) -> Iterator[tuple[int, Path]]:
        """A new file of the spool, gone when the block is left: its descriptor and path."""
        assert self._spool is not None
        number = next(self._numbers)
        path = self._spool.shard(number)
        fd = self._files.create(path)
        try:
            yield fd, path
        finally:
            os.close(fd)
            with contextlib.suppress(KVFormatError):
                self._spool.drop(number)

    def _foreign(self, item: Item) -> KVFormatError:
        return make_error(
            "E113",
            "an object with this name has other content: it is damaged or foreign, move it away and copy again",
            path=self._remote.path(item.name),
        )

    def commit(self) -> None:
        """Publish: everything is in its place.

        Raises
        ------
        ConflictError
            E113 where another dataset was published here meanwhile.
        """
        if not self._remote.create(ROOT, self._contents.root):
            message = "another dataset was published here meanwhile; compare with `kvformat diff`, and copy elsewhere"
            raise make_error("E113", message, path=self._remote.path(ROOT))
