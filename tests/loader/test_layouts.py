"""Layouts as they are asked for."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from kvformat.errors import KVFormatError, UsageError
from kvformat.loader.layouts import HF, BatchLayout, Packed, Padded, as_layout


@pytest.mark.parametrize(("name", "layout"), [("packed", Packed()), ("padded", Padded()), ("hf", HF())])
def test_by_name(name, layout):
    assert as_layout(name) == layout
    assert as_layout(layout) is layout
    assert (Padded().side, HF().side, HF().multiple_of) == ("right", "left", 1)


@pytest.mark.parametrize("wrong", ["Packed", "", None, 3, Packed, BatchLayout()])
def test_no_layout(wrong):
    with pytest.raises(UsageError, match="packed, padded, hf") as caught:
        as_layout(wrong)
    assert caught.value.code == "E081"


@pytest.mark.parametrize(
    "given",
    [
        {"components": "k"},
        {"components": ()},
        {"components": ("k", "k")},
        {"components": (1,)},
        {"components": 3},
        {"layers": ()},
        {"layers": (1, 1)},
        {"layers": ("1",)},
        {"layers": (True,)},
        {"layers": 1},
        {"extras": "ids"},
        {"extras": None},
        {"extras": ("x", "x")},
        {"position_rows": 2},
        {"position_rows": None},
        {"dtype": "float64"},
        {"dtype": torch.int8},
        {"dtype": "F8_E4M3"},
        {"dtype": "uint8"},
        {"dtype": 3},
    ],
)
@pytest.mark.parametrize("kind", [Packed, Padded, HF])
def test_refused(kind, given):
    with pytest.raises(KVFormatError) as caught:
        kind(**given)
    assert caught.value.code == "E081"


@pytest.mark.parametrize(
    "given", [{"side": "both"}, {"side": None}, {"multiple_of": 0}, {"multiple_of": 1.5}, {"multiple_of": True}]
)
@pytest.mark.parametrize("kind", [Padded, HF])
def test_refused_padding(kind, given):
    with pytest.raises(KVFormatError) as caught:
        kind(**given)
    assert caught.value.code == "E081"


@pytest.mark.parametrize("dtype", [torch.float32, "torch.float32", "float32", "F32"])
def test_one_form(dtype):
    """Equal wishes are equal, and hash alike: plans are kept by layout."""
    layout = Padded(components=["v", "k"], layers=range(3), dtype=dtype, extras=iter(["x"]))
    same = Padded(components=("v", "k"), layers=(0, 1, 2), dtype="F32", extras=("x",))
    assert (layout, hash(layout)) == (same, hash(same))
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert layout != Padded(components=("v", "k"), layers=(0, 1, 2), dtype="F32", extras=("x",), side="left")
    assert Packed() != Padded()
    with pytest.raises(AttributeError):
        layout.side = "left"


def test_numbers_of_numpy_are_layers():
    assert Packed(layers=np.arange(2)).layers == (0, 1)
    assert all(type(layer) is int for layer in Packed(layers=np.arange(2)).layers)
