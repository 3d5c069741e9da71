from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvformat.errors import InputError
from kvformat.extract.rope import attention_factor, inverse_frequencies, rope_group, tolerance
from kvformat.spec.context import to_float

THETAS = st.sampled_from([10000.0, 100000.0, 500000.0, 1e6, 5e6]) | st.floats(1e3, 1e7)
HEAD_DIMS = st.sampled_from([8, 16, 64, 80, 96, 128, 256])
FACTORS = st.floats(1.5, 64.0)


def group(settings: dict[str, Any], head_dim: int = 64, max_positions: int | None = 131072) -> Any:
    return rope_group(settings, layers=(0, 1), head_dim=head_dim, interleaved=False, max_positions=max_positions)


def library(settings: dict[str, Any], head_dim: int) -> tuple[np.ndarray, float]:
    """What the library computes from the same settings."""
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters=dict(settings),
    )
    kind = settings["rope_type"]
    make = LlamaRotaryEmbedding.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
    values, scale = make(config)
    return values.double().numpy(), float(scale)


def agree(settings: dict[str, Any], head_dim: int) -> None:
    ours = group(settings, head_dim)
    values, scale = library(settings, head_dim)
    np.testing.assert_allclose(inverse_frequencies(ours), values, rtol=tolerance(ours), atol=0)
    assert attention_factor(ours) == pytest.approx(scale, rel=1e-6)


@given(theta=THETAS, head_dim=HEAD_DIMS)
def test_default_frequencies_are_the_librarys(theta: float, head_dim: int) -> None:
    agree({"rope_type": "default", "rope_theta": theta}, head_dim)


@given(theta=THETAS, head_dim=HEAD_DIMS, factor=FACTORS)
def test_linear_frequencies_are_the_librarys(theta: float, head_dim: int, factor: float) -> None:
    agree({"rope_type": "linear", "rope_theta": theta, "factor": factor}, head_dim)


@given(theta=THETAS, head_dim=HEAD_DIMS, factor=FACTORS, low=st.floats(0.5, 2), span=st.floats(1, 8))
def test_llama3_frequencies_are_the_librarys(
    theta: float, head_dim: int, factor: float, low: float, span: float
) -> None:
    settings = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": low + span,
        "original_max_position_embeddings": 8192,
    }
    agree(settings, head_dim)


@given(
    theta=THETAS,
    head_dim=HEAD_DIMS,
    factor=FACTORS,
    extra=st.fixed_dictionaries(
        {},
        optional={
            "attention_factor": st.floats(0.5, 2),
            "beta_fast": st.floats(16, 64),
            "beta_slow": st.floats(0.5, 4),
            "mscale": st.just(1.0),
            "mscale_all_dim": st.floats(0.5, 1),
            "truncate": st.booleans(),
        },
    ),
)
def test_yarn_frequencies_are_the_librarys(theta: float, head_dim: int, factor: float, extra: dict[str, Any]) -> None:
    settings = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": 4096,
    } | extra
    agree(settings, head_dim)


@pytest.mark.parametrize(
    ("settings", "head_dim"),
    [
        ({"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 4096, "truncate": False}, 128),
        (
            {
                "rope_type": "llama3",
                "rope_theta": 150000.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            80,
        ),
    ],
    ids=["yarn", "llama3"],
)
def test_rounding_of_blended_frequencies_grows_with_the_factor(settings: dict[str, Any], head_dim: int) -> None:
    """Why their tolerance does: these parameters are right, and 1e-6 would refuse them."""
    settings = {**settings, "factor": 64.0}
    ours = group(settings, head_dim)
    off = np.abs(library(settings, head_dim)[0] / inverse_frequencies(ours) - 1)
    assert 1e-6 < off.max() < tolerance(ours) == pytest.approx(64e-6)
    closest = inverse_frequencies(group(settings | {"factor": 64.0 * 1.001}, head_dim))
    assert np.abs(closest / inverse_frequencies(ours) - 1).max() > tolerance(ours)


def test_one_parameter_more_gives_other_frequencies() -> None:
    plain = inverse_frequencies(group({"rope_type": "default", "rope_theta": 10000.0}))
    for other in (
        {"rope_type": "default", "rope_theta": 10001.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    ):
        assert not np.allclose(inverse_frequencies(group(other)), plain, rtol=1e-6, atol=0)


def test_integers_and_reals_are_one_value() -> None:
    assert group({"rope_type": "default", "rope_theta": 10000}) == group(
        {"rope_type": "default", "rope_theta": 10000.0}
    )


def test_partial_rotation_and_sections_are_recorded() -> None:
    found = group(
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [4, 2, 2]},
        head_dim=64,
    )
    assert (found.rotary_dim, found.sections, to_float(found.theta)) == (16, (4, 2, 2), 1e4)


def test_a_missing_yarn_factor_is_the_ratio_of_positions() -> None:
    settings = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 4096, "factor": None}
    assert to_float(group(settings, max_positions=16384).factor) == 4.0
    with pytest.raises(InputError, match="no factor"):
        group(settings, max_positions=None)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "longest sequence seen"),
        (
            {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "long_factor": [1.0],
                "short_factor": [1.0],
                "original_max_position_embeddings": 16,
            },
            "length of the sequence",
        ),
        ({"rope_type": "axial", "rope_theta": 1e4}, "unknown here"),
        ({"rope_theta": 1e4}, "unknown here"),
        ({"rope_type": "default", "rope_theta": 1e4, "rope_base": 5e5}, "rope_base"),
        ({"rope_type": "default", "rope_theta": 1e4, "factor": 8.0}, "factor"),
        ({"rope_type": "default"}, "rope_theta"),
        ({"rope_type": "default", "rope_theta": "10000"}, "rope_theta"),
        ({"rope_type": "default", "rope_theta": True}, "rope_theta"),
        ({"rope_type": "default", "rope_theta": float("nan")}, "rope_theta"),
        ({"rope_type": "linear", "rope_theta": 1e4}, "factor"),
        (
            {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192.5,
            },
            "original_max_position_embeddings",
        ),
    ],
)
def test_unknown_and_incomplete_settings_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text) as refused:
        group(settings)
    assert refused.value.code == "E302"


def test_the_library_default_matches_torch_arithmetic() -> None:
    values, _ = library({"rope_type": "default", "rope_theta": 10000.0}, 64)
    assert values.shape == (32,)
    assert torch.get_default_dtype() == torch.float32
