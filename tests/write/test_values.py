"""Values: every bit pattern of every dtype, from tensors of any kind, comes back as it was given."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvformat
from kvformat import Axis, Extra
from kvformat.errors import KVFormatError
from kvformat.spec.values import all_finite, all_positive
from kvformat.tensors import torch_dtype
from tests.write.make import all_bytes, component, ids, read, scaled, schema, single, writer

FLOATS = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "F8_E5M2": 1}
COMPONENTS = {**FLOATS, "I8": 1}


def of_bits(dtype, bits):
    """Tensor ``[n]`` of bit patterns."""
    width = {1: np.uint8, 2: np.uint16, 4: np.uint32}[COMPONENTS[dtype]]
    return torch.from_numpy(np.asarray(bits, dtype=width).view(np.uint8).copy()).view(torch_dtype(dtype))


def write_one(location, dtype, tensor, **options):
    """A dataset of one component ``[1, tokens]``."""
    with writer(location, of=single(dtype, "tokens"), **options) as out:
        out.add("a", {"x": tensor[None]}, token_ids=ids(len(tensor)))


def patterns(dtype):
    """All bit patterns of a dtype of 8 or 16 bits, and a choice of those of 32."""
    if COMPONENTS[dtype] < 4:
        return of_bits(dtype, np.arange(1 << 8 * COMPONENTS[dtype]))
    exponents = np.arange(512, dtype=np.uint32) << 23
    mantissas = np.array([0, 1, 2, 3, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFE, 0x7FFFFF], np.uint32)
    return of_bits(dtype, (exponents[:, None] | mantissas).reshape(-1))


# ------------------------------------------------------------------------------------------------------- bit patterns


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("dtype", COMPONENTS)
def test_every_bit_pattern_survives(tmp_path, dtype, io):
    """NaN payloads, signalling NaN, subnormals and -0.0 included."""
    given_ = patterns(dtype)
    write_one(tmp_path / "ds", dtype, given_, allow_non_finite=["x"])
    read(tmp_path / "ds")
    record = kvformat.open(tmp_path / "ds", io=io)[0]
    out = torch.empty(1, len(given_), dtype=given_.dtype)
    for found in (record.component("x"), record.component("x", copy=True), record.component("x", out=out)):
        assert found.dtype == given_.dtype
        assert all_bytes(found[0]) == all_bytes(given_)
    [shard] = (tmp_path / "ds" / "shards").rglob("*.safetensors")
    assert all_bytes(safetensors.torch.load_file(shard)["0000/x"]) == all_bytes(given_)


@pytest.mark.parametrize("dtype", FLOATS)
def test_finite_is_what_torch_calls_finite(dtype):
    """One by one, over all patterns: none is missed, none is refused without reason."""
    values = patterns(dtype)
    finite = torch.isfinite(values.float())
    width = FLOATS[dtype]
    data = all_bytes(values)
    found = [all_finite(memoryview(data)[n * width : (n + 1) * width], dtype) for n in range(len(values))]
    assert found == finite.tolist()
    assert 0 < sum(found) < len(found)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_value_is_found_wherever_it_stands(dtype):
    values = patterns(dtype)
    finite = values[torch.isfinite(values.float())]
    assert all_finite(memoryview(all_bytes(finite)), dtype)
    bad = values[~torch.isfinite(values.float())]
    for n, at in enumerate((0, 1, len(finite) // 2, len(finite) - 1)):
        for one in (bad[n % len(bad)], bad[-1 - n % len(bad)]):
            spoilt = finite.clone()
            spoilt.view(torch.uint8).view(-1, FLOATS[dtype])[at] = one.reshape(1).view(torch.uint8)
            assert not all_finite(memoryview(all_bytes(spoilt)), dtype)


def test_integers_are_finite():
    assert all_finite(memoryview(bytes(range(256))), "I8")
    assert all_finite(memoryview(b""), "BF16")


@given(st.floats(width=32), st.integers(0, 5))
def test_positive_is_positive_and_finite(value, others):
    data = np.array([1.0] * others + [value], "<f4").tobytes()
    assert all_positive(memoryview(data)) == (np.isfinite(value) and value > 0)


NON_FINITE = {
    "BF16": [0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x7F81, 0xFF81, 0x7FFF, 0xFFFF],
    "F16": [0x7C00, 0xFC00, 0x7E00, 0xFE00, 0x7C01, 0xFC01, 0x7FFF, 0xFFFF],
    "F32": [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF],
    "F8_E4M3": [0x7F, 0xFF],
    "F8_E5M2": [0x7C, 0xFC, 0x7D, 0xFD, 0x7E, 0xFE, 0x7F, 0xFF],
}


@pytest.mark.parametrize(("dtype", "bits"), [(dtype, bits) for dtype, all_ in NON_FINITE.items() for bits in all_])
def test_a_non_finite_value_is_refused_unless_allowed(tmp_path, dtype, bits):
    """Infinities and NaN of either sign, quiet and signalling, with any payload."""
    tensor = of_bits(dtype, [0, bits, 0])
    assert torch.isfinite(tensor.float()).tolist() == [True, False, True]
    with pytest.raises(kvformat.InputError) as caught:
        write_one(tmp_path / "ds", dtype, tensor)
    assert (caught.value.code, caught.value.record, caught.value.layer) == ("E104", "a", 0)
    write_one(tmp_path / "ds", dtype, tensor, allow_non_finite=["x"])
    assert all_bytes(read(tmp_path / "ds")[0].component("x")[0]) == all_bytes(tensor)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_finite_values_pass(tmp_path, dtype):
    largest = torch.finfo(torch_dtype(dtype)).max
    tensor = torch.tensor([largest, -largest, 0.0, -0.0]).to(torch_dtype(dtype))
    assert torch.isfinite(tensor.float()).all()
    write_one(tmp_path / "ds", dtype, tensor)
    assert all_bytes(read(tmp_path / "ds")[0].component("x")[0]) == all_bytes(tensor)


def test_allowing_one_component_allows_no_other(tmp_path):
    of = schema(component("x", "tokens"), component("y", "tokens"))
    nan = np.full((1, 2), np.nan, np.float32)
    with writer(tmp_path / "ds", of=of, allow_non_finite=["x"]) as out:
        with pytest.raises(KVFormatError) as caught:
            out.add("a", {"x": nan, "y": nan}, token_ids=ids(2))
        assert caught.value.code == "E104"
        assert "'y'" in caught.value.message
        out.add("a", {"x": nan, "y": np.zeros_like(nan)}, token_ids=ids(2))
    assert read(tmp_path / "ds")[0].component("x").isnan().all()


# ------------------------------------------------------------------------------------------------------------- tensors

BASE = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
SHAPE = (2, 3, 4, 5)
TENSORS = {
    "plain": BASE.clone,
    "transposed": lambda: BASE.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "heads-first": lambda: BASE.transpose(1, 2).contiguous().transpose(1, 2),
    "sliced": lambda: torch.randn(4, 6, 8, 10)[::2, 1:4, ::2, 3:8],
    "offset": lambda: torch.randn(1000)[7:127].view(SHAPE),
    "expanded": lambda: torch.randn(2, 1, 4, 1).expand(SHAPE),
    "one-number": lambda: torch.tensor(2.5).expand(SHAPE),
    "channels-last": lambda: BASE.clone(memory_format=torch.channels_last),
    "with-gradient": lambda: BASE.clone().requires_grad_(),
    "computed-with-gradient": lambda: BASE.clone().requires_grad_() * 2,
    "parameter": lambda: torch.nn.Parameter(BASE.clone()),
    "negated-view": lambda: torch.view_as_complex(torch.randn(*SHAPE, 2)).conj().imag,
    "unfolded": lambda: torch.randn(2, 3, 8).unfold(2, 5, 1),
    "numpy": BASE.numpy,
    "numpy-fortran": lambda: np.asfortranarray(BASE.numpy()),
    "numpy-reversed": lambda: BASE.numpy()[::-1, :, ::-1, ::-1],
    "numpy-sliced": lambda: np.random.default_rng(0).random((4, 3, 4, 9), np.float32)[::2, :, :, 2:7],
    "numpy-broadcast": lambda: np.broadcast_to(np.arange(5, dtype=np.float32), SHAPE),
    "numpy-big-endian": lambda: BASE.numpy().astype(">f4"),
    "numpy-read-only": lambda: read_only(BASE.numpy().copy()),
    "numpy-subclass": lambda: BASE.numpy().view(np.recarray),
    "numpy-unaligned": lambda: np.frombuffer(b"x" + BASE.numpy().tobytes(), np.float32, offset=1).reshape(SHAPE),
}


def read_only(array):
    array.setflags(write=False)
    return array


def plain(value):
    """Row-major values of a tensor of any kind."""
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).astype("<f4")
    return value.detach().resolve_neg().contiguous().numpy().copy()


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_of_any_strides(tmp_path, kind):
    value = TENSORS[kind]()
    before = plain(value)
    with writer(tmp_path / "ds", of=single("F32", "tokens", 4, 5, layers=(0, 1))) as out:
        out.add("a", {"x": value}, token_ids=ids(3))
    found = read(tmp_path / "ds")[0].component("x")
    assert tuple(found.shape) == SHAPE
    assert all_bytes(found) == before.tobytes()
    assert plain(value).tobytes() == before.tobytes(), "the caller's tensor was changed"


def test_one_element_of_a_larger_tensor(tmp_path):
    """It counts as contiguous, whatever its strides are."""
    tensor = torch.randn(1, 1, 2)[:, :, ::2]
    assert tensor.is_contiguous()
    assert tensor.stride() != (1, 1, 1)
    with writer(tmp_path / "ds", of=single("F32", "tokens", 1)) as out:
        out.add("a", {"x": tensor}, token_ids=ids(1))
    assert torch.equal(read(tmp_path / "ds")[0].component("x"), tensor)


@pytest.mark.parametrize("dtype", COMPONENTS)
def test_a_last_axis_of_one_entry_with_any_stride(tmp_path, dtype):
    """It counts as contiguous, and cannot be viewed as bytes."""
    bits = np.random.default_rng(0).integers(0, 0x38, 2 * 3 * 4)
    tensor = of_bits(dtype, bits).reshape(2, 3, 1, 4).transpose(2, 3)
    assert tensor.is_contiguous()
    assert tensor.stride(-1) != 1
    with writer(tmp_path / "ds", of=single(dtype, "tokens", 4, 1, layers=(0, 1))) as out:
        out.add("a", {"x": tensor}, token_ids=ids(3))
    assert all_bytes(read(tmp_path / "ds")[0].component("x")) == all_bytes(tensor)


@pytest.mark.parametrize("dtype", COMPONENTS)
@pytest.mark.parametrize("other", [np.float64, np.uint16, np.int64])
def test_numpy_of_another_dtype_is_refused(tmp_path, dtype, other):
    with pytest.raises(KVFormatError) as caught, writer(tmp_path / "ds", of=single(dtype, "tokens")) as out:
        out.add("a", {"x": np.zeros((1, 3), other)}, token_ids=ids(3))
    assert caught.value.code == "E102"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused(tmp_path):
    nested = torch.nested.nested_tensor([torch.zeros(3)])
    with pytest.raises(KVFormatError, match="nested") as caught, writer(tmp_path / "ds", of=single("F32")) as out:
        out.add("a", {"x": nested}, token_ids=ids(3))
    assert caught.value.code == "E081"


@pytest.mark.parametrize("dtype", COMPONENTS)
def test_strides_of_every_dtype(tmp_path, dtype):
    bits = np.random.default_rng(0).integers(0, 0x38, 2 * 3 * 6)
    tensor = of_bits(dtype, bits).reshape(6, 3, 2).permute(2, 1, 0)[:, :, ::2]
    with writer(tmp_path / "ds", of=single(dtype, "tokens", 3, layers=(0, 1))) as out:
        out.add("a", {"x": tensor}, token_ids=ids(3))
    assert all_bytes(read(tmp_path / "ds")[0].component("x")) == all_bytes(tensor)


@settings(max_examples=50)
@given(st.data())
def test_any_view_of_any_shape(tmp_path_factory, data):
    shape = data.draw(st.tuples(*[st.integers(1, 4)] * 3), "shape")
    order = data.draw(st.permutations(range(3)), "order")
    steps = data.draw(st.tuples(*[st.integers(1, 3)] * 3), "steps")
    larger = [shape[axis] * steps[axis] for axis in order]
    tensor = torch.randn(larger).permute(*np.argsort(order).tolist())
    tensor = tensor[tuple(slice(None, None, step) for step in steps)]
    assert tuple(tensor.shape) == shape
    location = tmp_path_factory.mktemp("view") / "ds"
    with writer(location, of=single("F32", "tokens", shape[2], layers=range(shape[0]))) as out:
        out.add("a", {"x": tensor}, token_ids=ids(shape[1]))
    assert torch.equal(read(location)[0].component("x"), tensor)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
def test_tensors_of_a_device(tmp_path):
    with writer(tmp_path / "ds", of=single("F32", "tokens", 4, 5, layers=(0, 1))) as out:
        out.add("a", {"x": BASE.cuda().transpose(1, 2).contiguous().transpose(1, 2)}, token_ids=ids(3))
    assert torch.equal(read(tmp_path / "ds")[0].component("x"), BASE)


def test_token_ids_of_any_kind(tmp_path):
    kinds = [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3], np.uint16), np.array([1, 2, 3], ">i8"), torch.tensor([1, 2, 3])]
    kinds.append(np.array([1, 0, 2, 0, 3])[::2])
    with writer(tmp_path / "ds", of=schema(component("x", "tokens"), token_ids=True)) as out:
        for number, token_ids in enumerate(kinds):
            assert out.add(f"{number}", {"x": np.ones((1, 3), np.float32)}, token_ids=token_ids) == 0
    assert read(tmp_path / "ds")[0].extra("token_ids").tolist() == [1, 2, 3]


def test_token_ids_up_to_the_largest(tmp_path):
    with writer(tmp_path / "ds", of=schema(component("x", "tokens"), token_ids=True)) as out:
        out.add("a", {"x": np.ones((1, 2), np.float32)}, token_ids=[0, 2**31 - 1])
    assert read(tmp_path / "ds")[0].extra("token_ids").tolist() == [0, 2**31 - 1]


# ------------------------------------------------------------------------------------------------------ 8 bits, scales


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_quantised_keys_and_values(tmp_path, io):
    """Dequantised = float32(stored) x scale, the scale broadcast over its axes of 1."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 3, 2, 4, generator=generator) for _ in range(2))
    ks = k.abs().amax(-1, keepdim=True) / 127
    vs = v.abs().amax((1, 3), keepdim=True) / 448
    components = {"k": (k / ks).round().to(torch.int8), "v": (v / vs).to(torch.float8_e4m3fn), "ks": ks, "vs": vs}
    with writer(tmp_path / "ds", of=scaled()) as out:
        out.add("a", components, token_ids=ids(3))
    read(tmp_path / "ds")
    record = kvformat.open(tmp_path / "ds", io=io)[0]
    for name, value in components.items():
        assert (record.component(name).dtype, record.component(name).shape) == (value.dtype, value.shape)
        assert all_bytes(record.component(name)) == all_bytes(value)
    for layer in (0, 1):
        again = record.slab("key", layer=layer).float() * record.slab("key_scale", layer=layer)
        assert (again - k[layer]).abs().max() <= ks.max() / 2 * 1.001
        again = record.slab("value", layer=layer).float() * record.slab("value_scale", layer=layer)
        assert ((again - v[layer]).abs() <= v[layer].abs() / 16 + vs[layer] * 2**-9).all()


def test_extras_of_every_dtype(tmp_path):
    names = {"BF16", "F16", "F32", "F8_E4M3", "F8_E5M2", "I8", "I32", "U8", "U64"}
    extras = [Extra(name=name.lower(), axes=(Axis(name="n", size=3),), dtype=name) for name in sorted(names)]
    values = {
        name.lower(): torch.tensor([0, 1, 100]).to(torch_dtype(name))
        if name.startswith(("I", "U"))
        else torch.tensor([0.5, -1.5, 100.0]).to(torch_dtype(name))
        for name in names
    }
    values["u64"] = torch.tensor([0, 2**63 - 1, 5]).to(torch.uint64) * 1
    values["i32"] = torch.tensor([-(2**31), 2**31 - 1, -1], dtype=torch.int32)
    with writer(tmp_path / "ds", of=schema(component("x", "tokens"), extras=extras)) as out:
        out.add("a", {"x": np.ones((1, 1), np.float32)}, token_ids=ids(1), extras=values)
        as_numpy = {**values, "u64": np.array([2**64 - 1, 0, 1], np.uint64)}
        out.add("b", {"x": np.ones((1, 2), np.float32)}, token_ids=ids(2), extras=as_numpy)
    dataset = read(tmp_path / "ds")
    for name, value in values.items():
        found = dataset["a"].extra(name)
        assert found.dtype == value.dtype
        assert all_bytes(found) == all_bytes(value)
    assert dataset["b"].extra("u64").numpy().tolist() == [2**64 - 1, 0, 1]
