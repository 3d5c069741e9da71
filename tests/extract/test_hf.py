from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from kvformat.errors import InputError, KVFormatError, UsageError
from kvformat.extract.hf import HuggingFaceExtractor, describe
from kvformat.spec.document import Document, Media
from kvformat.spec.rules import check_schema
from tests.models import TINY, live_attention, save_tiny, tiny_base_model, tiny_config, tiny_model

RNG = np.random.default_rng(0)
WITH_SDPA = [name for name in TINY if name != "gemma2"]
EXPANDED = [name for name in WITH_SDPA if name != "deepseek"]


def ids(count: int) -> list[int]:
    return [int(i) for i in RNG.integers(0, 256, count)]


@pytest.mark.parametrize("name", EXPANDED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["F32", "BF16"])
def test_k_and_v_are_what_the_attention_of_the_whole_model_is_given(name: str, dtype: torch.dtype) -> None:
    model = tiny_model(name, dtype=dtype)
    extractor = HuggingFaceExtractor.of(model)
    given = ids(23)  # more than any window
    (found,) = extractor.extract([Document.of(given)])
    live = live_attention(model, given)
    assert len(live) == len(found.components["k"]) == len(found.components["v"])
    for layer, (key, value) in enumerate(live):
        assert torch.equal(found.components["k"][layer], key)
        assert torch.equal(found.components["v"][layer], value)
    assert found.components["k"].dtype == dtype


@pytest.mark.parametrize("name", list(TINY))
def test_k_and_v_are_what_a_full_cache_holds(name: str) -> None:
    from transformers import DynamicCache

    model = tiny_model(name)
    extractor = HuggingFaceExtractor.of(model)
    check_schema(extractor.schema)
    given = ids(11)
    (found,) = extractor.extract([Document.of(given)])
    with torch.inference_mode():
        cache = model(input_ids=torch.tensor([given]), cache=DynamicCache(), use_cache=True).cache
    first, second = (component.name for component in extractor.schema.components)
    for layer, held in enumerate(cache.layers):
        key, value = held.keys[0].transpose(0, 1), held.values[0].transpose(0, 1)
        assert torch.equal(found.components[first][layer], key.reshape(found.components[first][layer].shape))
        assert torch.equal(found.components[second][layer], value.reshape(found.components[second][layer].shape))


def test_a_cache_that_drops_rows_of_sliding_layers_is_not_what_is_taken() -> None:
    model = tiny_model("gemma3")
    given = ids(23)
    with torch.inference_mode():
        own = model(input_ids=torch.tensor([given]), use_cache=True).cache
    (found,) = HuggingFaceExtractor.of(model).extract([Document.of(given)])
    kept = own.layers[0].keys.shape[2]
    assert kept < len(given)  # the model's own cache is short: this is the trap
    assert found.components["k"].shape[1] == len(given)
    assert torch.equal(found.components["k"][0, -kept:], own.layers[0].keys[0].transpose(0, 1))


def test_latent_attention_is_stored_compressed() -> None:
    extractor = HuggingFaceExtractor.of(tiny_model("deepseek"))
    latent, rope_key = extractor.schema.components
    assert (latent.name, latent.role, latent.stage) == ("latent", "latent", "normed")
    assert (rope_key.name, rope_key.role, rope_key.stage) == ("rope_key", "rope_key", "attention")
    (found,) = extractor.extract([Document.of(ids(7))])
    assert found.components["latent"].shape == (3, 7, 24)
    assert found.components["rope_key"].shape == (3, 7, 8)


def test_layers_of_different_shapes_get_components_of_their_own() -> None:
    config = tiny_config("gemma3")
    model = tiny_base_model(config)
    attention = model.layers[2].self_attn
    # A layer with one K/V head where the others have two: what models with per-layer geometry have.
    attention.k_proj = torch.nn.Linear(32, 16, bias=False)
    attention.v_proj = torch.nn.Linear(32, 16, bias=False)
    attention.num_key_value_groups = 4
    extractor = HuggingFaceExtractor.of(model, context="unknown")
    check_schema(extractor.schema)
    shape = {c.name: (c.role, c.layers, tuple(axis.size for axis in c.axes)) for c in extractor.schema.components}
    assert shape == {
        "k0": ("key", (0, 1), ("tokens", 2, 16)),
        "v0": ("value", (0, 1), ("tokens", 2, 16)),
        "k1": ("key", (2,), ("tokens", 1, 16)),
        "v1": ("value", (2,), ("tokens", 1, 16)),
    }
    given = ids(6)
    (found,) = extractor.extract([Document.of(given)])
    live = live_attention(model, given)
    assert torch.equal(found.components["k0"][1], live[1][0])
    assert torch.equal(found.components["v1"][0], live[2][1])
    with pytest.raises(InputError, match="the configuration says") as refused:
        HuggingFaceExtractor.of(model)
    assert (refused.value.code, refused.value.layer) == ("E302", 2)


@pytest.mark.parametrize("layers", [[0], [1], [0, 2], [2]])
def test_layers_above_the_wanted_ones_are_never_run(layers: list[int]) -> None:
    model = tiny_model("qwen3")
    given = ids(9)
    whole = HuggingFaceExtractor.of(model).extract([Document.of(given)])[0].components
    ran: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_args, name=name: ran.append(name))
    extractor = HuggingFaceExtractor.of(model, layers=layers)
    ran.clear()
    (found,) = extractor.extract([Document.of(given)])
    assert extractor.schema.components[0].layers == tuple(layers)
    assert torch.equal(found.components["k"], whole["k"][layers])
    assert torch.equal(found.components["v"], whole["v"][layers])
    last = layers[-1]
    assert f"model.layers.{last}.self_attn.v_proj" in ran
    for forbidden in ("lm_head", "model.norm", f"model.layers.{last}.self_attn.o_proj", f"model.layers.{last}.mlp"):
        assert not any(name == forbidden or name.startswith(f"{forbidden}.") for name in ran)
    assert not any(name.startswith(f"model.layers.{above}") for name in ran for above in range(last + 1, 3))


def test_loaded_extractor_keeps_no_layer_above_the_wanted_ones(tmp_path: object) -> None:
    directory = save_tiny(tmp_path / "model", tokenizer=False)
    extractor = HuggingFaceExtractor.load(directory, layers=[0, 1])
    assert len(extractor._decoder.layers) == 2
    assert not any(parameter.requires_grad for parameter in extractor._decoder.parameters())
    (found,) = extractor.extract([Document.of([1, 2, 3])])
    assert found.components["k"].shape == (2, 3, 2, 16)


def test_loaded_and_live_model_agree(tmp_path: object) -> None:
    directory = save_tiny(tmp_path / "model", "gemma3")
    given = ids(17)
    loaded = HuggingFaceExtractor.load(directory, compute_dtype="BF16", dtype="F32")
    live = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    (found,) = loaded.extract([Document.of(given)])
    assert found.components["k"].dtype == torch.float32
    for layer, (key, value) in enumerate(live_attention(live, given)):
        assert torch.equal(found.components["k"][layer], key.float())
        assert torch.equal(found.components["v"][layer], value.float())
    assert loaded.context == HuggingFaceExtractor.of(live).context


@pytest.mark.parametrize("storage", ["BF16", "F16"])
def test_storage_dtype_is_a_cast_of_the_computed_values(storage: str) -> None:
    model = tiny_model("llama")
    given = [Document.of(ids(8))]
    exact = HuggingFaceExtractor.of(model).extract(given)[0].components["k"]
    extractor = HuggingFaceExtractor.of(model, dtype=storage)
    stored = extractor.extract(given)[0].components["k"]
    assert {c.dtype for c in extractor.schema.components} == {storage}
    assert torch.equal(stored, exact.to(stored.dtype))
    assert stored.dtype == {"BF16": torch.bfloat16, "F16": torch.float16}[storage]


def test_a_batch_of_equal_lengths_gives_each_document_its_own() -> None:
    extractor = HuggingFaceExtractor.of(tiny_model("qwen3"))
    documents = [Document.of(ids(9)) for _ in range(4)]
    together = extractor.extract(documents)
    for document, found in zip(documents, together, strict=True):
        (alone,) = extractor.extract([document])
        for name in ("k", "v"):
            torch.testing.assert_close(found.components[name], alone.components[name], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(together[0].components["k"], together[1].components["k"], atol=0.1)


def test_repeated_calls_give_equal_bits() -> None:
    extractor = HuggingFaceExtractor.of(tiny_model("gemma3"))
    document = Document.of(ids(31))
    first = extractor.extract([document])[0].components["k"].clone()
    extractor.extract([Document.of(ids(60))])  # a longer one between leaves no trace
    assert torch.equal(extractor.extract([document])[0].components["k"], first)


def test_positions_are_honoured() -> None:
    model = tiny_model("llama")
    given = ids(6)
    shifted = [p + 5 for p in range(6)]
    (found,) = HuggingFaceExtractor.of(model).extract([Document.of(given, position_ids=shifted)])
    (plain,) = HuggingFaceExtractor.of(model).extract([Document.of(given)])
    with torch.inference_mode():
        cache = model(input_ids=torch.tensor([given]), position_ids=torch.tensor([shifted]), use_cache=True).cache
    assert torch.equal(found.components["k"][2], cache.layers[2].keys[0].transpose(0, 1))
    assert not torch.allclose(found.components["k"][0], plain.components["k"][0], atol=0.01)


def test_what_a_model_does_not_take_is_refused() -> None:
    extractor = HuggingFaceExtractor.of(tiny_model("llama"))
    cases = [
        ([Document.of([1, 2]), Document.of([1])], "E081", "one length"),
        ([], "E081", "none"),
        ([Document.of([1] * 65)], "E301", "64 positions"),
        ([Document.of([1, 320])], "E110", "vocabulary of 320"),
        ([Document.of([1, 2, 3], mask="prefix", prefix_length=2)], "E110", "causal"),
        ([Document.of([1, 2], media=[Media(scheme="opaque", first=0, count=1, digest=bytes(32))])], "E110", "media"),
        ([Document.of([1, 2], position_ids=[[0, 1], [0, 2], [0, 3]])], "E110", "one row"),
    ]
    for documents, code, text in cases:
        with pytest.raises(KVFormatError, match=text) as refused:
            extractor.extract(documents)
        assert refused.value.code == code


def test_shapes_that_change_after_the_probe_are_refused() -> None:
    model = tiny_model("llama")
    extractor = HuggingFaceExtractor.of(model)
    attention = model.model.layers[1].self_attn
    attention.v_proj = torch.nn.Linear(32, 16, bias=False)
    attention.k_proj = torch.nn.Linear(32, 16, bias=False)
    attention.num_key_value_groups = 4
    with pytest.raises(InputError) as refused:
        extractor.extract([Document.of([1, 2, 3])])
    assert (refused.value.code, refused.value.layer) == ("E303", 1)


def test_a_live_model_is_left_as_it_was() -> None:
    model = tiny_model("qwen3")
    before = {name: (p.requires_grad, p.grad, p.clone()) for name, p in model.named_parameters()}
    hooks = [len(module._forward_hooks) for module in model.modules()]
    HuggingFaceExtractor.of(model, layers=[0]).extract([Document.of([1, 2, 3])])
    assert len(model.model.layers) == 3
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    for name, parameter in model.named_parameters():
        requires_grad, grad, value = before[name]
        assert parameter.requires_grad == requires_grad
        assert parameter.grad is grad is None
        assert torch.equal(parameter, value)


@pytest.mark.parametrize("name", list(TINY))
def test_a_description_without_weights_promises_what_is_loaded(name: str, tmp_path: object) -> None:
    directory = save_tiny(tmp_path / "model", name, tokenizer=False)
    described = describe(directory, layers=[0, 2], dtype="BF16")
    extractor = HuggingFaceExtractor.load(directory, layers=[0, 2], dtype="BF16")
    assert described.schema == extractor.schema
    assert described.max_tokens == extractor.max_tokens == 64
    assert described.vocab_size == 320
    assert described.compute_dtype == "F32"


@pytest.mark.parametrize(
    ("name", "stage"), [("llama", "raw"), ("gemma3", "normed"), ("gpt2", "raw"), ("deepseek", "raw")]
)
def test_a_description_knows_the_stages_of_keys(name: str, stage: str, tmp_path: object) -> None:
    directory = save_tiny(tmp_path / "model", name, tokenizer=False)
    described = describe(directory, key_stage=stage)
    assert described.schema == HuggingFaceExtractor.load(directory, key_stage=stage).schema
    assert described.schema.components[0].stage == stage
    if name != "gemma3":
        for attempt in (describe, HuggingFaceExtractor.load):
            with pytest.raises(UsageError, match="no norm") as refused:
                attempt(directory, key_stage="normed")
            assert refused.value.code == "E081"


def test_a_model_in_training_mode_is_refused() -> None:
    with pytest.raises(UsageError, match="training mode"):
        HuggingFaceExtractor.of(tiny_model("llama").train())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dtype": "F8_E4M3"}, "storage dtype"),
        ({"compute_dtype": "I8"}, "compute dtype"),
        ({"dtype": "bfloat16"}, "storage dtype must be one of BF16, F16, F32"),
        ({"dtype": torch.bfloat16}, "storage dtype must be one of BF16, F16, F32"),
        ({"layers": []}, "no layer is asked for"),
        ({"layers": [0, 0]}, "found twice: 0$"),
        ({"layers": [3]}, "has layers 0 to 2, and not those that are asked for besides: 3$"),
        ({"layers": [-1, 1]}, "besides: -1$"),
        ({"layers": range(60_001)}, "besides: 59,998 of 3 to 60000$"),
        ({"layers": "0-2"}, "layers must be integers such as .* found '0-2'"),
        ({"layers": 2}, "layers must be integers such as .* found 2"),
        ({"layers": [0, 1.5]}, "layers must be integers"),
        ({"context": "unkown"}, "context must be 'derive', 'unknown' or "),
        ({"device": "foo"}, "device 'foo' is not available here, only cpu"),
        ({"device": "meta"}, "device 'meta' is not available here, only cpu"),
        ({"device": "cpu:1"}, "cpu has 1, counted from 0"),
        ({"revision": "main"}, "no revision"),
    ],
)
def test_bad_options_are_refused(options: dict, text: str, tmp_path: object) -> None:
    directory = save_tiny(tmp_path / "model", tokenizer=False)
    with pytest.raises(UsageError, match=text) as refused:
        HuggingFaceExtractor.load(directory, **options)
    assert refused.value.code == "E081"


def test_a_multimodal_model_gives_its_text_decoder() -> None:
    from transformers import AutoConfig

    text = {
        key: value
        for key, value in tiny_config("qwen3").to_dict().items()
        if key
        in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "max_position_embeddings",
        )
    }
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
        "deepstack_visual_indexes": [0],
        "patch_size": 4,
        "num_position_embeddings": 16,
    }
    config = AutoConfig.for_model("qwen3_vl", text_config=text, vision_config=vision)
    model = AutoModel.from_config(config).eval()
    extractor = HuggingFaceExtractor.of(model)
    assert extractor.context.model.family == "qwen3_vl_text"
    assert extractor.context.model.rope[0].sections == (4, 2, 2)
    given = ids(9)
    (found,) = extractor.extract([Document.of(given)])
    for layer, (key, value) in enumerate(live_attention(model, given)):
        assert torch.equal(found.components["k"][layer], key)
        assert torch.equal(found.components["v"][layer], value)
