"""Which documents a worker of a plan is likely to compute next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvformat.errors import KVFormatError

if TYPE_CHECKING:
    from kvformat.extract.plan import Plan
    from kvformat.spec.document import Document

__all__ = ["Following"]

_MOST_DOCUMENTS = 32


class Following:
    """Foresight of what follows a document: the ones behind it in its shard, as shards are made record by record.

    It says what is worth preparing, and nothing more: what is computed, and in which order, is up to the worker. For
    one thread.

    Parameters
    ----------
    plan
        The plan.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._ordinal = 0
        self._records: dict[bytes, int] = {}  # of the shard in hand, by document digest

    def __call__(self, document: Document) -> Iterator[Document]:
        """At most 32 documents, in order; none behind one that is not planned, or does not read as it was planned."""
        record = self._record(document.digest)
        if record is None:
            return
        end = self._plan.shard(self._ordinal).stop
        for following in range(record + 1, min(end, record + 1 + _MOST_DOCUMENTS)):
            try:
                found = self._plan.document(following).document
            except KVFormatError:
                return  # whoever computes it is told
            yield found

    def _record(self, digest: bytes) -> int | None:
        """Record of a document; that of the shard in hand, as a rule, or of one of the next ones."""
        if digest in self._records:
            return self._records[digest]
        count = self._plan.num_shards
        for step in range(count):
            ordinal = (self._ordinal + step) % count
            digests = self._plan.shard_documents(ordinal)
            if digest in digests:
                self._ordinal = ordinal
                self._records = dict(zip(digests, self._plan.shard(ordinal), strict=True))
                return self._records[digest]
        return None
