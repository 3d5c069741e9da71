from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel

from kvformat.errors import InputError
from kvformat.extract.hf import HuggingFaceExtractor, describe
from kvformat.spec import canonical
from kvformat.spec.context import Window, check, differences, real, to_float
from tests.models import TINY, randomise, save_tiny, tiny_base_model, tiny_config, tiny_model


def context_of(model: Any, **options: Any) -> Any:
    return HuggingFaceExtractor.of(model, **options).context


@pytest.mark.parametrize("name", list(TINY))
def test_a_context_is_derived_and_matches_itself_alone(name: str) -> None:
    first, again = (context_of(tiny_model(name)) for _ in range(2))
    check(first)
    assert differences(first, again) == []
    other = context_of(tiny_model(name, seed=1))
    assert [line.partition(":")[0] for line in differences(first, other)] == ["weights.sha256"]


def test_llama() -> None:
    model = context_of(tiny_model("llama")).model
    assert model.family == "llama"
    assert (model.qk_norm, model.activation, model.compute_dtype) == ("none", "silu", "F32")
    assert to_float(model.norm_eps) == 1e-6
    assert (model.sizes.head_dim, model.sizes.num_key_value_heads, model.sizes.num_hidden_layers) == (16, 2, 3)
    (rope,) = model.rope
    assert (rope.kind, rope.layers, rope.rotary_dim, to_float(rope.theta)) == ("default", (0, 1, 2), 16, 10000.0)
    assert model.windows == ()
    assert model.scalars.attention_scale is None


def test_gemma3_has_two_rope_groups_a_window_and_scales() -> None:
    model = context_of(tiny_model("gemma3")).model
    assert [(g.layers, to_float(g.theta)) for g in model.rope] == [((0, 1), 10000.0), ((2,), 1e6)]
    assert model.windows == (Window(layers=(0, 1), size=5),)
    assert to_float(model.scalars.embedding_scale) == math.sqrt(32)
    assert to_float(model.scalars.attention_scale) == 1 / math.sqrt(24)
    assert (model.qk_norm, model.activation) == ("rms_head", "gelu_tanh")


def test_deepseek_sizes() -> None:
    model = context_of(tiny_model("deepseek")).model
    assert (model.sizes.head_dim, model.sizes.v_head_dim, model.sizes.kv_lora_rank) == (16, 12, 24)
    assert (model.rope[0].interleaved, model.rope[0].rotary_dim) == (True, 8)
    assert to_float(model.scalars.routed_scale) == 2.5


def test_gpt2_has_no_rope_and_no_frequencies() -> None:
    extractor = HuggingFaceExtractor.of(tiny_model("gpt2"))
    assert extractor.context.model.rope == ()
    assert set(extractor.files) == {"weights"}


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama-yarn"])
def test_frequencies_are_a_covered_file(name: str) -> None:
    model = tiny_model(name)
    extractor = HuggingFaceExtractor.of(model)
    listed = canonical.decode(extractor.files["inv_freq"])["groups"]
    assert [tuple(g["layers"]) for g in listed] == [g.layers for g in extractor.context.model.rope]
    rotary = model.model.rotary_emb
    for group in listed:
        kind = f"{model.config.layer_types[group['layers'][0]]}_" if name == "gemma3" else ""
        live = getattr(rotary, f"{kind}inv_freq")
        assert [to_float(value) for value in group["values"]] == [float(value) for value in live]


@pytest.mark.parametrize(
    ("name", "overrides", "field"),
    [
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}, "rope[0].theta"),
        ("llama", {"rms_norm_eps": 1e-5}, "norm_eps"),
        ("llama", {"hidden_act": "gelu"}, "activation"),
        ("mistral", {"sliding_window": 6}, "windows[0].size"),
        ("gemma3", {"sliding_window": 6}, "windows[0].size"),
        ("gemma3", {"query_pre_attn_scalar": 25}, "scalars.attention_scale"),
        ("granite", {"residual_multiplier": 0.25}, "scalars.residual_scale"),
        ("llama-yarn", {"max_position_embeddings": 128}, None),
    ],
)
def test_equal_weights_under_another_configuration_differ_in_the_field(
    name: str, overrides: dict[str, Any], field: str | None
) -> None:
    changed = differences(context_of(tiny_model(name)), context_of(tiny_model(name, **overrides)))
    assert [line.partition(":")[0] for line in changed] == ([] if field is None else [field])


def test_compute_dtype_is_part_of_the_context() -> None:
    found = differences(context_of(tiny_model("llama")), context_of(tiny_model("llama", dtype=torch.bfloat16)))
    assert {line.partition(":")[0] for line in found} == {"compute_dtype", "weights.sha256"}


def test_storage_dtype_is_not() -> None:
    model = tiny_model("llama")
    assert differences(context_of(model), context_of(model, dtype="BF16")) == []


# ------------------------------------------------------------------------------------------------------- refusals


def refused(model: Any, text: str, code: str = "E302", **options: Any) -> InputError:
    with pytest.raises(InputError, match=text) as caught:
        HuggingFaceExtractor.of(model, **options)
    assert caught.value.code == code
    return caught.value


@pytest.mark.parametrize("context", ["derive", "unknown"])
def test_keys_that_depend_on_history_are_refused(context: str) -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    refused(tiny_model("llama", rope_parameters=dynamic), "longest sequence", context=context)
    long = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 2.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 32,
    }
    refused(tiny_model("llama", rope_parameters=long), "length of the sequence", context=context)


def test_history_is_seen_in_the_modules_too() -> None:
    model = tiny_model("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    refused(model, "longest sequence", context="unknown")


def test_an_unknown_family_needs_an_unknown_context() -> None:
    config = AutoConfig.for_model(
        "opt",
        hidden_size=32,
        ffn_dim=32,
        word_embed_proj_dim=32,
        num_attention_heads=4,
        num_hidden_layers=2,
        vocab_size=64,
        max_position_embeddings=64,
    )
    model = randomise(AutoModel.from_config(config)).eval()
    assert "--unknown-context" in str(refused(model, "'opt'"))
    extractor = HuggingFaceExtractor.of(model, context="unknown")
    assert extractor.context.kind == "unknown"
    assert dict(extractor.files) == {}
    assert extractor.schema.components[0].layers == (0, 1)


def test_frequencies_other_than_the_parameters_give_are_refused() -> None:
    model = tiny_model("llama")
    model.config.rope_parameters["rope_theta"] = 10001.0
    refused(model, "frequencies that differ")
    model = tiny_model("llama-yarn")
    model.model.rotary_emb.attention_scaling *= 1.01
    refused(model, "rotary attention factor")


def test_a_model_cast_as_a_whole_after_it_was_made_is_refused() -> None:
    # The cast rounds the frequencies too: keys are off by far more than bf16 rounding, and nothing else shows it.
    refused(tiny_model("llama").to(torch.bfloat16), "was cast after")


def test_a_fraction_the_library_ignores_is_refused() -> None:
    settings = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    refused(tiny_model("llama", rope_parameters=settings), "differ in number")


def test_settings_without_a_place_in_the_context_are_refused() -> None:
    refused(tiny_model("qwen3-moe", norm_topk_prob=False), "norm_topk_prob")
    refused(tiny_model("qwen3-moe", decoder_sparse_step=2), "decoder_sparse_step")
    refused(tiny_model("gpt2", scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx")
    refused(tiny_model("llama", hidden_act="tanh"), "'tanh'")
    settings = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    refused(tiny_model("llama", rope_parameters=settings), "position rows")


def test_modules_that_disagree_with_the_configuration_are_refused() -> None:
    model = tiny_model("llama")
    model.config.rms_norm_eps = 1e-5
    refused(model, "norm eps")
    model = tiny_model("llama")
    model.model.layers[1].self_attn.scaling *= 2
    assert refused(model, "attention scale").layer == 1
    model = tiny_model("gemma3")
    model.config.sliding_window = 6
    refused(model, "sliding window")
    model = tiny_model("llama")
    model.model.layers[0].self_attn.k_norm = torch.nn.Identity()
    refused(model, "key norm")
    model = tiny_model("llama")
    model.config.num_key_value_heads = 1
    refused(model, "the configuration says")


def test_adapters_are_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[1].self_attn.k_proj.lora_A = torch.nn.Linear(32, 2)
    assert "merge_and_unload" in str(refused(model, "adapter layer", context="unknown"))


def test_quantised_parameters_are_refused() -> None:
    model = tiny_model("llama")
    weight = torch.zeros((48, 32), dtype=torch.int8)
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(weight, requires_grad=False)
    refused(model, "quantised")


@pytest.mark.parametrize(
    ("model_type", "settings", "code", "text"),
    [
        ("bert", {}, "E302", "not causal"),
        ("mamba", {}, "E302", "keep other state"),
        (
            "qwen3_next",
            {
                "num_key_value_heads": 2,
                "head_dim": 16,
                "linear_num_value_heads": 2,
                "linear_num_key_heads": 2,
                "num_experts": 2,
                "num_experts_per_tok": 1,
            },
            "E302",
            "keep other state",
        ),
        (
            "gemma3_text",
            {"use_bidirectional_attention": True, "head_dim": 16, "pad_token_id": 0},
            "E302",
            "not causal",
        ),
    ],
)
def test_models_whose_keys_do_not_depend_on_earlier_tokens_alone_are_refused(
    model_type: str, settings: dict[str, Any], code: str, text: str
) -> None:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 64,
        "max_position_embeddings": 64,
    }
    model = tiny_base_model(AutoConfig.for_model(model_type, **(sizes | settings)))
    refused(model, text, code, context="unknown")


def test_encoder_decoders_are_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("t5", d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=32).save_pretrained(
        tmp_path
    )
    for attempt in (describe, HuggingFaceExtractor.load):
        with pytest.raises(InputError, match="encoder-decoder") as caught:
            attempt(tmp_path)
        assert caught.value.code == "E302"


# ------------------------------------------------------------------------------------------------------- loading


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    for path, text in (
        (tmp_path, "no model configuration"),
        ("some/where/else", "from the hub, and no such directory is here"),
        (tmp_path / "absent", "no such directory: give a model directory or a hub id"),
        ("./absent", "no such directory"),
        ("~/absent", "no such directory"),
        (tmp_path / "file", "a file stands there"),
    ):
        with pytest.raises(InputError, match=text) as caught:
            HuggingFaceExtractor.load(path)
        assert (caught.value.code, caught.value.path) == ("E304", str(path))


def test_a_missing_weight_is_never_random(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path / "model", tokenizer=False)
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"layers\.1\.self_attn\.k_proj\.weight") as caught:
        HuggingFaceExtractor.load(directory)
    assert caught.value.code == "E304"


def test_weights_the_model_class_does_not_know_are_refused(tmp_path: Path) -> None:
    # Weights with a key norm under a configuration without: loading would drop the norm and go on.
    directory = save_tiny(tmp_path / "model", "qwen3", tokenizer=False)
    config = json.loads((directory / "config.json").read_text())
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="k_norm") as caught:
        HuggingFaceExtractor.load(directory)
    assert caught.value.code == "E304"


def test_an_adapter_directory_is_refused(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path / "model", tokenizer=False)
    (directory / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="adapter") as caught:
        HuggingFaceExtractor.load(directory)
    assert caught.value.code == "E302"


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path / "model", tokenizer=False)
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InputError, match="does not load") as caught:
        HuggingFaceExtractor.load(directory)
    assert caught.value.code == "E304"


def test_theta_is_stored_by_value() -> None:
    config = tiny_config("llama")
    assert context_of(tiny_base_model(config)).model.rope[0].theta == real(10000)
