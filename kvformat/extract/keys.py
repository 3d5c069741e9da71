"""Keys from one stage to the next: the rotary embedding, applied to keys that were stored without it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvformat.errors import make_error
from kvformat.extract.rope import attention_factor, inverse_frequencies
from kvformat.spec.context import RopeGroup

__all__ = ["rotate", "rotate_keys"]


def rotate_keys(
    keys: torch.Tensor,
    group: RopeGroup,
    *,
    position_ids: torch.Tensor | None = None,
    frequencies: Sequence[float] | None = None,
) -> torch.Tensor:
    """Keys as attention consumes them, from keys that lack the rotary embedding alone.

    Those are keys of stage ``normed``, and of stage ``raw`` in a model without key norm. The steps and their order are
    those of transformers, so with the dataset's own ``frequencies`` the bits are those of stage ``attention``.

    Parameters
    ----------
    keys
        ``[..., tokens, heads, head_dim]`` of any floating dtype: layers of ``group``. A shared rotary key of latent
        attention has no heads: give ``keys.unsqueeze(-2)``.
    group
        Rotary embedding of these layers, from ``context.model.rope``. Interleaved pairs come out as the first halves
        of all pairs, then the second ones, as DeepSeek-V3 has them.
    position_ids
        ``[tokens]``, ``[1, tokens]`` or ``[3, tokens]``; 0 to tokens - 1 when absent. Three rows go by the sections of
        the group, interleaved as in Qwen3-VL.
    frequencies
        Inverse frequencies of the group, as in the covered file ``inv_freq``; computed from the parameters when
        absent, which may differ in the last bits.

    Returns
    -------
    torch.Tensor
        A new tensor of the shape and dtype of ``keys``.

    Raises
    ------
    UsageError
        E081 for positions or frequencies that do not fit.
    """
    num_tokens, half = keys.shape[-3], group.rotary_dim // 2
    values = inverse_frequencies(group).tolist() if frequencies is None else list(frequencies)
    if len(values) != half:
        raise make_error("E081", f"the group rotates {half} pairs, found {len(values)} frequencies")
    positions = torch.arange(num_tokens) if position_ids is None else torch.as_tensor(position_ids)
    rows = positions.reshape(-1, positions.shape[-1]) if positions.ndim in (1, 2) else positions
    if rows.ndim != 2 or rows.shape[0] not in (1, 3) or rows.shape[1] != num_tokens:
        raise make_error(
            "E081", f"expected positions of [1 or 3, {num_tokens}] for these keys, found {list(positions.shape)}"
        )
    if rows.shape[0] == 3 and group.sections is None:
        raise make_error("E081", "positions have three rows, but the group has no sections; give the row it goes by")
    # Angles are float32 whatever the keys are, as in the model: rounded first, distant positions would coincide.
    inverse = torch.from_numpy(np.asarray(values, dtype=np.float32)).to(keys.device)
    angles = rows.to(keys.device)[..., None].float() * inverse
    merged = angles[0].clone()
    for row in range(1, rows.shape[0]):
        own = slice(row, (group.sections or ())[row] * 3, 3)
        merged[:, own] = angles[row][:, own]
    both = torch.cat((merged, merged), dim=-1)
    factor = attention_factor(group)
    cos, sin = ((wave * factor).to(keys.dtype).unsqueeze(-2) for wave in (both.cos(), both.sin()))
    return rotate(keys, cos, sin, interleaved=group.interleaved)


def rotate(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Rotate the first columns of ``keys``, as many as ``cos`` and ``sin`` have, which broadcast against them.

    Parameters
    ----------
    interleaved
        Pairs are neighbours in ``keys``; they are halves apart in what comes out, and elsewhere.
    """
    width = cos.shape[-1]
    turned, rest = keys[..., :width], keys[..., width:]
    if interleaved:
        turned = torch.cat((turned[..., 0::2], turned[..., 1::2]), dim=-1)
    first, second = turned[..., : width // 2], turned[..., width // 2 :]
    rotated = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated
