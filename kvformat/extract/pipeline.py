"""Forward passes, copies to host memory, hashing and writing, beside each other."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from kvformat.errors import KVFormatError, make_error
from kvformat.extract.handover import LISTEN_S, Handover
from kvformat.extract.meter import PipelineMeter, PipelineTimes
from kvformat.extract.refused import OnError, is_of_document, skip_reason, with_records
from kvformat.interfaces import Extracted, Extractor
from kvformat.spec.document import Document

if TYPE_CHECKING:
    from kvformat.extract.host_copy import HostCopy, Sent

__all__ = ["INFLIGHT_NBYTES", "Encoder", "PlannedRecord", "RecordSink", "run_groups"]

INFLIGHT_NBYTES = 2 << 30
"""A default for what is on the way at once: a dozen records of long prompts, many forwards of short ones."""


class PlannedRecord(Protocol):
    """What the pipeline needs to know of a record that is to be made."""

    @property
    def name(self) -> str:
        """Its first name."""

    @property
    def document(self) -> Document:
        """What the model reads."""


P = TypeVar("P", bound=PlannedRecord)
P_contra = TypeVar("P_contra", bound=PlannedRecord, contravariant=True)
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


class Encoder(Protocol[T_co]):
    """Checks a record and makes of its tensors what is stored; :class:`kvformat.write.record.RecordEncoder` is one."""

    def encode(
        self, name: str, document: Document, components: Mapping[str, Any], extras: Mapping[str, Any], /
    ) -> T_co:
        """Check and encode one record, as views of the tensors where that is possible."""


class RecordSink(Protocol[P_contra, T_contra]):
    """Where records go. ``add`` and ``skip`` are called by one thread, in the order of the groups."""

    def add(self, planned: P_contra, record: T_contra) -> None:
        """Store a record. Its memory is used again when this returns."""

    def skip(self, planned: P_contra, reason: str) -> None:
        """Note that a document is left out, and why."""

    def stop(self) -> None:
        """Give up what :meth:`add` waits for: something failed, or somebody wants an end.

        Called by another thread, while :meth:`add` may run; it may raise then.
        """


def run_groups(
    extractor: Extractor,
    groups: Iterable[Sequence[P]],
    sink: RecordSink[P, T],
    *,
    encoder: Encoder[T],
    max_inflight_nbytes: int = INFLIGHT_NBYTES,
    on_error: OnError = "fail",
    meter: PipelineMeter | None = None,
    host_copy: HostCopy | None = None,
) -> PipelineTimes:
    """Compute groups of documents and store them.

    The calling thread iterates over ``groups`` and runs the model, which is bound to it on some devices. A second
    thread, which ends before this returns, waits for the copies to host memory, encodes, and stores. Results are used
    where the model left them: a forward must not write into the results of an earlier one.

    Parameters
    ----------
    groups
        Documents of one forward each, all of one length. Asked for one at a time, between forwards: what a generator
        does there runs in the calling thread.
    sink
        Where records go.
    encoder
        What makes them ready to be stored.
    max_inflight_nbytes
        Bytes of results between the forward that makes them, it included, and the storage, in host memory and, on its
        way there, on the device; page-locked memory for the copies takes about as much. A larger group passes alone.
        For overlap, leave room for two groups; there is no use in more than the whole extraction has.
    on_error
        What becomes of a document that is refused: ``"skip"`` leaves out what an ``InputError`` about this document
        (:data:`~kvformat.extract.refused.DOCUMENT_CODES`) says something about, and tells the sink why. Other
        documents of its group are computed without it.
    meter
        Adds up times; for looking at them meanwhile.
    host_copy
        What brings results to host memory, for devices of another kind than CPU, CUDA, and those that wait.

    Returns
    -------
    PipelineTimes
        Of the meter.

    Raises
    ------
    Exception
        What extractor, encoder, sink or ``groups`` raised, with the name of the record. The other thread has ended by
        then; what it had not stored is dropped.
    UsageError
        E081 for options that make no sense.
    """
    if max_inflight_nbytes < 1:
        raise make_error("E081", f"max_inflight_nbytes must be at least 1, found {max_inflight_nbytes}")
    if on_error not in ("fail", "skip"):
        raise make_error("E081", f"on_error must be 'fail' or 'skip', found {on_error!r}")
    meter = meter or PipelineMeter()
    run = _Run(extractor, sink, encoder, max_inflight_nbytes, on_error, meter, host_copy)
    with meter.running():
        run.through(groups)
    return meter.times()


class _Item(NamedTuple, Generic[P]):
    """A record on its way, or the reason why there is none; ``nbytes`` are done with when this is."""

    planned: P
    sent: Sent | None
    refusal: KVFormatError | None
    nbytes: int


class _Run(Generic[P, T]):
    def __init__(
        self,
        extractor: Extractor,
        sink: RecordSink[P, T],
        encoder: Encoder[T],
        most_nbytes: int,
        on_error: OnError,
        meter: PipelineMeter,
        copy: HostCopy | None,
    ) -> None:
        self._extractor = extractor
        self._sink = sink
        self._encoder = encoder
        self._most = most_nbytes
        self._skips = on_error == "skip"
        self._meter = meter
        self._copy: HostCopy | None = None
        if copy is not None:
            self._use(copy)
        self._on_the_way: Handover[_Item[P]] = Handover(most_nbytes)
        self._stored = threading.Event()
        self._token_nbytes = 0.0  # of the last group

    def through(self, groups: Iterable[Sequence[P]]) -> None:
        """All groups, from beginning to end."""
        thread = threading.Thread(target=self._store_all, name="kvformat-store", daemon=True)
        try:
            thread.start()
            self._compute_all(groups)
            self._on_the_way.end()
            with self._blocked():
                self._wait_for(thread)
            self._on_the_way.check()
        except BaseException:
            self._on_the_way.stop()
            try:
                self._sink.stop()
            finally:
                if thread.ident is not None:  # an interrupt may come before it has begun
                    self._wait_for(thread)
            raise
        finally:
            if self._copy is not None:
                self._copy.close()

    def _wait_for(self, thread: threading.Thread) -> None:
        # An interrupt within `join` has the interpreter take a thread that runs for one that ended.
        while not self._stored.wait(LISTEN_S):
            pass
        thread.join()

    # -- the calling thread

    def _compute_all(self, groups: Iterable[Sequence[P]]) -> None:
        following = iter(groups)
        while True:
            with self._meter.during("documents"):
                group = next(following, None)
            if group is None:
                return
            if group:
                expected = int(sum(planned.document.num_tokens for planned in group) * self._token_nbytes)
                with self._blocked():
                    self._on_the_way.reserve(expected)
                items = self._computed(group)
                self._on_the_way.put(items, reserved=expected, nbytes=items[-1].nbytes)

    def _blocked(self) -> AbstractContextManager[None]:
        """Measures a wait of the model, unless the device does."""
        timed = self._copy is not None and self._copy.device_timed
        return nullcontext() if timed else self._meter.during("blocked")

    def _computed(self, group: Sequence[P]) -> list[_Item[P]]:
        results = self._results(group)
        found = [result for result in results if isinstance(result, Extracted)]
        sent = iter(self._send(found))
        items: list[_Item[P]] = []
        for planned, result in zip(group, results, strict=True):
            if isinstance(result, Extracted):
                items.append(_Item(planned, next(sent), None, 0))
            else:
                items.append(_Item(planned, None, result, 0))
        nbytes = sum(map(_nbytes, found))
        if found:
            self._token_nbytes = nbytes / (len(found) * group[0].document.num_tokens)
        # The tensors of a group may share their memory, which is there until the last of them is stored.
        items[-1] = items[-1]._replace(nbytes=nbytes)
        return items

    def _send(self, found: Sequence[Extracted]) -> Sequence[Sent]:
        copy = self._copy
        if copy is None:  # nothing was ever computed
            return ()
        with nullcontext() if copy.device_timed else self._meter.during("copy"):
            return copy.send(found)

    def _results(self, group: Sequence[P]) -> list[Extracted | KVFormatError]:
        """What the model gives for each document, or why it is left out."""
        try:
            return [*self._forward(group)]
        except Exception as error:
            if not (isinstance(error, KVFormatError) and is_of_document(error)):
                with_records(error, [planned.name for planned in group])
                raise
            if len(group) == 1:
                with_records(error, [group[0].name])
                if not self._skips:
                    raise
                return [error]
            results = [result for planned in group for result in self._results([planned])]
            if all(isinstance(result, Extracted) for result in results):
                raise  # no single document is to blame
            return results

    def _forward(self, group: Sequence[P]) -> list[Extracted]:
        from kvformat.extract.results import checked_results

        documents = [planned.document for planned in group]
        if self._copy is not None and self._copy.device_timed:
            self._copy.begin()
            return checked_results(self._extractor.extract(documents), documents)
        with self._meter.during("model"):
            found = checked_results(self._extractor.extract(documents), documents)
            self._settle(found)
        return found

    def _settle(self, found: Sequence[Extracted]) -> None:
        """Choose how results get to host memory, and wait until these exist."""
        if self._copy is None and found:
            from kvformat.extract.host_copy import host_copy_for

            self._use(host_copy_for(found, inflight_nbytes=self._most))
        if self._copy is not None:
            self._copy.settle()

    def _use(self, copy: HostCopy) -> None:
        self._copy = copy
        if copy.device_timed:
            self._meter.timed_by_device()

    # -- the storing thread

    def _store_all(self) -> None:
        try:
            while True:
                with self._meter.during("starved"):
                    item = self._on_the_way.take()
                if item is None:
                    return
                self._store(item)
                del item  # its memory, else, would last until the next one is there
        except BaseException as error:  # noqa: BLE001 - raised by the calling thread
            self._on_the_way.fail(error)
        finally:
            self._stored.set()

    def _store(self, item: _Item[P]) -> None:
        refusal = item.refusal
        try:
            if item.sent is not None:
                refusal = self._add(item.planned, item.sent)
            if refusal is not None:
                with self._meter.during("disk"):
                    self._sink.skip(item.planned, skip_reason(refusal))
                self._meter.skip()
        except Exception as error:
            with_records(error, [item.planned.name])
            raise
        self._on_the_way.release(item.nbytes)

    def _add(self, planned: P, sent: Sent) -> KVFormatError | None:
        """Store a record, or say why it is left out."""
        copy = self._copy
        assert copy is not None
        with self._meter.during("starved"):
            found = copy.receive(sent, self._meter)
        try:
            try:
                with self._meter.during("hash"):
                    record = self._encoder.encode(planned.name, planned.document, found.components, found.extras)
            except KVFormatError as error:
                if self._skips and is_of_document(error):
                    return error
                raise
            with self._meter.during("disk"):
                self._sink.add(planned, record)
            self._meter.count(tokens=planned.document.num_tokens, nbytes=_nbytes(found))
        finally:
            copy.release(sent)
        return None


def _nbytes(found: Extracted) -> int:
    return sum(int(tensor.nbytes) for tensor in (*found.components.values(), *found.extras.values()))
