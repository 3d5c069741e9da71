"""Slabs of any size are hashed one by one, and the layer of a bad value is named wherever it stands."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

import kvformat
from kvformat.spec.layout import Layout
from kvformat.write import slabs
from kvformat.write.slabs import SlabChecker
from tests.write.make import component, scaled, schema

GROUP = slabs._GROUP_NBYTES
LAYERS = (1, 3, 4, 7, 9)


def checker(dtype="F32", layers=LAYERS, allowed=()):
    of = schema(component("x", "tokens", dtype=dtype, layers=layers))
    return SlabChecker.of(Layout(of), allow_non_finite=allowed)[0]


@pytest.mark.parametrize("nbytes", [4, 4096, GROUP // 5, GROUP // 2, GROUP // 2 + 4, GROUP, GROUP + 4, 2 * GROUP + 4])
def test_each_slab_has_its_sum(nbytes):
    data = np.random.default_rng(nbytes).standard_normal(len(LAYERS) * nbytes // 4).astype("<f4").tobytes()
    expected = [xxhash.xxh3_64_intdigest(data[n * nbytes : (n + 1) * nbytes]) for n in range(len(LAYERS))]
    assert checker().sums(memoryview(data), record="a") == expected


def test_empty_slabs_have_the_sum_of_nothing():
    assert checker().sums(memoryview(b""), record="a") == [xxhash.xxh3_64_intdigest(b"")] * len(LAYERS)


@pytest.mark.parametrize("nbytes", [4, 4096, GROUP // 2, GROUP + 4])
@pytest.mark.parametrize("slab", range(len(LAYERS)))
def test_the_layer_of_a_bad_value_is_named(slab, nbytes):
    values = np.zeros((len(LAYERS), nbytes // 4), "<f4")
    values[slab, -1] = np.nan
    with pytest.raises(kvformat.InputError) as caught:
        checker().sums(memoryview(values.tobytes()), record="a")
    assert (caught.value.code, caught.value.record, caught.value.layer) == ("E104", "a", LAYERS[slab])
    assert len(checker(allowed=["x"]).sums(memoryview(values.tobytes()), record="a")) == len(LAYERS)


@pytest.mark.parametrize("bad", [0.0, -1.0, np.inf, np.nan])
def test_a_bad_scale_is_refused_before_anything_else(bad):
    scales = SlabChecker.of(Layout(scaled()), allow_non_finite=["ks"])[2]
    assert (scales.name, scales.positive, scales.finite) == ("ks", True, False)
    values = np.array([[1.0, 2.0], [1.0, bad]], "<f4")
    with pytest.raises(kvformat.InputError) as caught:
        scales.sums(memoryview(values.tobytes()), record="a")
    assert (caught.value.code, caught.value.layer) == ("E105", 1)


def test_an_extra_is_one_slab_without_a_layer():
    of = schema(component("x", "tokens"), token_ids=True)
    _, ids = SlabChecker.of(Layout(of), allow_non_finite=())
    assert (ids.name, ids.first_sum, ids.num_slabs, ids.layers) == ("token_ids", 1, 1, ())
    assert ids.sums(memoryview(b"\xff" * 8), record="a") == [xxhash.xxh3_64_intdigest(b"\xff" * 8)]
