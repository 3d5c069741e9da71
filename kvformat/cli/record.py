"""One record, for ``kvformat inspect --record``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from kvformat.cli import output

if TYPE_CHECKING:
    from kvformat.read.dataset import Dataset
    from kvformat.read.record import Record

__all__ = ["show_record"]

_FIRST = 4


def show_record(record: Record, dataset: Dataset, *, values: bool, as_json: bool) -> None:
    """Print what a record is; its values only where ``values`` says so."""
    document = _document(record, dataset)
    if values:
        document |= _values(record, dataset)
    if as_json:
        output.emit_json({"ok": True, **document})
    else:
        _show(document)


def _document(record: Record, dataset: Dataset) -> dict[str, Any]:
    row = dataset.index.shard(dataset.index.shard_of(record.index))
    fingerprint = record.fingerprint
    placement = dataset.layout.place(tuple(record.dims.values()))
    return {
        "location": dataset.location,
        "id": dataset.id,
        "record": record.index,
        "names": record.names,
        "dims": record.dims,
        "nbytes": record.nbytes,
        "shard": row.path,
        "document": record.document.hex(),
        "fingerprint": None if fingerprint is None else fingerprint.hex(),
        "tensors": [
            {"name": placed.name, "dtype": placed.dtype, "shape": list(placed.shape), "nbytes": placed.nbytes}
            for placed in placement.tensors.values()
            if placed.name != "sums"
        ],
    }


def _values(record: Record, dataset: Dataset) -> dict[str, Any]:
    """Extras in full, and of each layer of each component its range and first values, as stored."""
    layers = []
    for component in dataset.schema.components:
        tensor = record.component(component.name)
        for row, layer in enumerate(component.layers):
            slab = tensor[row].float().flatten()
            if slab.numel() == 0:
                continue
            layers.append(
                {
                    "component": component.name,
                    "layer": layer,
                    "min": _number(slab.min().item()),
                    "max": _number(slab.max().item()),
                    "mean": _number(slab.mean().item()),
                    "rms": _number(slab.square().mean().sqrt().item()),
                    "first": [_number(value) for value in slab[:_FIRST].tolist()],
                }
            )
    extras = {extra.name: record.extra(extra.name).tolist() for extra in dataset.schema.extras}  # noqa: S610 - no database
    return {"extras": _numbers(extras), "layers": layers}


def _number(value: float) -> float | str:
    """JSON has no name for these: they are given as text."""
    return value if math.isfinite(value) else str(value)


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return _number(value) if isinstance(value, float) else value


def _show(document: dict[str, Any]) -> None:
    from kvformat.cli.tables import facts, heading, table

    tensors = table("tensor", "dtype", "shape", "size", right=("size",))
    for tensor in document["tensors"]:
        tensors.add_row(tensor["name"], tensor["dtype"], str(tensor["shape"]), output.size_text(tensor["nbytes"]))
    parts: list[Any] = [
        facts(
            {
                "dataset": document["location"],
                "record": document["record"],
                "names": ", ".join(document["names"]),
                **document["dims"],
                "size": output.size_text(document["nbytes"]),
                "shard": document["shard"],
                "document": document["document"],
                "fingerprint": document["fingerprint"] or "none: the context is unknown",
            }
        ),
        heading("tensors"),
        tensors,
    ]
    if "layers" in document:
        layers = table("component", "layer", "min", "max", "mean", "rms", "first values", right=("layer",))
        for layer in document["layers"]:
            measured = [_short(layer[name]) for name in ("min", "max", "mean", "rms")]
            first = " ".join(_short(value) for value in layer["first"])
            layers.add_row(layer["component"], str(layer["layer"]), *measured, first)
        parts += [heading("values, as stored"), layers]
        for name, value in document["extras"].items():
            parts += [heading(name), facts({"": str(value)})]
    output.render(*parts)


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
