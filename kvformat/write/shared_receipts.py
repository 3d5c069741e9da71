"""Receipts that workers share: the first one decides, and what is damaged is set aside, to be made again."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

from kvformat.errors import KVFormatError, KVFormatWarning, make_error
from kvformat.spec.layout import Layout
from kvformat.spec.paths import shard_path
from kvformat.write.parallel import side_by_side
from kvformat.write.planned import Planned
from kvformat.write.planned_shard import documents_fault
from kvformat.write.receipt_file import decode_receipt, encode_receipt
from kvformat.write.shared import Shared
from kvformat.write.staging import Receipt

__all__ = ["SharedReceipts"]

_AHEAD = 64
_ATTEMPTS = 5


class SharedReceipts:
    """The receipts of a run, each looked at before it is relied on. Safe to use in threads."""

    def __init__(self, shared: Shared, planned: Planned, layout: Layout) -> None:
        self._shared = shared
        self._planned = planned
        self._layout = layout

    def counting(self, ordinal: int, sizes: Mapping[str, int] | None = None) -> Receipt | None:
        """The receipt of a shard, once that is found to be there; None where there is none, or it was set aside.

        Parameters
        ----------
        sizes
            Of shards that are known to be there, by their final name.

        Raises
        ------
        ConflictError
            E112 where its documents are not the planned ones.
        """
        data = self._shared.read(ordinal)
        if data is None:
            return None
        receipt, why = self._decoded(ordinal, data)
        if receipt is not None and why is None:
            differs = documents_fault(receipt, self._planned.shard_documents(ordinal))
            if differs is not None:
                raise make_error(
                    "E112",
                    f"the receipt of shard {ordinal} is not by this plan: {differs}; run `kvformat clean` and start "
                    "again",
                    path=self._shared.place,
                )
            name = shard_path(ordinal, bytes.fromhex(receipt.sha256))
            if sizes is None or sizes.get(name) != receipt.size:
                why = self._shared.fault(receipt, self._layout, whole=False)
        if why is not None:
            self._set_aside(ordinal, data, receipt, why)
            return None
        return receipt

    def all(self) -> Iterator[tuple[int, Receipt | None]]:
        """Every planned ordinal with :meth:`counting`; some are read ahead, side by side, and none is kept."""
        sizes = self._shared.sizes()
        for first in range(0, self._planned.num_shards, _AHEAD):
            ordinals = range(first, min(first + _AHEAD, self._planned.num_shards))
            yield from zip(ordinals, side_by_side(lambda one: self.counting(one, sizes), ordinals), strict=True)

    def add(self, receipt: Receipt) -> Receipt:
        """Store the receipt of a kept shard, unless there is one; the one that counts.

        Raises
        ------
        ConflictError
            E112 where that is of other documents than the planned ones.
        DamageError
            E116 where what is there is damaged again and again.
        """
        data = encode_receipt(receipt, key=self._shared.run.key)
        for _ in range(_ATTEMPTS):
            if self._shared.create(receipt.ordinal, data):
                return receipt
            first = self.counting(receipt.ordinal)
            if first is not None:
                return first
        raise make_error(
            "E116",
            f"receipts of shard {receipt.ordinal} are damaged again and again: check the storage",
            path=self._shared.place,
        )

    def check(self, ordinal: int, *, allow_skips: bool) -> bool:
        """Whether a shard may stay finished; looks at all of it. See :meth:`Workshop.check`."""
        data = self._shared.read(ordinal)
        if data is None:
            return False
        receipt, why = self._decoded(ordinal, data)
        if receipt is not None and why is None:
            why = documents_fault(receipt, self._planned.shard_documents(ordinal))
            why = why or self._shared.fault(receipt, self._layout, whole=True)
        if why is not None:
            self._set_aside(ordinal, data, receipt, why)
            return False
        assert receipt is not None
        if receipt.skipped and not allow_skips:
            if receipt.is_empty:
                self._shared.set_aside(ordinal, data, receipt)
            else:
                self._shared.set_aside(ordinal, data, None)
                self._shared.drop(receipt)  # sound, and of no use: not worth its bytes
            return False
        return True

    def _decoded(self, ordinal: int, data: bytes) -> tuple[Receipt | None, str | None]:
        """A receipt as far as it can be read, and what is wrong with it."""
        run = self._shared.run
        try:
            receipt = decode_receipt(data, key=run.key, ordinal=ordinal, path=self._shared.place)
        except KVFormatError as error:
            return None, error.message.partition(": run `kvformat clean`")[0]
        if receipt.is_empty:
            return receipt, None
        size = run.header_size + sum(self._layout.place(record.dims).nbytes for record in receipt.records)
        return receipt, None if receipt.size == size else f"its receipt says {receipt.size} bytes, its records {size}"

    def _set_aside(self, ordinal: int, data: bytes, receipt: Receipt | None, why: str) -> None:
        self._shared.set_aside(ordinal, data, receipt)
        message = f"shard {ordinal} is set aside and will be made again: {why}"
        warnings.warn(KVFormatWarning(message, code="W006", path=str(self._shared.place)), stacklevel=3)
