"""How the records of a batch are laid out, as asked for."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any, Literal, SupportsIndex

from msgspec import Struct
from msgspec.structs import force_setattr

from kvformat.errors import make_error
from kvformat.tensors import dtype_name

__all__ = ["CASTS", "HF", "BatchLayout", "LayoutName", "Packed", "Padded", "PaddedLayout", "as_layout"]

LayoutName = Literal["packed", "padded", "hf"]
Side = Literal["left", "right"]
CASTS = frozenset({"BF16", "F16", "F32"})
"""What is cast, and what to. Values of 8 bits mean nothing without their scales, and are dequantised."""


class BatchLayout(Struct, frozen=True, kw_only=True):
    """What every layout has; its parameters are those of :class:`Packed`."""

    components: tuple[str, ...] | None = None
    layers: tuple[int, ...] | None = None
    dtype: Any = None
    position_rows: Literal[1, 3] = 1
    extras: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Bring the parameters into one form; E081 for what none can have."""
        for name in ("components", "layers", "extras"):
            given: object = getattr(self, name)
            if given is None and name != "extras":
                continue
            if isinstance(given, str) or not isinstance(given, Iterable):
                raise make_error("E081", f"{name} is a sequence, found {given!r}")
            # Layers may be an array's: what has an index is an integer, but for a bool.
            listed = tuple(_plain(entry) for entry in given) if name == "layers" else tuple(given)
            kind = int if name == "layers" else str
            if not all(isinstance(entry, kind) and not isinstance(entry, bool) for entry in listed):
                raise make_error("E081", f"{name} holds what is no {kind.__name__}: {listed!r}")
            if len(set(listed)) != len(listed) or not (listed or name == "extras"):
                raise make_error("E081", f"{name} must name something, and nothing twice: {listed!r}")
            force_setattr(self, name, listed)
        if self.position_rows not in (1, 3):
            raise make_error("E081", f"position_rows must be 1 or 3, found {self.position_rows!r}")
        if self.dtype is not None:
            name = dtype_name(self.dtype)
            if name not in CASTS:
                raise make_error("E081", f"dtype {name}: a cast is to one of {', '.join(sorted(CASTS))}")
            force_setattr(self, "dtype", name)


class Packed(BatchLayout, frozen=True, kw_only=True):
    """Records one behind the other, without padding: ``[layers, sum of tokens, heads, head_dim]``.

    What attention over variable lengths takes, with ``cu_seqlens`` and ``max_seqlen``
    (FlashAttention's ``flash_attn_varlen_func``, Dao et al., 2022).

    Parameters
    ----------
    components
        Names of the components wanted; all when None.
    layers
        Model layers wanted, in this order; all of each component when None. A component that holds none of them is
        left out. Only their bytes are read.
    dtype
        What BF16, F16 and F32 components are cast to, and quantised ones dequantised: one of these three, as a torch
        dtype, or by its torch or safetensors name; None keeps them. Scales then are left out unless they are named,
        and stay as they are.
    position_rows
        Rows of positions the consumer takes: 1, or 3 for grids of time, height and width.
    extras
        Further extras of the schema to put in :attr:`Batch.extras`; the first axis must be tokens, or of a fixed size.
    """


class PaddedLayout(BatchLayout, frozen=True, kw_only=True):
    """What layouts with padding have; their parameters are those of :class:`Padded`."""

    side: Side = "right"
    multiple_of: int = 1

    def __post_init__(self) -> None:
        """As above."""
        super().__post_init__()
        if self.side not in ("left", "right"):
            raise make_error("E081", f"side must be left or right, found {self.side!r}")
        given: object = self.multiple_of
        if type(given) is not int or given < 1:
            raise make_error("E081", f"multiple_of must be an integer from 1 on, found {given!r}")

    def padded(self, longest: int) -> int:
        """Entries of each record, padding included, where the longest has so many."""
        return -(-longest // self.multiple_of) * self.multiple_of


class Padded(PaddedLayout, frozen=True, kw_only=True):
    """Records side by side: ``[layers, records, longest, heads, head_dim]``, zeros where a shorter one has ended.

    Parameters
    ----------
    components, layers, dtype, position_rows, extras
        As for :class:`Packed`.
    side
        Where the padding is.
    multiple_of
        The longest is rounded up to a multiple of this number of tokens.
    """


class HF(PaddedLayout, frozen=True, kw_only=True):
    """K and V as the cache of a Hugging Face model: ``[layers, records, heads, longest, head_dim]``.

    :meth:`Batch.past_key_values` makes a ``DynamicCache`` of it. A record alone gives what the model's own cache
    gives, to the bit. With a mask, as several records of different lengths need one, torch takes another kernel:
    attention outputs then agree within 1e-5 in F32 and 2e-2 in BF16 (SmolLM2-135M).

    Parameters
    ----------
    components, layers, dtype, position_rows, extras
        As for :class:`Packed`.
    side
        Where the padding is; generation with that library continues on the right, so it pads on the left.
    multiple_of
        As for :class:`Padded`.
    """

    side: Side = "left"


_BY_NAME: dict[str, type[BatchLayout]] = {"packed": Packed, "padded": Padded, "hf": HF}


def as_layout(layout: LayoutName | BatchLayout) -> BatchLayout:
    """A layout, or the one of a name as it is by default; E081 for anything else."""
    given: object = layout
    if isinstance(given, (Packed, Padded, HF)):
        return given
    found = _BY_NAME.get(given) if isinstance(given, str) else None
    if found is None:
        hint = f": write {given.__name__}()" if isinstance(given, type) and given in _BY_NAME.values() else ""
        hint = ": give DataLoader an instance, collate_fn=Collate()" if isinstance(given, list) else hint
        shown = type(given).__name__ if isinstance(given, list) else repr(given)
        raise make_error("E081", f"layout must be {', '.join(_BY_NAME)}, or one of their objects; found {shown}{hint}")
    return found()


def _plain(number: object) -> object:
    return index(number) if isinstance(number, SupportsIndex) and not isinstance(number, bool) else number
