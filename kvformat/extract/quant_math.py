"""Values to 8 bits with scales, and what is lost. Bits do not depend on the device.

Scales are such that stored value x scale is exact in float32, and finite in the dtype that was given: beside integers
of 7 bits a scale has 17 significant bits, beside floats of 8 bits it is a power of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvformat.tensors import torch_dtype

__all__ = ["Encoded", "error_bound", "quantise"]

_LEAST = 2.0**-90
"""What is smaller counts as this when a scale is chosen: scales and products stay normal numbers, which no device
flushes to zero, and a scale is greater than zero where all values are zero."""
_CHUNK_NUMEL = 1 << 22
"""Of the float32 copy that is made on the way."""
_INT8_MOST = 127
_KEPT_BITS = -(1 << 7)  # of 24 significant bits of a float32 the upper 17


class Encoded(NamedTuple):
    """Quantised values.

    Attributes
    ----------
    stored
        8-bit values, in the shape that was given.
    scale
        float32; 1 along the axes a scale extends over.
    finite
        bool ``[layers]``: whether a layer's values were finite. Where they were not, the rest means nothing.
    relative_rms
        float64 ``[layers]``: RMS of what was lost, over the RMS of the layer.
    """

    stored: torch.Tensor
    scale: torch.Tensor
    finite: torch.Tensor
    relative_rms: torch.Tensor


class _Floats(NamedTuple):
    """An 8-bit float: explicit bits of its significand, exponent of its largest number, 1.75 x 2^exponent."""

    mantissa: int
    exponent: int
    least_exponent: int  # of the smallest subnormal

    @property
    def relative(self) -> float:
        """Half a unit in the last place, of a normal number at most."""
        return 2.0 ** -(self.mantissa + 1)

    @property
    def absolute(self) -> float:
        """Half the smallest subnormal."""
        return 2.0 ** (self.least_exponent - 1)


_FLOATS = {"F8_E4M3": _Floats(3, 8, -9), "F8_E5M2": _Floats(2, 15, -16)}
_OVER = 0x600000  # significand bits of 1.75 in a float32
_INT8_HALF = 0.5 + 2.0**-17  # the quotient is rounded to float32 first


def quantise(values: torch.Tensor, *, shared: Sequence[int], dtype: str) -> Encoded:
    """Quantise by the largest magnitude of each group of values, symmetrically, rounding to nearest, ties to even.

    Parameters
    ----------
    values
        ``[layers, *axes]``, BF16, F16 or F32, on any device; no axis of 0.
    shared
        Axes that one scale extends over; never 0.
    dtype
        I8, F8_E4M3 or F8_E5M2.

    Returns
    -------
    Encoded
        On the device of the values; no view of them.
    """
    shape = [1 if axis in shared else size for axis, size in enumerate(values.shape)]
    device = values.device
    stored = torch.empty(values.shape, dtype=torch_dtype(dtype), device=device)
    scale = torch.empty(shape, dtype=torch.float32, device=device)
    finite = torch.empty(len(values), dtype=torch.bool, device=device)
    lost = torch.empty(len(values), dtype=torch.float64, device=device)
    step = max(1, _CHUNK_NUMEL // values[0].numel())
    with torch.no_grad():
        for row in range(0, len(values), step):
            rows = slice(row, row + step)
            single = values[rows].float()
            # NaN is the greatest and the least of all; an infinity stays one.
            peak = torch.maximum(single.amax(tuple(shared), keepdim=True), -single.amin(tuple(shared), keepdim=True))
            finite[rows] = peak.isfinite().flatten(1).all(1)
            if dtype == "I8":
                scale[rows] = _integer_scale(peak)
                quotient = single.div(scale[rows])
                stored[rows] = quotient.round().to(stored.dtype)
            else:
                form = _FLOATS[dtype]
                limit = _limit(values.dtype, form)
                scale[rows] = _power_of_two(peak.clamp(max=limit), form)
                quotient = single.div(scale[rows])
                most = limit / scale[rows]
                stored[rows] = quotient.clamp(-most, most).to(stored.dtype)
            lost[rows] = _relative_rms(stored[rows].float().sub_(quotient), quotient, scale[rows], tuple(shared))
    return Encoded(stored, scale, finite, lost)


def error_bound(values: torch.Tensor, scale: torch.Tensor, dtype: str) -> torch.Tensor:
    """What a dequantised value, in float32, differs from the one that was given at most: float64, shape of ``values``.

    Parameters
    ----------
    values
        As given to :func:`quantise`.
    scale
        As it returned it.
    """
    if dtype == "I8":
        return scale.double().mul(_INT8_HALF).expand(values.shape)
    form = _FLOATS[dtype]
    return torch.maximum(values.double().abs() * form.relative, scale.double() * form.absolute)


def _integer_scale(peak: torch.Tensor) -> torch.Tensor:
    # Divided by a tensor: by a number, some devices multiply by its reciprocal, which is another result.
    most = torch.full((), _INT8_MOST, dtype=torch.float32, device=peak.device)
    exact = peak.clamp(min=_LEAST).div(most)
    # Less than 2^-16 smaller than the quotient: 127.002 still rounds to 127.
    return exact.view(torch.int32).bitwise_and(_KEPT_BITS).view(torch.float32)


def _power_of_two(peak: torch.Tensor, form: _Floats) -> torch.Tensor:
    """The least power of two by which the largest magnitude is in the range of the 8-bit float."""
    bits = peak.clamp(min=_LEAST).view(torch.int32)
    exponent = (bits >> 23) - form.exponent + ((bits & 0x7FFFFF) > _OVER).to(torch.int32)
    return (exponent << 23).view(torch.float32)


def _relative_rms(
    error: torch.Tensor, quotient: torch.Tensor, scale: torch.Tensor, shared: tuple[int, ...]
) -> torch.Tensor:
    """RMS of errors over RMS of values, both given in units of the scale, for each row; the arguments are used up.

    Squares of such are no numbers that float32 has not, whatever the values.
    """
    squares = [one.square_().sum(shared, keepdim=True).double() * scale.double().square() for one in (error, quotient)]
    lost, whole = (one.flatten(1).sum(1) for one in squares)
    return (lost / whole.clamp(min=torch.finfo(torch.float64).tiny)).sqrt()


def _limit(dtype: torch.dtype, form: _Floats) -> float:
    """The largest magnitude that rounds to none beyond those of the dtype it is given in.

    Above it values are stored as this: a change of less than half a unit in the last place of the 8-bit float's next
    binade, the largest relative one that rounding makes anyway.
    """
    largest = math.frexp(torch.finfo(dtype).max)[1]
    return (2.0 - 2.0**-form.mantissa) * 2.0 ** (largest - 1)
