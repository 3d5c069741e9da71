"""Quantisation of values: what is stored, what is lost, and that neither depends on how it was asked for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvformat.extract import quant_math
from kvformat.extract.quant_math import error_bound, quantise

DTYPES = ["I8", "F8_E4M3", "F8_E5M2"]
SOURCES = [torch.float32, torch.bfloat16, torch.float16]
SHARED = [(1,), (3,), (1, 3), (1, 2, 3)]
MOST = {"F8_E4M3": 448.0, "F8_E5M2": 57344.0}
LEAST = 2.0**-90


def finite_values(source: torch.dtype) -> st.SearchStrategy[float]:
    largest, smallest = torch.finfo(source).max, torch.finfo(source).smallest_normal
    odd = [
        0.0,
        -0.0,
        largest,
        -largest,
        largest / 2,
        smallest,
        -smallest,
        smallest / 4,
        1.0,
        -1.0,
        1.75,
        1.7501,
        127.5,
    ]
    return (
        st.sampled_from(odd) | st.floats(width=32, allow_nan=False, allow_infinity=False) | st.floats(-4, 4, width=32)
    )


@st.composite
def tensors(draw, source: torch.dtype):
    """``[layers, tokens, heads, head_dim]``, values alike or of any magnitudes."""
    shape = draw(st.tuples(st.integers(1, 2), st.integers(1, 4), st.integers(1, 2), st.integers(1, 3)))
    count = math.prod(shape)
    values = draw(st.lists(finite_values(source), min_size=count, max_size=count))
    largest = torch.finfo(source).max
    return torch.tensor(values, dtype=torch.float32).clamp(-largest, largest).to(source).reshape(shape)


def dequantised(made: quant_math.Encoded) -> torch.Tensor:
    return made.stored.float() * made.scale


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_nothing_is_lost_beyond_the_bound(dtype, source, data):
    """Of any finite values: extremes, subnormals, zeros, outliers, a single token."""
    values = data.draw(tensors(source))
    shared = data.draw(st.sampled_from(SHARED))
    made = quantise(values, shared=shared, dtype=dtype)
    assert made.stored.shape == values.shape
    assert made.scale.dtype == torch.float32
    assert made.scale.shape == torch.Size(1 if axis in shared else size for axis, size in enumerate(values.shape))
    assert made.finite.all()
    assert (made.scale > 0).all()
    assert (made.scale >= torch.finfo(torch.float32).smallest_normal).all()
    found = dequantised(made)
    # Exact, so every reader gets the same, and finite wherever the values were at home.
    assert torch.equal(found.double(), made.stored.float().double() * made.scale.double())
    assert found.to(source).isfinite().all()
    assert ((found.double() - values.double()).abs() <= error_bound(values, made.scale, dtype)).all()
    assert (found[values == 0] == 0).all()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
@given(data=st.data())
def test_floats_are_the_nearest_there_are(dtype, source, data):
    """Against a table of all numbers of the format; between two, the one with an even code."""
    values = data.draw(tensors(source))
    made = quantise(values, shared=(1, 3), dtype=dtype)
    mantissa = 3 if dtype == "F8_E4M3" else 2
    top = (2 - 2.0**-mantissa) * 2.0 ** math.floor(math.log2(torch.finfo(source).max))
    wanted = (values.double().clamp(-top, top) / made.scale.double()).abs().flatten().numpy()
    table = torch.arange(128, dtype=torch.uint8).view(made.stored.dtype).double().numpy()
    table = table[np.isfinite(table)]
    distance = np.abs(wanted[:, None] - table)
    nearest = distance.min(1, keepdims=True)
    codes = [
        next(iter(sorted(np.flatnonzero(row == least), key=lambda code: code % 2)))
        for row, least in zip(distance, nearest, strict=True)
    ]
    assert (made.stored.view(torch.uint8).flatten().numpy() & 0x7F).tolist() == codes
    signs = made.stored.float().flatten().signbit()[torch.from_numpy(np.array(codes) > 0)]
    assert torch.equal(signs, values.flatten().signbit()[torch.from_numpy(np.array(codes) > 0)])


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
@given(st.floats(LEAST, 2.0**100, width=32))
def test_the_scale_of_floats_is_the_least_power_of_two(dtype, peak):
    made = quantise(torch.tensor([[[peak, 0.0, -peak / 3]]]), shared=(1, 2), dtype=dtype)
    scale = made.scale.item()
    assert math.frexp(scale)[0] == 0.5
    assert peak / scale <= MOST[dtype] < 2 * peak / scale


@given(st.floats(LEAST, torch.finfo(torch.float32).max, width=32))
def test_the_largest_integer_is_taken_by_the_largest_magnitude(peak):
    made = quantise(torch.tensor([[[peak], [-peak]]]), shared=(1,), dtype="I8")
    assert made.stored.flatten().tolist() == [127, -127]
    assert peak / 127 * (1 - 2.0**-15) <= made.scale.item() <= peak / 127 * (1 + 2.0**-23)


def test_ties_go_to_even():
    values = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]).reshape(1, 7, 1)
    made = quantise(values, shared=(1,), dtype="I8")
    assert made.scale.item() == 1
    assert made.stored.flatten().tolist() == [127, 0, 2, 2, 0, -2, -2]
    floats = torch.tensor([448.0, 17.0, 19.0, 21.0]).reshape(1, 4, 1)  # numbers from 16 to 32 are even
    made = quantise(floats, shared=(1,), dtype="F8_E4M3")
    assert made.stored.float().flatten().tolist() == [448, 16, 20, 20]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", SOURCES)
def test_groups_know_nothing_of_each_other(dtype, source):
    """Layers, documents and heads give the same alone, as views of any strides, and in pieces."""
    values = torch.randn(3, 5, 2, 4, generator=torch.Generator().manual_seed(0)).mul(50).to(source)
    before = values.clone()
    for shared in SHARED[:3]:
        whole = quantise(values, shared=shared, dtype=dtype)
        for layer in range(3):
            alone = quantise(values[layer : layer + 1], shared=shared, dtype=dtype)
            assert same(alone.stored[0], whole.stored[layer])
            assert torch.equal(alone.scale[0], whole.scale[layer])
            assert alone.relative_rms[0] == whole.relative_rms[layer]
        strided = values.transpose(1, 2).contiguous().transpose(1, 2)
        assert same(quantise(strided, shared=shared, dtype=dtype).stored, whole.stored)
        head = quantise(values[:, :, 1:], shared=shared, dtype=dtype)
        assert same(head.stored, whole.stored[:, :, 1:])
    assert torch.equal(values, before)


def test_large_values_are_taken_in_pieces(monkeypatch):
    values = torch.randn(5, 4, 2, 3, generator=torch.Generator().manual_seed(1))
    whole = quantise(values, shared=(1,), dtype="I8")
    for numel in (1, 24, 50, 119):
        monkeypatch.setattr(quant_math, "_CHUNK_NUMEL", numel)
        pieces = quantise(values, shared=(1,), dtype="I8")
        assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_found_in_its_layer(dtype, bad):
    for layer in range(3):
        for place in range(2 * 3):
            values = torch.randn(3, 2, 1, 3, generator=torch.Generator().manual_seed(2))
            values[layer].view(-1)[place] = bad
            made = quantise(values, shared=(3,), dtype=dtype)
            assert made.finite.tolist() == [number != layer for number in range(3)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_are_stored_exactly_beside_a_scale(dtype):
    values = torch.zeros(2, 3, 1, 4)
    values[1, 1] = 3
    made = quantise(values, shared=(3,), dtype=dtype)
    assert torch.equal(dequantised(made)[0], values[0])
    assert (made.scale > 0).all()
    assert made.scale.isfinite().all()
    assert made.relative_rms[0] == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_loss_of_a_layer_is_what_it_says(dtype):
    values = torch.randn(4, 16, 2, 8, generator=torch.Generator().manual_seed(3))
    values *= torch.tensor([1e-33, 1.0, 1e19, 1e30]).reshape(4, 1, 1, 1)  # their squares are no float32
    made = quantise(values, shared=(1,), dtype=dtype)
    error = (dequantised(made).double() - values.double()).flatten(1)
    wanted = error.square().mean(1).sqrt() / values.double().flatten(1).square().mean(1).sqrt()
    torch.testing.assert_close(made.relative_rms, wanted, rtol=1e-4, atol=0)
    assert (made.relative_rms[1:] < {"I8": 0.01, "F8_E4M3": 0.04, "F8_E5M2": 0.07}[dtype]).all()


def test_a_single_token_is_kept_by_a_scale_of_each_channel():
    values = torch.randn(2, 1, 3, 16, generator=torch.Generator().manual_seed(4))
    assert (quantise(values, shared=(1,), dtype="I8").relative_rms < 2.0**-15).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", SOURCES)
def test_every_device_gives_the_same_bits(dtype, source):
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(4, 300, 2, 64, generator=generator) * torch.randn(1, 1, 2, 64, generator=generator).exp()
    values[:, ::7] *= 1e-4
    values[0, :3] = 0
    values = values.to(source)
    for shared in SHARED:
        here, there = (quantise(values.to(device), shared=shared, dtype=dtype) for device in ("cpu", "cuda"))
        assert same(here.stored, there.stored.cpu())
        assert torch.equal(here.scale, there.scale.cpu())


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
