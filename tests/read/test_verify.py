"""``kvformat.verify``: everything it finds at once, where it is, and how far it got."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import msgspec
import pytest

import kvformat
from kvformat.errors import FormatError, IdentityError, StorageError, UsageError
from kvformat.read import verify as verify_module
from kvformat.storage.local_read import LocalReader
from kvformat.testing.dataset_files import DatasetFiles


def damaged(files: DatasetFiles, path: Path) -> None:
    """Several defects in several places, not sealed: as a failing disk leaves them."""
    files.tensor(0, "k")[0] ^= 1
    files.tensor(1, "token_ids")[0] ^= 1
    files.tensor(3, "pad")[-1] ^= 1
    files.tensor(4, "sums")[0] ^= 1
    files.shards[2][300] ^= 1
    files.save(path)


def test_all_faults_are_found_and_placed(base, tmp_path: Path) -> None:
    path = tmp_path / "dataset"
    files: DatasetFiles = base("several-shards")
    damaged(files, path)
    report = kvformat.verify(path)
    assert not report.ok
    assert report.warnings == ()
    shards = [str(path / name) for name in files.shard_paths()]
    assert [(f.code, f.path, f.record, f.layer) for f in report.findings] == [
        ("E063", shards[2], None, None),
        ("E070", shards[2], 4, None),
        ("E072", shards[0], 0, 0),
        ("E073", shards[0], 1, None),
        ("E076", shards[1], 3, None),
        ("E077", shards[0], None, None),
        ("E077", shards[1], None, None),
        ("E077", shards[2], None, None),
    ]
    assert all(finding.message for finding in report.findings)
    assert {f.code for f in kvformat.verify(path, level=3).findings} == {"E063", "E070", "E072", "E073"}
    assert {f.code for f in kvformat.verify(path, level=2).findings} == {"E063"}
    assert kvformat.verify(path, level=1).ok


@pytest.mark.parametrize("name", ["several-shards", "tables-in-parts"])
def test_the_number_of_threads_changes_nothing(name: str, base, tmp_path: Path) -> None:
    path = tmp_path / "dataset"
    damaged(base(name), path)
    reports = [kvformat.verify(path, threads=threads) for threads in (1, 2, 7, None)]
    assert all(report == reports[0] for report in reports)
    assert reports[0].findings


def test_a_report_is_plain_data(saved) -> None:
    path = saved("several-shards")
    report = kvformat.verify(path)
    assert (report.ok, report.level, report.records) == (True, 4, 5)
    assert report.nbytes == sum(file.stat().st_size for file in (path / "shards").rglob("*.safetensors"))
    assert msgspec.json.decode(msgspec.json.encode(report), type=kvformat.Report) == report


@pytest.mark.parametrize("level", [2, 3, 4])
def test_progress_is_monotonic_and_complete(saved, level: int) -> None:
    calls: list[tuple[int, int]] = []
    lock = threading.Lock()

    def progress(done: int, total: int) -> None:
        assert not lock.locked(), "one call at a time"
        with lock:
            calls.append((done, total))

    path = saved("several-shards")
    report = kvformat.verify(path, level=level, progress=progress, threads=3)
    assert report.ok
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert len({total for _, total in calls}) <= 1
    assert not calls or calls[-1][0] == calls[-1][1]
    assert bool(calls) == (level > 2)


@pytest.mark.parametrize("options", [{"level": 0}, {"level": 5}, {"level": "4"}, {"threads": 0}, {"threads": -1}])
def test_arguments_are_checked(saved, options) -> None:
    with pytest.raises(UsageError, match="E081"):
        kvformat.verify(saved("one-record"), **options)


def test_a_pinned_id_is_a_finding(saved) -> None:
    path = saved("one-record")
    report = kvformat.verify(path, expected_id="0" * 64)
    assert [finding.code for finding in report.findings] == ["E007"]
    with pytest.raises(IdentityError):
        kvformat.open(path, expected_id="0" * 64)


def test_an_interruption_passes_through(saved) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kvformat.verify(saved("several-shards"), progress=interrupt)


def test_a_file_the_process_may_not_read_is_a_finding(saved, monkeypatch) -> None:
    """Of the storage, not of the format; the rest is still checked."""
    path = saved("several-shards")
    real = LocalReader.open

    def deny(self: LocalReader, name: str, **options: object):
        if "00000001-" in name:
            raise kvformat.StorageError("Permission denied", code="E207", path=self.path(name))
        return real(self, name, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalReader, "open", deny)
    report = kvformat.verify(path)
    assert [finding.code for finding in report.findings] == ["E207"]


@pytest.mark.parametrize("level", [1, 2, 4])
@pytest.mark.parametrize("code", ["E002", "E007"])
def test_a_root_that_changes_meanwhile_is_reported(level: int, code: str, saved, monkeypatch) -> None:
    """At the worst moment: the rest of verification still looks at what the root named at the beginning."""
    path, other = saved("several-shards"), saved("two-shards")
    identity = kvformat.open(path).id
    ours = {str(file) for file in path.rglob("*")}
    load = verify_module.load_manifest
    reads: list[str] = []
    read = LocalReader.read

    def replace(reader: LocalReader, **options: object):
        found = load(reader, **options)
        (path / "kvformat.json").unlink()
        if code == "E007":
            shutil.copytree(other, path, dirs_exist_ok=True)
        return found

    def count(self: LocalReader, name: str, **options: object) -> bytes:
        reads.append(name)
        return read(self, name, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(verify_module, "load_manifest", replace)
    monkeypatch.setattr(LocalReader, "read", count)
    report = kvformat.verify(path, level=level)
    assert [finding.code for finding in report.findings] == [code]
    assert report.id == identity
    assert report.findings[0].path == str(path / "kvformat.json")
    assert sum(name.startswith("manifest/") for name in reads) == 1
    assert reads.count("kvformat.json") == 2  # before and after
    assert not {warning.path for warning in report.warnings} & ours


def test_a_record_said_to_lie_beyond_its_shard(base, tmp_path: Path) -> None:
    """Two rows that agree with each other, not with the file."""
    for number, offset in enumerate((1 << 40, 1 << 62, 1 << 63, (1 << 64) - 8192)):
        files: DatasetFiles = base("no-token-ids")
        offsets = files.column("rows", "offset")
        offsets[1], offsets[2] = offset, (offset + files.placement(1).nbytes) % (1 << 64)
        files.reseal("parts")
        path = tmp_path / str(number)
        files.save(path)
        assert {finding.code for finding in kvformat.verify(path).findings} == {"E054"}
        for io in ("mmap", "pread"):
            for mode in ("first", "off"):
                with pytest.raises(FormatError, match="E054"):
                    kvformat.open(path, io=io, verify=mode)[1].component("k")


def test_equal_documents_are_found_whatever_lies_between_them(base, tmp_path: Path) -> None:
    """Other documents may have the same key: the first 8 bytes."""
    files: DatasetFiles = base("no-token-ids")
    documents = files.parts["rows"][0].columns["document"]
    documents[1] = documents[2] = documents[0]
    documents[1][8] ^= 1
    files.set_document_keys()
    files.reseal("parts")
    files.save(tmp_path / "dataset")
    found = kvformat.verify(tmp_path / "dataset").findings
    assert [(finding.code, finding.record) for finding in found] == [("E058", 2)]


def test_tables_are_summed_and_padding_is_looked_at_beside_other_faults(base, tmp_path: Path) -> None:
    files: DatasetFiles = base("one-record")
    files.parts["shards"][0].columns["first_record"][0] = 1
    files.parts["rows"][0].columns["dims"][0, 0] += 1
    files.parts["rows"][0].data[-1] = 1
    files.reseal("parts")
    files.save(tmp_path / "dataset")
    (tmp_path / "dataset" / files.part_paths("name_keys")[0]).unlink()
    assert {"E002", "E020", "E052", "E076"} <= {f.code for f in kvformat.verify(tmp_path / "dataset").findings}


@pytest.mark.parametrize("location", ["x" * 5000, "/" + "y/" * 3000])
def test_a_location_that_cannot_be_looked_at(location: str) -> None:
    with pytest.raises(StorageError, match="E203"):
        kvformat.open(location)
    assert [finding.code for finding in kvformat.verify(location).findings] == ["E203"]


@pytest.mark.parametrize("table", ["rows", "names", "document_keys"])
def test_shards_are_known_where_another_table_is_damaged(saved, base, table: str) -> None:
    path = saved("several-shards")
    for name in base("several-shards").part_paths(table):
        (path / name).unlink()
    report = kvformat.verify(path)
    assert {finding.code for finding in report.findings} == {"E002"}
    assert report.warnings == ()
