"""An extractor whose keys and values are quantised on their way to storage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch

from kvformat.errors import make_error
from kvformat.extract.bounds import Quantisation, bounds_file
from kvformat.extract.quant_math import Encoded, quantise
from kvformat.extract.schemes import Quantised, quantised_components, quantised_schema, scheme_named
from kvformat.extract.tag import Identified
from kvformat.interfaces import Extracted, Extractor
from kvformat.read.error_bounds import LABEL
from kvformat.spec.context import ComputeDtype
from kvformat.tensors import dtype_name, torch_dtype

if TYPE_CHECKING:
    from kvformat.spec.context import Context, Text
    from kvformat.spec.document import Document
    from kvformat.spec.schema import Schema

__all__ = ["QuantisingExtractor"]


class QuantisingExtractor:
    """Stores what another extractor computes in 8 bits, with scales beside it; itself an extractor.

    Quantisation runs on the device of the tensors. It is a function of one document's values alone, and gives the
    same bits on every device. Scales are chosen by the largest magnitude, so that nothing overflows; values that are
    not finite are refused here, since nothing would show them afterwards.

    The context is that of the inner extractor: it says what values were computed, and the schema how they are stored.

    Parameters
    ----------
    inner
        What computes keys and values.
    scheme
        ``int8``: a scale for each channel of keys, over the tokens of a record, and for each head and token of values.
        ``fp8`` and ``fp8-e5m2``: floats of 8 bits, a scale for each head.
    relative_rms
        RMS error that a layer of a record may be stored with, over its RMS; the scheme's when absent. It is recorded
        in the covered file ``bounds``, and a document that exceeds it is refused.

    Attributes
    ----------
    values_digest
        As the inner extractor's, where it has one.

    Raises
    ------
    UsageError
        E081 for an unknown scheme, where nothing can be quantised or is quantised already, and for a ``relative_rms``
        that bounds nothing.
    InputError
        E302 for a component whose axes give scales no place.
    """

    # Nothing of these in the class: an extractor without it must not seem to have it.
    values_digest: Callable[[], str]

    def __init__(self, inner: Extractor, *, scheme: str = "int8", relative_rms: float | None = None) -> None:
        chosen = scheme_named(scheme)
        self._inner = inner
        self._scheme = chosen.name
        self._most = chosen.relative_rms if relative_rms is None else relative_rms
        self._quantised = quantised_components(inner.schema, chosen)
        self._schema = quantised_schema(inner.schema, chosen)
        lost = Quantisation(scheme=chosen.name, relative_rms=self._most)
        bounds = bounds_file(
            self._schema,
            _compute_dtype(inner.context, self._quantised),
            quantised={one.source.name: lost for one in self._quantised},
        )
        self._files = {**inner.files, LABEL: bounds}
        if isinstance(inner, Identified):
            self.values_digest = inner.values_digest

    @property
    def schema(self) -> Schema:
        """The inner extractor's, with 8-bit components and their scales."""
        return self._schema

    @property
    def context(self) -> Context:
        """The inner extractor's."""
        return self._inner.context

    @property
    def text(self) -> Text:
        """The inner extractor's."""
        return self._inner.text

    @property
    def provenance(self) -> Mapping[str, str]:
        """The inner extractor's."""
        return self._inner.provenance

    @property
    def files(self) -> Mapping[str, bytes]:
        """The inner extractor's, and ``bounds`` in place of its own: the scheme, and how far off values may be."""
        return self._files

    @property
    def max_tokens(self) -> int | None:
        """The inner extractor's."""
        return self._inner.max_tokens

    def extract(self, documents: Sequence[Document]) -> Sequence[Extracted]:
        """Components of each document, quantised, in order.

        Raises
        ------
        InputError
            E104 for values that are not finite, E313 for a layer that would lose more than the bound, naming component
            and layer, and of several documents the digest of the one: names are the caller's to add. E101, E102 where
            the inner extractor gives what its schema does not say; whatever that one raises.
        """
        found, encoded = [], []
        for number, given in enumerate(self._inner.extract(documents)):
            components = dict(given.components)
            for one in self._quantised:
                values = components.get(one.source.name)
                if values is None:
                    continue  # the writer says what is missing, and of which record
                _check_form(values, one)
                made = quantise(values, shared=one.shared, dtype=one.stored.dtype)
                components[one.source.name], components[one.scale.name] = made.stored, made.scale
                encoded.append((number, one, made))
            found.append(Extracted(components=components, extras=given.extras))
        _check_loss(encoded, documents, scheme=self._scheme, most=self._most)
        return found


def _compute_dtype(context: Context, quantised: Sequence[Quantised]) -> ComputeDtype:
    """Of the context; where it is unknown, what is stored without quantisation is thought to be computed like that."""
    if context.model is not None:
        return context.model.compute_dtype
    return cast("ComputeDtype", quantised[0].source.dtype)


def _check_form(values: torch.Tensor, one: Quantised) -> None:
    if values.dtype != torch_dtype(one.source.dtype):
        raise make_error(
            "E102",
            f"{one.source.name!r}: dtype {dtype_name(values.dtype)}, expected {one.source.dtype}; cast it yourself",
        )
    if values.ndim != len(one.source.axes) + 1 or len(values) != len(one.source.layers) or not values.numel():
        raise make_error(
            "E101",
            f"{one.source.name!r}: shape {list(values.shape)}, expected {len(one.source.layers)} layers, "
            f"{', '.join(axis.name for axis in one.source.axes)}, none of them empty",
        )


def _check_loss(
    encoded: Sequence[tuple[int, Quantised, Encoded]], documents: Sequence[Document], *, scheme: str, most: float
) -> None:
    """Refuse what cannot be stored in 8 bits. A device is waited for once, not for each component.

    Raises
    ------
    InputError
        E104 for the first layer with values that are not finite, else E313 for the first that loses too much.
    """
    if not encoded:
        return
    finite = torch.cat([made.finite for _, _, made in encoded])
    lost = torch.cat([made.relative_rms for _, _, made in encoded])
    if bool((finite & (lost <= most)).all()):
        return
    layers = [(number, one, layer) for number, one, _ in encoded for layer in one.source.layers]
    kept, errors = finite.tolist(), lost.tolist()
    at = next(n for n, error in enumerate(errors) if error > most) if all(kept) else kept.index(False)
    number, one, layer = layers[at]
    if kept[at]:
        code = "E313"
        message = (
            f"{one.source.name!r} stored by {scheme} would be off by {errors[at]:.3g} of its RMS, more than "
            f"{most:.3g}: take another scheme, none, or state a larger relative_rms"
        )
    else:
        code = "E104"
        message = (
            f"{one.source.name!r} holds NaN or infinity, which {one.stored.dtype} with scales cannot store: find out "
            "why, or store it without quantisation"
        )
    record = documents[number].digest.hex() if len(documents) > 1 else None
    raise make_error(code, message, record=record, layer=layer)
