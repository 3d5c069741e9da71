from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvformat.extract.checkpoint import CheckpointSource
from kvformat.extract.hf import HuggingFaceExtractor
from kvformat.extract.hf.loading import load_decoder
from kvformat.extract.probe import probe, reachable_state
from kvformat.extract.weights import reaching_tensors, state_digest, tensor_digest, weights_digest, weights_file
from kvformat.spec import canonical
from tests.extract.checkpoints import cpu_ranks, save_dcp
from tests.models import save_tiny, tiny_model


def digest(model: Any, **options: Any) -> str:
    return HuggingFaceExtractor.of(model, **options).context.model.weights.sha256


def listed(model: Any, **options: Any) -> list[str]:
    file = HuggingFaceExtractor.of(model, **options).files["weights"]
    return [line["name"] for line in canonical.decode(file)["tensors"]]


def test_the_file_is_canonical_and_sorted_and_its_digest_is_the_identity() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    extractor = HuggingFaceExtractor.of(model)
    file = extractor.files["weights"]
    lines = canonical.decode(file)["tensors"]
    names = [line["name"] for line in lines]
    assert names == sorted(names, key=str.encode)
    assert len(names) == len(set(names))
    assert extractor.context.model.weights.sha256 == hashlib.sha256(file).hexdigest()
    for line in lines:
        tensor = model.model.get_parameter(line["name"])
        assert line["dtype"] == "BF16"
        assert line["shape"] == list(tensor.shape)
        raw = tensor.detach().view(torch.uint8).numpy().tobytes()
        assert line["sha256"] == hashlib.sha256(raw).hexdigest()


def test_only_what_reaches_k_and_v_is_listed() -> None:
    names = listed(tiny_model("qwen3"))
    below = {
        name for name, _ in tiny_model("qwen3").model.named_parameters() if name.startswith(("layers.0", "layers.1"))
    }
    last = {
        f"layers.2.{part}.weight"
        for part in ("input_layernorm", "self_attn.k_norm", "self_attn.k_proj", "self_attn.v_proj")
    }
    assert set(names) == {"embed_tokens.weight"} | below | last


def test_fewer_layers_list_fewer_tensors() -> None:
    names = listed(tiny_model("llama"), layers=[0])
    assert names == [
        "embed_tokens.weight",
        "layers.0.input_layernorm.weight",
        "layers.0.self_attn.k_proj.weight",
        "layers.0.self_attn.v_proj.weight",
    ]


def test_positions_that_are_weights_are_listed() -> None:
    assert {"wpe.weight", "wte.weight", "h.2.attn.c_attn.bias"} <= set(listed(tiny_model("gpt2")))


def test_experts_count_wholly_whoever_was_routed_to() -> None:
    model = tiny_model("deepseek")
    names = listed(model)
    assert "layers.1.mlp.experts.down_proj" in names
    assert any(name.endswith("e_score_correction_bias") for name in names)  # a buffer that decides the routing
    assert not any(name.startswith("layers.2.mlp") for name in names)
    before = digest(model)
    model.model.layers[1].mlp.gate.e_score_correction_bias[0] += 1
    assert digest(model) != before


REACHING: dict[str, Callable[[Any], torch.Tensor]] = {
    "embedding": lambda m: m.model.embed_tokens.weight,
    "first layer's MLP": lambda m: m.model.layers[0].mlp.down_proj.weight,
    "first layer's query": lambda m: m.model.layers[0].self_attn.q_proj.weight,
    "last layer's key": lambda m: m.model.layers[2].self_attn.k_proj.weight,
    "last layer's key norm": lambda m: m.model.layers[2].self_attn.k_norm.weight,
    "last layer's value": lambda m: m.model.layers[2].self_attn.v_proj.weight,
    "last layer's input norm": lambda m: m.model.layers[2].input_layernorm.weight,
}
BEYOND: dict[str, Callable[[Any], torch.Tensor]] = {
    "output head": lambda m: m.lm_head.weight,
    "final norm": lambda m: m.model.norm.weight,
    "last layer's MLP": lambda m: m.model.layers[2].mlp.down_proj.weight,
    "last layer's query": lambda m: m.model.layers[2].self_attn.q_proj.weight,
    "last layer's output": lambda m: m.model.layers[2].self_attn.o_proj.weight,
    "last layer's second norm": lambda m: m.model.layers[2].post_attention_layernorm.weight,
}


def changed(pick: Callable[[Any], torch.Tensor]) -> str:
    model = tiny_model("qwen3", tie_word_embeddings=False)
    with torch.no_grad():
        pick(model).view(-1)[-1] += 0.5
    return digest(model)


@pytest.mark.parametrize("where", list(REACHING))
def test_one_changed_value_that_reaches_changes_the_digest(where: str) -> None:
    assert changed(REACHING[where]) != digest(tiny_model("qwen3", tie_word_embeddings=False))


@pytest.mark.parametrize("where", list(BEYOND))
def test_a_changed_value_beyond_does_not(where: str) -> None:
    assert changed(BEYOND[where]) == digest(tiny_model("qwen3", tie_word_embeddings=False))


def test_one_file_many_files_and_another_storage_dtype_have_one_digest(tmp_path: Path) -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    model.float().save_pretrained(tmp_path / "wide")  # exact: every bf16 value is a float32 value
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    assert len(list((tmp_path / "one").glob("*.safetensors"))) == 1
    found = {
        HuggingFaceExtractor.load(tmp_path / kind, compute_dtype="BF16").context.model.weights.sha256
        for kind in ("one", "many", "wide")
    }
    assert len(found) == 1
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "one").model
    base.save_pretrained(tmp_path / "base")  # names without the prefix of the whole model
    assert HuggingFaceExtractor.load(tmp_path / "base").context.model.weights.sha256 in found


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_a_dcp_checkpoint_and_safetensors_of_the_same_values_have_one_digest(tmp_path: Path, name: str) -> None:
    model = tiny_model(name, dtype=torch.bfloat16)
    single, sharded = tmp_path / "single", tmp_path / "sharded"
    model.save_pretrained(single)
    model.save_pretrained(sharded, max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    save_dcp(model.state_dict(), tmp_path / "dcp")
    save_dcp(model.float().state_dict(), tmp_path / "wide")  # exact: every bf16 value is a float32 value
    files = [
        HuggingFaceExtractor.of(load_decoder(single, compute_dtype="BF16", checkpoint=checkpoint)).files["weights"]
        for checkpoint in (
            None,
            f"safetensors:{single}",
            f"safetensors:{sharded}",
            f"dcp:{tmp_path / 'dcp'}",
            f"dcp:{tmp_path / 'wide'}",
        )
    ]
    assert len(set(files)) == 1
    assert weights_digest(files[0]).sha256 == HuggingFaceExtractor.load(sharded).context.model.weights.sha256


@pytest.mark.slow
def test_a_checkpoint_that_two_ranks_saved_in_halves_has_the_digest_of_its_values(
    tmp_path: Path, repository: Path
) -> None:
    saved = save_tiny(tmp_path / "model", "qwen3", tokenizer=False, intermediate_size=45, vocab_size=321)
    cpu_ranks(repository, saved, tmp_path / "ranks", tmp_path / "store")
    halves = CheckpointSource(kind="dcp", path=tmp_path / "ranks", preset="mot")
    assert digest(load_decoder(saved, checkpoint=halves)) == digest(load_decoder(saved))


def test_threads_do_not_matter() -> None:
    model = tiny_model("gemma3")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = digest(model)
        torch.set_num_threads(3)
        assert digest(model) == one
    finally:
        torch.set_num_threads(threads)


def test_a_frozen_model_lists_the_same_tensors() -> None:
    model = tiny_model("llama")
    before = listed(model)
    model.requires_grad_(requires_grad=False)
    assert listed(model) == before


def test_tied_tensors_are_listed_once() -> None:
    model = tiny_model("llama")
    shared = model.model.layers[0].self_attn
    model.model.layers[1].self_attn.k_proj.weight = shared.k_proj.weight
    names = [name for name in listed(model) if name.endswith("k_proj.weight")]
    assert names == ["layers.0.self_attn.k_proj.weight", "layers.2.self_attn.k_proj.weight"]


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_a_tensor_is_hashed_in_row_major_order_after_the_cast(dtype: str) -> None:
    target = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[dtype]
    tensor = torch.randn(37, 19, generator=torch.Generator().manual_seed(0))
    expected = hashlib.sha256(tensor.to(target).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    assert tensor_digest(tensor, dtype=dtype) == expected
    assert tensor_digest(tensor.t().contiguous().t(), dtype=dtype) == expected
    assert tensor_digest(tensor.t(), dtype=dtype) != expected


def test_pieces_of_any_size_give_one_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(100, 7)
    whole = tensor_digest(tensor, dtype="F32")
    for nbytes in (1, 28, 29, 300, 2801):
        monkeypatch.setattr("kvformat.extract.weights._CHUNK_NBYTES", nbytes)
        assert tensor_digest(tensor, dtype="F32") == whole


def test_scalars_and_empty_tensors_have_a_digest() -> None:
    assert tensor_digest(torch.tensor(1.0), dtype="F32") == hashlib.sha256(b"\x00\x00\x80\x3f").hexdigest()
    assert tensor_digest(torch.empty(0, 3), dtype="F32") == hashlib.sha256(b"").hexdigest()


def test_layers_are_told_by_number_not_by_prefix() -> None:
    state = {name: torch.zeros(1) for name in ("layers.1.w", "layers.10.w", "layers.2.w", "layersx.0.w", "norm.w")}
    assert set(reaching_tensors(state, stack="layers", last=2, reached=["norm.w"])) == {"layers.1.w", "norm.w"}


def test_digest_and_file_of_given_tensors() -> None:
    file = weights_file({"b": torch.zeros(2), "a": torch.ones(1, 1)}, compute_dtype="F32")
    lines = canonical.decode(file)["tensors"]
    assert [(line["name"], line["shape"]) for line in lines] == [("a", [1, 1]), ("b", [2])]
    assert weights_digest(file).sha256 == hashlib.sha256(file).hexdigest()


def test_the_probe_walks_the_graph_and_not_the_names() -> None:
    model = tiny_model("llama").model
    model.layers[2].self_attn.unused = torch.nn.Linear(4, 4)
    probed = probe(model, [2])
    assert "layers.2.self_attn.unused.weight" in reachable_state(model)
    assert "layers.2.self_attn.unused.weight" not in probed.reached
    assert "layers.0.mlp.up_proj.weight" in probed.reached


def test_saved_and_loaded_models_list_the_same_names(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path / "model", "qwen3-moe", tokenizer=False)
    loaded = HuggingFaceExtractor.load(directory)
    assert canonical.decode(loaded.files["weights"]) == canonical.decode(
        HuggingFaceExtractor.of(tiny_model("qwen3-moe")).files["weights"]
    )


def test_a_state_digest_covers_names_dtypes_shapes_and_every_byte() -> None:
    state = {
        "a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "mask": torch.tensor([True, False]),
        "table": torch.tensor([1, 2], dtype=torch.int64),
        "scale": torch.tensor(2.0),
        "none": torch.empty(0, 4),
    }
    changes: list[dict[str, torch.Tensor]] = [
        {"a": state["a"].reshape(3, 2)},
        {"a": state["a"].view(torch.float16)},
        {"mask": torch.tensor([True, True])},
        {"table": torch.tensor([1, 3])},
        {"scale": torch.tensor([2.0])},
        {"none": torch.empty(4, 0)},
        {"more": torch.empty(0)},
    ]
    found = [state_digest(state), *(state_digest(state | change) for change in changes)]
    found.append(state_digest({"b" if name == "a" else name: tensor for name, tensor in state.items()}))
    assert len(set(found)) == len(found)
    assert state_digest(dict(reversed(state.items()))) == found[0]


def test_the_digest_an_unknown_context_resumes_by_is_the_same_in_every_process(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", "deepseek", tokenizer=False)
    code = (
        "import sys; from kvformat.extract import HuggingFaceExtractor as E\n"
        "print(E.load(sys.argv[1], context='unknown', layers=[0, 1]).values_digest())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code, str(model)],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
    (digest,) = found
    assert len(digest.strip()) == 64
    assert HuggingFaceExtractor.load(model, context="unknown", layers=[0]).values_digest() != digest.strip()
