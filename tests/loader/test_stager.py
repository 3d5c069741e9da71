"""Layers of a batch on a device: views on the CPU, and the streams of a simulated device."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import kvformat
from kvformat.errors import LookupFailedError, UsageError
from kvformat.loader import KVLoader
from kvformat.loader.mover import StreamMover
from kvformat.loader.stager import LayerStager
from tests.loader.layered import Layered, several
from tests.loader.simulated import Event, SimulatedStreams, Stream
from tests.write.make import ids, kv, writer

SHARED = {0: 0, 2: 1, 3: 2, 5: 1, 6: 2, 9: 3}  # layers 5 and 6 reuse what 2 and 3 have


def staged_on(streams: SimulatedStreams, batch: Layered, depth: int = 2) -> LayerStager:
    return LayerStager(batch, "cpu", depth, mover=StreamMover(streams, slots=depth))


# -- on the CPU ----------------------------------------------------------------------------------------------------


def test_views_on_the_cpu() -> None:
    batch = Layered(SHARED)
    threads = threading.active_count()
    with LayerStager(batch, "cpu") as stager:
        assert stager.layers == tuple(SHARED)
        assert len(stager) == 6
        for layer in (*SHARED, *reversed(SHARED)):
            staged = stager[layer]
            assert staged.layer == layer
            assert list(staged) == ["k", "v"]
            assert staged["k"].data_ptr() == batch.tensor("k", layer).data_ptr()
            assert staged["k"].shape == (3, 4)
            assert staged.key is staged["k"]
            assert staged.value is staged.of_role("value") is staged["v"]
            assert len(stager.resident) <= 2
        assert [staged.layer for staged in stager] == list(SHARED)
    assert threading.active_count() == threads


def test_what_a_layer_does_not_have() -> None:
    staged = LayerStager(several(2), "cpu")[1]
    assert "k" in staged
    assert "latent" not in staged
    assert staged.get("latent") is None
    assert repr(staged) == "<layer 1: k [3, 4], v [3, 4]>"
    with pytest.raises(LookupFailedError, match=r"\[E082\].*no component 'latent'.*\['k', 'v'\].*layer 1"):
        staged["latent"]
    with pytest.raises(LookupFailedError, match=r"\[E082\].*no role 'latent'.*\['key', 'value'\]"):
        staged.of_role("latent")


def test_a_batch_that_knows_no_roles() -> None:
    batch = several(2)
    batch.role_of = None
    staged = LayerStager(batch, "cpu")[0]
    assert torch.equal(staged["k"], batch.tensor("k", 0))
    with pytest.raises(LookupFailedError, match="E082"):
        staged.key  # noqa: B018 -- reading it raises


def test_components_of_some_layers() -> None:
    """A hybrid model: full and sliding layers are components of their own."""
    batch = several(2)
    batch.layers = (0, 1, 2)
    batch.rows_of = lambda layer: {"v": 1} if layer == 1 else {"k": layer // 2}
    stager = LayerStager(batch, "cpu")
    assert [list(stager[layer]) for layer in (0, 1, 2)] == [["k"], ["v"], ["k"]]
    assert torch.equal(stager[2].key, batch.components["k"][1])


@pytest.mark.parametrize("layer", [-1, 1, 10, "0", None, 0.5, [0]])
def test_layers_the_batch_does_not_hold(layer) -> None:
    stager = LayerStager(Layered(SHARED), "cpu")
    with pytest.raises(UsageError, match=r"\[E081\].*no layer.*\[0, 2, 3, 5, 6, 9\]"):
        stager[layer]
    assert stager[0].layer == 0


@pytest.mark.parametrize("depth", [0, -1, 1.5, "2", None, True])
def test_a_depth_must_be_a_positive_integer(depth) -> None:
    with pytest.raises(UsageError, match=r"\[E081\].*depth"):
        LayerStager(several(2), "cpu", depth)


@pytest.mark.parametrize("device", ["gpu", "meta", "cuda:99", object()])
def test_devices_that_are_not_there(device) -> None:
    with pytest.raises(UsageError, match="E081"):
        LayerStager(several(2), device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device() -> None:
    with pytest.raises(UsageError, match=r"\[E081\] there is no cuda: this process sees 0 CUDA devices"):
        LayerStager(several(2), "cuda")


def test_a_batch_that_lies_elsewhere() -> None:
    batch = several(2)
    batch.components = {name: tensor.to("meta") for name, tensor in batch.components.items()}
    with pytest.raises(UsageError, match=r"\[E081\].*a batch on meta for cpu"):
        LayerStager(batch, "cpu")


def test_nothing_after_close() -> None:
    batch = several(3)
    stager = LayerStager(batch, "cpu")
    kept = stager[0].key
    gone = weakref.ref(batch)
    stager.close()
    stager.close()
    with pytest.raises(UsageError, match=r"\[E081\] the stager is closed"):
        stager[0]
    assert stager.resident == ()
    wanted = batch.tensor("k", 0).clone()
    del batch
    assert gone() is None
    assert torch.equal(kept, wanted)


# -- gradients -----------------------------------------------------------------------------------------------------


class Attend(torch.nn.Module):
    """A generator's layer: own projections, keys and values of the batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = torch.nn.Linear(width, width)
        self.out = torch.nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor, layers, layer: int) -> torch.Tensor:
        staged = layers[layer]
        weights = torch.softmax(self.query(hidden) @ staged["k"].T, dim=-1)
        return hidden + self.out(weights @ staged["v"])


def trained(layers, order: tuple[int, ...], *, recompute: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(3)
    modules = torch.nn.ModuleList(Attend(4) for _ in order)
    hidden = torch.linspace(-1, 1, 20).view(5, 4)
    for module, layer in zip(modules, order, strict=True):
        if recompute:
            hidden = checkpoint(module, hidden, layers, layer, use_reentrant=False)
        else:
            hidden = module(hidden, layers, layer)
    loss = hidden.square().sum()
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in modules.parameters()]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_loss_and_gradients_are_those_without_it(device: str, recompute: bool, depth: int) -> None:
    batch = Layered(SHARED)
    plain = {layer: {name: batch.tensor(name, layer) for name in "kv"} for layer in SHARED}
    loss, gradients = trained(plain, batch.layers, recompute=recompute)
    streams = SimulatedStreams(eager=True)
    with LayerStager(batch, "cpu", depth) if device == "cpu" else staged_on(streams, batch, depth) as stager:
        found, found_gradients = trained(stager, batch.layers, recompute=recompute)
    assert torch.equal(found, loss)
    assert all(map(torch.equal, found_gradients, gradients))
    assert all(gradient.any() for gradient in gradients)
    if device == "simulated" and recompute:
        # The layer in use and those the stager holds; without checkpoints autograd saves all.
        assert streams.peak_nbytes <= (depth + 1) * batch.layer_nbytes < 4 * batch.layer_nbytes or depth == 3


def test_layers_loaded_for_inference_serve_training() -> None:
    batch = several(3)
    stager = staged_on(SimulatedStreams(eager=True), batch, depth=3)
    with torch.inference_mode():
        stager[0]
    query = torch.ones(3, 4, requires_grad=True)
    (query * stager[1].key).sum().backward()
    assert torch.equal(query.grad, batch.tensor("k", 1))


# -- on a device ---------------------------------------------------------------------------------------------------


def walk(streams: SimulatedStreams, batch: Layered, visits: list[int], *, depth: int, held: int, steps: int) -> None:
    """Use layers as a consumer does, holding on to the last ``held``, while the device runs in between."""
    with staged_on(streams, batch, depth) as stager:
        kept = deque(maxlen=held)
        for layer in visits:
            staged = stager[layer]
            assert len(stager.resident) <= depth
            for name in staged:
                streams.compute(staged[name], batch.tensor(name, layer).clone())
            kept.append(staged)
            del staged
            for other in kept:  # autograd's saved tensors are read later, too
                streams.compute(other["k"], batch.tensor("k", other.layer).clone())
            streams.run(streams.random.randint(0, steps))
    for component in batch.components.values():
        component.fill_(7)  # closed: the memory of the batch serves another one
    streams.finish()


@given(
    st.integers(0, 2**32),
    st.lists(st.sampled_from(tuple(SHARED)), min_size=1, max_size=25),
    st.integers(1, 4),
    st.integers(0, 3),
    st.sampled_from([0, 3, 20]),
    st.booleans(),
)
def test_any_order_of_access(seed: int, visits, depth: int, held: int, steps: int, pinned: bool) -> None:
    walk(SimulatedStreams(seed, pinned=pinned), Layered(SHARED), visits, depth=depth, held=held, steps=steps)


@given(st.integers(0, 2**32), st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=25), st.booleans())
def test_any_stream(seed: int, visits, pinned: bool) -> None:
    """A consumer that changes its stream: memory of one is read on the other."""
    streams, batch = SimulatedStreams(seed, pinned=pinned), several(5)
    first, second = streams.main, streams.side()
    with staged_on(streams, batch) as stager:
        for layer, other in visits:
            streams.main = second if other else first
            staged = stager[layer]
            streams.compute(staged.key, batch.tensor("k", layer).clone())
            del staged
            streams.run(streams.random.randint(0, 6))
    streams.finish()


class NoWaitForTheCopy(SimulatedStreams):
    def wait(self, stream: Stream, event: Event) -> None:
        if stream is not self.main:
            super().wait(stream, event)


class NoWaitForTheMemory(SimulatedStreams):
    def wait(self, stream: Stream, event: Event) -> None:
        if stream is self.main:
            super().wait(stream, event)


class NoWaitForTheSlot(SimulatedStreams):
    def synchronize(self, event: Event) -> None:
        pass


class NothingKept(SimulatedStreams):
    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        pass


@pytest.mark.parametrize(
    ("broken", "pinned"),
    [
        (NoWaitForTheCopy, False),
        (NoWaitForTheCopy, True),
        (NoWaitForTheMemory, False),
        (NoWaitForTheMemory, True),
        (NoWaitForTheSlot, False),
        (NoWaitForTheSlot, True),  # by close alone
    ],
)
def test_the_simulated_device_sees_each_missing_wait(broken: type[SimulatedStreams], pinned: bool) -> None:
    visits = [*range(6), *reversed(range(6))]

    def tries(kind: type[SimulatedStreams]) -> None:
        for seed in range(20):
            walk(kind(seed, pinned=pinned), several(6), visits, depth=2, held=1, steps=3)

    tries(SimulatedStreams)
    with pytest.raises(AssertionError, match="read something else"):
        tries(broken)


def test_memory_of_another_stream_is_kept() -> None:
    def use(streams: SimulatedStreams) -> None:
        batch = several(4)
        first, second = streams.main, streams.side()
        with staged_on(streams, batch, depth=1) as stager:
            for layer in range(4):
                streams.main = first
                stager[layer]
                streams.main = second
                staged = stager[layer]
                streams.compute(staged.key, batch.tensor("k", layer).clone())
                del staged
        streams.finish()

    for seed in range(20):
        use(SimulatedStreams(seed))
    with pytest.raises(AssertionError, match="read something else"):
        for seed in range(20):
            use(NothingKept(seed))


def test_a_layer_that_was_never_used_is_dropped_safely() -> None:
    """Its memory may serve the stream it belongs to, which has not waited for the copy that still runs."""
    for seed in range(20):
        streams, batch = SimulatedStreams(seed, pinned=True), several(5)
        stager = staged_on(streams, batch, depth=3)
        first, second = streams.main, streams.side()
        stager[0]  # moves 1 and 2 ahead
        streams.main = second
        stager[4]  # drops both, and moves 4 alone
        assert stager.resident == (0, 4)
        streams.main = first
        own = [streams.empty(batch.tensor("k", 0)) for _ in range(4)]
        source = torch.full_like(own[0], 5)
        for tensor in own:
            streams.copy(streams.main, tensor, source)
        streams.finish()
        assert all(torch.equal(tensor, source) for tensor in own)


def test_next_layer_moves_before_it_is_asked_for() -> None:
    streams, batch = SimulatedStreams(pinned=True), several(8)
    with staged_on(streams, batch) as stager:
        for layer in (*range(8), *reversed(range(8))):
            before = stager.resident
            assert layer in before or not before
            streams.compute(stager[layer].key, batch.tensor("k", layer))
            assert len(stager.resident) == 2
    streams.finish()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_host_far_ahead_needs_no_more_memory(depth: int) -> None:
    """Nothing runs before all is queued, and pinned sources let the host go on without a wait."""
    streams, batch = SimulatedStreams(pinned=True), several(12)
    stager = staged_on(streams, batch, depth)
    for layer in range(12):
        streams.compute(stager[layer].key, batch.tensor("k", layer).clone())
    assert streams.host_waits == 0
    assert streams.peak_nbytes == depth * batch.layer_nbytes
    assert streams.pinned_nbytes == []
    stager.close()
    assert streams.host_waits == 1
    assert streams.nbytes == 0
    streams.finish()


def test_the_ring_is_small() -> None:
    streams, batch = SimulatedStreams(), several(12, tokens=5)
    with staged_on(streams, batch, depth=2) as stager:
        for layer in range(12):
            streams.compute(stager[layer].key, batch.tensor("k", layer).clone())
    assert streams.pinned_nbytes == [2 * 256] * 2  # 80 bytes each of K and V, aligned
    streams.finish()


def test_sources_that_are_not_contiguous_pass_the_ring() -> None:
    streams, batch = SimulatedStreams(pinned=True), several(4)
    batch.components["k"] = batch.components["k"].transpose(1, 2)
    with staged_on(streams, batch) as stager:
        for layer in range(4):
            streams.compute(stager[layer].key, batch.tensor("k", layer).clone())
            assert stager[layer].key.is_contiguous()
    assert streams.pinned_nbytes == [256] * 2  # K alone
    streams.finish()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_dtypes(dtype: torch.dtype) -> None:
    streams, batch = SimulatedStreams(eager=True), several(3, dtype=dtype)
    with staged_on(streams, batch) as stager:
        for layer in range(3):
            assert stager[layer].key.dtype == dtype
            assert torch.equal(stager[layer].key.view(torch.uint8), batch.tensor("k", layer).view(torch.uint8))


def test_a_failed_load_leaves_the_rest_usable() -> None:
    class Failing(SimulatedStreams):
        failing = False

        def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
            super().copy(stream, target, source)
            if self.failing:
                raise MemoryError

    streams, batch = Failing(), several(4)
    with staged_on(streams, batch) as stager:
        stager[0]
        streams.failing = True
        with pytest.raises(MemoryError):
            stager[2]
        assert not any(stream.queue for stream in streams.streams), "what was queued has run"
        streams.failing = False
        for layer in (2, 3, 2, 1):
            streams.compute(stager[layer].key, batch.tensor("k", layer).clone())
    streams.finish()


def test_a_collected_stager_waits_for_its_copies() -> None:
    streams, batch = SimulatedStreams(pinned=True), several(3)
    stager = staged_on(streams, batch)
    kept, wanted = stager[0].key, batch.tensor("k", 0).clone()
    del stager
    gc.collect()
    for component in batch.components.values():
        component.fill_(7)
    streams.finish()
    assert torch.equal(kept, wanted)


def test_threads() -> None:
    batch = several(6)
    streams = SimulatedStreams(eager=True)
    with staged_on(streams, batch) as stager, ThreadPoolExecutor(4) as pool:

        def use(seed: int) -> None:
            for number in range(50):
                layer = (seed * 5 + number) % 6
                staged = stager[layer]
                assert staged.layer == layer
                assert staged.key.shape == (3, 4)

        list(pool.map(use, range(4)))


# -- batches of a dataset ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["packed", "padded", "hf"])
@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_a_batch_of_a_dataset(layout: str, device: str, tmp_path) -> None:
    with writer(tmp_path / "dataset") as out:
        for number in range(3):
            out.add(str(number), kv(number + 2), token_ids=ids(number + 2))
    dataset = kvformat.open(tmp_path / "dataset")
    loader = KVLoader(dataset, [[0, 2], [1]], layout=layout)
    streams = SimulatedStreams(eager=True)
    for batch in loader:
        with LayerStager(batch, "cpu") if device == "cpu" else staged_on(streams, batch) as stager:
            assert stager.layers == batch.layers == (0, 1)
            for layer in (0, 1, 1, 0):
                staged = stager[layer]
                assert torch.equal(staged.key, batch.slab("key", layer=layer))
                assert torch.equal(staged.value, batch.slab("value", layer=layer))
                assert staged.key.any()
