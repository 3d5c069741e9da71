"""The stager on a CUDA device: right values, bounded memory, copies beside computation."""

from __future__ import annotations

import time

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from kvformat.loader.stager import LayerStager
from tests.loader.layered import Layered, several

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

COUNT = 12
MIB = 1 << 20


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def large(*, pinned: bool) -> Layered:
    """Layers of 16 MiB: K and V of 8 each."""
    batch = several(COUNT, tokens=2048, width=1024)
    if pinned:
        batch.components = {name: tensor.pin_memory() for name, tensor in batch.components.items()}
    return batch


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_values_of_both_directions(device: torch.device, depth: int, pinned: bool) -> None:
    batch = large(pinned=pinned)
    order = [*range(COUNT), *reversed(range(COUNT)), 7, 2, 9, 9, 0]
    with LayerStager(batch, device, depth) as stager:
        # Kept to the end, as autograd keeps what it saved; nothing waits for the device in between.
        kept = [(layer, stager[layer]) for layer in order]
        sums = [staged.value.sum(dtype=torch.float64) for _, staged in kept]
    for (layer, staged), total in zip(kept, sums, strict=True):
        assert staged.key.device == device
        assert torch.equal(staged.key.cpu(), batch.tensor("k", layer))
        assert total.item() == pytest.approx(batch.tensor("v", layer).double().sum().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8])
def test_dtypes(device: torch.device, dtype: torch.dtype) -> None:
    batch = several(4, dtype=dtype)
    with LayerStager(batch, device) as stager:
        for layer in range(4):
            found, wanted = stager[layer].key.cpu(), batch.tensor("k", layer)
            assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_memory_is_that_of_depth_layers(device: torch.device, depth: int, pinned: bool) -> None:
    """Although the host is far ahead: the device is kept busy while all layers are asked for."""
    batch = large(pinned=pinned)
    total = torch.zeros((), dtype=torch.float64, device=device)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with LayerStager(batch, device, depth) as stager:
        torch.cuda._sleep(50_000_000)
        for layer in (*range(COUNT), *reversed(range(COUNT))):
            total += stager[layer].key.sum(dtype=torch.float64)
        peak = torch.cuda.max_memory_allocated(device) - before
    assert peak <= depth * batch.layer_nbytes + MIB
    wanted = 2 * batch.components["k"].double().sum().item()
    assert total.item() == pytest.approx(wanted)
    assert torch.cuda.memory_allocated(device) - before <= MIB


@pytest.mark.parametrize("pinned", [False, True])
def test_the_next_layer_moves_while_the_device_computes(device: torch.device, pinned: bool) -> None:
    with LayerStager(large(pinned=pinned), device) as stager:
        stager[0]
        torch.cuda._sleep(4_000_000_000)  # seconds; the copy of layer 1 takes milliseconds
        busy = torch.cuda.Event()
        busy.record(torch.cuda.current_stream(device))
        copied = stager._held[1].done
        deadline = time.monotonic() + 60
        while not copied.query():
            assert time.monotonic() < deadline
        assert not busy.query(), "the copy waited for the computation"
    torch.cuda.synchronize(device)


def test_another_stream(device: torch.device) -> None:
    batch = large(pinned=True)
    other = torch.cuda.Stream(device)
    sums = []
    with LayerStager(batch, device) as stager:
        for layer in range(COUNT):
            with torch.cuda.stream(other if layer % 2 else torch.cuda.current_stream(device)):
                torch.cuda._sleep(1_000_000)
                sums.append(stager[layer].key.sum(dtype=torch.float64))
    torch.cuda.synchronize(device)
    for layer, total in enumerate(sums):
        assert total.item() == pytest.approx(batch.tensor("k", layer).double().sum().item())


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_those_without_it(device: torch.device, recompute: bool) -> None:
    """The backward pass asks for layers in a thread of autograd's own."""
    batch = several(6, tokens=256, width=64)

    def attend(hidden: torch.Tensor, layers, layer: int) -> torch.Tensor:
        staged = layers[layer]
        return hidden + torch.softmax(hidden @ staged["k"].T / 8, dim=-1) @ staged["v"]

    def gradient(layers) -> torch.Tensor:
        start = torch.linspace(-1, 1, 32 * 64, device=device).view(32, 64).requires_grad_()
        hidden = start
        for layer in range(6):
            if recompute:
                hidden = checkpoint(attend, hidden, layers, layer, use_reentrant=False)
            else:
                hidden = attend(hidden, layers, layer)
        hidden.square().sum().backward()
        return start.grad

    plain = {layer: {name: batch.tensor(name, layer).to(device) for name in "kv"} for layer in range(6)}
    with LayerStager(batch, device) as stager:
        assert torch.equal(gradient(stager), gradient(plain))


def test_a_batch_on_the_device_is_viewed(device: torch.device) -> None:
    batch = several(3)
    batch.components = {name: tensor.to(device) for name, tensor in batch.components.items()}
    with LayerStager(batch, device) as stager:
        assert stager[1].key.data_ptr() == batch.components["k"][1].data_ptr()
