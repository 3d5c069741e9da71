"""An object store over a directory, for tests with several processes."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

from kvformat.storage.remote import Remote
from kvformat.storage.remote_options import RemoteOptions
from kvformat.testing.memory_store import MemoryStore

__all__ = ["folder_remote"]


class FolderObjects(MutableMapping[str, bytes]):
    """Files below a directory, as a dict of bytes."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __getitem__(self, name: str) -> bytes:
        try:
            return (self.root / name).read_bytes()
        except (FileNotFoundError, IsADirectoryError):
            raise KeyError(name) from None

    def __setitem__(self, name: str, data: bytes) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def __delitem__(self, name: str) -> None:
        (self.root / name).unlink()

    def __iter__(self) -> Iterator[str]:
        return (path.relative_to(self.root).as_posix() for path in self.root.rglob("*") if path.is_file())

    def __len__(self) -> int:
        return sum(1 for _ in self)


class FolderStore(MemoryStore):
    """Counts its calls in a file, so that those of other processes count too."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        super().__init__(url, FolderObjects(Path(options["root"])))  # type: ignore[arg-type]  # as good as a dict
        self._log = options["log"]

    def get(self, name: str, start: int, nbytes: int, *, timeout_s: float) -> Any:
        with open(self._log, "a", encoding="ascii") as log:  # noqa: PTH123 -- one short write each
            log.write(f"{name} {start} {nbytes}\n")
        return super().get(name, start, nbytes, timeout_s=timeout_s)


def _connect(url: str, storage_options: dict[str, Any], options: RemoteOptions) -> FolderStore:
    return FolderStore(url, storage_options)


def folder_remote(root: Path, log: Path, **options: Any) -> Remote:
    """The objects of a directory; (name, start, bytes) of each range that is read are appended to ``log``."""
    log.touch()
    storage = {"root": str(root), "log": str(log)}
    return Remote("folder://data", storage_options=storage, options=RemoteOptions(**options), connect=_connect)
