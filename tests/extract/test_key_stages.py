from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from transformers import AutoConfig, AutoModel
from transformers.models.llama import modeling_llama

from kvformat.errors import InputError, UsageError
from kvformat.extract.families import FAMILIES
from kvformat.extract.hf import HuggingFaceExtractor
from kvformat.extract.keys import rotate_keys
from kvformat.extract.probe import LayerForm
from kvformat.extract.shapes import cached_schema
from kvformat.spec import canonical
from kvformat.spec.document import Document
from kvformat.spec.rules import check_schema
from tests.models import live_attention, randomise, tiny_base_model, tiny_config, tiny_model

RNG = np.random.default_rng(0)
NORMED = ["qwen3", "gemma3", "qwen3-moe", "qwen3-vl"]
PLAIN = ["llama", "llama3-rope", "llama-yarn", "llama-linear", "mistral", "qwen2", "granite", "gpt2"]
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def ids(count: int) -> list[int]:
    return [int(i) for i in RNG.integers(0, 256, count)]


def model_of(name: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    if name != "qwen3-vl":
        return tiny_model(name, dtype=dtype, **overrides)
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes += ("head_dim", "vocab_size", "max_position_embeddings")
    text = {key: value for key, value in tiny_config("qwen3").to_dict().items() if key in sizes}
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"deepstack_visual_indexes": [0], "patch_size": 4, "num_position_embeddings": 16}
    config = AutoConfig.for_model("qwen3_vl", text_config=text, vision_config=vision)
    return randomise(AutoModel.from_config(config, dtype=dtype)).eval()


def taken(model: Any, given: list[int], stage: str, **options: Any) -> Any:
    extractor = HuggingFaceExtractor.of(model, key_stage=stage, **options)
    check_schema(extractor.schema)
    (found,) = extractor.extract([Document.of(given)])
    return extractor, found.components


def attention_of(model: Any, layer: int) -> Any:
    decoder = model.get_decoder()
    family = FAMILIES[decoder.config.model_type]
    return getattr((decoder.h if hasattr(decoder, "h") else decoder.layers)[layer], family.attention)


def finished(model: Any, layer: int, keys: torch.Tensor, *, norm: bool) -> torch.Tensor:
    """``keys``, ``[tokens, heads, head_dim]``, behind the model's own norm and rotary embedding."""
    decoder, attention = model.get_decoder(), attention_of(model, layer)
    if norm and getattr(attention, "k_norm", None) is not None:
        keys = attention.k_norm(keys)
    if decoder.config.model_type == "gpt2":
        return keys
    kind = [decoder.config.layer_types[layer]] if decoder.config.model_type == "gemma3_text" else []
    cos, sin = decoder.rotary_emb(keys, torch.arange(len(keys))[None], *kind)
    own = sys.modules[type(attention).__module__].apply_rotary_pos_emb
    given = keys.transpose(0, 1)[None]
    return own(given, given, cos, sin)[1][0].transpose(0, 1)


@pytest.mark.parametrize("name", NORMED + PLAIN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["F32", "BF16"])
def test_the_missing_steps_lead_from_each_stage_to_what_attention_is_given(name: str, dtype: torch.dtype) -> None:
    model = model_of(name, dtype)
    given = ids(23)
    live = live_attention(model, given)
    for stage in ("raw", "normed") if name in NORMED else ("raw",):
        extractor, components = taken(model, given, stage)
        assert {c.name: c.stage for c in extractor.schema.components} == {"k": stage, "v": None}
        assert components["k"].dtype == dtype
        for layer, (key, value) in enumerate(live):
            stored = components["k"][layer]
            assert stored.shape == key.shape
            with torch.inference_mode():
                assert torch.equal(finished(model, layer, stored, norm=stage == "raw"), key)
            assert torch.equal(components["v"][layer], value)
            if name != "gpt2":
                assert not torch.equal(stored, key)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "llama", "llama3-rope", "llama-yarn", "qwen3-vl"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["F32", "BF16"])
def test_a_dataset_says_enough_to_rotate_what_it_holds(name: str, dtype: torch.dtype) -> None:
    model = model_of(name, dtype)
    given = ids(23)
    extractor, components = taken(model, given, "normed" if name in NORMED else "raw")
    frequencies = json.loads(extractor.files["inv_freq"])["groups"]
    live = live_attention(model, given)
    groups = extractor.context.model.rope
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(live)))
    for group, own in zip(groups, frequencies, strict=True):
        layers = list(group.layers)
        values = [canonical.decode_real(value) for value in own["values"]]
        made = rotate_keys(components["k"][layers], group, frequencies=values)
        assert torch.equal(made, torch.stack([live[layer][0] for layer in layers]))
        computed = rotate_keys(components["k"][layers], group)
        torch.testing.assert_close(computed, made, rtol=1e-4, atol=1e-4 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["F32", "BF16"])
def test_positions_of_one_row_and_of_three_are_honoured(dtype: torch.dtype) -> None:
    model = model_of("qwen3-vl", dtype)
    decoder = model.get_decoder()
    (group,) = HuggingFaceExtractor.of(model).context.model.rope
    keys = torch.randn(6, 2, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    own = sys.modules[type(decoder).__module__].apply_rotary_pos_emb
    rows = torch.from_numpy(RNG.integers(0, 50_000, (3, 6)))  # more than BF16 can tell apart
    frequencies = decoder.rotary_emb.inv_freq.tolist()
    for positions in (rows, rows[:1], rows[1]):
        cos, sin = decoder.rotary_emb(keys, positions.reshape(-1, 6).expand(3, 6)[:, None])
        expected = own(keys[None], keys[None], cos, sin, unsqueeze_dim=2)[1][0]
        assert torch.equal(rotate_keys(keys, group, position_ids=positions, frequencies=frequencies), expected)


def test_keys_of_stage_raw_do_not_know_their_position() -> None:
    extractor = HuggingFaceExtractor.of(model_of("llama"), key_stage="raw")
    given = ids(6)
    keys = [
        extractor.extract([Document.of(given, position_ids=positions)])[0].components["k"]
        for positions in (range(6), range(0, 30, 5))
    ]
    assert torch.equal(keys[0][0], keys[1][0])
    assert not torch.equal(keys[0][1], keys[1][1])  # the layer below has seen it


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"position_ids": torch.arange(5)}, r"\[1 or 3, 6\] for these keys, found \[5\]"),
        ({"position_ids": torch.zeros(2, 6)}, r"\[1 or 3, 6\] for these keys, found \[2, 6\]"),
        ({"position_ids": torch.tensor(3)}, r"\[1 or 3, 6\] for these keys, found \[\]"),
        ({"position_ids": torch.zeros(3, 6)}, "no sections"),
        ({"frequencies": [1.0]}, "8 pairs, found 1 frequencies"),
    ],
)
def test_what_does_not_fit_the_keys_is_refused(options: dict, text: str) -> None:
    (group,) = HuggingFaceExtractor.of(model_of("llama")).context.model.rope
    with pytest.raises(UsageError, match=text) as refused:
        rotate_keys(torch.zeros(6, 2, 16), group, **options)
    assert refused.value.code == "E081"


@pytest.mark.parametrize("interleave", [True, False])
def test_raw_latent_and_rotary_key_become_what_a_compressed_cache_holds(*, interleave: bool) -> None:
    model = model_of("deepseek", rope_interleave=interleave)
    given = ids(9)
    cached, whole = taken(model, given, "attention")
    extractor, raw = taken(model, given, "raw")
    assert [c.stage for c in cached.schema.components] == ["normed", "attention"]
    assert [c.stage for c in extractor.schema.components] == ["raw", "raw"]
    (group,) = extractor.context.model.rope
    assert group.interleaved == interleave
    frequencies = model.get_decoder().rotary_emb.inv_freq.tolist()
    for layer in range(3):
        with torch.inference_mode():
            latent = attention_of(model, layer).kv_a_layernorm(raw["latent"][layer])
        assert torch.equal(latent, whole["latent"][layer])
        assert not torch.equal(raw["latent"][layer], latent)
    made = rotate_keys(raw["rope_key"].unsqueeze(-2), group, frequencies=frequencies).squeeze(-2)
    assert torch.equal(made, whole["rope_key"])
    for layer, (key, _) in enumerate(live_attention(model, given)):
        assert torch.equal(made[layer], key[:, 0, -8:])


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_as_many_heads_as_tokens_are_not_swapped(name: str) -> None:
    """What the norm puts out is [tokens, heads] in one family and [heads, tokens] in the other."""
    model = model_of(name, hidden_size=40, num_attention_heads=5, num_key_value_heads=5)
    given = ids(5)  # as many as the probe has
    _, components = taken(model, given, "normed")
    for layer, (key, _) in enumerate(live_attention(model, given)):
        with torch.inference_mode():
            assert torch.equal(finished(model, layer, components["k"][layer], norm=False), key)


def test_a_fused_projection_gives_its_keys() -> None:
    config = AutoConfig.for_model("phi3", **SIZES, num_key_value_heads=2, partial_rotary_factor=0.5)
    model = tiny_base_model(config)
    given = [3, 1, 4, 1, 5, 9, 2]
    _, components = taken(model, given, "raw", context="unknown")
    states: list[torch.Tensor] = []
    model.layers[1].self_attn.qkv_proj.register_forward_hook(lambda *args: states.append(args[2]))
    with torch.inference_mode():
        model(input_ids=torch.tensor([given]))
    assert torch.equal(components["k"][1], states[0][0, :, 32:48].reshape(7, 2, 8))


@pytest.mark.parametrize("stage", ["raw", "normed"])
def test_a_batch_and_a_part_of_the_layers_give_each_its_own(stage: str) -> None:
    model = model_of("qwen3")
    documents = [Document.of(ids(9)) for _ in range(3)]
    extractor = HuggingFaceExtractor.of(model, key_stage=stage)
    part = HuggingFaceExtractor.of(model, key_stage=stage, layers=[0, 2], dtype="BF16")
    for document, together, some in zip(documents, extractor.extract(documents), part.extract(documents), strict=True):
        (alone,) = extractor.extract([document])
        torch.testing.assert_close(together.components["k"], alone.components["k"], rtol=1e-4, atol=1e-5)
        assert torch.equal(some.components["k"], together.components["k"][[0, 2]].bfloat16())


def test_the_weights_are_those_that_reach_the_stored_keys() -> None:
    model = model_of("qwen3")

    def names(stage: str) -> set[str]:
        file = HuggingFaceExtractor.of(model, key_stage=stage).files["weights"]
        return {line["name"] for line in json.loads(file)["tensors"]}

    assert names("attention") - names("raw") == {"layers.2.self_attn.k_norm.weight"}
    assert names("normed") == names("attention")


def test_a_model_is_left_as_it_was() -> None:
    model = model_of("qwen3")

    def hooks() -> list[int]:
        return [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]

    before = hooks()
    extractor = HuggingFaceExtractor.of(model, key_stage="raw")
    extractor.extract([Document.of([1, 2, 3])])
    assert hooks() == before
    model.model.layers[1].self_attn.v_proj = torch.nn.Linear(32, 16, bias=False)
    with pytest.raises(InputError):
        extractor.extract([Document.of([1, 2, 3])])
    assert hooks()[:5] == before[:5]
    assert not any(hooks())


@pytest.mark.parametrize(
    ("name", "stage", "text"),
    [
        ("llama", "normed", "its keys have no norm: key_stage must be 'raw' or 'attention'"),
        ("gpt2", "normed", "its keys have no norm"),
        ("deepseek", "normed", "its rotary key has no norm"),
        ("llama", "rotated", "key_stage must be one of raw, normed, attention, found 'rotated'"),
        ("llama", None, "key_stage must be one of raw, normed, attention, found None"),
    ],
)
def test_a_stage_that_a_family_does_not_have_is_refused(name: str, stage: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text) as refused:
        HuggingFaceExtractor.of(model_of(name), key_stage=stage)
    assert refused.value.code == "E081"


def rotated_and(change: Any) -> Any:
    rotate = modeling_llama.apply_rotary_pos_emb

    def rotating(query: Any, key: Any, cos: Any, sin: Any) -> Any:
        return change(key, *rotate(query, key, cos, sin))

    return rotating


def test_attention_that_does_something_else_in_between_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = rotated_and(lambda _key, query, rotated: (query, rotated * 1.5))
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", scaled)
    model = model_of("llama")
    HuggingFaceExtractor.of(model)  # the keys that attention consumes can be taken all the same
    with pytest.raises(InputError, match="does something else in between") as refused:
        HuggingFaceExtractor.of(model, key_stage="raw")
    assert (refused.value.code, refused.value.layer) == ("E302", 0)


def test_a_norm_of_something_else_is_refused() -> None:
    model = model_of("qwen3")
    norm = model.model.layers[1].self_attn.k_norm
    HuggingFaceExtractor.of(model, key_stage="raw")
    norm.register_forward_pre_hook(lambda _module, args: (args[0] + 1,))
    for stage in ("raw", "normed"):
        with pytest.raises(InputError, match="by the norm as known here") as refused:
            HuggingFaceExtractor.of(model, key_stage=stage)
        assert (refused.value.code, refused.value.layer) == ("E302", 1)


def test_keys_that_are_changed_in_place_are_taken_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    given = ids(7)
    _, before = taken(model, given, "raw")
    in_place = rotated_and(lambda key, query, rotated: (query, key.copy_(rotated)))
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", in_place)
    _, after = taken(model, given, "raw")
    assert torch.equal(before["k"], after["k"])


def test_modules_that_run_otherwise_than_when_looked_at_are_refused() -> None:
    model = model_of("qwen3")
    extractor = HuggingFaceExtractor.of(model, key_stage="raw")
    attention = model.model.layers[1].self_attn
    plain = attention.forward

    def twice(**options: Any) -> Any:
        attention.k_proj(options["hidden_states"])
        return plain(**options)

    attention.forward = twice
    with pytest.raises(InputError, match="the key projection ran 2 times before this layer's cache") as refused:
        extractor.extract([Document.of([1, 2, 3])])
    assert (refused.value.code, refused.value.layer) == ("E302", 1)


@pytest.mark.parametrize(
    ("model_type", "settings", "text"),
    [
        ("gpt_neox", {}, "0 key projections known here"),
        ("cohere", {"num_key_value_heads": 2}, "by the rotary embedding as known here"),
        (
            "llama4_text",
            {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 32},
            "by the rotary embedding as known here",
        ),
    ],
)
def test_families_with_other_steps_are_refused(model_type: str, settings: dict, text: str) -> None:
    config = AutoConfig.for_model(model_type, **SIZES, **settings)
    model = randomise(AutoModel.from_config(config, attn_implementation="eager")).eval()
    HuggingFaceExtractor.of(model, context="unknown")
    with pytest.raises(InputError, match=text) as refused:
        HuggingFaceExtractor.of(model, context="unknown", key_stage="raw")
    assert (refused.value.code, refused.value.layer) == ("E302", 0)


def test_a_context_that_rotates_otherwise_than_the_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    extractor = HuggingFaceExtractor.of(model_of("qwen3"), key_stage="raw")
    (group,) = extractor.context.model.rope
    extractor._stored.stages.check_groups([group])
    for other in (structs.replace(group, interleaved=True), structs.replace(group, rotary_dim=8)):
        with pytest.raises(InputError, match="the context gives") as refused:
            extractor._stored.stages.check_groups([other])
        assert (refused.value.code, refused.value.layer) == ("E302", 0)
    with pytest.raises(InputError, match="the context gives None"):
        extractor._stored.stages.check_groups([])
    context = structs.replace(extractor.context, model=structs.replace(extractor.context.model, rope=()))
    monkeypatch.setattr("kvformat.extract.hf.decoder_context.derive_context", lambda *_args, **_options: context)
    with pytest.raises(InputError, match="the context gives None"):
        HuggingFaceExtractor.of(model_of("qwen3"), key_stage="raw")
    HuggingFaceExtractor.of(model_of("qwen3"))


def test_the_stage_stands_in_the_schema() -> None:
    wide, latent = LayerForm((2, 8), (2, 8), latent=False), LayerForm((1, 24), (1, 8), latent=True)
    for stage, expected in (
        ("attention", ["attention", None, "normed", "attention"]),
        ("raw", ["raw", None, "raw", "raw"]),
    ):
        schema = cached_schema({0: wide, 1: latent}, dtype="BF16", key_stage=stage)
        assert [component.stage for component in schema.components] == expected
