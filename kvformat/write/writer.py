"""The simple writer: one process, records one after the other."""

from __future__ import annotations

import contextlib
import hashlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from numpy.typing import ArrayLike

from kvformat.errors import KVFormatError, make_error
from kvformat.spec import canonical, limits
from kvformat.spec.context import Context, Text
from kvformat.spec.digests import context_digest, schema_digest
from kvformat.spec.document import Document, Mask, Media
from kvformat.spec.layout import Layout
from kvformat.spec.manifest import CoveredFile, Manifest, Skipped, Totals, parse_manifest, parse_root
from kvformat.spec.paths import ROOT
from kvformat.spec.rules import check_schema
from kvformat.spec.schema import Schema
from kvformat.storage.faults import translated
from kvformat.storage.local_write import LocalFiles
from kvformat.write.record import RecordEncoder
from kvformat.write.rows import EncodedPart, Tables
from kvformat.write.seal import encode_root, index_of, publish
from kvformat.write.shard import ShardWriter, hash_file
from kvformat.write.staging import Plan, Receipt, Staging

__all__ = ["OnDuplicate", "Writer"]

OnDuplicate = Literal["error", "keep_first"]
_FINISHERS = 2
_ATTEMPTS = 100


class Writer:
    """Writes one dataset. Made by :func:`kvformat.create`, used as a context manager.

    Leaving the ``with`` block publishes. An exception leaves no dataset and removes what the writer created; with
    ``resume=True`` the finished shards stay staged for the next run instead.

    A writer is used by one thread. Finished shards are synced and hashed by helper threads.
    """

    def __init__(
        self,
        root: Path,
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
        files: LocalFiles,
    ) -> None:
        self._root = root
        self._files = files
        self._schema = schema
        self._context = context
        self._text = text
        self._provenance = dict(provenance)
        self._covered = dict(sorted(covered.items()))
        self._extensions = dict(extensions) if extensions else None
        self._shard_nbytes = shard_nbytes
        self._shard_slots = shard_slots
        self._resume = resume
        self._on_duplicate = on_duplicate
        self._version = limits.VERSION
        check_schema(schema)
        self._layout = Layout(schema)
        self._encoder = RecordEncoder(self._layout, allow_non_finite=allow_non_finite)
        self._header_size = self._layout.header_size(self._version, shard_slots)
        if self._header_size > limits.MAX_HEADER_NBYTES:
            raise make_error("E111", f"shard headers would have {self._header_size} bytes: lower shard_slots")
        self._plan = Plan(
            context=context_digest(context).hex(),
            header_size=self._header_size,
            schema=schema_digest(schema).hex(),
            shard_nbytes=shard_nbytes,
            shard_slots=shard_slots,
            tag=tag,
            version=self._version,
        )
        self._tables = Tables(len(schema.dims))
        self._names: dict[str, int] = {}
        self._documents: dict[bytes, int] = {}
        self._skipped: list[Skipped] = []
        self._inputs = 0
        self._shard: ShardWriter | None = None
        self._shard_first: list[int] = []
        self._receipts: list[Receipt] = []
        self._pool: ThreadPoolExecutor | None = None
        self._finishing: deque[Future[Receipt]] = deque()
        self._state: Literal["new", "open", "failed", "closed"] = "new"
        self._made: list[Path] = []
        self._staging: Staging | None = None
        self._replayed = 0
        self._replayed_shard = 0
        self._staged: deque[Receipt] = deque()
        self._id: str | None = None
        # What a reader would refuse in the manifest is refused before hours of work, not after.
        self._manifest(_least_tables(len(schema.dims), self._header_size))

    @property
    def id(self) -> str:
        """Dataset id, once published."""
        if self._id is None:
            raise make_error("E115", "the dataset id exists once the `with` block was left", path=self._root)
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
        closed = self._tables.nbytes
        return closed + (self._header_size + self._shard.nbytes if self._shard is not None else 0)

    def __enter__(self) -> Self:
        if self._state != "new":
            raise make_error("E115", "a writer is entered once", path=self._root)
        with translated(self._root):
            if (self._root / ROOT).exists():
                raise make_error("E100", "a dataset is here already; choose another location", path=self._root)
        try:
            self._open_staging()
        except BaseException:
            self._abort()
            raise
        self._state = "open"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._state == "closed":
            return
        if kind is not None or self._state == "failed":
            self._abort()
            if kind is None:
                raise make_error("E115", "an earlier call failed; nothing was published", path=self._root)
            return
        try:
            self._publish()
        except BaseException:
            self._abort()
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
        encoded_name = self._check_name(name)
        if document is None:
            if token_ids is None:
                raise make_error("E081", "add needs token_ids or a document", record=name)
            document = Document.of(
                token_ids, position_ids=position_ids, mask=mask, prefix_length=prefix_length, media=media
            )
        digest = document.digest
        encoded = self._encoder.encode(name, document, components, extras or {})
        known = self._documents.get(digest)
        if known is not None:
            same = self._tables.record(known)[1] == encoded.record_sum
            if not same and self._on_duplicate == "error":
                raise make_error(
                    "E108",
                    'the document is stored already, with other bytes; pass on_duplicate="keep_first" to keep those',
                    record=name,
                )
            return self._name(name, encoded_name, known)
        with self._whole_or_failed():
            if self._next_staged() is not None:
                record = self._replay(name, digest, encoded.record_sum)
            else:
                record = self._write(encoded.placement.nbytes, encoded, digest)
            self._documents[digest] = record
            return self._name(name, encoded_name, record)

    def alias(self, name: str, target: str) -> int:
        """Give the record named ``target`` another name; returns the record's number.

        Raises
        ------
        InputError
            E106, E107; E109 where nothing was added as ``target``.
        """
        self._need_open()
        encoded_name = self._check_name(name)
        record = self._names.get(target, -1)
        if record < 0:
            raise make_error("E109", f"no record was added as {target!r}", record=name)
        return self._name(name, encoded_name, record)

    def replay(self, name: str, document: Document) -> bool:
        """Add a record without its tensors, where they are known already.

        True where the document is stored, or is the next one an interrupted run left staged: then the record has the
        name, and its tensors need not be computed again. False where :meth:`add` is needed.

        Raises
        ------
        ConflictError
            E112 where something else is staged next.
        """
        self._need_open()
        encoded_name = self._check_name(name)
        digest = document.digest
        record = self._documents.get(digest)
        if record is None:
            if self._next_staged() is None:
                return False
            with self._whole_or_failed():
                record = self._replay(name, digest, None)
                self._documents[digest] = record
                self._name(name, encoded_name, record)
            return True
        self._name(name, encoded_name, record)
        return True

    def skip(self, name: str, reason: str) -> None:
        """List a document as given and not stored, with the reason."""
        self._need_open()
        self._check_name(name)
        if not _is_text(reason):
            raise make_error("E081", f"a skipped document needs a reason in Unicode, found {reason!r}", record=name)
        self._skipped.append(Skipped(input=self._inputs, name=name, reason=reason))
        self._names[name] = -1
        self._inputs += 1

    # -- names and records ---------------------------------------------------------------------------------------

    def _check_name(self, name: str) -> bytes:
        try:
            encoded = name.encode()
        except (AttributeError, UnicodeEncodeError):
            encoded = b""
        if not 1 <= len(encoded) <= limits.MAX_NAME_NBYTES:
            raise make_error(
                "E106", f"a name is a string of 1 to {limits.MAX_NAME_NBYTES} bytes of UTF-8, found {name!r:.80}"
            )
        if name in self._names:
            raise make_error("E107", "the name was given before", record=name)
        return encoded

    def _name(self, name: str, encoded: bytes, record: int) -> int:
        with self._whole_or_failed():
            self._tables.add_name(record=record, name=encoded, position=self._inputs)
            self._names[name] = record
            self._inputs += 1
        return record

    def _write(self, nbytes: int, encoded: Any, digest: bytes) -> int:
        if self._shard is not None and (
            self._shard.num_records >= self._shard_slots or self._shard.nbytes + nbytes > self._shard_nbytes
        ):
            self._close_shard()
        if self._shard is None:
            self._shard_first.append(self._tables.num_records)
            self._shard = ShardWriter(
                self._files,
                self._need_staging(),
                self._layout,
                ordinal=len(self._shard_first) - 1,
                version=self._version,
                header_size=self._header_size,
            )
        offset = self._shard.add(encoded.placement, encoded.buffers, document=digest, record_sum=encoded.record_sum)
        return self._tables.add_record(
            offset=offset, dims=encoded.placement.dims, document=digest, record_sum=encoded.record_sum
        )

    @contextlib.contextmanager
    def _whole_or_failed(self) -> Iterator[None]:
        """A change that is cut short, even by an interrupt, leaves tables that must not be published."""
        try:
            yield
        except BaseException:
            self._state = "failed"
            raise

    # -- resuming ------------------------------------------------------------------------------------------------

    def _open_staging(self) -> None:
        for attempt in range(_ATTEMPTS):
            try:
                self._make_root()
                if self._resume:
                    self._staging = Staging.resume(self._files, self._root, self._plan)
                if self._staging is None:
                    self._staging = Staging.create(self._files, self._root, self._plan)
                    return
            except KVFormatError as error:
                # A directory that was there is gone: another writer that failed or finished here removed its own.
                if error.code != "E002" or attempt == _ATTEMPTS - 1:
                    raise
            else:
                break
        self._staged.extend(self._need_staging().receipts())
        for receipt in self._staged:
            self._submit_check(receipt)

    def _next_staged(self) -> Receipt | None:
        return self._staged[0] if self._staged else None

    def _replay(self, name: str, digest: bytes, record_sum: bytes | None) -> int:
        receipt = self._staged[0]
        staged = receipt.records[self._replayed]
        if staged.document != digest.hex() or (record_sum is not None and staged.record_sum != record_sum.hex()):
            what = "document" if staged.document != digest.hex() else "values of the same document"
            raise make_error(
                "E112",
                f"an interrupted run staged another {what} as record {self._tables.num_records}: replay the same "
                "inputs, or run `kvformat clean` and start again",
                path=self._root,
                record=name,
            )
        if self._replayed == 0:
            self._shard_first.append(self._tables.num_records)
            self._replayed_shard = 0
        record = self._tables.add_record(
            offset=self._replayed_shard,
            dims=staged.dims,
            document=digest,
            record_sum=bytes.fromhex(staged.record_sum),
        )
        self._replayed_shard += self._layout.place(staged.dims).nbytes
        self._replayed += 1
        if self._replayed == len(receipt.records):
            self._staged.popleft()
            self._replayed = 0
        return record

    def _submit_check(self, receipt: Receipt) -> None:
        """Hash a staged shard again in the background: present on disk is no reason to trust it."""
        path = self._need_staging().shard(receipt.ordinal)

        def check() -> Receipt:
            if hash_file(path, path).hex() != receipt.sha256:
                raise make_error(
                    "E116", "the staged shard is damaged: run `kvformat clean` and start again", path=path
                )
            return receipt

        self._submit(check)

    # -- shards --------------------------------------------------------------------------------------------------

    def _close_shard(self) -> None:
        if self._shard is not None:
            shard, self._shard = self._shard, None
            self._submit(shard.finish)
            while len(self._finishing) > _FINISHERS + 1 or (self._finishing and self._finishing[0].done()):
                self._collect()

    def _submit(self, work: Any) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_FINISHERS, thread_name_prefix="kvformat-finish")
        self._finishing.append(self._pool.submit(work))

    def _collect(self) -> None:
        try:
            receipt = self._finishing.popleft().result()
        except BaseException:
            self._state = "failed"
            raise
        self._receipts.append(receipt)
        self._tables.add_shard(
            sha256=bytes.fromhex(receipt.sha256), size=receipt.size, first_record=self._shard_first[receipt.ordinal]
        )

    # -- end -----------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        if self._staged:
            raise make_error(
                "E112",
                f"an interrupted run staged more than was replayed: {len(self._staged)} shards are left over",
                path=self._root,
            )
        if self._tables.num_records == 0:
            raise make_error("E114", "nothing was added: a dataset holds at least one record", path=self._root)
        self._close_shard()
        while self._finishing:
            self._collect()
        manifest, parts = self._manifest(self._tables)
        staging = self._need_staging()
        root_bytes = publish(
            self._files,
            self._root,
            staging,
            receipts=self._receipts,
            parts=parts,
            covered=self._covered,
            manifest=manifest,
            undo=not self._resume,
        )
        self._state = "closed"
        self._shutdown()
        self._id = _sha256(root_bytes)
        with contextlib.suppress(KVFormatError, OSError):  # published: what stays, `kvformat clean` removes
            staging.remove()

    def _manifest(self, tables: Tables) -> tuple[Manifest, list[EncodedPart]]:
        parts = list(tables.encode(self._version))
        manifest = Manifest(
            context=self._context,
            files=tuple(
                CoveredFile(name=name, sha256=_sha256(data), size=len(data)) for name, data in self._covered.items()
            ),
            format="kvformat",
            header_size=self._header_size,
            index=index_of(parts),
            provenance=self._provenance,
            schema=self._schema,
            shard_slots=self._shard_slots,
            skipped=tuple(self._skipped),
            text=self._text,
            totals=Totals(
                names=tables.num_names,
                nbytes=tables.nbytes,
                records=tables.num_records,
                shards=tables.num_shards,
                tokens=tables.tokens,
            ),
            version=self._version,
            extensions=self._extensions,
        )
        # What a reader would refuse must never be published: the writer reads its own manifest first.
        data = canonical.encode(manifest)
        if len(data) > limits.MAX_MANIFEST_NBYTES:
            message = f"the manifest has {len(data)} bytes, at most 64 MiB are allowed"
            raise make_error("E111", message, path=self._root)
        parse_manifest(data, parse_root(encode_root(data, self._version)))
        return manifest, parts

    def _abort(self) -> None:
        if self._state != "closed":
            self._state = "failed"
        if self._shard is not None:
            self._shard.close()
            self._shard = None
        self._shutdown()
        staging, self._staging = self._staging, None
        if staging is not None:
            if self._resume:
                staging.release()
                return
            with contextlib.suppress(KVFormatError, OSError):  # what went wrong first is what the caller must see
                staging.remove()
        for path in reversed(self._made):
            self._files.remove_dir(path)

    def _shutdown(self) -> None:
        if self._pool is not None:
            # A writer that can resume lets complete shards get their receipts: they are what the next run starts from.
            self._pool.shutdown(wait=True, cancel_futures=not self._resume)
            self._pool = None
        self._finishing.clear()

    def _make_root(self) -> None:
        missing = []
        path = self._root
        with translated(path):
            while not path.exists():
                missing.append(path)
                path = path.parent
        if not path.is_dir():
            raise make_error("E207", "a file stands where the dataset's directory is needed", path=path)
        if missing:
            self._sync_existing(path.parent)
        for folder in reversed(missing):
            self._made.append(folder)  # before it is made: an interrupt may come in between
            if self._files.make_dir(folder):
                self._files.sync_dir(folder.parent)
            else:
                self._made.pop()

    def _sync_existing(self, folder: Path) -> None:
        """Sync what a killed writer may have made an entry in; it need not be ours to open."""
        try:
            self._files.sync_dir(folder)
        except KVFormatError as error:
            if error.code != "E207":
                raise

    def _need_open(self) -> None:
        if self._state != "open":
            raise make_error("E115", f"the writer is {self._state}: use it inside its `with` block", path=self._root)

    def _need_staging(self) -> Staging:
        if self._staging is None:
            raise make_error("E115", "the writer is not open", path=self._root)
        return self._staging


def _least_tables(num_dims: int, header_size: int) -> Tables:
    """Tables of one record, which are as good as any to find out whether the rest of a manifest is sound."""
    tables = Tables(num_dims)
    tables.add_record(offset=0, dims=(1,) * num_dims, document=bytes(32), record_sum=bytes(16))
    tables.add_name(record=0, name=b"a", position=0)
    tables.add_shard(sha256=bytes(32), size=header_size + limits.ALIGNMENT, first_record=0)
    return tables


def _is_text(value: object) -> bool:
    try:
        return isinstance(value, str) and bool(value.encode())
    except UnicodeEncodeError:
        return False


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
