from __future__ import annotations

import os
import signal
import threading
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvformat
from kvformat.errors import InputError, StorageError, UsageError, make_error
from kvformat.extract.meter import PipelineMeter
from kvformat.extract.pipeline import run_groups
from kvformat.interfaces import Extracted
from tests.extract.pipelines import SCHEMA, TOKEN_NBYTES, WAIT_S, Gathered, Plain, encoder, groups_of, planned, stored

RECORD = 4 * TOKEN_NBYTES


@pytest.fixture(autouse=True)
def no_thread_survives():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def run(extractor, groups, sink, **options):
    return run_groups(extractor, groups, sink, **({"encoder": encoder()} | options))


# -------------------------------------------------------------------------------------------------------- what arrives


@pytest.mark.parametrize("most", [1, RECORD, 3 * RECORD, 1 << 30])
def test_every_record_arrives_in_order_with_its_values(most: int) -> None:
    groups = groups_of(1, 3, 2, 1)
    sink, extractor = Gathered(), Plain()
    times = run(extractor, groups, sink, max_inflight_nbytes=most)
    everything = list(chain.from_iterable(groups))
    assert sink.order == [one.name for one in everything]
    assert sink.records == {one.name: stored(one) for one in everything}
    assert extractor.calls == [[one.record for one in group] for group in groups]
    assert (times.records, times.skipped, times.tokens, times.nbytes) == (7, 0, 28, 7 * RECORD)


def test_the_model_stays_with_the_calling_thread_and_storing_is_another_one() -> None:
    seen: list[threading.Thread] = []
    sink = Gathered()
    run(Plain(before=lambda _: seen.append(threading.current_thread())), groups_of(1, 1), sink)
    assert seen == [threading.current_thread()] * 2
    assert sink.threads == {"kvformat-store"}


def test_nothing_is_computed_for_no_groups_and_empty_ones() -> None:
    sink, extractor = Gathered(), Plain()
    assert run(extractor, [], sink).records == 0
    assert run(extractor, [[], *groups_of(1), []], sink).records == 1
    assert extractor.calls == [[0]]


def test_results_on_the_cpu_are_stored_from_where_the_model_left_them() -> None:
    kept: list[torch.Tensor] = []
    seen: list[int] = []

    class Addresses(Gathered):
        def add(self, planned, record) -> None:
            seen.extend(np.frombuffer(buffer, dtype=np.uint8).ctypes.data for buffer in record.buffers)

    run(Plain(change=lambda _, tensors: kept.extend(tensors.values())), groups_of(2, 1), Addresses())
    assert {tensor.data_ptr() for tensor in kept} <= set(seen)


def test_a_dataset_is_what_the_writer_makes_of_the_same_tensors(tmp_path) -> None:
    class WriterSink:
        def __init__(self, writer) -> None:
            self.writer = writer

        def add(self, planned, found) -> None:
            self.writer.add(planned.name, found.components, document=planned.document, extras=found.extras)

        def stop(self) -> None:
            pass

    class Unencoded:
        def encode(self, name, document, components, extras):
            return Extracted(components, extras)

    groups = groups_of(2, 1, 3)
    options = {"schema": SCHEMA, "context": kvformat.Context.unknown(), "shard_nbytes": 2 * RECORD}
    with kvformat.create(tmp_path / "piped", **options) as piped:
        run(Plain(), groups, WriterSink(piped), encoder=Unencoded())
    with kvformat.create(tmp_path / "plain", **options) as plain:
        for one in chain.from_iterable(groups):
            (found,) = Plain().extract([one.document])
            plain.add(one.name, found.components, document=one.document)
    assert piped.id == plain.id


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 3), max_size=8),
    most=st.integers(1, 6 * RECORD),
    refused=st.sets(st.integers(0, 20), max_size=4),
)
def test_any_sizes_and_any_bound_come_to_an_end(sizes: list[int], most: int, refused: set[int]) -> None:
    def poison(document, tensors) -> None:
        if int(document.token_ids[0]) - 1 in refused:
            tensors["v"][1, 0, 0, 0] = torch.inf

    groups, sink = groups_of(*sizes), Gathered()
    times = run(Plain(change=poison), groups, sink, max_inflight_nbytes=most, on_error="skip")
    everything = list(chain.from_iterable(groups))
    assert sink.order == [one.name for one in everything]
    assert [name for name, _ in sink.skipped] == [one.name for one in everything if one.record in refused]
    assert times.records + times.skipped == len(everything)


# ----------------------------------------------------------------------------------------------- overlap and its bound


def test_the_next_forward_runs_while_a_record_is_stored() -> None:
    """Both wait for each other: whoever waits for the other to end would break the barrier."""
    both = threading.Barrier(2, timeout=WAIT_S)

    def forward(documents) -> None:
        if documents[0].token_ids[0] == 2:
            both.wait()

    def add(one) -> None:
        if one.record == 0:
            both.wait()

    sink = Gathered(before=add)
    run(Plain(before=forward), groups_of(1, 1, 1), sink, max_inflight_nbytes=2 * RECORD)
    assert len(sink.records) == 3


@pytest.mark.parametrize("most", [1, RECORD, 2 * RECORD, 3 * RECORD, 4 * RECORD + 1])
def test_no_more_bytes_are_on_the_way_than_allowed(most: int) -> None:
    """A group counts from before its forward until all of it is stored; one that is larger passes alone."""
    sizes = (1, 2, 1, 4, 1, 1, 2, 3)
    lock = threading.Lock()
    on_the_way = peak = 0
    groups = groups_of(*sizes)
    last_of = {group[-1].record: len(group) for group in groups}

    def forward(documents) -> None:
        nonlocal on_the_way, peak
        with lock:
            alone = on_the_way == 0
            on_the_way += len(documents)
            peak = max(peak, on_the_way)
            assert alone or on_the_way * RECORD <= most

    def add(one) -> None:
        nonlocal on_the_way
        with lock:
            on_the_way -= last_of.get(one.record, 0)

    run(Plain(before=forward), groups, Gathered(before=add), max_inflight_nbytes=most)
    assert on_the_way == 0
    assert peak * RECORD <= max(most, 4 * RECORD)


# ------------------------------------------------------------------------------------------------------------ failures


def test_what_the_model_raises_is_raised_as_it_is() -> None:
    failure = RuntimeError("out of memory")

    def forward(documents) -> None:
        if documents[0].token_ids[0] == 3:
            raise failure

    with pytest.raises(RuntimeError) as caught:
        run(Plain(before=forward), groups_of(2, 2, 1), Gathered())
    assert caught.value is failure
    assert failure.__notes__ == ["in extraction of 'doc-2', 'doc-3'"]


def test_what_the_storage_raises_ends_the_model_too() -> None:
    failure = make_error("E200", "no space")

    def add(one) -> None:
        if one.record == 1:
            raise failure

    extractor = Plain()
    with pytest.raises(StorageError) as caught:
        run(extractor, groups_of(*[1] * 50), Gathered(before=add), max_inflight_nbytes=RECORD)
    assert caught.value is failure
    assert failure.record == "doc-1"
    assert len(extractor.calls) <= 4


@pytest.mark.parametrize("record", [0, 2])
def test_a_sink_that_failed_is_told_to_stop_whenever_it_did(record: int) -> None:
    def add(one) -> None:
        if one.record == record:
            raise make_error("E203", "the disk is gone")

    sink = Gathered(before=add)
    with pytest.raises(StorageError, match="the disk is gone"):
        run(Plain(), groups_of(1, 1, 1), sink)
    assert sink.stopped.is_set()


def test_a_model_that_waits_for_room_hears_of_the_storage_failing() -> None:
    """Its second forward has no room until the first is stored, which never happens."""
    reached = threading.Event()

    def groups():
        yield from groups_of(1)
        reached.set()
        yield [planned(7)]

    def add(_) -> None:
        assert reached.wait(WAIT_S)
        raise make_error("E203", "the disk is gone")

    extractor = Plain()
    with pytest.raises(StorageError, match="the disk is gone"):
        run(extractor, groups(), Gathered(before=add), max_inflight_nbytes=1)
    assert extractor.calls == [[0]]


def test_a_storage_that_waits_hears_of_the_model_failing() -> None:
    waiting = threading.Event()

    def add(_) -> None:
        waiting.set()
        assert sink.stopped.wait(WAIT_S)

    def forward(documents) -> None:
        if documents[0].token_ids[0] == 2:
            assert waiting.wait(WAIT_S)
            raise ValueError("bad weights")

    sink = Gathered(before=add)
    with pytest.raises(ValueError, match="bad weights"):
        run(Plain(before=forward), groups_of(1, 1), sink)
    assert sink.order == ["doc-0"]


def test_what_was_computed_when_something_failed_is_not_stored() -> None:
    begun = threading.Event()

    def add(_) -> None:
        begun.set()
        assert sink.stopped.wait(WAIT_S)

    def groups():
        yield from groups_of(1, 1, 1)
        assert begun.wait(WAIT_S)
        raise ValueError("the plan ends here")

    sink = Gathered(before=add)
    with pytest.raises(ValueError, match="the plan ends here"):
        run(Plain(), groups(), sink)
    assert sink.order == ["doc-0"]


def test_a_refused_record_is_named() -> None:
    def poison(document, tensors) -> None:
        if document.token_ids[0] == 3:
            tensors["k"][1, 2] = torch.nan

    sink = Gathered()
    with pytest.raises(InputError) as caught:
        run(Plain(change=poison), groups_of(4), sink)
    assert (caught.value.code, caught.value.record, caught.value.layer) == ("E104", "doc-2", 1)
    assert sink.order == ["doc-0", "doc-1"]


def test_too_few_results_are_refused() -> None:
    class Short(Plain):
        def extract(self, documents):
            return super().extract(documents)[:-1]

    with pytest.raises(InputError, match="gave 1 results for 2 documents"):
        run(Short(), groups_of(2), Gathered())


@pytest.mark.parametrize("option", [{"max_inflight_nbytes": 0}, {"on_error": "ignore"}])
def test_options_without_sense(option) -> None:
    with pytest.raises(UsageError) as caught:
        run(Plain(), [], Gathered(), **option)
    assert caught.value.code == "E081"


# ---------------------------------------------------------------------------------------------------------- interrupts


def test_an_interrupt_of_the_model_leaves() -> None:
    def forward(documents) -> None:
        if documents[0].token_ids[0] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(Plain(before=forward), groups_of(1, 1, 1), Gathered())


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("where", ["room", "end"])
def test_an_interrupt_leaves_while_the_storage_waits(where: str) -> None:
    """The signal comes while the calling thread waits for room, or for the last record to be stored."""

    def add(_) -> None:
        assert computed.wait(WAIT_S)
        os.kill(os.getpid(), signal.SIGINT)
        assert sink.stopped.wait(WAIT_S)

    computed = threading.Event()

    def groups():
        yield from groups_of(1)
        computed.set()
        if where == "room":
            yield [planned(9)]

    sink = Gathered(before=add)
    with pytest.raises(KeyboardInterrupt):
        run(Plain(), groups(), sink, max_inflight_nbytes=1)


# --------------------------------------------------------------------------------------------------- refused documents


def test_a_poisoned_document_is_left_out_and_its_neighbours_are_not() -> None:
    def poison(document, tensors) -> None:
        if document.token_ids[0] == 2:
            tensors["v"][1, 0, 0, 0] = torch.nan

    sink, extractor = Gathered(), Plain(change=poison)
    (group,) = groups_of(3)
    times = run(extractor, [group], sink, on_error="skip")
    assert sink.order == ["doc-0", "doc-1", "doc-2"]
    assert sink.records == {one.name: stored(one) for one in group if one.record != 1}
    ((name, reason),) = sink.skipped
    assert name == "doc-1"
    assert reason.startswith("E104: 'v' holds NaN or infinity")
    assert reason.endswith("(layer 1)")
    assert extractor.calls == [[0, 1, 2]]
    assert (times.records, times.skipped) == (2, 1)


def refuse(code: str, *first_ids: int, together_only: bool = False):
    def forward(documents) -> None:
        bad = [document for document in documents if int(document.token_ids[0]) in first_ids]
        if bad and not (together_only and len(documents) == 1):
            raise make_error(code, "refused by the model")

    return forward


@pytest.mark.parametrize("code", ["E110", "E301", "E303", "E309"])
def test_a_document_the_model_refuses_is_found_among_its_neighbours(code: str) -> None:
    sink, extractor = Gathered(), Plain(before=refuse(code, 2, 4))
    run(extractor, groups_of(4, 1), sink, on_error="skip")
    assert sink.order == [f"doc-{number}" for number in range(5)]
    assert sink.skipped == [("doc-1", f"{code}: refused by the model"), ("doc-3", f"{code}: refused by the model")]
    assert extractor.calls == [[0, 1, 2, 3], [0], [1], [2], [3], [4]]


def test_a_group_of_refused_documents_alone_is_left_out() -> None:
    sink = Gathered()
    times = run(
        Plain(before=refuse("E301", 1, 2, 3)), groups_of(1, 2, 1), sink, on_error="skip", max_inflight_nbytes=1
    )
    assert [name for name, _ in sink.skipped] == ["doc-0", "doc-1", "doc-2"]
    assert list(sink.records) == ["doc-3"]
    assert (times.records, times.skipped) == (1, 3)


def test_without_skipping_the_refused_document_is_named_too() -> None:
    with pytest.raises(InputError) as caught:
        run(Plain(before=refuse("E301", 2)), groups_of(3), Gathered())
    assert (caught.value.code, caught.value.record) == ("E301", "doc-1")


@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_what_no_single_document_is_to_blame_for_fails(on_error: str) -> None:
    with pytest.raises(InputError, match="refused by the model"):
        run(Plain(before=refuse("E303", 2, together_only=True)), groups_of(3), Gathered(), on_error=on_error)


@pytest.mark.parametrize("code", ["E101", "E102", "E103", "E302", "E304", "E203"])
def test_what_is_not_about_a_document_fails_whatever_the_policy(code: str) -> None:
    with pytest.raises(kvformat.KVFormatError) as caught:
        run(Plain(before=refuse(code, 1)), groups_of(1, 1), Gathered(), on_error="skip")
    assert (caught.value.code, caught.value.record) == (code, "doc-0")


def test_a_wrong_dtype_is_no_documents_fault() -> None:
    def change(_, tensors) -> None:
        tensors["k"] = tensors["k"].to(torch.float16)

    with pytest.raises(InputError) as caught:
        run(Plain(change=change), groups_of(1), Gathered(), on_error="skip")
    assert (caught.value.code, caught.value.record) == ("E102", "doc-0")


def test_what_the_sink_refuses_fails() -> None:
    def add(_) -> None:
        raise make_error("E111", "the shard would be too large")

    with pytest.raises(InputError, match="the shard would be too large"):
        run(Plain(), groups_of(1), Gathered(before=add), on_error="skip")


# --------------------------------------------------------------------------------------------------------------- times


class Recorded(PipelineMeter):
    """Remembers what was measured in which thread."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[str, list[str]] = {}

    def during(self, what):
        self.steps.setdefault(threading.current_thread().name, []).append(what)
        return super().during(what)


def test_each_step_is_measured_in_its_thread() -> None:
    def poison(document, tensors) -> None:
        if document.token_ids[0] == 2:
            tensors["k"][0, 0, 0, 0] = torch.nan

    meter = Recorded()
    times = run(Plain(change=poison), groups_of(1, 2), Gathered(), meter=meter, on_error="skip")
    here = threading.current_thread().name
    group = ["documents", "blocked", "model", "copy"]
    record = ["starved", "starved", "hash", "disk"]
    assert meter.steps[here] == [*group, *group, "documents", "blocked"]
    assert meter.steps["kvformat-store"] == [*record * 3, "starved"]
    assert times == meter.times()
    assert (times.records, times.skipped, times.nbytes, times.device_timed) == (2, 1, 2 * RECORD, False)
    assert 0 < times.model_s < times.elapsed_s


def test_a_meter_adds_up_several_runs_and_can_be_read_meanwhile() -> None:
    seen = []
    meter = PipelineMeter()
    for _ in range(2):
        run(Plain(before=lambda _: seen.append(meter.times())), groups_of(1, 1), Gathered(), meter=meter)
    assert meter.times().records == 4
    elapsed = [times.elapsed_s for times in seen]
    assert elapsed == sorted(set(elapsed))
    assert all(earlier.model_s < later.model_s for earlier, later in pairwise(seen))
