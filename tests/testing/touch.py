"""Use everything of a dataset once, as a careful program would."""

from __future__ import annotations

import kvformat
from kvformat.read.record import Record

ROLES = ("key", "value", "latent", "rope_key", "key_scale", "value_scale", "hidden", "state")


def touch_all(dataset: kvformat.Dataset) -> int:
    """Read every record, look every name and every document up; returns how many look-ups found something else."""
    wrong = 0
    for number in range(len(dataset)):
        wrong += touch_record(dataset, dataset[number])
    for name, number in list(dataset.names()):
        wrong += not finds(dataset, name, number)
    return wrong


def touch_record(dataset: kvformat.Dataset, record: Record) -> int:
    """Read every tensor of a record and look it up by each of its keys."""
    for component in dataset.schema.components:
        assert record.component(component.name).shape[0] == len(component.layers)
        if component.role in ROLES:
            for layer in component.layers:
                record.slab(component.role, layer=layer)
    for extra in dataset.schema.extras:
        record.extra(extra.name)
    assert (record.fingerprint is None) == (dataset.context.model is None)
    found = dataset.find(document=record.document)
    wrong = found is None or found.index != record.index
    assert record.names
    return wrong + sum(not finds(dataset, name, record.index) for name in record.names)


def finds(dataset: kvformat.Dataset, name: str, number: int) -> bool:
    """Whether the record of a name is the one of this number."""
    if name not in dataset:
        return False
    return dataset[name].index == number
