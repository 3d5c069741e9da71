from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel
from transformers.models.llama import modeling_llama

from kvformat.errors import InputError
from kvformat.extract.capture import CaptureCache, LastLayerReachedError, cache_argument
from kvformat.extract.hf import HuggingFaceExtractor
from kvformat.extract.probe import LayerForm, probe
from kvformat.extract.shapes import cached_schema, slots
from tests.models import TINY, randomise, tiny_model

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
MORE: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "cohere": {},
    "falcon": {},
    "glm4": {"head_dim": 8, "num_key_value_heads": 2},
    "gpt_neox": {},
    "gpt_oss": {"head_dim": 16, "num_key_value_heads": 2, "num_local_experts": 4},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
    "llama4_text": {"head_dim": 16, "num_key_value_heads": 2, "num_local_experts": 2, "intermediate_size_mlp": 32},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 2},
    "olmo2": {"num_key_value_heads": 2},
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 32},
    "phi": {"num_key_value_heads": 2},
    "phi3": {"num_key_value_heads": 2},
    "smollm3": {"num_key_value_heads": 2},
    "starcoder2": {"num_key_value_heads": 2},
}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", [name for name in TINY if name != "gemma2"])
def test_both_plain_attentions_are_seen_through(name: str, attention: str) -> None:
    forms = probe(tiny_model(name, attention=attention).get_decoder(), [0, 1, 2], latent=(24, 8)).forms
    assert {form.latent for form in forms.values()} == {name == "deepseek"}


def test_a_kernel_that_hides_its_products_is_replaced_while_looking() -> None:
    model = tiny_model("llama", attention="flex_attention")
    extractor = HuggingFaceExtractor.of(model)
    assert model.config._attn_implementation == "flex_attention"
    assert extractor.provenance["attn_implementation"] == "flex_attention"


@pytest.mark.parametrize("model_type", list(MORE))
def test_other_families_extract_under_an_unknown_context(model_type: str) -> None:
    config = AutoConfig.for_model(model_type, **(SIZES | MORE[model_type]))
    model = randomise(AutoModel.from_config(config, attn_implementation="eager")).eval()
    extractor = HuggingFaceExtractor.of(model, context="unknown")
    roles = [component.role for component in extractor.schema.components]
    assert roles == ["key", "value"]
    assert extractor.schema.components[0].layers == (0, 1)


def test_keys_before_the_rotary_embedding_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that rotates what comes out of its cache would give keys of another stage."""
    model = tiny_model("llama")
    rotate = modeling_llama.apply_rotary_pos_emb
    seen: dict[str, Any] = {}

    def later(query: Any, key: Any, cos: Any, sin: Any) -> Any:
        seen["cos"], seen["sin"] = cos, sin
        return rotate(query, key, cos, sin)[0], key

    def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        key = rotate(key, key, seen["cos"], seen["sin"])[1]
        return modeling_llama.eager_attention_forward(module, query, key, value, *args, **kwargs)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", later)
    monkeypatch.setitem(modeling_llama.ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", attend)
    with pytest.raises(
        InputError, match="the key the model caches is not what its attention product consumes"
    ) as refused:
        HuggingFaceExtractor.of(model)
    assert (refused.value.code, refused.value.layer) == ("E302", 0)


def test_documents_of_a_batch_that_see_each_other_are_refused() -> None:
    model = tiny_model("llama")
    block = model.model.layers[0].mlp
    plain = block.forward
    block.forward = lambda hidden: plain(hidden) + plain(hidden).mean(dim=0, keepdim=True)
    with pytest.raises(InputError, match="documents of one batch") as refused:
        HuggingFaceExtractor.of(model)
    assert refused.value.code == "E302"


def test_layers_without_k_and_v_of_their_own_are_refused_unless_left_out() -> None:
    model = tiny_model("llama")
    attention = model.model.layers[1].self_attn
    plain = attention.forward
    attention.forward = lambda *args, cache=None, **kwargs: plain(*args, cache=None, **kwargs)
    with pytest.raises(InputError, match=r"layers \[1\]") as refused:
        HuggingFaceExtractor.of(model)
    assert (refused.value.code, refused.value.layer) == ("E303", 1)
    assert HuggingFaceExtractor.of(model, layers=[0, 2]).schema.components[0].layers == (0, 2)


def test_a_model_that_takes_no_cache_is_refused() -> None:
    with pytest.raises(InputError, match="takes no K/V cache") as refused:
        cache_argument(torch.nn.Linear(2, 2))
    assert refused.value.code == "E303"


def test_the_cache_passes_on_and_stops() -> None:
    taken: list[int] = []
    cache = CaptureCache(lambda layer, *_: taken.append(layer), stop=lambda layer: layer == 1)
    key, value = torch.zeros(1, 1, 2, 4), torch.ones(1, 1, 2, 4)
    assert cache.update(key, value, 0) == (key, value)
    with pytest.raises(LastLayerReachedError):
        cache.update(key, value, 1)
    assert taken == [0, 1]
    assert cache.get_seq_length() == 0
    with pytest.raises(InputError, match="twice"):
        cache.update(key, value, 0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_probe_sees_the_graph_in_any_mode_and_leaves_no_gradient(mode: Any) -> None:
    model = tiny_model("llama")
    with mode():
        probed = probe(model.model, [2])
    assert "embed_tokens.weight" in probed.reached
    assert all(parameter.grad is None for parameter in model.parameters())


def test_schema_and_slots_agree() -> None:
    wide, narrow = LayerForm((2, 8), (2, 8), latent=False), LayerForm((1, 8), (1, 4), latent=False)
    latent = LayerForm((1, 24), (1, 8), latent=True)
    forms = {1: narrow, 0: wide, 3: wide, 5: latent, 4: narrow}
    schema = cached_schema(forms, dtype="BF16")
    assert [(c.name, c.role, c.layers) for c in schema.components] == [
        ("k0", "key", (0, 3)),
        ("v0", "value", (0, 3)),
        ("k1", "key", (1, 4)),
        ("v1", "value", (1, 4)),
        ("latent2", "latent", (5,)),
        ("rope_key2", "rope_key", (5,)),
    ]
    by_name = {component.name: component for component in schema.components}
    for layer, slot in slots(forms).items():
        assert by_name[slot.key].layers[slot.row] == by_name[slot.value].layers[slot.row] == layer
