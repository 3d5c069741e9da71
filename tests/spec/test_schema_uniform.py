"""``Schema.uniform`` says what is wrong in the words of its own arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvformat import Schema
from kvformat.errors import UsageError

USUAL: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 4}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_layers": 0}, "num_layers must be an integer of 1 to 65536, found 0"),
        ({"num_layers": -1}, "num_layers"),
        ({"num_layers": 10**12}, "num_layers"),
        ({"num_kv_heads": 2.0}, "num_kv_heads"),
        ({"head_dim": -1}, "head_dim"),
        ({"head_dim": None}, "head_dim"),
        ({"v_head_dim": 0}, "v_head_dim"),
        ({"dtype": torch.bfloat16}, "dtype must be one of BF16, F16, F32, found torch.bfloat16"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"dtype": "I8"}, "dtype"),
        ({"key_stage": "rope"}, "key_stage must be one of raw, normed, attention, found 'rope'"),
        ({"layers": [3]}, "num_layers is the number of layers stored: found 2, and 1 in layers"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match="E081") as caught:
        Schema.uniform(**{**USUAL, **options})
    assert words in caught.value.message


def test_layers_may_be_any_sequence() -> None:
    assert Schema.uniform(**USUAL, layers=range(4, 8, 2)).components[0].layers == (4, 6)
