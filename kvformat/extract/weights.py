"""Digest of the weights that reach the stored values: scheme ``kvf-tensors-1`` (SPEC.md, "Weights digest")."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping

import torch

from kvformat.errors import make_error
from kvformat.spec import canonical
from kvformat.spec.context import ComputeDtype, TensorDigest, WeightsDigest
from kvformat.tensors import torch_dtype

__all__ = ["reaching_tensors", "state_digest", "tensor_digest", "weights_digest", "weights_file"]

_CHUNK_NBYTES = 16 << 20


def reaching_tensors(
    state: Mapping[str, torch.Tensor], *, stack: str, last: int, reached: Iterable[str]
) -> dict[str, torch.Tensor]:
    """The tensors that determine K and V of layers up to ``last``.

    Layers below the last count wholly: which experts a few tokens were routed to must not matter. In the last layer
    and outside the layers, only what reached counts.

    Parameters
    ----------
    state
        Tensors of the decoder by name.
    stack
        Name of the list of decoder layers, such as ``layers``.
    reached
        Names that the graph of K and V leads to.
    """
    wanted = set(reached)
    return {name: tensor for name, tensor in state.items() if name in wanted or -1 < _layer(name, stack) < last}


def weights_file(tensors: Mapping[str, torch.Tensor], *, compute_dtype: ComputeDtype) -> bytes:
    """The covered file ``weights``. Tensors are cast and hashed piece by piece: no second copy of the model.

    Parameters
    ----------
    tensors
        By name inside the decoder; any device, any floating dtype.
    """
    lines = [
        TensorDigest(
            dtype=compute_dtype,
            name=name,
            sha256=tensor_digest(tensors[name], dtype=compute_dtype),
            shape=tuple(tensors[name].shape),
        )
        for name in sorted(tensors, key=str.encode)
    ]
    return canonical.encode({"tensors": lines})


def weights_digest(file: bytes) -> WeightsDigest:
    """Digest over a covered file ``weights``."""
    return WeightsDigest(scheme="kvf-tensors-1", sha256=hashlib.sha256(file).hexdigest())


def state_digest(state: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 (hex) over all tensors of a state: names, dtypes, shapes and bytes as they are, nothing cast.

    Unlike the weights digest it needs to know nothing of the model, and differs where that would not: with another
    dtype, and with tensors that reach no stored value.
    """
    lines = [
        {
            "dtype": str(tensor.dtype),
            "name": name,
            "sha256": tensor_digest(tensor, dtype=None),
            "shape": list(tensor.shape),
        }
        for name, tensor in sorted(state.items(), key=lambda item: item[0].encode())
    ]
    return hashlib.sha256(canonical.encode({"tensors": lines})).hexdigest()


def tensor_digest(tensor: torch.Tensor, *, dtype: ComputeDtype | None) -> str:
    """SHA-256 (hex) of a tensor's row-major little-endian bytes after the cast to ``dtype``; None casts nothing."""
    if sys.byteorder != "little":
        raise make_error("E302", "weights are hashed as little-endian bytes, which this machine does not hold")
    target = tensor.dtype if dtype is None else torch_dtype(dtype)
    hasher = hashlib.sha256()
    tensor = tensor.detach()
    rows = tensor.reshape(1) if tensor.ndim == 0 else tensor
    per_row = max(1, rows[0].numel() * target.itemsize) if rows.shape[0] else 1
    step = max(1, _CHUNK_NBYTES // per_row)
    for first in range(0, rows.shape[0], step):
        piece = rows[first : first + step].to(device="cpu", dtype=target).contiguous()
        hasher.update(piece.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def _layer(name: str, stack: str) -> int:
    """Layer a tensor belongs to, or -1."""
    head = f"{stack}."
    number = name[len(head) :].partition(".")[0] if name.startswith(head) else ""
    return int(number) if number.isdigit() else -1
