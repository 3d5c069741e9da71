"""safetensors names of torch dtypes: all that a checkpoint may hold, not only what kvformat stores."""

from __future__ import annotations

import torch

__all__ = ["dtype_of", "name_of"]

_DTYPES = {
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "U8": torch.uint8,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_of(name: str) -> torch.dtype | None:
    """torch dtype of a safetensors name; None for one this version does not know."""
    return _DTYPES.get(name)


def name_of(dtype: torch.dtype) -> str:
    """safetensors name of a torch dtype; torch's own where there is none."""
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.")
