"""An object store in a local directory, which several processes share and a killed one leaves as it was."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

from kvformat.storage.store import Buffer, ExistsFault, MissingFault, ShortFault, Stat

__all__ = ["DyingStore", "FileStore"]


class FileStore:
    """Objects are files; what is being made lies beside them, under names nothing asks for."""

    def __init__(self, directory: Path) -> None:
        self.url = f"files://{directory}"
        self._directory = directory
        self._drafts = directory.parent / f"{directory.name}.drafts"
        self._directory.mkdir(parents=True, exist_ok=True)
        self._drafts.mkdir(exist_ok=True)

    def get(self, name: str, start: int, nbytes: int, *, timeout_s: float) -> Buffer:
        """A slice."""
        found = self.get_all(name, max_nbytes=1 << 40, timeout_s=timeout_s)[start : start + nbytes]
        if len(found) != nbytes:
            raise ShortFault(name)
        return found

    def get_all(self, name: str, *, max_nbytes: int, timeout_s: float) -> bytes:
        """All of it."""
        try:
            return (self._directory / name).read_bytes()[: max_nbytes + 1]
        except FileNotFoundError:
            raise MissingFault(name) from None

    def stat(self, name: str, *, timeout_s: float) -> Stat:
        """The size."""
        try:
            return Stat(name, (self._directory / name).stat().st_size)
        except FileNotFoundError:
            raise MissingFault(name) from None

    def put(self, name: str, data: Buffer, *, timeout_s: float) -> None:
        """Replace."""
        with self._draft(name, data) as draft:
            draft.replace(self._directory / name)

    def create(self, name: str, data: Buffer, *, timeout_s: float) -> None:
        """Make, unless it is there."""
        with self._draft(name, data) as draft:
            try:
                os.link(draft, self._directory / name)
            except FileExistsError:
                raise ExistsFault(name) from None

    def begin(self, name: str, *, timeout_s: float) -> None:
        """Everything here is small."""
        raise AssertionError

    def list(self, prefix: str = "", *, timeout_s: float) -> Iterator[Stat]:
        """All that begin with it."""
        for path in sorted(self._directory.rglob("*")):
            name = path.relative_to(self._directory).as_posix()
            if path.is_file() and name.startswith(prefix):
                yield Stat(name, path.stat().st_size)

    def delete(self, name: str, *, timeout_s: float) -> None:
        """Remove; directories are no objects."""
        path = self._directory / name
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            while path.parent != self._directory:
                path = path.parent
                path.rmdir()

    def close(self) -> None:
        """Nothing to close."""

    @contextlib.contextmanager
    def _draft(self, name: str, data: Buffer) -> Iterator[Path]:
        draft = self._drafts / secrets.token_hex(8)
        draft.write_bytes(data)
        (self._directory / name).parent.mkdir(parents=True, exist_ok=True)
        yield draft
        draft.unlink(missing_ok=True)


class DyingStore:
    """Kills the process at its ``count``-th operation: before it is done, or after, when nobody heard of it yet."""

    def __init__(self, store: FileStore, count: int, *, after: bool) -> None:
        self._store = store
        self._left = count
        self._after = after

    def __getattr__(self, name):
        found = getattr(self._store, name)
        if not callable(found) or name == "close":
            return found

        def operate(*args, **options):
            self._left -= 1
            dies = self._left == 0
            if dies and not self._after:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return found(*args, **options)
            finally:
                if dies:
                    os.kill(os.getpid(), signal.SIGKILL)

        return operate
