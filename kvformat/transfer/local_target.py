"""A local directory that becomes a copy: every file proved before it has its final name, the root last."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from kvformat.errors import KVFormatError, make_error
from kvformat.spec.paths import ROOT, STAGING
from kvformat.storage.faults import translated
from kvformat.storage.lease import DirectoryLease, exclusive
from kvformat.storage.local_write import LocalFiles
from kvformat.storage.readers import Reader
from kvformat.transfer.contents import Contents, Item
from kvformat.transfer.drafts import fetch
from kvformat.transfer.leasing import take_lease
from kvformat.transfer.tally import Share
from kvformat.write.folders import Folders
from kvformat.write.seal import Publication
from kvformat.write.shard import hash_file

__all__ = ["LocalTarget"]

_COMMIT_TIMEOUT_S = 600.0
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class LocalTarget:
    """A directory, used as a context: entering takes the staging directory of this copy, leaving removes it.

    What has its final name stays when a copy fails: the next one proves it again, and goes on.

    Parameters
    ----------
    root
        The directory; made where it does not exist.
    contents
        What is copied there.
    files
        Operations that change the disk.
    """

    def __init__(self, root: Path, contents: Contents, *, files: LocalFiles | None = None) -> None:
        self._root = root
        self._contents = contents
        self._files = files or LocalFiles()
        self._folders = Folders(self._files)
        self._staging = root / STAGING / f"copy-{contents.id[:16]}"
        self._lease: DirectoryLease | None = None
        self._publication = Publication(self._files, root)
        self._placing = threading.Lock()

    def __enter__(self) -> Self:
        try:
            self._lease = take_lease(self._folders, self._staging)
            if self._lease is None:
                message = "another process is copying this dataset to here: wait for it, or stop it"
                raise make_error("E117", message, path=self._staging)
            if self._lease.supported:  # else they may be another's
                self._remove_drafts()
        except BaseException:
            self._leave(published=False)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave(published=kind is None)

    def sweep(self) -> None:
        """Remove what a copy left in staging that was killed behind its commit; nothing where one is at work."""
        if not self._staging.is_dir():
            self._files.remove_dir(self._staging.parent)  # where it is empty
            return
        with contextlib.suppress(KVFormatError):  # no reason to call a complete copy a failure
            self._lease = DirectoryLease.take(self._staging)
            if self._lease is not None:
                try:
                    if self._lease.supported:
                        self._remove_drafts()
                finally:
                    self._leave(published=True)

    def _leave(self, *, published: bool) -> None:
        # Removed before the lease is given back, so that who takes it next sees that it was.
        if self._lease is not None:
            self._files.remove_dir(self._staging)
            self._lease.release()
            self._files.remove_dir(self._staging.parent)
        if not published:
            self._folders.remove()

    def _remove_drafts(self) -> None:
        with translated(self._staging):
            drafts = sorted(path for path in self._staging.iterdir() if path.suffix == ".part")
        for draft in drafts:
            self._files.unlink(draft)

    # -- files ---------------------------------------------------------------------------------------------------

    def require_space(self, items: Sequence[Item], threads: int) -> None:  # noqa: ARG002 -- as of the other target
        """E200 where the file system has no room for what is not here yet."""
        needed = sum(item.nbytes for item in items if not os.path.lexists(self._root / item.name))
        with translated(self._root):
            free = shutil.disk_usage(self._root).free
        if free < needed:
            raise make_error(
                "E200",
                f"{needed:,} bytes are to be copied here, {free:,} are free: free space, or copy to elsewhere",
                path=self._root,
            )

    def place(self, source: Reader, item: Item, share: Share) -> bool:
        """Bring a file to its place, durable and proved; False where it is there already, which is proved again.

        Raises
        ------
        KVFormatError
            As :func:`~kvformat.transfer.drafts.fetch`; E113 where another content has its name.
        """
        path = self._root / item.name
        if os.path.lexists(path):
            self._require_equal(path, item, share)
            self._publish(path, item)
            return False
        draft = self._staging / f"{path.name}.{secrets.token_hex(4)}.part"
        try:
            fd = self._files.create(draft)
            try:
                fetch(source, item, self._files, fd, draft, share.add)
                self._files.sync(fd, draft)
            finally:
                os.close(fd)
            self._publish(draft, item)
        finally:
            with contextlib.suppress(KVFormatError):
                self._files.unlink(draft)
        return True

    def _publish(self, path: Path, item: Item) -> None:
        with self._placing:
            self._publication.place(path, item.name)

    def _require_equal(self, path: Path, item: Item, share: Share) -> None:
        """Prove a file that is in its place, and make it durable: who knows how it came there."""
        with translated(path):
            fd = os.open(path, _READ)
        try:
            status = os.fstat(fd)
            share.check()
            regular = stat.S_ISREG(status.st_mode) and status.st_size == item.nbytes
            if not regular or hash_file(fd, path).hex() != item.sha256:
                message = "a file with this name has other content: it is damaged or foreign, move it away"
                raise make_error("E113", f"{message} and copy again", path=path)
            self._files.sync(fd, path)
        finally:
            os.close(fd)

    # -- the commit ----------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Publish: everything is in its place.

        Raises
        ------
        ConflictError
            E113 where another dataset was published here meanwhile; E117.
        """
        draft = self._staging / f"root.{secrets.token_hex(4)}.part"
        try:
            self._files.create_file(draft, self._contents.root)
            with exclusive(self._root, timeout_s=_COMMIT_TIMEOUT_S, refusal=self._busy):
                self._publication.sync()
                self._files.sync_dir(self._root)
                self._folders.sync(self._root.parent)
                published = self._root / ROOT
                if not self._files.link(draft, published):
                    self._compare(published)
                self._files.sync_dir(self._root)
        finally:
            with contextlib.suppress(KVFormatError):
                self._files.unlink(draft)

    def _compare(self, published: Path) -> None:
        with translated(published):
            found = published.read_bytes()
        if found != self._contents.root:
            message = "another dataset was published here meanwhile; compare with `kvformat diff`, and copy elsewhere"
            raise make_error("E113", message, path=published)

    def _busy(self) -> Exception:
        return make_error("E117", "another writer is publishing here for more than ten minutes", path=self._root)
