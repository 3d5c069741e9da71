"""Small local models and tokenizers for tests: random weights, real architectures, nothing downloaded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast

__all__ = [
    "CHAT_TEMPLATE",
    "TINY",
    "live_attention",
    "save_tiny",
    "tiny_config",
    "tiny_model",
    "tiny_tokenizer",
    "write_documents",
]

VOCAB = 320
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)

_COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": None,
}
_GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": VOCAB}
_MLA = {name: value for name, value in _COMMON.items() if name != "head_dim"} | {
    "q_lora_rank": 16,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
}
_MIXED = ["sliding_attention", "sliding_attention", "full_attention"]
TINY: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _COMMON),
    "llama3-rope": (
        "llama",
        _COMMON
        | {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama-linear": (
        "llama",
        _COMMON | {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-yarn": (
        "llama",
        _COMMON
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "mistral": ("mistral", _COMMON | {"sliding_window": 5}),
    "qwen2": ("qwen2", _COMMON | {"head_dim": 8}),
    "qwen3": ("qwen3", _COMMON),
    "qwen3-moe": (
        "qwen3_moe",
        _COMMON | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True},
    ),
    "gemma2": (
        "gemma2",
        _COMMON
        | {
            "sliding_window": 5,
            "pad_token_id": 0,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_hidden_layers": 4,
            "query_pre_attn_scalar": 24,
        },
    ),
    "gemma3": (
        "gemma3_text",
        _COMMON | {"sliding_window": 5, "pad_token_id": 0, "layer_types": _MIXED, "query_pre_attn_scalar": 24},
    ),
    "granite": ("granite", _COMMON | {"head_dim": 8, "attention_multiplier": 0.2, "residual_multiplier": 0.5}),
    "gpt2": ("gpt2", _GPT2),
    "deepseek": ("deepseek_v3", _MLA),
}
"""By name: ``model_type`` and configuration. Sizes differ wherever two axes could be confused."""


def tiny_config(name: str, **overrides: Any) -> Any:
    """Configuration of a tiny model."""
    model_type, settings = TINY[name]
    return AutoConfig.for_model(model_type, **(settings | overrides))


def tiny_model(
    name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, attention: str | None = None, **overrides: Any
) -> Any:
    """A causal language model with random weights, norms and biases included, in evaluation mode."""
    config = tiny_config(name, **overrides)
    options = {} if attention is None else {"attn_implementation": attention}
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    return randomise(model, seed=seed).eval()


def tiny_base_model(config: Any) -> Any:
    """A base model of a configuration, in evaluation mode."""
    return randomise(AutoModel.from_config(config)).eval()


def randomise(model: Any, *, seed: int = 0) -> Any:
    """Give every parameter random values: what is initialised to one or zero would hide a tensor left out."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim < 2:
                parameter.add_(noise, alpha=0.1)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    return model


def tiny_tokenizer(*, chat_template: str | None = CHAT_TEMPLATE, bos: bool = True) -> Any:
    """A byte-level tokenizer: one token a byte, and BOS (256) before each text where ``bos``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    vocabulary |= {"<s>": 256, "</s>": 257}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = chat_template
    return tokenizer


def save_tiny(
    directory: Path, name: str = "llama", *, tokenizer: bool = True, seed: int = 0, **overrides: Any
) -> Path:
    """Save a tiny model, and by default a tokenizer, as a directory ``HuggingFaceExtractor.load`` reads."""
    tiny_model(name, seed=seed, **overrides).save_pretrained(directory)
    if tokenizer:
        tiny_tokenizer().save_pretrained(directory)
    return directory


def write_documents(path: Path, lines: Iterable[Mapping[str, Any] | str]) -> Path:
    """Write a documents file; a string is written as it is."""
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line, ensure_ascii=False)}\n" for line in lines)
    path.write_text(text, encoding="utf-8")
    return path


def live_attention(model: Any, ids: Iterable[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V, ``[tokens, heads, width]``, that each layer of the whole model hands to its attention function."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    mapping = ALL_ATTENTION_FUNCTIONS._global_mapping
    chosen = model.config.get_text_config(decoder=True)._attn_implementation
    plain = mapping[chosen]
    seen = []

    def recording(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((key[0].transpose(0, 1).clone(), value[0].transpose(0, 1).clone()))
        return plain(module, query, key, value, *args, **kwargs)

    mapping[chosen] = recording
    try:
        with torch.inference_mode():
            model(input_ids=torch.tensor([list(ids)]))
    finally:
        mapping[chosen] = plain
    return seen
