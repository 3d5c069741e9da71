from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from kvformat.errors import DependencyError, InputError, UsageError
from kvformat.extract.hf import HuggingFaceExtractor
from kvformat.extract.weights import weights_file
from kvformat.spec.context import differences, real
from kvformat.spec.document import Document
from tests.models import live_attention, save_tiny

GIVEN = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
KEY = "base_model.model.model.layers.1.self_attn.k_proj.lora_A.weight"
TARGETS = ["k_proj", "v_proj", "down_proj"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("base") / "model", "qwen3", tokenizer=False)


def randomised(model: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return model.eval()


def quietly(make: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Without the warning that peft's wrapper draws from transformers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        return make(*args, **options)


def adapted(
    base: Path, *, seed: int = 0, bare: bool = False, dtype: torch.dtype = torch.float32, **options: Any
) -> Any:
    """The model with the layers of a random adapter in it."""
    model = (AutoModel if bare else AutoModelForCausalLM).from_pretrained(base, dtype=dtype)
    settings = {"r": 4, "lora_alpha": 12, "target_modules": TARGETS} | options
    return randomised(quietly(peft.get_peft_model, model, peft.LoraConfig(**settings)), seed)


def save(base: Path, directory: Path, **options: Any) -> Path:
    adapted(base, **options).save_pretrained(directory)
    return directory


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    return save(base, tmp_path / "adapter")


def load(base: Path, adapter: Path, mode: str = "merge", **options: Any) -> HuggingFaceExtractor:
    return HuggingFaceExtractor.load(base, adapter=adapter, adapter_mode=mode, **options)


def values(extractor: HuggingFaceExtractor) -> tuple[torch.Tensor, torch.Tensor]:
    (found,) = extractor.extract([Document.of(GIVEN)])
    return found.components["k"], found.components["v"]


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16], ids=["from-F32", "from-BF16"])
def test_merged_is_the_model_that_peft_merges(base: Path, tmp_path: Path, dtype: str, own: torch.dtype) -> None:
    directory = tmp_path / "adapter"
    adapted(base).to(own).save_pretrained(directory)
    compute = {"F32": torch.float32, "BF16": torch.bfloat16}[dtype]
    model = AutoModelForCausalLM.from_pretrained(base, dtype=compute)
    merged = quietly(peft.PeftModel.from_pretrained, model, directory).merge_and_unload().eval()
    extractor = load(base, directory, compute_dtype=dtype)
    expected = HuggingFaceExtractor.of(merged)
    assert extractor.context == expected.context
    assert extractor.context.model.adapters == ()
    assert extractor.files == expected.files
    for found, other in zip(values(extractor), values(expected), strict=True):
        assert torch.equal(found, other)
    plain = HuggingFaceExtractor.load(base, compute_dtype=dtype)
    assert extractor.context != plain.context
    assert not torch.equal(values(extractor)[0], values(plain)[0])


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_applied_is_what_the_live_model_computes(base: Path, tmp_path: Path, dtype: str) -> None:
    compute = {"F32": torch.float32, "BF16": torch.bfloat16}[dtype]
    directory = save(base, tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=compute)
    live = quietly(peft.PeftModel.from_pretrained, model, directory, autocast_adapter_dtype=False)
    for name, parameter in live.named_parameters():  # casting the whole model would round its frequencies
        parameter.data = parameter.data.to(compute) if "lora_" in name else parameter.data
    live.eval()
    extractor = load(base, directory, "apply", compute_dtype=dtype)
    keys, held = values(extractor)
    for layer, (key, value) in enumerate(live_attention(live, GIVEN)):
        assert torch.equal(keys[layer], key)
        assert torch.equal(held[layer], value)
    of = HuggingFaceExtractor.of(live, adapter_mode="apply")
    assert of.context == extractor.context
    assert of.files == extractor.files
    assert torch.equal(values(of)[0], keys)


def test_an_applied_adapter_is_named_beside_the_weights_of_the_base(base: Path, adapter: Path) -> None:
    extractor = load(base, adapter, "apply")
    plain = HuggingFaceExtractor.load(base)
    assert extractor.files == plain.files
    assert extractor.context.model.weights == plain.context.model.weights
    (named,) = extractor.context.model.adapters
    stored = {
        name.removeprefix("base_model.model.model."): tensor
        for name, tensor in load_file(adapter / "adapter_model.safetensors").items()
        if "layers.2.mlp" not in name  # reaches no stored key or value
    }
    assert named.scale == real(12 / 4)
    assert named.sha256 == hashlib.sha256(weights_file(stored, compute_dtype="F32")).hexdigest()
    (found,) = differences(extractor.context, load(base, adapter, "apply", layers=[0, 1]).context)[:1]
    assert found.startswith("adapters[0].sha256")


def test_applied_and_merged_are_two_identities(base: Path, adapter: Path) -> None:
    applied, merged = load(base, adapter, "apply"), load(base, adapter, "merge")
    fields = {line.partition(":")[0] for line in differences(applied.context, merged.context)}
    assert "weights.sha256" in fields
    assert any(field.startswith("adapters") for field in fields)
    torch.testing.assert_close(values(applied)[0], values(merged)[0], rtol=1e-3, atol=1e-4)
    assert not torch.equal(values(applied)[0], values(merged)[0])


@pytest.mark.parametrize("mode", ["merge", "apply"])
def test_a_file_rewritten_with_the_same_time_and_size_is_another_adapter(base: Path, adapter: Path, mode: str) -> None:
    before = load(base, adapter, mode)
    file = adapter / "adapter_model.safetensors"
    status = file.stat()
    tensors = load_file(file)
    tensors[KEY][0, 0] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_size == status.st_size
    after = load(base, adapter, mode)
    assert before.provenance["adapter"] == after.provenance["adapter"] == "adapter"
    assert before.provenance["adapter_sha256"] != after.provenance["adapter_sha256"]
    assert before.context != after.context


@pytest.mark.parametrize("mode", ["merge", "apply"])
def test_another_scale_is_another_identity(base: Path, tmp_path: Path, mode: str) -> None:
    found = [
        load(base, save(base, tmp_path / str(number), **options), mode)
        for number, options in enumerate([{}, {"lora_alpha": 8}, {"use_rslora": True}])
    ]
    assert len({json.dumps(differences(found[0].context, other.context)) for other in found}) == 3
    if mode == "apply":
        scales = [extractor.context.model.adapters[0].scale for extractor in found]
        assert scales == [real(3.0), real(2.0), real(6.0)]


def test_what_an_adapter_was_trained_around_does_not_matter(base: Path, tmp_path: Path, adapter: Path) -> None:
    bare = save(base, tmp_path / "bare", bare=True)
    assert set(load_file(bare / "adapter_model.safetensors")) != set(load_file(adapter / "adapter_model.safetensors"))
    for mode in ("merge", "apply"):
        assert load(base, bare, mode).context == load(base, adapter, mode).context


@pytest.mark.parametrize("mode", ["merge", "apply"])
def test_provenance_says_what_was_done(base: Path, adapter: Path, mode: str) -> None:
    provenance = load(base, adapter, mode).provenance
    assert provenance["adapter"] == "adapter"
    assert provenance["adapter_mode"] == mode
    assert len(provenance["adapter_sha256"]) == 64
    assert provenance["peft"] == peft.__version__
    assert "adapter" not in HuggingFaceExtractor.load(base).provenance


def test_an_adapter_of_fused_projections_is_merged_and_applied(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path / "model", "gpt2", tokenizer=False)
    own = save(directory, tmp_path / "adapter", target_modules=["c_attn"], fan_in_fan_out=True)
    live = quietly(peft.PeftModel.from_pretrained, AutoModelForCausalLM.from_pretrained(directory), own).eval()
    keys, _ = values(load(directory, own, "apply"))
    for layer, (key, _) in enumerate(live_attention(live, GIVEN)):
        assert torch.equal(keys[layer], key)
    expected = HuggingFaceExtractor.of(live.merge_and_unload())
    assert load(directory, own, "merge").context == expected.context


@pytest.mark.parametrize("stage", ["raw", "normed"])
def test_stages_are_taken_behind_an_adapter(base: Path, adapter: Path, stage: str) -> None:
    applied, merged = (load(base, adapter, mode, key_stage=stage) for mode in ("apply", "merge"))
    torch.testing.assert_close(values(applied)[0], values(merged)[0], rtol=1e-3, atol=1e-4)
    assert not torch.allclose(
        values(applied)[0], values(HuggingFaceExtractor.load(base, key_stage=stage))[0], atol=0.1
    )


@pytest.mark.parametrize("mode", ["merge", "apply"])
def test_layers_above_the_wanted_ones_are_dropped_with_their_adapter(base: Path, adapter: Path, mode: str) -> None:
    part = load(base, adapter, mode, layers=[0, 1])
    assert len(part._decoder.layers) == 2
    whole = values(load(base, adapter, mode))[0]
    assert torch.equal(values(part)[0], whole[:2])


@pytest.mark.parametrize("mode", ["merge", "apply"])
def test_weights_may_come_from_a_checkpoint(base: Path, adapter: Path, mode: str) -> None:
    """Layers above the wanted ones are not read then, and no adapter can be merged into what is not there."""
    found = load(base, adapter, mode, checkpoint=f"safetensors:{base}", layers=[0, 1])
    expected = load(base, adapter, mode, layers=[0, 1])
    assert found.context == expected.context
    assert torch.equal(values(found)[0], values(expected)[0])
    assert found.provenance["adapter_sha256"] == expected.provenance["adapter_sha256"]
    assert found.provenance.keys() > expected.provenance.keys()


def test_random_numbers_of_the_program_are_left_alone(base: Path, adapter: Path) -> None:
    state = torch.get_rng_state()
    load(base, adapter, "apply")
    load(base, adapter, "merge")
    assert torch.equal(torch.get_rng_state(), state)


def test_what_determines_values_without_a_context_includes_the_scale(base: Path, tmp_path: Path) -> None:
    digests = [
        load(base, save(base, tmp_path / "adapter", lora_alpha=alpha), "apply", context="unknown").values_digest()
        for alpha in (12, 8)
    ]
    assert digests[0] != digests[1]


def edit(adapter: Path, **members: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | members))


def rewrite(adapter: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    path = adapter / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ({"use_dora": True}, "not plain LoRA .*: use_dora = True"),
        ({"rank_pattern": {"k_proj": 8}}, "rank_pattern = "),
        ({"alpha_pattern": {"k_proj": 8}}, "alpha_pattern = "),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save = "),
        ({"bias": "all"}, "bias = 'all'"),
        ({"lora_bias": True}, "lora_bias = True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters = "),
        ({"layer_replication": [[0, 2]]}, "layer_replication = "),
        ({"something_new": 3}, "something_new = 3"),
        ({"peft_type": "IA3"}, "expected an adapter of type 'LORA', found 'IA3'"),
        ({"r": 0}, "`r` from 1 and `lora_alpha`, found 0 and 12"),
        ({"r": True}, "found True and 12"),
        ({"lora_alpha": None}, "found 4 and None"),
        ({"lora_alpha": float("inf")}, "found 4 and inf"),
        ({"r": 8}, "this model with rank 8 needs"),
    ],
)
def test_what_is_no_plain_lora_is_refused(base: Path, adapter: Path, members: dict, text: str) -> None:
    edit(adapter, **members)
    with pytest.raises(InputError, match=text) as refused:
        load(base, adapter)
    assert refused.value.code == "E310"


def renamed(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (renamed("layers.2.self_attn.k_proj", "layers.9.self_attn.k_proj"), "belongs to no linear module"),
        (renamed("layers.2.self_attn.k_proj", "layers.2.self_attn.q_norm"), "belongs to no linear module"),
        (renamed("model.layers.2.self_attn.k_proj", "lm_head"), "'base_model.model.lm_head.lora_A.weight' belongs"),
        (renamed("model.layers.2", "model.visual.layers.2"), "belongs to no linear module"),
        (renamed("lora_A", "lora_embedding_A"), "belongs to no linear module"),
        (renamed("lora_A.weight", "lora_A.bias"), "belongs to no linear module"),
        (lambda found: found | {KEY.replace("model.layers", "layers"): found[KEY].clone()}, "two tensors are lora_A"),
        (lambda found: {name: found[name] for name in found if name != KEY}, "the adapter of another model"),
        (lambda found: found | {KEY: torch.zeros(4, 48)}, r"\[4, 48\].* needs .*\[4, 32\]"),
        (lambda found: found | {KEY: torch.full((4, 32), float("nan"))}, "finite real numbers"),
        (lambda found: found | {KEY: torch.zeros(4, 32, dtype=torch.int32)}, "finite real numbers"),
        (lambda _found: {}, "has no tensors"),
    ],
)
def test_an_adapter_of_something_else_is_refused(base: Path, adapter: Path, change: Any, text: str) -> None:
    rewrite(adapter, change)
    with pytest.raises(InputError, match=text) as refused:
        load(base, adapter)
    assert refused.value.code == "E310"
    assert str(adapter) in str(refused.value)


def test_the_adapter_of_another_base_is_refused(base: Path, tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other", "qwen3", tokenizer=False, hidden_size=48)
    with pytest.raises(InputError, match="the adapter of another model") as refused:
        load(base, save(other, tmp_path / "adapter"))
    assert refused.value.code == "E310"


@pytest.mark.parametrize("content", [None, b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_a_configuration_that_does_not_load_is_refused(base: Path, adapter: Path, content: bytes | None) -> None:
    path = adapter / "adapter_config.json"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(InputError, match=r"configuration|type 'LORA'") as refused:
        load(base, adapter)
    assert refused.value.code == "E310"


@pytest.mark.parametrize("cut", [None, 0, 100])
def test_tensors_that_do_not_load_are_refused(base: Path, adapter: Path, cut: int | None) -> None:
    path = adapter / "adapter_model.safetensors"
    path.unlink() if cut is None else path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(InputError, match="save the adapter as safetensors") as refused:
        load(base, adapter)
    assert refused.value.code == "E310"


@pytest.mark.parametrize(("mode", "context"), [("merge", "derive"), ("merge", "unknown"), ("apply", "derive")])
@pytest.mark.parametrize(
    ("targets", "layers", "reaches"),
    [
        (r".*\.2\..*k_proj", [0, 1], False),
        (r".*\.2\..*(o_proj|down_proj|q_proj)", None, False),
        (r".*\.2\..*k_proj", None, True),
        (r".*\.0\..*down_proj", [1], True),
        (r".*\.1\..*o_proj", [2], True),
    ],
)
def test_an_adapter_that_reaches_nothing_that_is_stored_is_refused(
    base: Path, tmp_path: Path, mode: str, context: str, targets: str, layers: list[int] | None, *, reaches: bool
) -> None:
    directory = save(base, tmp_path / "adapter", target_modules=targets)
    if reaches:
        assert load(base, directory, mode, context=context, layers=layers).schema
        return
    with pytest.raises(InputError, match="none reaches what is to be stored") as refused:
        load(base, directory, mode, context=context, layers=layers)
    assert refused.value.code == "E310"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"adapter_mode": "merge"}, "without an adapter"),
        ({"adapter": "somewhere"}, "adapter_mode must be one of merge, apply, found None"),
        ({"adapter": "somewhere", "adapter_mode": "both"}, "adapter_mode must be one of merge, apply, found 'both'"),
    ],
)
def test_adapter_and_mode_go_together(base: Path, options: dict, text: str) -> None:
    with pytest.raises(UsageError, match=text) as refused:
        HuggingFaceExtractor.load(base, **options)
    assert refused.value.code == "E081"


def test_without_peft_the_command_is_named(base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(DependencyError, match="pip install") as refused:
        load(base, adapter)
    assert refused.value.code == "E205"
    assert HuggingFaceExtractor.load(base).schema


class TestLive:
    """A model with adapter layers in it."""

    def test_is_refused_unless_the_mode_says_so(self, base: Path) -> None:
        model = adapted(base)
        with pytest.raises(InputError, match="is an adapter layer") as refused:
            HuggingFaceExtractor.of(model)
        assert refused.value.code == "E302"
        with pytest.raises(UsageError, match="merge_and_unload"):
            HuggingFaceExtractor.of(model, adapter_mode="merge")
        with pytest.raises(InputError, match="no adapter layers") as refused:
            HuggingFaceExtractor.of(model.merge_and_unload(), adapter_mode="apply")
        assert refused.value.code == "E310"

    def test_an_adapter_that_is_not_active_has_no_part(self, base: Path) -> None:
        alone = HuggingFaceExtractor.of(adapted(base), adapter_mode="apply")
        model = adapted(base)
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["k_proj", "gate_proj"]))
        extractor = HuggingFaceExtractor.of(model.eval(), adapter_mode="apply")
        assert extractor.context == alone.context
        assert extractor.files == alone.files
        assert torch.equal(values(extractor)[0], values(alone)[0])
        model.set_adapter("other")
        assert HuggingFaceExtractor.of(model, adapter_mode="apply").context != alone.context
        model.base_model.set_adapter(["default", "other"])
        with pytest.raises(InputError, match="2 active adapters"):
            HuggingFaceExtractor.of(model, adapter_mode="apply")

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            (lambda model: model.merge_adapter(), "is merged"),
            (lambda model: model.base_model.disable_adapter_layers(), "is switched off"),
            (
                lambda model: model.base_model.model.model.layers[1].self_attn.k_proj.set_scale("default", 0.5),
                "1 active adapters and 2 scales",
            ),
        ],
    )
    def test_other_states_are_refused(self, base: Path, change: Any, text: str) -> None:
        model = adapted(base)
        change(model)
        with pytest.raises(InputError, match=text) as refused:
            HuggingFaceExtractor.of(model, adapter_mode="apply")
        assert refused.value.code == "E310"

    def test_the_scale_is_that_of_the_layers(self, base: Path) -> None:
        model = adapted(base)
        for module in model.modules():
            if hasattr(module, "set_scale"):
                module.set_scale("default", 0.5)
        (named,) = HuggingFaceExtractor.of(model, adapter_mode="apply").context.model.adapters
        assert named.scale == real(1.5)

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"use_dora": True}, "no plain LoRA layer"),
            ({"rank_pattern": {"k_proj": 8}}, "2 scales"),
            ({"modules_to_save": ["input_layernorm"]}, "ModulesToSaveWrapper"),
            ({"target_modules": ["embed_tokens", "k_proj"]}, "Embedding"),
        ],
    )
    def test_other_kinds_are_refused(self, base: Path, options: dict, text: str) -> None:
        model = adapted(base, **options)
        with pytest.raises(InputError, match=text) as refused:
            HuggingFaceExtractor.of(model, adapter_mode="apply")
        assert refused.value.code == "E310"

    def test_an_adapter_in_another_dtype_than_the_model_is_refused(self, base: Path) -> None:
        model = adapted(base, dtype=torch.bfloat16)  # peft keeps what it trains in float32
        with pytest.raises(InputError, match=r"torch.float32, the model computes in BF16") as refused:
            HuggingFaceExtractor.of(model, adapter_mode="apply")
        assert refused.value.code == "E310"
