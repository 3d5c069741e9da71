"""Models whose weights come from a checkpoint: the same tensors, buffers, K and V as those that were saved."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from kvformat.errors import KVFormatError
from kvformat.extract.checkpoint import CheckpointSource
from kvformat.extract.hf import HuggingFaceExtractor
from kvformat.extract.hf.loading import load_decoder, load_from_checkpoint
from kvformat.spec.document import Document
from tests.extract.checkpoints import save_dcp, training_state
from tests.models import TINY, save_tiny, tiny_base_model, tiny_config, tiny_model

MOT = "mot"


def save_config(directory: Path, name: str, **overrides: Any) -> Path:
    """Configuration and nothing else, which is all a model directory is asked for."""
    tiny_config(name, **overrides).save_pretrained(directory)
    return directory


def source(path: Path, **options: Any) -> CheckpointSource:
    return CheckpointSource(kind="dcp" if (path / ".metadata").exists() else "safetensors", path=path, **options)


def everything(decoder: Any) -> dict[str, torch.Tensor]:
    """Parameters and all buffers, computed ones too."""
    return dict(decoder.named_parameters()) | dict(decoder.named_buffers())


def assert_same(found: Any, expected: Any) -> None:
    ours, theirs = everything(found), everything(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert ours[name].device == tensor.device, name
        assert torch.equal(ours[name], tensor), name
    assert type(found) is type(expected)
    assert not found.training


def kv(decoder: Any, **options: Any) -> tuple[dict[str, torch.Tensor], Any]:
    extractor = HuggingFaceExtractor.of(decoder, **options)
    (found,) = extractor.extract([Document.of([3, 1, 4, 1, 5, 9, 2, 6, 5])])
    return dict(found.components), extractor.context


def assert_same_kv(found: Any, expected: Any, **options: Any) -> None:
    (ours, context), (theirs, wanted) = kv(found, **options), kv(expected, **options)
    assert context == wanted
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("name", list(TINY))
@pytest.mark.parametrize("compute", ["F32", "BF16"])
def test_every_tensor_and_buffer_is_that_of_a_model_loaded_by_its_class(
    tmp_path: Path, name: str, compute: str
) -> None:
    saved = save_tiny(tmp_path / "model", name, tokenizer=False)
    config = save_config(tmp_path / "config", name)
    checkpoint = save_dcp(AutoModelForCausalLM.from_pretrained(saved).state_dict(), tmp_path / "dcp")
    expected = load_decoder(saved, compute_dtype=compute)
    state = torch.get_rng_state()
    assert_same(load_decoder(config, compute_dtype=compute, checkpoint=source(checkpoint)), expected)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("weights", ["live", "ema"])
def test_the_reasoner_of_a_mixture_of_transformers_gives_the_k_and_v_of_the_original(
    tmp_path: Path, weights: str
) -> None:
    originals = {"live": tiny_model("qwen3", seed=1), "ema": tiny_model("qwen3", seed=2)}
    checkpoint = save_dcp(training_state(**originals), tmp_path / "dcp")
    originals[weights].save_pretrained(tmp_path / "reasoner")
    config = save_config(tmp_path / "config", "qwen3")
    loaded = load_from_checkpoint(config, source(checkpoint, preset=MOT, weights=weights))
    assert loaded.provenance == {
        "checkpoint": "dcp:dcp",
        "checkpoint_dtype": "F32",
        "checkpoint_preset": MOT,
        "checkpoint_weights": weights,
    }
    assert_same(loaded.module, load_decoder(tmp_path / "reasoner"))
    assert_same_kv(loaded.module, load_decoder(tmp_path / "reasoner"))
    by_hand = source(
        checkpoint,
        select=rf"^net{'_ema' if weights == 'ema' else ''}\.language_model\.model\.(?!.*(_moe_gen|_und_for_gen)\b)",
        rename=((r"^net(_ema)?\.language_model\.", ""),),
    )
    found = load_from_checkpoint(config, by_hand)
    assert_same(found.module, loaded.module)
    assert found.provenance["checkpoint_select"] == by_hand.select
    assert found.provenance["checkpoint_rename"] == r"^net(_ema)?\.language_model\.="


def test_an_extractor_of_a_checkpoint_records_it_and_has_the_identity_of_its_values(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    checkpoint = save_dcp(training_state(model, tiny_model("qwen3", seed=5)), tmp_path / "dcp")
    model.save_pretrained(tmp_path / "model")
    config = save_config(tmp_path / "config", "qwen3")
    where = source(checkpoint, preset=MOT, weights="live")
    found = HuggingFaceExtractor.load(config, checkpoint=where, layers=[1])
    expected = HuggingFaceExtractor.load(tmp_path / "model", layers=[1])
    assert found.context == expected.context
    assert found.files == expected.files
    assert found.provenance["checkpoint_weights"] == "live"
    document = Document.of([1, 2, 3])
    (ours,), (theirs,) = found.extract([document]), expected.extract([document])
    assert all(torch.equal(ours.components[name], tensor) for name, tensor in theirs.components.items())


def test_live_and_ema_weights_are_not_chosen_between(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    checkpoint = save_dcp(training_state(model, model), tmp_path / "dcp")
    config = save_config(tmp_path / "config", "qwen3")
    for options in (
        {"preset": MOT},
        {"select": r"language_model\.model\.(?!.*_gen)", "rename": ((r"^net(_ema)?\.language_model\.", ""),)},
    ):
        with pytest.raises(KVFormatError, match="E308"):
            load_decoder(config, checkpoint=source(checkpoint, **options))


@pytest.mark.parametrize(("head", "weights"), [("net.", "live"), ("", "live"), ("net_ema.", "ema")])
def test_where_only_one_kind_of_weights_is_it_is_taken_and_recorded(tmp_path: Path, head: str, weights: str) -> None:
    model = tiny_model("llama")
    state = {f"{head}language_model.{name}": tensor for name, tensor in model.state_dict().items()}
    checkpoint = save_dcp(state, tmp_path / "dcp")
    loaded = load_from_checkpoint(save_config(tmp_path / "config", "llama"), source(checkpoint, preset=MOT))
    assert loaded.provenance["checkpoint_weights"] == weights
    assert_same(loaded.module, model.model)


def test_what_stands_beside_the_model_is_left_and_what_its_layers_lack_is_not(tmp_path: Path) -> None:
    model = tiny_model("llama")
    config = save_config(tmp_path / "config", "llama")
    state = model.state_dict() | {
        "step": 5,
        "vae.weight": torch.ones(2),
        "model.layers.0.rotary_emb.inv_freq": torch.ones(8),
    }
    checkpoint = save_dcp(state, tmp_path / "dcp")
    assert_same(load_decoder(config, checkpoint=source(checkpoint)), model.model)
    odd = save_dcp(state | {"model.layers.0.self_attn.k_norm.weight": torch.ones(16)}, tmp_path / "odd")
    with pytest.raises(
        KVFormatError, match=r"E308.*1 tensors are none of the model's: 'model\.layers\.0\.self_attn\.k"
    ):
        load_decoder(config, checkpoint=source(odd))


@pytest.mark.parametrize("prefix", ["", "model."])
def test_names_with_and_without_the_prefix_of_the_whole_model(tmp_path: Path, prefix: str) -> None:
    model = tiny_model("llama")
    state = {f"{prefix}{name}": tensor for name, tensor in model.model.state_dict().items()}
    checkpoint = save_dcp(state, tmp_path / "dcp")
    assert_same(load_decoder(save_config(tmp_path / "c", "llama"), checkpoint=f"dcp:{checkpoint}"), model.model)


def test_a_checkpoint_that_holds_the_model_twice(tmp_path: Path) -> None:
    model = tiny_model("llama")
    checkpoint = save_dcp(model.state_dict() | model.model.state_dict(), tmp_path / "dcp")
    with pytest.raises(KVFormatError, match=r"E308.*twice, bare \(29\) and below 'model\.' \(29\); select one"):
        load_decoder(save_config(tmp_path / "c", "llama"), checkpoint=source(checkpoint))


def test_layers_above_the_wanted_ones_are_not_read(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    config = save_config(tmp_path / "config", "qwen3")
    state = model.model.state_dict()
    checkpoint = save_dcp(state, tmp_path / "whole")
    lower = {name: tensor for name, tensor in state.items() if not name.startswith(("layers.1", "layers.2"))}
    partial = save_dcp(lower, tmp_path / "partial")
    whole = load_from_checkpoint(config, source(checkpoint))
    found = load_from_checkpoint(config, source(checkpoint), layers=[0])
    less = load_from_checkpoint(config, source(partial), layers=[0])
    assert less.nbytes < found.nbytes < whole.nbytes / 2  # the metadata of what is there, and the tensors of a layer
    upper = found.module.layers[2].mlp.down_proj.weight
    assert upper.isnan().all()
    assert upper.untyped_storage().nbytes() == upper.itemsize
    for module in (found.module, less.module):
        assert_same_kv(module, model.model, layers=[0])
    with pytest.raises(KVFormatError, match=r"E308.*22 of 35 tensors of the model are missing: 'layers\.1\."):
        load_decoder(config, checkpoint=source(partial))
    with pytest.raises(KVFormatError, match="E081"):
        load_decoder(config, checkpoint=source(checkpoint), layers=[3])


@pytest.mark.parametrize("stored", ["F64", "F32", "F16"])
def test_wider_weights_are_rounded_once_as_their_class_does(tmp_path: Path, stored: str) -> None:
    dtype = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16}[stored]
    model = tiny_model("deepseek").to(dtype)
    model.save_pretrained(tmp_path / "model")
    config = save_config(tmp_path / "config", "deepseek")
    checkpoint = save_dcp(model.state_dict(), tmp_path / "dcp")
    loaded = load_from_checkpoint(config, source(checkpoint, dtype=stored), compute_dtype="BF16")
    assert loaded.provenance["checkpoint_dtype"] == stored
    assert_same(loaded.module, load_decoder(tmp_path / "model", compute_dtype="BF16"))


def test_a_declared_dtype_that_is_not_the_stored_one(tmp_path: Path) -> None:
    checkpoint = save_dcp(tiny_model("llama").state_dict(), tmp_path / "dcp")
    with pytest.raises(KVFormatError, match=r"E308.*29 tensors have another dtype: '.*' is F32, expected BF16"):
        load_decoder(save_config(tmp_path / "c", "llama"), checkpoint=source(checkpoint, dtype="BF16"))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.complex64])
def test_weights_that_mean_nothing_alone_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    state = tiny_model("llama").state_dict()
    name = "model.layers.1.mlp.up_proj.weight"
    checkpoint = save_dcp(state | {name: state[name].to(dtype)}, tmp_path / "dcp")
    with pytest.raises(KVFormatError, match=r"E308.*1 tensors have another dtype.*up_proj.*dequantised"):
        load_decoder(save_config(tmp_path / "c", "llama"), checkpoint=source(checkpoint))


def refusals() -> dict[str, tuple[dict[str, Any], dict[str, Any], str]]:
    """Changes to the state, options of the source, and what the error says."""
    some = torch.ones(2)
    return {
        "missing": (
            {"model.layers.1.mlp.up_proj.weight": None},
            {},
            r"1 of 29 tensors of the model are missing \(below",
        ),
        "surplus": ({}, {"select": "."}, r"1 tensors are none of the model's: 'lm_head\.weight'; mend select"),
        "outside": ({"vae.w": some}, {"select": "^model|vae"}, r"1 tensors are none of the model's: 'vae\.w'"),
        "both": (
            {"model.norm.weight": None, "model.layers.0.x": some},
            {"select": "^model"},
            r"missing \(below 'model\.'\): 'norm\.weight'; 1 tensors are none of",
        ),
        "object": (
            {"model.layers.0._extra_state": {"a": 1}},
            {"select": "^model"},
            "1 of the selected entries are no t",
        ),
        "shape": (
            {"model.norm.weight": some},
            {"select": "^model"},
            r"1 tensors have another shape: 'model\.norm\.weight' is \[2\], the model has \[32\]",
        ),
        "rank": ({"model.norm.weight": torch.ones(32, 1)}, {}, r"is \[32, 1\], the model has \[32\]"),
        "nothing": ({}, {"select": "^nett"}, r"no name of the checkpoint matches '\^nett'.*model\.layers \("),
        "prefix": (
            {},
            {"rename": (("^model", "net.deep"),)},
            r"stands below 'net\.deep\.'; rename, such as '\^net\\\\\.deep\\\\\.='",
        ),
        "alien": ({}, {"select": "lm_head"}, r"begins with lm_head\.weight \(1\); expected such as"),
    }


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        (case, kind)
        for case in refusals()
        for kind in ("dcp", "safetensors")
        if (case, kind) != ("object", "safetensors")  # which hold tensors alone
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(tmp_path: Path, case: str, kind: str) -> None:
    changes, options, message = refusals()[case]
    state = tiny_model("llama", tie_word_embeddings=False).state_dict() | changes
    state = {name: value for name, value in state.items() if value is not None}
    if kind == "dcp":
        path = save_dcp(state, tmp_path / "checkpoint")
    else:
        path = tmp_path / "checkpoint.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
    config = save_config(tmp_path / "config", "llama")
    with pytest.raises(KVFormatError, match=message) as caught:
        load_decoder(config, checkpoint=source(path, **options))
    assert caught.value.code == "E308"
    assert caught.value.path == str(path)


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek"])
def test_experts_that_were_saved_one_by_one(tmp_path: Path, name: str) -> None:
    saved = save_tiny(tmp_path / "model", name, tokenizer=False)  # in its files each expert is a module of its own
    config = save_config(tmp_path / "config", name)
    expected = load_decoder(saved)
    assert_same(load_decoder(config, checkpoint=f"safetensors:{saved}"), expected)
    found = load_from_checkpoint(config, source(saved, select="^model", rename=(("^model", "model"),)), layers=[0])
    assert_same_kv(found.module, expected, layers=[0])


def test_one_expert_missing(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    saved = save_tiny(tmp_path / "model", "qwen3-moe", tokenizer=False)
    state = load_file(saved / "model.safetensors")
    del state["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(state, tmp_path / "less.safetensors")
    with pytest.raises(
        KVFormatError, match=r"E308.*missing \(below 'model\.'\): 'layers\.1\.mlp\.experts\.2\.up_proj"
    ):
        load_decoder(saved, checkpoint=f"safetensors:{tmp_path / 'less.safetensors'}")


def test_a_vision_language_model_gives_its_decoder_or_everything(tmp_path: Path) -> None:
    from transformers import AutoConfig

    text = TINY["qwen3"][1] | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        }
    }
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
    vision |= {
        "patch_size": 4,
        "spatial_merge_size": 2,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    config = AutoConfig.for_model("qwen3_vl", text_config=text, vision_config=vision)
    model = tiny_base_model(config)
    config.save_pretrained(tmp_path / "config")
    checkpoint = save_dcp({f"model.{n}": t for n, t in model.state_dict().items()}, tmp_path / "dcp")
    reasoner = load_from_checkpoint(tmp_path / "config", source(checkpoint))
    assert_same(reasoner.module, model.language_model)
    whole = load_from_checkpoint(tmp_path / "config", source(checkpoint, select="^model"), whole=True)
    assert_same(whole.module, model)
    assert reasoner.nbytes < whole.nbytes
    with pytest.raises(KVFormatError, match=r"E308.*none of the model's: 'model\.visual\."):
        load_decoder(tmp_path / "config", checkpoint=source(checkpoint, select="^model"))


@pytest.mark.slow
def test_a_real_model_out_of_a_checkpoint(smollm2: Path, tmp_path: Path) -> None:
    expected = load_decoder(smollm2)
    state = {f"net.language_model.model.{name}": tensor for name, tensor in expected.state_dict().items()}
    twins = {name.replace(".weight", "_moe_gen.weight"): torch.zeros_like(tensor) for name, tensor in state.items()}
    checkpoint = save_dcp(state | twins, tmp_path / "dcp", thread_count=3)
    size = sum(file.stat().st_size for file in checkpoint.iterdir())
    found = load_from_checkpoint(smollm2, source(checkpoint, preset=MOT))
    assert found.nbytes <= 0.55 * size
    assert_same(found.module, expected)
    assert_same_kv(found.module, expected)
    assert_same_kv(
        load_decoder(smollm2, checkpoint=source(checkpoint, preset=MOT), layers=[1, 7]), expected, layers=[1, 7]
    )


def test_a_configuration_that_makes_no_model(tmp_path: Path) -> None:
    config = save_config(tmp_path / "config", "llama", hidden_act="none")
    checkpoint = save_dcp(tiny_model("llama").state_dict(), tmp_path / "dcp")
    with pytest.raises(KVFormatError, match=r"E304.*no model can be made of the configuration: KeyError"):
        load_decoder(config, checkpoint=source(checkpoint))
    with pytest.raises(KVFormatError, match="E304"):
        load_decoder(tmp_path / "nowhere", checkpoint=source(checkpoint))


def test_the_checkpoint_is_left_as_it_was_and_loading_twice_gives_the_same(tmp_path: Path) -> None:
    model = tiny_model("llama")
    checkpoint = save_dcp(model.state_dict(), tmp_path / "dcp")
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    config = save_config(tmp_path / "config", "llama")
    one, two = (load_decoder(config, checkpoint=source(checkpoint)) for _ in range(2))
    with torch.no_grad():
        one.norm.weight.zero_()
    assert_same(two, copy.deepcopy(model.model))
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == before
