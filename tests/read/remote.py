"""Datasets in an object store that is a dict, for the tests of reading from afar."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kvformat
from kvformat.storage.remote import Remote
from kvformat.storage.remote_options import RemoteOptions
from kvformat.storage.store import Buffer, Store
from kvformat.testing.dataset_files import DatasetFiles
from kvformat.testing.memory_store import MemoryStore

__all__ = ["FlippingStore", "opened", "remote_over"]


class FlippingStore(MemoryStore):
    """Gives out one wrong bit at places of an object, as often as it is told: on the way, not in the store."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(objects=objects)
        self.flips: dict[str, tuple[int, int]] = {}
        """By name, (byte, times left)."""

    def get(self, name: str, start: int, nbytes: int, *, timeout_s: float) -> Buffer:
        data = super().get(name, start, nbytes, timeout_s=timeout_s)
        return self._flipped(name, data, start)

    def get_all(self, name: str, *, max_nbytes: int, timeout_s: float) -> bytes:
        data = super().get_all(name, max_nbytes=max_nbytes, timeout_s=timeout_s)
        return bytes(self._flipped(name, data, 0))

    def _flipped(self, name: str, data: Buffer, start: int) -> Buffer:
        at, left = self.flips.get(name, (0, 0))
        if not left or not start <= at < start + len(data):
            return data
        self.flips[name] = at, left - 1
        changed = bytearray(data)
        changed[at - start] ^= 1
        return changed


def remote_over(store: Store, **options: Any) -> Remote:
    """An object store of one's own, retrying at once."""
    connect: Callable[..., Store] = lambda *_: store  # noqa: E731 -- of this store
    return Remote(store.url, options=RemoteOptions(**options), connect=connect)


def opened(files: DatasetFiles | dict[str, bytes], **options: Any) -> tuple[kvformat.Dataset, MemoryStore]:
    """A dataset opened from afar, and where it lies."""
    store = MemoryStore(objects=dict(files if isinstance(files, dict) else files.files()))
    return kvformat.open(remote_over(store), **options), store
