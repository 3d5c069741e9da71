"""Every mutation of the registry is found, by the package and by the reference reader, and as nothing else."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path

import pytest

import kvformat
from kvformat.codes import CODES
from kvformat.errors import KVFormatError
from kvformat.testing.mutations import MUTATIONS, Mutation
from kvformat.testing.vectors import VALID
from tests.spec.reference import refusal
from tests.testing.touch import touch_all

EVERY = pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.case)


def test_every_reader_code_has_a_mutation_and_a_vector() -> None:
    reader = {code for code, row in CODES.items() if row.kind == "reader"}
    assert {mutation.code for mutation in MUTATIONS} == reader
    assert {mutation.code for mutation in MUTATIONS if mutation.vector} == reader


def test_names_are_unique_and_bases_exist() -> None:
    assert [name for name, count in Counter(m.case for m in MUTATIONS).items() if count > 1] == []
    assert {mutation.base for mutation in MUTATIONS} <= set(VALID)


@EVERY
def test_a_mutation_is_found_as_its_code_and_nothing_else(mutation: Mutation, base, tmp_path: Path) -> None:
    files = base(mutation.base)
    mutation.apply(files)
    path = tmp_path / "dataset"
    files.save(path)

    report = kvformat.verify(path, expected_id=mutation.expected_id)
    assert not report.ok
    assert {finding.code for finding in report.findings} == {mutation.code}
    assert all(finding.message for finding in report.findings)
    assert refusal(path, mutation.expected_id) == mutation.code
    assert mutation.found in CODES[mutation.code].detected.split(", ")
    for io in ("mmap", "pread"):
        assert read(path, mutation.expected_id, io) == (mutation.found, mutation.code)


@EVERY
def test_a_reader_told_not_to_verify_never_crashes(mutation: Mutation, base, tmp_path: Path) -> None:
    files = base(mutation.base)
    mutation.apply(files)
    files.save(tmp_path / "dataset")
    code = None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"\[W003\]")
            dataset = kvformat.open(tmp_path / "dataset", expected_id=mutation.expected_id, verify="off")
        touch_all(dataset)
    except KVFormatError as error:
        code = error.code
    if mutation.found == "open":
        assert code == mutation.code
    if mutation.code in ("E072", "E073", "E077"):
        assert code is None, "the caller asked for no checks of values"


def read(path: Path, expected_id: str | None, io: str) -> tuple[str, str]:
    """When a reader refuses the dataset, and with which code; as found by verification where it does not."""
    try:
        dataset = kvformat.open(path, expected_id=expected_id, io=io)
    except KVFormatError as error:
        return "open", error.code
    try:
        touch_all(dataset)
    except KVFormatError as error:
        return "touch", error.code
    (code,) = {finding.code for finding in kvformat.verify(path, expected_id=expected_id).findings}
    return "verify", code


def level_of(mutation: Mutation) -> int:
    """The lowest verification level that finds it (SPEC.md, section 18)."""
    if mutation.found == "open":
        return 1
    if mutation.code in ("E076", "E077"):
        return 4
    return 3 if mutation.code >= "E070" else 2


@pytest.mark.parametrize("level", [1, 2, 3])
def test_lower_levels_find_what_belongs_to_them(level: int, base, tmp_path: Path) -> None:
    for mutation in {m.code: m for m in MUTATIONS if m.vector}.values():
        files = base(mutation.base)
        mutation.apply(files)
        path = tmp_path / mutation.case / "dataset"
        files.save(path)
        report = kvformat.verify(path, level=level, expected_id=mutation.expected_id)
        assert report.ok == (level_of(mutation) > level), mutation.case
        assert {finding.code for finding in report.findings} <= {mutation.code}, mutation.case
