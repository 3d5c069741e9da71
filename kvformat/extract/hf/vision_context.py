"""A context whose weights include those of the vision tower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from kvformat.errors import make_error
from kvformat.extract.probe import reachable_state
from kvformat.extract.towers import check_tower, tower_tensors
from kvformat.extract.weights import weights_digest, weights_file
from kvformat.spec import canonical
from kvformat.spec.context import ComputeDtype, Context
from kvformat.tensors import torch_dtype

__all__ = ["context_with_tower"]


def context_with_tower(
    context: Context, weights: bytes, visual: Any, *, last: int, compute_dtype: ComputeDtype
) -> tuple[Context, bytes]:
    """A decoder's context and covered file ``weights``, with the tensors of the tower added.

    Parameters
    ----------
    visual
        The vision tower.
    last
        The highest decoder layer that is stored.
    compute_dtype
        Of the decoder.

    Raises
    ------
    InputError
        E302 for a tower of no known kind, and for one that computes in another dtype.
    """
    check_tower(visual.config, visual)
    odd = {str(tensor.dtype) for tensor in visual.parameters()} - {str(torch_dtype(compute_dtype))}
    if odd:
        raise make_error(
            "E302",
            f"the vision tower computes in {', '.join(sorted(odd))}, the decoder in {compute_dtype}: load both in one",
        )
    tower = weights_file(tower_tensors(reachable_state(visual), last=last), compute_dtype=compute_dtype)
    lines = [*_lines(weights), *_lines(tower)]
    lines.sort(key=lambda line: str(line["name"]).encode())
    merged = canonical.encode({"tensors": lines})
    assert context.model is not None, "only a known context has weights"
    return replace(context, model=replace(context.model, weights=weights_digest(merged))), merged


def _lines(file: bytes) -> Sequence[Mapping[str, Any]]:
    decoded: Any = canonical.decode(file)
    tensors: Sequence[Mapping[str, Any]] = decoded["tensors"]
    return tensors
