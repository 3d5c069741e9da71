"""An object store in a directory, that outlives the process which uses it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from kvformat.storage.store import Buffer, ExistsFault, MissingFault, ShortFault, Stat, Upload

__all__ = ["DirectoryStore"]


class DirectoryStore:
    """Objects appear whole or not at all."""

    def __init__(self, path: str) -> None:
        self._root = Path(path)
        self.url = f"memory://{path}"

    def get(self, name: str, start: int, nbytes: int, *, timeout_s: float) -> Buffer:
        data = self._read(name)[start : start + nbytes]
        if len(data) != nbytes:
            raise ShortFault(name)
        return data

    def get_all(self, name: str, *, max_nbytes: int, timeout_s: float) -> bytes:
        return self._read(name)[: max_nbytes + 1]

    def stat(self, name: str, *, timeout_s: float) -> Stat:
        return Stat(name, len(self._read(name)))

    def put(self, name: str, data: Buffer, *, timeout_s: float) -> None:
        self._draft(name, data).rename(self._root / name)

    def create(self, name: str, data: Buffer, *, timeout_s: float) -> None:
        draft = self._draft(name, data)
        try:
            os.link(draft, self._root / name)
        except FileExistsError:
            raise ExistsFault(name) from None
        finally:
            draft.unlink()

    def begin(self, name: str, *, timeout_s: float) -> Upload:
        raise NotImplementedError

    def list(self, prefix: str = "", *, timeout_s: float) -> Iterator[Stat]:
        for path in sorted(self._root.rglob("*")):
            name = path.relative_to(self._root).as_posix()
            if path.is_file() and name.startswith(prefix):
                yield Stat(name, path.stat().st_size)

    def delete(self, name: str, *, timeout_s: float) -> None:
        (self._root / name).unlink(missing_ok=True)

    def close(self) -> None:
        pass

    def _read(self, name: str) -> bytes:
        try:
            return (self._root / name).read_bytes()
        except FileNotFoundError:
            raise MissingFault(name) from None

    def _draft(self, name: str, data: Buffer) -> Path:
        (self._root / name).parent.mkdir(parents=True, exist_ok=True)
        # Beside the objects: what is half written has no name in the store.
        drafts = self._root.with_name(f"{self._root.name}.drafts")
        drafts.mkdir(exist_ok=True)
        draft = drafts / secrets.token_hex(8)
        draft.write_bytes(data)
        return draft
