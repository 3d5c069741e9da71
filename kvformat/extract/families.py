"""What is known of each model family: the facts a context needs and a configuration does not state as such."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvformat.errors import make_error
from kvformat.spec.context import QKNorm, Scalars, Sizes, real

__all__ = ["DO_WITHOUT", "FAMILIES", "Family", "activation", "family_of", "setting"]

Config = Any  # a transformers configuration: attributes only, read through `setting`
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
DO_WITHOUT = "extract with an unknown context instead (--unknown-context, context='unknown')"


class Family(NamedTuple):
    """How to read the configuration of one ``model_type``.

    Attributes
    ----------
    eps, activation
        Names of the settings.
    attention
        Name of the attention module inside a layer.
    demands
        Settings that have no place in a context, and the one value this derivation is right for.
    sizes, scalars
        Read from the configuration.
    interleaved
        Setting that says whether rotary pairs are neighbours, or None where they never are.
    rotary
        Whether positions are rotary embeddings; otherwise they are weights.
    sections
        Whether rotary dimensions are split over position rows.
    window
        Whether ``sliding_window`` holds for every layer, where no ``layer_types`` say otherwise.
    """

    qk_norm: QKNorm
    sizes: Callable[[Config], Sizes]
    eps: str = "rms_norm_eps"
    activation: str = "hidden_act"
    attention: str = "self_attn"
    demands: Mapping[str, object] = {}
    scalars: Callable[[Config], Scalars] = lambda _config: Scalars()
    interleaved: str | None = None
    rotary: bool = True
    sections: bool = False
    window: bool = False


def setting(config: Config, name: str) -> Any:
    """A setting that must be there; never a default of our own.

    Raises
    ------
    InputError
        E302 where it is absent.
    """
    value = getattr(config, name, None)
    if value is None:
        raise make_error(
            "E302",
            f"the configuration of {config.model_type!r} has no {name!r}, from which the context is derived; "
            f"{DO_WITHOUT}",
        )
    return value


def activation(config: Config, family: Family) -> str:
    """Label of the activation function; E302 for one without a label here."""
    name = setting(config, family.activation)
    if name not in _ACTIVATIONS:
        raise make_error("E302", f"activation {name!r} is unknown here; {DO_WITHOUT}")
    return _ACTIVATIONS[name]


def family_of(config: Config) -> Family:
    """The family of a decoder's configuration.

    Raises
    ------
    InputError
        E302 for an unknown family, or for a setting this derivation is not right for.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise make_error(
            "E302",
            f"no context can be derived for models of type {config.model_type!r}, only for "
            f"{', '.join(sorted(FAMILIES))}; {DO_WITHOUT}",
        )
    for name, demanded in family.demands.items():
        found = getattr(config, name, None)
        if found != demanded and not (demanded is False and found is None):
            raise make_error(
                "E302",
                f"{name} = {found!r} has no place in a context of family {config.model_type!r}, only {demanded!r} is "
                f"known; {DO_WITHOUT}",
            )
    return family


def _dense(config: Config) -> Sizes:
    return Sizes(**_common(config), intermediate_size=setting(config, "intermediate_size"))


def _common(config: Config) -> dict[str, int]:
    heads = setting(config, "num_attention_heads")
    hidden = setting(config, "hidden_size")
    head_dim = getattr(config, "head_dim", None)
    if head_dim is None:
        if hidden % heads:
            raise make_error(
                "E302", f"hidden size {hidden} is no multiple of {heads} attention heads, and no head_dim is set"
            )
        head_dim = hidden // heads
    return {
        "head_dim": head_dim,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_hidden_layers": setting(config, "num_hidden_layers"),
        "num_key_value_heads": setting(config, "num_key_value_heads"),
        "vocab_size": setting(config, "vocab_size"),
    }


def _gpt2_sizes(config: Config) -> Sizes:
    heads, hidden = setting(config, "n_head"), setting(config, "n_embd")
    inner = getattr(config, "n_inner", None)
    return Sizes(
        head_dim=hidden // heads,
        hidden_size=hidden,
        intermediate_size=4 * hidden if inner is None else inner,
        num_attention_heads=heads,
        num_hidden_layers=setting(config, "n_layer"),
        num_key_value_heads=heads,
        vocab_size=setting(config, "vocab_size"),
    )


def _qwen3_moe_sizes(config: Config) -> Sizes:
    return Sizes(
        **_common(config),
        intermediate_size=setting(config, "intermediate_size"),
        moe_intermediate_size=setting(config, "moe_intermediate_size"),
        num_experts=setting(config, "num_experts"),
        num_experts_per_token=setting(config, "num_experts_per_tok"),
    )


def _deepseek_sizes(config: Config) -> Sizes:
    nope, rope = setting(config, "qk_nope_head_dim"), setting(config, "qk_rope_head_dim")
    return Sizes(
        **(_common(config) | {"head_dim": nope + rope}),
        first_dense_layers=setting(config, "first_k_dense_replace"),
        intermediate_size=setting(config, "intermediate_size"),
        kv_lora_rank=setting(config, "kv_lora_rank"),
        moe_intermediate_size=setting(config, "moe_intermediate_size"),
        num_expert_groups=setting(config, "n_group"),
        num_experts=setting(config, "n_routed_experts"),
        num_experts_per_token=setting(config, "num_experts_per_tok"),
        num_shared_experts=setting(config, "n_shared_experts"),
        num_topk_groups=setting(config, "topk_group"),
        q_lora_rank=config.q_lora_rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=setting(config, "v_head_dim"),
    )


def _gemma_scalars(config: Config) -> Scalars:
    softcap = getattr(config, "attn_logit_softcapping", None)
    # Square roots and quotients are exact to the last bit everywhere; powers are not.
    return Scalars(
        attention_scale=real(1 / math.sqrt(setting(config, "query_pre_attn_scalar"))),
        attention_softcap=None if softcap is None else real(softcap),
        embedding_scale=real(math.sqrt(setting(config, "hidden_size"))),
    )


def _granite_scalars(config: Config) -> Scalars:
    return Scalars(
        attention_scale=real(setting(config, "attention_multiplier")),
        embedding_scale=real(setting(config, "embedding_multiplier")),
        residual_scale=real(setting(config, "residual_multiplier")),
    )


def _deepseek_scalars(config: Config) -> Scalars:
    return Scalars(routed_scale=real(setting(config, "routed_scaling_factor")))


FAMILIES: Mapping[str, Family] = {
    "deepseek_v3": Family(
        qk_norm="none",
        sizes=_deepseek_sizes,
        scalars=_deepseek_scalars,
        interleaved="rope_interleave",
        demands={"norm_topk_prob": True},
    ),
    "gemma2": Family(
        qk_norm="none",
        sizes=_dense,
        scalars=_gemma_scalars,
        activation="hidden_activation",
        demands={"use_bidirectional_attention": False},
    ),
    "gemma3_text": Family(
        qk_norm="rms_head",
        sizes=_dense,
        scalars=_gemma_scalars,
        activation="hidden_activation",
        demands={"attn_logit_softcapping": None, "use_bidirectional_attention": False},
    ),
    "gpt2": Family(
        qk_norm="none",
        sizes=_gpt2_sizes,
        eps="layer_norm_epsilon",
        activation="activation_function",
        attention="attn",
        rotary=False,
        demands={
            "add_cross_attention": False,
            "reorder_and_upcast_attn": False,
            "scale_attn_by_inverse_layer_idx": False,
            "scale_attn_weights": True,
        },
    ),
    "granite": Family(qk_norm="none", sizes=_dense, scalars=_granite_scalars),
    "llama": Family(qk_norm="none", sizes=_dense),
    "mistral": Family(qk_norm="none", sizes=_dense, window=True),
    "qwen2": Family(qk_norm="none", sizes=_dense),
    "qwen3": Family(qk_norm="rms_head", sizes=_dense),
    "qwen3_moe": Family(
        qk_norm="rms_head",
        sizes=_qwen3_moe_sizes,
        window=True,
        demands={"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
    ),
    "qwen3_vl_text": Family(qk_norm="rms_head", sizes=_dense, sections=True),
}
