"""A record as a writer is given it: checked, hashed, and laid out as buffers in stored order."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvformat.codec.shard import sum_record
from kvformat.errors import KVFormatError, make_error
from kvformat.spec.document import MASKS, MEDIA_ENTRY_NBYTES, Document
from kvformat.spec.layout import Layout, Placement
from kvformat.spec.schema import Axis, Schema
from kvformat.tensors import stored_bytes
from kvformat.write.slabs import SlabChecker

__all__ = ["EncodedRecord", "RecordEncoder"]

_OWNED = frozenset({"token_ids", "position_ids", "mask", "media"})


class EncodedRecord(NamedTuple):
    """Buffers in stored order (without the final pad), and what the index says of them."""

    placement: Placement
    buffers: list[memoryview]
    record_sum: bytes


class RecordEncoder:
    """Turns tensors into an :class:`EncodedRecord` for one schema.

    Parameters
    ----------
    layout
        Compiled layout of the schema.
    allow_non_finite
        Names of components and extras that may hold NaN or infinities.
    """

    def __init__(self, layout: Layout, *, allow_non_finite: Collection[str] = ()) -> None:
        self._layout = layout
        self._schema = layout.schema
        self._axes = _axes_of(self._schema)
        unknown = set(allow_non_finite) - set(self._axes)
        if unknown:
            raise make_error("E081", f"allow_non_finite names {', '.join(sorted(unknown))}, which the schema has not")
        self._slabs = SlabChecker.of(layout, allow_non_finite=allow_non_finite)
        self._components = {c.name for c in self._schema.components}
        self._owned = [e.name for e in self._schema.extras if e.name in _OWNED]
        self._extras = {e.name for e in self._schema.extras}.difference(_OWNED)

    def encode(
        self, name: str, document: Document, components: Mapping[str, Any], extras: Mapping[str, Any]
    ) -> EncodedRecord:
        """Check and encode one record.

        Raises
        ------
        InputError
            E101 to E105, E110, E111, naming record, component, expected and actual.
        """
        given = self._gather(name, document, components, extras)
        placement = self._layout.place(self._dims(name, document, given))
        sums = [0] * self._layout.num_sums
        buffers: dict[str, memoryview] = {}
        for slabs in self._slabs:
            tensor = slabs.name
            placed = placement.tensors[tensor]
            try:
                data = stored_bytes(
                    given[tensor], dtype=placed.dtype, shape=placed.shape, what=repr(tensor), record=name
                ).data
            except KVFormatError as error:
                if error.code == "E101":
                    raise self._explained(error, tensor, document) from None
                raise
            sums[slabs.first_sum : slabs.first_sum + slabs.num_slabs] = slabs.sums(data, record=name)
            buffers[tensor] = data
        stored, record_sum = sum_record(placement.dims, sums)
        buffers["sums"] = memoryview(stored)
        return EncodedRecord(placement, [buffers[tensor] for tensor in placement.tensors], record_sum)

    def _explained(self, error: KVFormatError, tensor: str, document: Document) -> KVFormatError:
        """A wrong shape, with what its axes are."""
        axes = next((c.axes for c in self._schema.components if c.name == tensor), None)
        if axes is None:
            names = [axis.name for extra in self._schema.extras if extra.name == tensor for axis in extra.axes]
        else:
            names = ["layers", *(axis.name for axis in axes)]
        return make_error(
            "E101",
            f"{error.message}: its axes are [{', '.join(names)}], and the document has {document.num_tokens} tokens",
            record=error.record,
        )

    def _gather(
        self, name: str, document: Document, components: Mapping[str, Any], extras: Mapping[str, Any]
    ) -> dict[str, Any]:
        """All tensors by name: those given, and the extras whose content is the document itself."""
        self._refuse_lost_inputs(name, document)
        both: dict[str, object] = {"components": components, "extras": extras}
        for what, value in both.items():
            if not isinstance(value, Mapping):
                message = f"{what} must be a mapping of names to tensors, found {type(value).__name__}"
                raise make_error("E081", message, record=name)
        if components.keys() != self._components or extras.keys() != self._extras:
            given, everything = [*components, *extras], self._components | self._extras
            misplaced = (components.keys() & self._extras) | (extras.keys() & self._components)
            missing = everything - set(given)
            unexpected = (set(given) - everything) | misplaced | {one for one in given if given.count(one) > 1}
            raise make_error(
                "E103",
                f"missing {', '.join(sorted(missing)) or 'nothing'}; "
                f"not expected {', '.join(sorted(unexpected)) or 'nothing'}",
                record=name,
            )
        return {**components, **extras, **{extra: _owned(extra, document, self._axes) for extra in self._owned}}

    def _refuse_lost_inputs(self, name: str, document: Document) -> None:
        """Where token ids are stored, everything else the digest is made of must be stored too."""
        if "token_ids" not in self._axes:
            return
        needed = {
            "position_ids": document.position_ids is not None,
            "mask": document.mask != "causal",
            "media": bool(document.media),
        }
        lost = [extra for extra, needs in needed.items() if needs and extra not in self._axes]
        if lost:
            raise make_error(
                "E110", f"the document has {', '.join(lost)}, the schema needs extras of these names", record=name
            )
        rows = self._axes.get("position_ids", (None,))[0]
        if rows == 1 and document.position_ids is not None and len(document.position_ids) == 3:
            raise make_error("E110", "the document has 3 rows of positions, the schema's position_ids 1", record=name)

    def _dims(self, name: str, document: Document, given: Mapping[str, Any]) -> tuple[int, ...]:
        dims = [document.num_tokens]
        for dim in self._schema.dims[1:]:
            size = None
            for tensor, axes in self._axes.items():
                shape = tuple(getattr(given[tensor], "shape", ()))
                if dim in axes and len(shape) == len(axes):
                    size = int(shape[axes.index(dim)])
                    break
            if size is None:
                raise make_error("E101", f"the size of dim {dim!r} follows from no tensor given", record=name)
            dims.append(size)
        return tuple(dims)


def _axes_of(schema: Schema) -> dict[str, tuple[object, ...]]:
    def sizes(axes: tuple[Axis, ...]) -> tuple[object, ...]:
        return tuple(axis.size for axis in axes)

    found: dict[str, tuple[object, ...]] = {c.name: ("layers", *sizes(c.axes)) for c in schema.components}
    found.update({e.name: sizes(e.axes) for e in schema.extras})
    return found


def _owned(extra: str, document: Document, axes: Mapping[str, tuple[object, ...]]) -> NDArray[Any]:
    """Content of one of the extras :data:`_OWNED`."""
    if extra == "token_ids":
        return document.token_ids
    if extra == "position_ids":
        rows = 3 if axes[extra][0] == 3 else 1
        positions = document.position_ids
        if positions is None:
            positions = np.arange(document.num_tokens, dtype="<i4")[None]
        return np.ascontiguousarray(np.broadcast_to(positions, (rows, document.num_tokens)))
    if extra == "mask":
        return np.array([MASKS.index(document.mask), document.prefix_length], dtype="<u8")
    packed = b"".join(entry.pack() for entry in document.media)
    return np.frombuffer(packed, dtype=np.uint8).reshape(len(document.media), MEDIA_ENTRY_NBYTES)
