"""The editable model of a dataset: what it loads it saves, and sealing changes nothing that is sound."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvformat
from kvformat.testing.dataset_files import LEVELS, DatasetFiles
from kvformat.testing.vectors import VALID

EVERY = pytest.mark.parametrize("name", sorted(VALID))


@EVERY
def test_what_is_loaded_is_saved(name: str, base, tmp_path: Path) -> None:
    files = base(name)
    files.save(tmp_path / "a")
    DatasetFiles.load(tmp_path / "a").save(tmp_path / "b")
    saved = [{p.relative_to(d).as_posix(): p.read_bytes() for p in d.rglob("*") if p.is_file()} for d in
             (tmp_path / "a", tmp_path / "b")]  # fmt: skip
    assert saved[0] == saved[1] == files.files()


@EVERY
@pytest.mark.parametrize("level", LEVELS)
def test_sealing_a_sound_dataset_changes_nothing(name: str, level, base) -> None:
    files = base(name)
    before = files.files()
    files.reseal(level)
    assert files.files() == before


@EVERY
def test_a_table_encoded_anew_is_the_same(name: str, base) -> None:
    files = base(name)
    before = files.files()
    for table, parts in files.parts.items():
        counts = [part.entry["count"] for part in parts]
        cuts = [sum(counts[:number]) for number in range(1, len(counts))]
        files.set_table(table, files.table(table), cuts=cuts)
    files.reseal("parts")
    assert files.files() == before


def test_a_copy_is_independent(base) -> None:
    files = base("several-shards")
    twin = files.copy()
    twin.tensor(0, "k")[0] ^= 1
    twin.column("rows", "offset")[0] = 7
    twin.manifest["totals"]["names"] = 0
    assert files.files() == base("several-shards").files()


def test_sealing_the_sums_makes_other_values_valid(base, tmp_path: Path) -> None:
    files = base("several-shards")
    files.tensor(3, "v")[:] = 0
    files.reseal("sums")
    files.save(tmp_path / "dataset")
    assert kvformat.verify(tmp_path / "dataset").ok
    assert not kvformat.open(tmp_path / "dataset")[3].component("v").any()


def test_another_minor_version_is_valid(base, tmp_path: Path) -> None:
    files = base("tables-in-parts")
    files.set_version("1.23")
    files.save(tmp_path / "dataset")
    report = kvformat.verify(tmp_path / "dataset")
    assert (report.findings, [finding.code for finding in report.warnings]) == ((), ["W003"])
    with pytest.warns(kvformat.KVFormatWarning, match="W003"):
        kvformat.open(tmp_path / "dataset")


def test_a_schema_that_lays_records_out_otherwise_is_not_adopted(base) -> None:
    files = base("one-record")
    before = files.files()
    files.manifest["schema"]["components"][0]["axes"][2]["size"] = 4096
    assert not files.adopt_schema()
    assert files.files() == before
