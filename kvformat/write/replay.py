"""What an interrupted run left staged, on its way into the tables of the run that continues it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvformat.errors import make_error
from kvformat.spec.layout import Layout
from kvformat.write.staging import Receipt

__all__ = ["Replay", "StagedRow"]


class StagedRow(NamedTuple):
    """A staged record as a row of the dataset; ``first`` where a shard begins with it."""

    offset: int
    dims: tuple[int, ...]
    record_sum: bytes
    first: bool


class Replay:
    """Staged records, which the caller adds again in the same order, under whatever names: none are staged.

    Parameters
    ----------
    root
        For messages.
    """

    def __init__(self, layout: Layout, root: Path | str, receipts: Sequence[Receipt] = ()) -> None:
        self._layout = layout
        self._root = root
        self._left = deque(receipts)
        self._taken = 0
        self._offset = 0

    @property
    def num_shards(self) -> int:
        """Shards of which at least one record is left."""
        return len(self._left)

    def take(self, name: str, number: int, document: bytes, record_sum: bytes | None = None) -> StagedRow:
        """The next staged record, which must be this one; without ``record_sum`` its values are not compared.

        Raises
        ------
        ConflictError
            E112 where it is another one; nothing is taken then.
        """
        receipt = self._left[0]
        staged = receipt.records[self._taken]
        if staged.document != document.hex() or (record_sum is not None and staged.record_sum != record_sum.hex()):
            what = "document" if staged.document != document.hex() else "values of the same document"
            raise make_error(
                "E112",
                f"an interrupted run staged another {what} as record {number}: replay the same inputs, or run "
                "`kvformat clean` and start again",
                path=self._root,
                record=name,
            )
        first = self._taken == 0
        offset = 0 if first else self._offset
        row = StagedRow(offset, staged.dims, bytes.fromhex(staged.record_sum), first)
        self._offset = offset + self._layout.place(staged.dims).nbytes
        self._taken += 1
        if self._taken == len(receipt.records):
            self._left.popleft()
            self._taken = 0
        return row

    def check_empty(self) -> None:
        """E112 where something is left."""
        if self._left:
            raise make_error(
                "E112",
                f"an interrupted run staged more than was replayed: {len(self._left)} shards are left over",
                path=self._root,
            )
