"""The slabs of one tensor: hashed, and refused where they hold what must not be stored."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from kvformat.errors import make_error
from kvformat.spec import digests
from kvformat.spec.layout import Layout
from kvformat.spec.values import all_finite, all_positive

__all__ = ["SlabChecker"]

# Slabs are checked and hashed in groups of about this size, so that they come from memory once.
_GROUP_NBYTES = 1 << 18


class SlabChecker(NamedTuple):
    """What is demanded of a component's slabs, or of an extra, which counts as one.

    Attributes
    ----------
    name, dtype
        Of the component or extra.
    first_sum, num_slabs
        Its entries in ``sums``.
    layers
        Of the model, by slab; empty for an extra.
    finite, positive
        Whether NaN and infinities are refused, and whether whatever is not positive is.
    """

    name: str
    dtype: str
    first_sum: int
    num_slabs: int
    layers: tuple[int, ...]
    finite: bool
    positive: bool

    @classmethod
    def of(cls, layout: Layout, *, allow_non_finite: Collection[str]) -> list[SlabChecker]:
        """One for each component, then each extra, in schema order."""
        schema = layout.schema
        scales = {c.quant.scale for c in schema.components if c.quant is not None}
        tensors: list[tuple[str, str, tuple[int, ...]]] = [(c.name, c.dtype, c.layers) for c in schema.components]
        tensors += [(extra.name, extra.dtype, ()) for extra in schema.extras]
        return [
            cls(
                name=name,
                dtype=dtype,
                first_sum=layout.first_sum[name],
                num_slabs=len(layers) or 1,
                layers=layers,
                finite=name not in allow_non_finite,
                positive=name in scales,
            )
            for name, dtype, layers in tensors
        ]

    def sums(self, data: memoryview, *, record: str) -> list[int]:
        """XXH3-64 of each slab of a record.

        Parameters
        ----------
        data
            Flat bytes of all slabs.

        Raises
        ------
        InputError
            E104 non-finite, E105 a bad scale, naming record, component and layer.
        """
        nbytes = len(data) // self.num_slabs
        if len(data) <= _GROUP_NBYTES:
            if nbytes:
                self._check(data, 0, nbytes, record)
            return digests.slab_sums(data, self.num_slabs)
        found: list[int] = []
        step = max(1, _GROUP_NBYTES // nbytes) * nbytes
        for start in range(0, len(data), step):
            group = data[start : start + step]
            self._check(group, start // nbytes, nbytes, record)
            found += digests.slab_sums(group, len(group) // nbytes)
        return found

    def _check(self, group: memoryview, first: int, nbytes: int, record: str) -> None:
        if not (self.positive and not all_positive(group)) and not (self.finite and not all_finite(group, self.dtype)):
            return
        for slab, at in enumerate(range(0, len(group), nbytes), first):
            part = group[at : at + nbytes]
            layer = self.layers[slab] if self.layers else None
            if self.positive and not all_positive(part):
                message = f"{self.name!r}: a scale is not finite and positive"
                raise make_error("E105", message, record=record, layer=layer)
            if self.finite and not all_finite(part, self.dtype):
                raise make_error(
                    "E104",
                    f"{self.name!r} holds NaN or infinity; find out why, or allow it by "
                    f"allow_non_finite=[{self.name!r}]",
                    record=record,
                    layer=layer,
                )
