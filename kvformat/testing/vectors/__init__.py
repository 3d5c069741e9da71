"""Small valid datasets, one for each thing the format can express, and what a reader finds in each."""

from __future__ import annotations

from kvformat.spec.schema import Schema
from kvformat.testing.dataset_files import DatasetFiles
from kvformat.testing.vectors import documents, models, naming, shapes
from kvformat.testing.vectors.case import UNIFORM, Case, Entry, usual_entries
from kvformat.testing.vectors.naming import COLLIDING_NAMES

__all__ = ["COLLIDING_NAMES", "VALID", "WARN", "Case", "Entry"]

_WIDE = Schema.uniform(
    num_layers=2, num_kv_heads=1, head_dim=3, v_head_dim=5, dtype="F16", key_stage="raw", layers=(3, 9)
)
_CASES = (
    Case(name="one-record", schema=UNIFORM, entries=usual_entries(5)),
    Case(name="uniform-bf16", schema=UNIFORM, entries=usual_entries(5, 3)),
    Case(name="two-shards", schema=UNIFORM, entries=usual_entries(3, 5, 2), options={"shard_slots": 2}),
    Case(name="several-shards", schema=UNIFORM, entries=usual_entries(3, 5, 2, 6, 4), options={"shard_slots": 2}),
    Case(name="wide-values", schema=_WIDE, entries=usual_entries(4, 2)),
    *naming.CASES,
    *models.CASES,
    *shapes.CASES,
    *documents.CASES,
)


def _unknown_file(files: DatasetFiles) -> None:
    files.other = {"README.md": b"not of the dataset\n", "shards/00000/note.txt": b"nor this\n"}


def _staging(files: DatasetFiles) -> None:
    files.other = {".staging/0123456789abcdef-01234567/plan.json": b"{}"}


def _newer_minor(files: DatasetFiles) -> None:
    files.set_version("1.7")


_WARN = (
    Case(name="W001-unknown-file", schema=UNIFORM, entries=usual_entries(2), finish=_unknown_file, warnings=("W001",)),
    Case(name="W002-staging-left", schema=UNIFORM, entries=usual_entries(2), finish=_staging, warnings=("W002",)),
    Case(name="W003-newer-minor", schema=UNIFORM, entries=usual_entries(2), finish=_newer_minor, warnings=("W003",)),
)

VALID: dict[str, Case] = {case.name: case for case in _CASES}
"""Valid datasets without warnings, by name."""
WARN: dict[str, Case] = {case.name: case for case in _WARN}
"""Valid datasets that verification warns about, by name: the code comes first."""
