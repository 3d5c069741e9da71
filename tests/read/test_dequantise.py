"""Values of 8 bits, read as floats."""

from __future__ import annotations

import pytest
import torch

import kvformat
from kvformat.errors import DamageError, FormatError, LookupFailedError, UsageError
from kvformat.read.dequantise import dequantise_into
from kvformat.testing.vectors import VALID, Case
from tests.write.make import component, schema

QUANTISED = ("int8-with-scales", "fp8-with-scales")


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("verify", ["first", "always", "off"])
@pytest.mark.parametrize("name", QUANTISED)
def test_stored_times_scale(name, verify, io, saved):
    dataset = kvformat.open(saved(name), io=io, verify=verify)
    found = 0
    for record in dataset:
        for given in dataset.schema.components:
            if given.quant is None:
                continue
            wanted = record.component(given.name).float() * record.component(given.quant.scale)
            for dtype in (torch.float32, "BF16", "float16"):
                whole = record.dequantised(given.name, dtype=dtype)
                assert whole.dtype == {"BF16": torch.bfloat16, "float16": torch.float16}.get(dtype, dtype)
                assert torch.equal(whole, wanted.to(whole.dtype))
            for row, layer in enumerate(given.layers):
                slab = record.dequantised_slab(given.role, layer=layer)
                assert torch.equal(slab, wanted[row])
                found += 1
    assert found


def test_what_is_not_quantised_is_cast_and_a_tensor_of_its_own(saved):
    record = kvformat.open(saved("uniform-bf16"))[0]
    for given in ("F32", "BF16"):
        found = record.dequantised("k", dtype=given)
        assert torch.equal(found, record.component("k").to(found.dtype))
        found.zero_()
        slab = record.dequantised_slab("value", layer=1, dtype=given)
        assert torch.equal(slab, record.slab("value", layer=1).to(slab.dtype))
        slab.zero_()
    assert record.component("k").any()
    assert record.slab("value", layer=1).any()


def test_scales_without_a_role_of_their_own(tmp_path):
    """Of a latent or a hidden state: found by name, however many there are."""
    of = schema(
        component("c", "tokens", 4, role="latent", dtype="I8", layers=(0, 2), scale="cs"),
        component("h", "tokens", 3, role="hidden", dtype="F8_E4M3", layers=(0, 2), scale="hs"),
        component("cs", 1, 4, layers=(0, 2)),
        component("hs", "tokens", 1, layers=(0, 2)),
        token_ids=True,
    )
    case = Case(name="mine", schema=of, entries=VALID["uniform-bf16"].entries)
    case.build().save(tmp_path / "data")
    record = kvformat.open(tmp_path / "data")[0]
    for name, role, scale in (("c", "latent", "cs"), ("h", "hidden", "hs")):
        wanted = record.component(name).float() * record.component(scale)
        assert torch.equal(record.dequantised(name), wanted)
        assert torch.equal(record.dequantised_slab(role, layer=2), wanted[1])


@pytest.mark.parametrize("tensor", ["k", "k_scale"])
@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_damage_is_found(tensor, io, saved, flip):
    path = saved("int8-with-scales")
    flip(path, "int8-with-scales", tensor=tensor)
    record = kvformat.open(path, io=io)[0]
    for read in (lambda: record.dequantised("k"), lambda: record.dequantised_slab("key", layer=0)):
        with pytest.raises((DamageError, FormatError)) as caught:
            read()
        assert caught.value.code in {"E072", "E074"}
    record.dequantised("v")


def test_wrong_questions(saved):
    record = kvformat.open(saved("int8-with-scales"))[0]
    for read in (
        lambda: record.dequantised("x"),
        lambda: record.dequantised("token_ids"),
        lambda: record.dequantised_slab("key", layer=77),
        lambda: record.dequantised_slab("hidden", layer=0),
    ):
        with pytest.raises(LookupFailedError) as caught:
            read()
        assert caught.value.code == "E082"
    for dtype in ("I8", torch.float64, "F8_E4M3", "", None):
        for read in (
            lambda: record.dequantised("k", dtype=dtype),  # noqa: B023 -- called at once
            lambda: record.dequantised_slab("key", layer=0, dtype=dtype),  # noqa: B023 -- as above
        ):
            with pytest.raises(UsageError) as caught:
                read()
            assert caught.value.code == "E081"


def test_a_layer_that_shares_anothers(tmp_path):
    of = schema(
        component("k", "tokens", 1, 2, role="key", dtype="I8", layers=(0, 2), scale="ks"),
        component("v", "tokens", 1, 2, role="value", dtype="I8", layers=(0, 2), scale="vs"),
        component("ks", 1, 1, 2, role="key_scale", layers=(0, 2)),
        component("vs", "tokens", 1, 1, role="value_scale", layers=(0, 2)),
        shared=(kvformat.Shared(layer=1, source=2),),
        token_ids=True,
    )
    Case(name="mine", schema=of, entries=VALID["uniform-bf16"].entries).build().save(tmp_path / "data")
    record = kvformat.open(tmp_path / "data")[0]
    assert torch.equal(record.dequantised_slab("key", layer=1), record.dequantised("k")[1])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_every_code_of_a_dtype(dtype):
    """What no value makes, NaN and infinities of a float, is read as it is."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).view(1, 2, 128)
    for stored in (codes, codes.transpose(1, 2)):
        out = torch.empty(stored.shape)
        dequantise_into(out, stored, torch.full((1, 1, 1), 0.5))
        torch.testing.assert_close(out, stored.float() / 2, rtol=0, atol=0, equal_nan=True)
