"""How known kinds of training checkpoints name the tensors of the frozen model."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

__all__ = ["PRESETS", "Preset"]


class Preset(Struct, frozen=True, kw_only=True):
    """Names of one kind of checkpoint. All patterns are regular expressions of :mod:`re`.

    Attributes
    ----------
    live, ema
        What the names of the live weights and of their moving average (EMA) begin with.
    select
        Matched against what follows; names that do not match belong to something else.
    rename
        (pattern, replacement) pairs, applied in order to what follows.
    """

    live: str
    ema: str
    select: str
    rename: tuple[tuple[str, str], ...]


PRESETS: Mapping[str, Preset] = {
    # Mixture-of-Transformers. Generator twins of the Reasoner's modules end in `_moe_gen`; `k_norm_und_for_gen` norms
    # the Reasoner's keys again, for the Generator alone. Output head and vision tower reach no key of a text.
    "mot": Preset(
        live=r"(?:net\.)?",
        ema=r"net_ema\.",
        select=(
            r"language_model\.(?!(?:model\.)?(?:lm_head|visual)\.)"
            r"(?!.*_moe_gen(?:\.|$))(?!.*\.k_norm_und_for_gen(?:\.|$))(?!.*\._extra_state$)"
        ),
        rename=((r"^language_model\.(?:model\.)?(?:language_model\.)?", ""),),
    ),
}
"""By name, as ``--preset`` takes it."""
