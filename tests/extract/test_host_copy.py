from __future__ import annotations

import threading
from itertools import chain

import pytest
import torch

from kvformat.extract.cuda_clock import ring_size
from kvformat.extract.host_copy import BlockingCopy, InPlace, StreamCopy, host_copy_for
from kvformat.extract.meter import PipelineMeter
from kvformat.extract.pipeline import run_groups
from kvformat.interfaces import Extracted
from tests.extract.pipelines import SCHEMA, TOKEN_NBYTES, WAIT_S, Gathered, Plain, encoder, groups_of, stored, values
from tests.extract.queued_device import QueuedDevice, QueuedModel

RECORD = 4 * TOKEN_NBYTES


def through(device: QueuedDevice, groups, sink, *, ring_nbytes: int, **options):
    copy = StreamCopy(device, ring_nbytes=ring_nbytes)
    return run_groups(QueuedModel(device), groups, sink, encoder=encoder(), host_copy=copy, **options)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("most", [1, 3 * RECORD, 1 << 20])
def test_records_arrive_unharmed_whatever_runs_first(seed: int, most: int) -> None:
    device, sink = QueuedDevice(seed), Gathered()
    groups = [*groups_of(1, 3, 2, 1, 1, 2, 3, 1)]
    times = through(device, groups, sink, max_inflight_nbytes=most, ring_nbytes=most + most // 4)
    assert sink.records == {one.name: stored(one) for one in chain.from_iterable(groups)}
    assert sink.order == list(sink.records)
    assert times.device_timed
    assert times.nbytes == 14 * RECORD
    assert (device.nbytes, device.queued) == (0, 0)


def test_one_ring_serves_all_records() -> None:
    device, sink = QueuedDevice(), Gathered()
    through(device, groups_of(*[1] * 40), sink, max_inflight_nbytes=4 * RECORD, ring_nbytes=5 * RECORD)
    assert device.pinned_nbytes == [5 * RECORD]


def test_times_are_the_devices() -> None:
    """Two tensors a record, a second each to compute and to copy."""
    device = QueuedDevice()
    meter = PipelineMeter()
    times = through(device, groups_of(2, 1), Gathered(), ring_nbytes=RECORD, meter=meter, max_inflight_nbytes=1)
    assert (times.model_s, times.copy_s) == (6.0, 6.0)
    assert times.blocked_s == 4.0  # while the first group was copied there was no room for the second
    assert times.limit is not None


def test_the_device_computes_while_the_results_before_are_stored() -> None:
    """The first record is not let go before the forward of the second is queued."""
    queued = threading.Event()

    def forward(documents) -> None:
        if documents[0].token_ids[0] == 2:
            queued.set()

    def add(one) -> None:
        assert queued.wait(WAIT_S)

    device, sink = QueuedDevice(), Gathered(before=add)
    copy = StreamCopy(device, ring_nbytes=2 * RECORD)
    model = QueuedModel(device, before=forward)
    run_groups(model, groups_of(1, 1), sink, encoder=encoder(), host_copy=copy, max_inflight_nbytes=2 * RECORD)
    assert len(sink.records) == 2


def test_device_memory_is_let_go_when_its_copy_is_there() -> None:
    device = QueuedDevice()
    left = []
    sink = Gathered(before=lambda _: left.append(device.nbytes))
    through(device, groups_of(1, 1, 1), sink, ring_nbytes=RECORD, max_inflight_nbytes=1)
    assert left == [0, 0, 0]


def test_no_copy_is_under_way_after_a_failure() -> None:
    def add(one) -> None:
        raise OSError("the disk is gone")

    device = QueuedDevice(3)
    with pytest.raises(OSError, match="the disk is gone"):
        through(device, groups_of(*[2] * 5), Gathered(before=add), ring_nbytes=RECORD)
    assert not any(stream.queue for stream in device.streams[1:])


def test_a_copy_that_cannot_be_queued_waits_for_those_before_it() -> None:
    class Broken(QueuedDevice):
        def copy(self, stream, target, source) -> None:
            if self.pinned_nbytes and len(stream.queue) > 4:
                raise RuntimeError("the device is gone")
            super().copy(stream, target, source)

    device = Broken()
    with pytest.raises(RuntimeError, match="the device is gone"):
        through(device, groups_of(4), Gathered(), ring_nbytes=8 * RECORD)
    assert not any(stream.queue for stream in device.streams[1:])


def test_what_is_in_host_memory_already_is_passed_on() -> None:
    device = QueuedDevice()
    copy = StreamCopy(device, ring_nbytes=RECORD)
    key, note = torch.arange(6.0).view(2, 3), torch.arange(3)
    (sent,) = copy.send([Extracted({"k": device.compute(key)}, {"note": note})])
    found = copy.receive(sent, PipelineMeter())
    assert torch.equal(found.components["k"], key)
    assert found.extras["note"] is note
    copy.release(sent)
    copy.close()
    copy.close()


# --------------------------------------------------------------------------------------------- devices without streams


@pytest.mark.parametrize(
    ("inflight", "ring"),
    [(2 << 30, 2 << 30), (3 << 30, 4 << 30), (13 << 28, 4 << 30), (1700 << 20, 2 << 30), (4096, 4096), (1, 1)],
)
def test_the_ring_wastes_no_page_locked_memory(inflight: int, ring: int) -> None:
    assert ring_size(inflight) == ring
    assert ring.bit_count() == 1  # torch would round anything else up
    assert ring >= 0.78 * inflight


def test_results_on_the_cpu_stay_where_they_are() -> None:
    found = [Extracted({"k": torch.zeros(2)}, {})]
    copy = host_copy_for(found, inflight_nbytes=1)
    assert type(copy) is InPlace
    (sent,) = copy.send(found)
    assert copy.receive(sent, PipelineMeter()) is found[0]


def test_a_device_that_is_waited_for() -> None:
    steps: list[str] = []
    model = Plain(before=lambda _: steps.append("forward"))
    copy = BlockingCopy(lambda: steps.append("waited"))
    sink = Gathered()
    times = run_groups(model, groups_of(2, 1), sink, encoder=encoder(), host_copy=copy)
    assert steps == ["forward", "waited"] * 2
    assert sink.records == {one.name: stored(one) for one in chain.from_iterable(groups_of(2, 1))}
    assert not times.device_timed
    assert times.copy_s > 0


# ---------------------------------------------------------------------------------------------------------------- CUDA

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class CudaModel(Plain):
    """Computes late, and lets go of its results at once."""

    def __init__(self, cycles: int, **options) -> None:
        super().__init__(**options)
        self.cycles = cycles

    def extract(self, documents):
        torch.cuda._sleep(self.cycles)
        found = []
        for document in documents:
            tensors = {name: tensor.cuda() for name, tensor in values(document).items()}
            tensors["k"] = tensors["k"].transpose(0, 1).contiguous().transpose(0, 1)  # strides of its own
            torch.empty_like(tensors["v"]).fill_(float("nan"))  # memory that was freed is used again
            found.append(Extracted(tensors, {}))
        return found


@needs_cuda
@pytest.mark.parametrize("most", [1, 3 * RECORD, 1 << 30])
def test_cuda_values_and_times(most: int) -> None:
    sink, groups = Gathered(), groups_of(*[1, 3, 2] * 20)
    times = run_groups(CudaModel(2_000_000), groups, sink, encoder=encoder(), max_inflight_nbytes=most)
    assert sink.records == {one.name: stored(one) for one in chain.from_iterable(groups)}
    assert times.device_timed
    assert 0 < times.model_s <= times.elapsed_s
    assert 0 < times.copy_s <= times.elapsed_s


@needs_cuda
def test_cuda_copies_beside_the_next_forward() -> None:
    found = CudaModel(0).extract([one.document for one in groups_of(1)[0]])
    copy = host_copy_for(found, inflight_nbytes=1 << 20)
    assert type(copy) is StreamCopy
    torch.cuda.synchronize()
    (sent,) = copy.send(found)
    torch.cuda._sleep(4_000_000_000)
    busy = torch.cuda.Event()
    busy.record()
    copy.receive(sent, PipelineMeter())
    assert not busy.query(), "the copy waited for the forward behind it"
    torch.cuda.synchronize()
    assert SCHEMA.components[0].name in sent.found.components
    copy.close()
