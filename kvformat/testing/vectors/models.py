"""Contexts of models, covered files, text and provenance."""

from __future__ import annotations

import hashlib
from typing import Any

import kvformat
from kvformat.spec import canonical
from kvformat.spec.context import Adapter, Canary, Model, RopeGroup, Scalars, Sizes, WeightsDigest, Window, real
from kvformat.testing.vectors.case import UNIFORM, Case, usual_entries

__all__ = ["CASES"]


def _weights(dtype: str) -> bytes:
    tensors = [
        {"dtype": dtype, "name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "shape": shape}
        for name, shape in (
            ("embed_tokens.weight", [32_000, 16]),
            ("layers.0.self_attn.k_proj.weight", [8, 16]),
            ("layers.0.self_attn.v_proj.weight", [8, 16]),
        )
    ]
    return canonical.encode({"tensors": tensors})


def _model(weights: bytes, **changes: Any) -> Model:
    theta = real(10_000.0)
    usual: dict[str, Any] = {
        "adapters": (),
        "compute_dtype": "BF16",
        "family": "llama",
        "norm_eps": real(1e-5),
        "qk_norm": "none",
        "rope": (RopeGroup(interleaved=False, kind="default", layers=(0, 1), rotary_dim=4, theta=theta),),
        "scalars": Scalars(),
        "sizes": Sizes(head_dim=4, hidden_size=16, num_attention_heads=4, num_hidden_layers=4, num_key_value_heads=2),
        "weights": WeightsDigest(scheme="kvf-tensors-1", sha256=hashlib.sha256(weights).hexdigest()),
        "windows": (),
    }
    return Model(**{**usual, **changes})


def _deep(levels: int) -> Any:
    value: Any = []
    for number in range(levels - 1):
        value = {"a": value} if number % 2 else [value]
    return value


def _model_case() -> Case:
    weights = _weights("BF16")
    groups = [{"layers": [0, 1], "values": [real(1.0), real(0.01)]}]
    return Case(
        name="model-context",
        schema=UNIFORM,
        entries=usual_entries(4, 6),
        context=kvformat.Context.of(_model(weights)),
        skipped=(("too-long-1", "4,096 tokens and more"), ("\u00fcbergro\u00df", "not UTF-8")),
        options={
            "files": {
                "weights": weights,
                "inv_freq": canonical.encode({"groups": groups}),
                "notes.txt": b"free \xff bytes\n",
                "empty": b"",
            },
            "text": kvformat.Text(
                add_generation_prompt=False,
                canary=Canary(text='caf\u00e9 "\\\b\f\n\r\t\x01\x7f', token_ids=(1, 2**31 - 1)),
                chat_template=hashlib.sha256(b"template").hexdigest(),
                special_tokens=True,
                tokenizer=hashlib.sha256(b"tokenizer").hexdigest(),
                truncate=4096,
            ),
            "provenance": {"torch": "2.13.0", "device": "cpu", "": ""},
            # Inside the manifest and `extensions`, 30 levels more: the deepest nesting there may be.
            "extensions": {"deep": _deep(30), "flags": [True, False, 0, 2**53 - 1, "", {}, []]},
        },
    )


def _rope_case() -> Case:
    weights = _weights("F32")
    one, two = real(1.0), real(2.5)
    usual: dict[str, Any] = {"interleaved": True, "rotary_dim": 4, "theta": real(500_000.0)}
    rope = (
        RopeGroup(kind="linear", layers=(0, 7), factor=two, **usual),
        RopeGroup(
            kind="llama3",
            layers=(1,),
            factor=two,
            low_freq_factor=one,
            high_freq_factor=real(4.0),
            original_max_position=8192,
            sections=(1, 1, 0),
            **usual,
        ),
        RopeGroup(
            kind="longrope",
            layers=(2,),
            long_factor=(one, two),
            short_factor=(one, one),
            original_max_position=4096,
            attention_factor=one,
            **usual,
        ),
        RopeGroup(
            kind="yarn",
            layers=(3, 4),
            factor=two,
            beta_fast=real(32.0),
            beta_slow=one,
            original_max_position=4096,
            attention_factor=real(0.0),
            mscale=one,
            mscale_all_dim=one,
            truncate=False,
            **usual,
        ),
        RopeGroup(kind="proportional", layers=(5,), **usual),
    )
    sizes = Sizes(
        head_dim=4,
        hidden_size=16,
        num_attention_heads=4,
        num_hidden_layers=8,
        num_key_value_heads=2,
        first_dense_layers=0,
        num_shared_experts=0,
        num_experts=4,
        vocab_size=32_000,
    )
    model = _model(
        weights,
        activation="gelu_pytorch_tanh",
        adapters=(Adapter(scale=real(-0.5), scheme="kvf-tensors-1", sha256=hashlib.sha256(b"adapter").hexdigest()),),
        compute_dtype="F32",
        family="gemma3_text",
        qk_norm="rms_head",
        rope=rope,
        scalars=Scalars(attention_scale=real(0.0625), attention_softcap=real(50.0), embedding_scale=real(4.0)),
        sizes=sizes,
        windows=(Window(layers=(0, 2), size=4), Window(layers=(1,), size=512)),
    )
    return Case(
        name="rope-kinds",
        schema=UNIFORM,
        entries=usual_entries(2),
        context=kvformat.Context.of(model),
        options={"files": {"weights": weights}},
    )


CASES = (
    _model_case(),
    _rope_case(),
)
