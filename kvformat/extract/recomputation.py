"""Records computed again, one by one. Importing this loads torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvformat.errors import FormatError, InputError
from kvformat.extract.agreement import begins_twice
from kvformat.extract.audit_report import Findings, Tally, beyond
from kvformat.extract.bounds import ROW_FACTOR, Bounds, read_bounds
from kvformat.extract.deviation import ComponentPair, Slab, compare, exchanged, pairs
from kvformat.extract.inputs import stored_document

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from kvformat.interfaces import Extractor
    from kvformat.read.dataset import Dataset
    from kvformat.read.record import Record

__all__ = ["Recomputation"]

_EXPLAINED = 3  # records of which layers are compared crosswise


class Recomputation:
    """Computes records again, and keeps count.

    Parameters
    ----------
    findings
        Gets what is wrong.

    Attributes
    ----------
    tallies
        By component that can be compared, how it differs so far.
    computed, equal, beyond, tokens
        Records computed again, of these equal bit by bit and beyond the bounds, and their tokens.
    """

    def __init__(
        self,
        dataset: Dataset,
        extractor: Extractor,
        tokenizer: PreTrainedTokenizerBase | None,
        findings: Findings,
    ) -> None:
        model = extractor.context.model
        self._dataset = dataset
        self._extractor = extractor
        self._tokenizer = tokenizer
        self._bounds: Bounds = read_bounds(dataset, compute_dtype=None if model is None else model.compute_dtype)
        self._findings = findings
        self._pairs, without = pairs(dataset.schema, extractor.schema)
        for component, layer, reason in without:
            findings.add("E311", f"{component.name!r} cannot be compared: {reason}", layer=layer)
        self.tallies = [Tally(pair, self._bounds) for pair in self._pairs]
        self.computed = self.equal = self.beyond = self.tokens = 0

    def look_at(self, record: Record) -> None:
        """Compute one record again, and compare it."""
        name = record.names[0]
        try:
            document = stored_document(self._dataset, record)
            stored = {one.name: record.component(one.name) for one in self._dataset.schema.components}
        except FormatError as error:
            self._findings.add(error.code, error.message, path=error.path, record=name, layer=error.layer)
            return
        if begins_twice(self._tokenizer, document.token_ids):
            message = "the document begins with BOS twice: once in its text, and added once more"
            self._findings.add("E305", message, record=name)
        try:
            (extracted,) = self._extractor.extract([document])
        except InputError as error:
            message = f"the model does not take the stored document: {error.message}"
            self._findings.add(error.code, message, record=name, layer=error.layer)
            return
        self.computed += 1
        self.tokens += document.num_tokens
        self._compare(record.index, name, stored, extracted.components)

    def _compare(
        self,
        number: int,
        name: str,
        stored: Mapping[str, torch.Tensor],
        computed: Mapping[str, torch.Tensor],
    ) -> None:
        found = [compare(pair, stored, computed) for pair in self._pairs]
        for tally, slabs in zip(self.tallies, found, strict=True):
            tally.add(number, slabs)
        self.equal += bool(found) and all(slab.equal for slabs in found for slab in slabs)
        off = [beyond(pair, slabs, self._bounds) for pair, slabs in zip(self._pairs, found, strict=True)]
        if not any(off):
            return
        self.beyond += 1
        parts = []
        layer = None
        for pair, slabs, indices in zip(self._pairs, found, off, strict=True):
            if not indices:
                parts.append(f"{pair.stored.name!r} agrees")
                continue
            worst = max(indices, key=lambda index: slabs[index].relative(slabs[index].rms))
            layer = pair.stored.layers[worst] if layer is None else layer
            parts.append(self._told(pair, slabs, indices, worst))
            if self.beyond <= _EXPLAINED:
                parts += self._exchange(pair, indices, stored, computed)
        message = "; ".join([*parts, *_hint(self._pairs, off)])
        self._findings.add("E311", message, record=name, layer=layer)

    def _told(self, pair: ComponentPair, slabs: list[Slab], indices: list[int], worst: int) -> str:
        slab, bound = slabs[worst], self._bounds.relative_rms[pair.stored.name]
        by, row = slab.relative(slab.rms), slab.relative(slab.row_rms)
        told = f"{pair.stored.name!r} differs in {len(indices)} of {len(slabs)} layers, "
        layer = f"layer {pair.stored.layers[worst]}"
        if by <= bound:
            most = ROW_FACTOR * bound
            return f"{told}in {layer} at token {slab.row} alone, by {row:.2g} of its RMS (allowed {most:.2g})"
        return f"{told}most in {layer}, by {by:.2g} of its RMS (allowed {bound:.2g})"

    def _exchange(
        self,
        pair: ComponentPair,
        indices: list[int],
        stored: Mapping[str, torch.Tensor],
        computed: Mapping[str, torch.Tensor],
    ) -> list[str]:
        name, bound = pair.stored.name, self._bounds.relative_rms[pair.stored.name]
        for index in indices:
            other = exchanged(pair, stored, computed, index=index, bound=bound)
            if other is not None:
                return [f"layer {pair.stored.layers[index]} of {name!r} is what the model gives for layer {other}"]
        return []


def _hint(pairs: list[ComponentPair], off: list[list[int]]) -> list[str]:
    rotated, others = (
        [bool(indices) for pair, indices in zip(pairs, off, strict=True) if pair.stored.role in roles]
        for roles in (("key", "rope_key"), ("value", "latent"))
    )
    if any(rotated) and others and not any(others):
        return ["keys alone differ: they were made with other positions or another rotary embedding, padding included"]
    return []
