"""Whether a finished dataset is what a plan would make."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import NoReturn

from kvformat.errors import make_error
from kvformat.extract.options import ContextKind
from kvformat.extract.plan import Plan
from kvformat.extract.rules import other_rules
from kvformat.interfaces import Extractor
from kvformat.read.dataset import Dataset
from kvformat.read.opening import open_dataset
from kvformat.spec.context import differences
from kvformat.spec.paths import ROOT, STAGING
from kvformat.spec.schema import Schema
from kvformat.storage.faults import translated
from kvformat.storage.remote import Remote
from kvformat.write.prepared import check_place

__all__ = [
    "check_comparable",
    "check_context",
    "check_directory",
    "check_names",
    "check_plan",
    "check_schema",
    "check_target",
]


def check_target(target: Path | Remote, *, probe: bool) -> Dataset | None:
    """The dataset that is finished at a location, or None where one can be made.

    Parameters
    ----------
    probe
        Whether to try that an object store can be written to, and commits; otherwise nothing is written.

    Raises
    ------
    UsageError
        E081 in the directory of a plan, and for the name of a documents file.
    StorageError
        E207 where a file stands in the way, or the location may not be written to; E208, E209 of an object store.
    """
    if isinstance(target, Path):
        check_place(target, what="a dataset")
        return _finished_in(target)
    if target.stat(ROOT) is not None:
        return open_dataset(target)
    if probe:
        target.require_create(f"{STAGING}/")
    return None


def _finished_in(root: Path) -> Dataset | None:
    with translated(root):
        if (root / ROOT).exists():
            return open_dataset(root)
    check_directory(root)
    return None


def check_directory(root: Path) -> None:
    """Refuse a directory that could not be made or written to; E207."""
    with translated(root):
        place = next(path for path in (root, *root.parents) if os.path.lexists(path))
        if not place.is_dir():
            raise make_error("E207", "a file stands where a directory is needed: choose another location", path=place)
        if not os.access(place, os.W_OK | os.X_OK):
            raise make_error("E207", "the directory may not be written to: check owner and mode", path=place)


def check_names(schema: Schema, allow_non_finite: Collection[str]) -> None:
    """Refuse names that a schema has not, which otherwise shows when the first shard begins; E081."""
    names = [*(one.name for one in schema.components), *(one.name for one in schema.extras)]
    unknown = sorted(set(allow_non_finite) - set(names))
    if unknown:
        has = f"names {', '.join(unknown)}, which the schema has not; it has {', '.join(names)}"
        raise make_error("E081", f"allow_non_finite {has}")


def check_schema(dataset: Dataset, schema: Schema) -> None:
    """Refuse another schema; E118. No document need be read for that."""
    if dataset.schema != schema:
        _differs(dataset, "its schema is another one")


def check_plan(dataset: Dataset, plan: Plan) -> None:
    """Refuse unless a dataset holds just the documents of a plan, under the same names, in the same order; E118.

    Documents it lists as skipped may be missing. Rules by which text became token ids are named where they differ:
    of other documents, they may be the reason.
    """
    rules = other_rules(dataset.text, plan.text)
    found = _other_documents(dataset, plan)
    if found is None and rules is None:
        return
    if found is None:
        _differs(dataset, f"its text became the same token ids by other rules ({rules})")
    _differs(dataset, found if rules is None else f"{found}, and its text became token ids by other rules ({rules})")


def _other_documents(dataset: Dataset, plan: Plan) -> str | None:
    """In what names, documents or order are not those of a plan; None where they are."""
    skipped = {one.name for one in dataset.manifest.skipped}
    expected = plan.num_names - len(skipped - {one.name for one in plan.skipped})
    if dataset.num_names != expected:
        return f"it has {dataset.num_names} names, the plan {expected}"
    absent: set[int] = set()
    for record, _, encoded in plan.names():
        name = encoded.decode()
        number = dataset.index.find_name(name)
        if number is None and name in skipped:
            absent.add(record)
        elif number is None:
            return f"it has no record named {name!r}"
        elif dataset.index.document(number) != plan.digest_of(record):
            return f"its record {name!r} is of another document"
        elif number != record - len(absent):
            return f"its record {name!r} is number {number}, the plan says {record - len(absent)}"
    return None


def check_comparable(dataset: Dataset, wanted: ContextKind) -> None:
    """Refuse where a context is unknown: it equals nothing, itself included, and no model need be loaded. E118."""
    if dataset.context.kind != "unknown" and wanted != "unknown":
        return
    if dataset.context.kind != "unknown":
        whose = "this run's context would be unknown"
        remedy = "leave out --unknown-context (context='unknown') to have the contexts compared, or"
    else:
        whose = "both contexts are unknown" if wanted == "unknown" else "its context is unknown"
        remedy = "use it as it is if you trust it, or"
    _differs(
        dataset,
        f"{whose}, which equals nothing: whether its K and V are this run's cannot be told",
        remedy=f"{remedy} choose another location",
    )


def check_context(dataset: Dataset, extractor: Extractor) -> None:
    """Refuse unless the contexts are equal. E118."""
    found = differences(dataset.context, extractor.context)
    if found:
        _differs(dataset, f"the contexts differ: {'; '.join(found)}")


def _differs(dataset: Dataset, what: str, *, remedy: str = "choose another location") -> NoReturn:
    raise make_error("E118", f"a dataset is here already, and {what}; {remedy}", path=dataset.location)
