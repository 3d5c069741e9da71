"""The one place that turns buffers into torch tensors and back. Imports torch on first use."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvformat.errors import make_error

if TYPE_CHECKING:
    import torch

__all__ = ["dtype_name", "flat_bytes", "from_buffer", "stored_bytes", "torch_dtype", "writable_bytes"]

_FIELD_NAME = re.compile(":[^:]*:")
_NAMES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I8": "int8",
    "I32": "int32",
    "U8": "uint8",
    "U64": "uint64",
}
_LITTLE = {
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "I8": np.dtype("i1"),
    "I32": np.dtype("<i4"),
    "U8": np.dtype("u1"),
    "U64": np.dtype("<u8"),
}


@cache
def torch_dtype(name: str) -> torch.dtype:
    """torch dtype of a safetensors dtype name."""
    import torch

    dtype: torch.dtype = getattr(torch, _NAMES[name])
    return dtype


def dtype_name(dtype: object) -> str:
    """safetensors name of a torch dtype, or of its torch or safetensors name; E081 where no tensor can have it."""
    name = str(dtype).removeprefix("torch.")
    found = next((known for known, torch_name in _NAMES.items() if name in {known, torch_name}), None)
    if found is None:
        raise make_error("E081", f"no dtype {dtype!r}; there are {', '.join(_NAMES.values())}")
    return found


def from_buffer(buffer: Any, dtype: str, *, offset: int = 0, count: int = -1) -> torch.Tensor:
    """One-dimensional tensor over a buffer, without a copy; it keeps the buffer alive.

    A read-only buffer gives a tensor that must not be written to; torch's warning about it is avoided by handing
    torch the address, because the caller was told already.
    """
    import torch

    view = memoryview(buffer)
    if view.nbytes == 0 or count == 0:
        return torch.empty(0, dtype=torch_dtype(dtype))
    if view.readonly:
        view = _unprotected(view)
    return torch.frombuffer(view, dtype=torch_dtype(dtype), offset=offset, count=count)


def flat_bytes(tensor: torch.Tensor, dtype: str) -> NDArray[np.uint8]:
    """Writable bytes of a contiguous CPU tensor, ``[nbytes]``; E081 where it is something else."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise make_error("E081", f"expected a tensor to copy into, found {type(tensor).__name__}")
    if tensor.dtype != torch_dtype(dtype) or not _is_memory(tensor):
        raise make_error(
            "E081",
            f"expected a contiguous CPU tensor of {torch_dtype(dtype)}, found {tensor.dtype} on {tensor.device}",
        )
    return _memory(tensor)


def writable_bytes(out: Any) -> memoryview:
    """Bytes of anything one can copy into: a contiguous CPU tensor, an array, a buffer. E081 where one cannot."""
    try:
        if type(out) is memoryview and out.format == "B" and out.ndim == 1 and out.contiguous and not out.readonly:
            return out
    except ValueError:
        pass  # released, which is said below
    what = type(out).__name__
    if not isinstance(out, memoryview):
        import torch

        if isinstance(out, torch.Tensor):
            if not _is_memory(out):
                message = f"expected a dense, contiguous CPU tensor; this one is strided, sparse or on {out.device}"
                raise make_error("E081", message)
            out = _memory(out)
    try:
        view = memoryview(out)
        if not view.readonly and view.c_contiguous and not _holds_objects(view.format):
            return view.cast("B") if view.nbytes else memoryview(bytearray())
    except (TypeError, ValueError):
        pass
    raise make_error("E081", f"expected a contiguous, writable buffer, found {what}")


def stored_bytes(value: Any, *, dtype: str, shape: tuple[int, ...], what: str, record: str) -> NDArray[np.uint8]:
    """The bytes of a tensor as they are stored: row-major, ``[nbytes]`` uint8; a view where the tensor allows it.

    Parameters
    ----------
    value
        torch tensor (any device, any strides) or numpy array.
    dtype, shape
        What the schema and the dims of the record demand.
    what, record
        For messages.

    Raises
    ------
    InputError
        E101 shape, E102 dtype; E081 for something that is no tensor.
    """
    if isinstance(value, np.ndarray):
        return _numpy_bytes(value, dtype, shape, what, record)
    import torch

    dense = isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested
    if dense and type(value) is torch.Tensor and _is_plain(value, torch_dtype(dtype), shape):
        plain: NDArray[np.uint8] = value.view(torch.uint8).numpy()
        return plain.reshape(-1)
    if not dense or value.is_meta:
        found_kind = type(value).__name__
        if isinstance(value, torch.Tensor):
            found_kind = f"{'nested' if value.is_nested else value.layout} on {value.device}"
        raise make_error("E081", f"{what}: expected a dense tensor, found {found_kind}", record=record)
    _check(tuple(value.shape), str(value.dtype).removeprefix("torch."), _NAMES[dtype], dtype, shape, what, record)
    flat = value.detach().to("cpu").contiguous().reshape(-1)
    if flat.is_conj() or flat.is_neg():
        flat = flat.resolve_conj().resolve_neg()
    return _memory(flat)


def _is_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is, byte by byte, one piece of this process's memory."""
    import torch

    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and not tensor.is_nested
        and tensor.is_contiguous()
        and not (tensor.is_neg() or tensor.is_conj())
    )


def _memory(tensor: torch.Tensor) -> NDArray[np.uint8]:
    import torch

    # One element with an odd stride counts as contiguous, and cannot be viewed as bytes.
    found: NDArray[np.uint8] = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return found


def _holds_objects(form: str) -> bool:
    """Whether a buffer's format has pointers to Python objects, which bytes must not overwrite."""
    return "O" in form and "O" in _FIELD_NAME.sub("", form)


def _is_plain(value: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    """Whether a tensor's memory is what is stored. Most are, and the general way costs as much as copying 100 kB."""
    return (
        value.dtype is dtype
        and value.shape == shape
        and value.is_cpu
        and value.is_contiguous()
        and value.stride(-1) == 1  # an axis of one entry may have any stride, and bytes cannot be viewed then
        and not (value.requires_grad or value.is_neg() or value.is_conj())
    )


def _numpy_bytes(value: NDArray[Any], dtype: str, shape: tuple[int, ...], what: str, record: str) -> NDArray[np.uint8]:
    # None would compare equal to float64.
    little_dtype = _LITTLE.get(dtype)
    if (
        type(value) is np.ndarray
        and little_dtype is not None
        and value.dtype == little_dtype
        and value.shape == shape
        and value.flags.carray
    ):
        return value.reshape(-1).view(np.uint8)
    if isinstance(value, np.ma.MaskedArray):
        raise make_error("E081", f"{what}: a masked array cannot be stored: fill it first", record=record)
    _check(value.shape, value.dtype.name, _NAMES[dtype], dtype, shape, what, record)
    little = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("<"))
    return little.reshape(-1).view(np.uint8)


def _check(
    found_shape: tuple[int, ...],
    found_dtype: str,
    wanted_dtype: str,
    dtype: str,
    shape: tuple[int, ...],
    what: str,
    record: str,
) -> None:
    if found_dtype != wanted_dtype:
        raise make_error(
            "E102", f"{what}: dtype {found_dtype}, expected {wanted_dtype} ({dtype}); cast it yourself", record=record
        )
    if found_shape != shape:
        raise make_error("E101", f"{what}: shape {list(found_shape)}, expected {list(shape)}", record=record)


def _unprotected(view: memoryview) -> Any:
    import ctypes

    array = np.frombuffer(view, dtype=np.uint8)
    raw: Any = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
    raw.keep = array  # ctypes arrays take attributes: the view lives as long as the tensor
    return raw
