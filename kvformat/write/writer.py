"""The simple writer: one process, records one after the other."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Literal, Self

from numpy.typing import ArrayLike

from kvformat.errors import KVFormatError, make_error
from kvformat.spec import limits
from kvformat.spec.context import Context, Text
from kvformat.spec.digests import context_digest, schema_digest
from kvformat.spec.document import Document, Mask, Media
from kvformat.spec.layout import Layout
from kvformat.spec.rules import check_schema
from kvformat.spec.schema import Schema
from kvformat.write.draft import Draft
from kvformat.write.names import Names
from kvformat.write.record import RecordEncoder
from kvformat.write.replay import Replay
from kvformat.write.rows import Tables
from kvformat.write.sequence import ShardSequence
from kvformat.write.staging import Plan
from kvformat.write.target import Stage, Target

__all__ = ["OnDuplicate", "Writer"]

OnDuplicate = Literal["error", "keep_first"]


class Writer:
    """Writes one dataset. Made by :func:`kvformat.create`, used as a context manager.

    Leaving the ``with`` block publishes. An exception leaves no dataset and removes what the writer created; with
    ``resume=True`` the finished shards stay staged for the next run instead. In an object store nothing is removed
    that others may rely on: shards that arrived stay. An exception lets those that are finished arrive first where the
    next run can use them; an interrupt does not wait for that.

    A writer is used by one thread. Finished shards are synced and hashed, or uploaded, by helper threads.
    """

    def __init__(
        self,
        target: Target,
        *,
        schema: Schema,
        context: Context,
        text: Text,
        provenance: Mapping[str, str],
        covered: Mapping[str, bytes],
        extensions: Mapping[str, Any] | None,
        shard_nbytes: int,
        shard_slots: int,
        resume: bool,
        tag: str,
        on_duplicate: OnDuplicate,
        allow_non_finite: Collection[str],
    ) -> None:
        self._target = target
        self._place = target.place
        self._covered = dict(sorted(covered.items()))
        self._resume = resume
        self._on_duplicate = on_duplicate
        check_schema(schema)
        self._layout = Layout(schema)
        self._encoder = RecordEncoder(self._layout, allow_non_finite=allow_non_finite)
        header_size = self._layout.header_size(limits.VERSION, shard_slots)
        if header_size > limits.MAX_HEADER_NBYTES:
            raise make_error("E111", f"shard headers would have {header_size} bytes: lower shard_slots")
        self._plan = Plan(
            context=context_digest(context).hex(),
            header_size=header_size,
            schema=schema_digest(schema).hex(),
            shard_nbytes=shard_nbytes,
            shard_slots=shard_slots,
            tag=tag,
            version=limits.VERSION,
        )
        self._draft = Draft(
            self._place,
            schema=schema,
            context=context,
            text=text,
            provenance=provenance,
            covered=self._covered,
            extensions=extensions,
            version=limits.VERSION,
            header_size=header_size,
            shard_slots=shard_slots,
        )
        self._tables = Tables(len(schema.dims))
        self._names = Names()
        self._documents: dict[bytes, int] = {}
        self._shards = ShardSequence(target.files, self._layout, self._tables, self._plan, keep=resume)
        self._replay = Replay(self._layout, self._place)
        self._staging: Stage | None = None
        self._state: Literal["new", "open", "failed", "closed"] = "new"
        self._id: str | None = None

    @property
    def id(self) -> str:
        """Dataset id, once published."""
        if self._id is None:
            raise make_error("E115", "the dataset id exists once the `with` block was left", path=self._place)
        return self._id

    @property
    def num_records(self) -> int:
        """Records so far, resumed ones included."""
        return self._tables.num_records

    @property
    def num_names(self) -> int:
        """Names so far."""
        return self._tables.num_names

    @property
    def nbytes(self) -> int:
        """Payload bytes of the shards so far, resumed ones included."""
        return self._shards.nbytes

    def __enter__(self) -> Self:
        if self._state != "new":
            raise make_error("E115", "a writer is entered once", path=self._place)
        try:
            self._target.require_free()
            self._open()
        except BaseException as error:
            self._abort(error)
            raise
        self._state = "open"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._state == "closed":
            return
        if kind is not None or self._state == "failed":
            self._abort(error)
            if kind is None:
                raise make_error("E115", "an earlier call failed; nothing was published", path=self._place)
            return
        try:
            self._publish()
        except BaseException as failure:
            self._abort(failure)
            raise

    def add(
        self,
        name: str,
        components: Mapping[str, Any],
        *,
        token_ids: ArrayLike | None = None,
        position_ids: ArrayLike | None = None,
        mask: Mask = "causal",
        prefix_length: int = 0,
        media: Iterable[Media] = (),
        document: Document | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> int:
        """Add a record, or, for a document that is there already, a name.

        Parameters
        ----------
        name
            Sample id: 1 to 512 bytes of UTF-8, given once.
        components
            By component name, tensors ``[layers, *axes]`` of the schema's dtype: torch (any device, any strides) or
            numpy. Nothing is cast. The data are copied before this returns.
        token_ids, position_ids, mask, prefix_length, media
            The document, as for :meth:`Document.of`; or ``document`` in their place.
        extras
            Extras the schema has besides ``token_ids``, ``position_ids``, ``mask`` and ``media``.

        Returns
        -------
        int
            Number of the record.

        Raises
        ------
        InputError
            E101 to E108, E110, E111. The writer stays usable; nothing was added.
        ConflictError
            E112 where a resumed run does not replay what is staged.
        """
        self._need_open()
        encoded_name = self._names.check(name)
        if document is None:
            if token_ids is None:
                raise make_error("E081", "add needs token_ids or a document", record=name)
            document = Document.of(
                token_ids, position_ids=position_ids, mask=mask, prefix_length=prefix_length, media=media
            )
        digest = document.digest
        encoded = self._encoder.encode(name, document, components, extras or {})
        record = self._documents.get(digest)
        if record is not None:
            self._check_duplicate(name, record, encoded.record_sum)
        with self._whole_or_failed():
            if record is None:
                if self._replay.num_shards:
                    record = self._take_staged(name, digest, encoded.record_sum)
                else:
                    record = self._shards.add(self._need_staging(), encoded, digest)
                self._documents[digest] = record
            self._name(name, encoded_name, record)
        return record

    def alias(self, name: str, target: str) -> int:
        """Give the record named ``target`` another name; returns the record's number.

        Raises
        ------
        InputError
            E106, E107; E109 where nothing was added as ``target``.
        """
        self._need_open()
        encoded_name = self._names.check(name)
        record = self._names.record(target, alias=name)
        with self._whole_or_failed():
            self._name(name, encoded_name, record)
        return record

    def replay(self, name: str, document: Document) -> bool:
        """Add a record without its tensors, where they are known already.

        True where the document is stored, or is the next one an interrupted run left staged: then the record has the
        name, and its tensors need not be computed again. False where :meth:`add` is needed. The name may be another
        than in the interrupted run, which staged none. That the values would be the same again is for the caller to
        know: documents are compared, values are not.

        Raises
        ------
        ConflictError
            E112 where something else is staged next.
        """
        self._need_open()
        encoded_name = self._names.check(name)
        digest = document.digest
        record = self._documents.get(digest)
        if record is None and not self._replay.num_shards:
            return False
        with self._whole_or_failed():
            if record is None:
                record = self._take_staged(name, digest, None)
                self._documents[digest] = record
            self._name(name, encoded_name, record)
        return True

    def skip(self, name: str, reason: str) -> None:
        """List a document as given and not stored, with the reason."""
        self._need_open()
        skipped = self._names.skipped_as(self._names.check(name), reason)
        with self._whole_or_failed():
            self._names.skip(skipped)

    def _check_duplicate(self, name: str, record: int, record_sum: bytes) -> None:
        if self._on_duplicate == "error" and self._tables.record(record)[1] != record_sum:
            raise make_error(
                "E108",
                'the document is stored already, with other bytes; pass on_duplicate="keep_first" to keep those',
                record=name,
            )

    def _name(self, name: str, encoded: bytes, record: int) -> None:
        self._tables.add_name(record=record, name=encoded, position=self._names.num_inputs)
        self._names.add(name, record)

    @contextlib.contextmanager
    def _whole_or_failed(self) -> Iterator[None]:
        """A change that is cut short, even by an interrupt, leaves tables that must not be published."""
        self._state = "failed"
        yield
        self._state = "open"

    def _take_staged(self, name: str, digest: bytes, record_sum: bytes | None) -> int:
        return self._shards.add_staged(self._replay.take(name, self._tables.num_records, digest, record_sum), digest)

    def _open(self) -> None:
        self._staging = self._target.stage(self._plan, self._layout, resume=self._resume)
        receipts = self._staging.receipts()
        if receipts:
            self._replay = Replay(self._layout, self._place, receipts)
            self._shards.check_staged(self._staging, receipts)

    def _publish(self) -> None:
        self._replay.check_empty()
        if self._tables.num_records == 0:
            raise make_error("E114", "nothing was added: a dataset holds at least one record", path=self._place)
        self._shards.finish()
        manifest, parts = self._draft.complete(self._tables, self._names.skipped)
        staging = self._need_staging()
        root_bytes = staging.publish(
            receipts=self._shards.receipts,
            parts=parts,
            covered=self._covered,
            manifest=manifest,
            undo=not self._resume,
        )
        self._state = "closed"
        self._shards.close()
        self._id = hashlib.sha256(root_bytes).hexdigest()
        with contextlib.suppress(KVFormatError, OSError):  # published: what stays, `kvformat clean` removes
            staging.remove()
        self._target.close()

    def _abort(self, error: BaseException | None) -> None:
        if self._state != "closed":
            self._state = "failed"
        staging, self._staging = self._staging, None
        if staging is not None and not (self._resume and isinstance(error, Exception | None)):
            staging.stop()  # nobody wants what is in work, or whoever interrupts wants an end
        self._shards.close()
        try:
            if staging is not None:
                if self._resume:
                    staging.release()
                    return
                with contextlib.suppress(KVFormatError, OSError):  # what went wrong first is what the caller must see
                    staging.remove()
            self._target.remove()
        finally:
            self._target.close()

    def _need_open(self) -> None:
        if self._state != "open":
            raise make_error("E115", f"the writer is {self._state}: use it inside its `with` block", path=self._place)

    def _need_staging(self) -> Stage:
        if self._staging is None:
            raise make_error("E115", "the writer is not open", path=self._place)
        return self._staging
