"""Every flipped bit and every other length of every file is found; no read gives other bytes than were written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import kvformat
from kvformat.codes import CODES
from kvformat.errors import KVFormatError
from kvformat.read.dataset import Dataset
from kvformat.read.opening import load_manifest
from kvformat.testing.dataset_files import DatasetFiles
from kvformat.testing.vectors import VALID
from tests.read.memory import MemoryReader
from tests.testing.touch import touch_all

SLICES = 4
KINDS = ("kvformat.json", "manifest/", "index/", "files/", "shards/")


@pytest.fixture(scope="module")
def tiny() -> DatasetFiles:
    """One record in one shard; a few hundred bytes in each other file."""
    return VALID["one-record"].build()


@pytest.fixture(scope="module")
def covered() -> DatasetFiles:
    """The same with covered files and a model's context."""
    return VALID["model-context"].build()


def bits(reader: MemoryReader, kind: str, *, step: int = 1, first: int = 0) -> Iterator[tuple[str, int]]:
    for name, size in reader.sizes.items():
        if name.startswith(kind):
            yield from ((name, bit) for bit in range(first, 8 * size, step))


def check_flips(files: DatasetFiles, kind: str, *, step: int = 1, first: int = 0) -> None:
    reader = MemoryReader(files.files())
    assert reader.verify().ok
    checked = 0
    for name, bit in bits(reader, kind, step=step, first=first):
        reader.flip(name, bit)
        report = reader.verify()
        assert report.findings, f"bit {bit % 8} of byte {bit // 8} of {name}"
        assert all(CODES[finding.code].kind == "reader" for finding in report.findings)
        reader.flip(name, bit)
        checked += 1
    assert checked
    assert reader.verify().ok


@pytest.mark.parametrize("kind", ["kvformat.json", "manifest/"])
def test_every_bit_of_root_and_manifest(kind: str, tiny: DatasetFiles, covered: DatasetFiles) -> None:
    for files in (tiny, covered):
        check_flips(files, kind)


@pytest.mark.parametrize(("kind", "step"), [("index/", 11), ("files/", 11), ("shards/", 43)])
def test_many_bits_of_the_other_files(kind: str, step: int, tiny: DatasetFiles, covered: DatasetFiles) -> None:
    """A step that is odd reaches every bit of a byte, and every kind of byte."""
    check_flips(covered if kind == "files/" else tiny, kind, step=step)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SLICES))
@pytest.mark.parametrize("kind", ["index/", "files/", "shards/"])
def test_every_bit_of_the_other_files(kind: str, first: int, tiny: DatasetFiles, covered: DatasetFiles) -> None:
    check_flips(covered if kind == "files/" else tiny, kind, step=SLICES, first=first)


def opened(reader: MemoryReader, verify: str) -> Dataset:
    identity, manifest, layout = load_manifest(reader)
    options = {"verify": verify, "io": "mmap", "max_open_files": 4}
    return Dataset(reader, location="/dataset", dataset_id=identity, manifest=manifest, layout=layout, options=options)


def contents(dataset: Dataset) -> list[bytes]:
    """All that a reader is given of a dataset."""
    found: list[bytes] = []
    for record in dataset:
        found += [record.document, *(name.encode() for name in record.names)]
        for component in dataset.schema.components:
            tensor = record.component(component.name)
            found.append(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        found += [record.extra(extra.name).numpy().tobytes() for extra in dataset.schema.extras]
    return found


@pytest.mark.parametrize("verify", ["first", "always"])
@pytest.mark.parametrize(("kind", "step"), [("kvformat.json", 1), ("manifest/", 7), ("index/", 13), ("shards/", 13)])
def test_a_read_gives_what_was_written_or_refuses(kind: str, step: int, verify: str, tiny: DatasetFiles) -> None:
    """Whatever bit is flipped; bits that no read looks at change nothing."""
    reader = MemoryReader(tiny.files())
    wanted = contents(opened(reader, verify))
    codes = set()
    for name, bit in bits(reader, kind, step=step):
        reader.flip(name, bit)
        try:
            found = contents(opened(reader, verify))
        except KVFormatError as error:
            codes.add(error.code)
        else:
            assert found == wanted, f"bit {bit} of {name}"
        reader.flip(name, bit)
    assert codes
    assert {CODES[code].kind for code in codes} == {"reader"}


def test_damage_in_a_record_is_refused_by_touching_only_what_it_hits(covered: DatasetFiles) -> None:
    """The other record, and the other slab of the same component, stay readable."""
    reader = MemoryReader(covered.files())
    shard, start = covered.locate(0)
    placed = covered.placement(0).tensors["k"]
    reader.flip(covered.shard_paths()[shard], 8 * (start + placed.offset + placed.slab_nbytes) + 3)
    dataset = opened(reader, "first")
    with pytest.raises(KVFormatError, match="E072") as caught:
        dataset[0].component("k")
    assert (caught.value.record, caught.value.layer) == (0, 1)
    with pytest.raises(KVFormatError, match="E072"):
        dataset[0].slab("key", layer=1)
    dataset[0].slab("key", layer=0)
    dataset[0].component("v")
    dataset[0].extra("token_ids")
    dataset[1].component("k")


# ---------------------------------------------------------------------------------------------- lengths


def check_lengths(path: Path, names: list[str], lengths: Callable[[int], list[int]]) -> None:
    assert kvformat.verify(path).ok
    for name in names:
        file = path / name
        data = file.read_bytes()
        for length in lengths(len(data)):
            file.write_bytes((data + b"\0" * 4096)[:length])
            report = kvformat.verify(path)
            assert report.findings, f"{name} of {length} instead of {len(data)} bytes"
            first = report.findings[0].code
            assert first == ("E011" if name == "kvformat.json" else "E005"), f"{name} of {length} bytes: {first}"
            with pytest.raises(KVFormatError):
                touch_all(kvformat.open(path))
        file.write_bytes(data)
    assert kvformat.verify(path).ok


def names_of(files: DatasetFiles, *kinds: str) -> list[str]:
    return [name for name in files.files() if name.startswith(kinds)]


@pytest.mark.parametrize("name", ["tiny", "covered"])
def test_every_length_of_root_and_manifest(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    files: DatasetFiles = request.getfixturevalue(name)
    files.save(tmp_path / "dataset")
    names = names_of(files, "kvformat.json", "manifest/")
    check_lengths(tmp_path / "dataset", names, lambda size: [*range(size), size + 1, size + 4096])


def test_some_lengths_of_the_other_files(tiny: DatasetFiles, tmp_path: Path) -> None:
    tiny.save(tmp_path / "dataset")
    names = names_of(tiny, "index/", "shards/")

    def lengths(size: int) -> list[int]:
        return [*range(0, size, 67), 1, 8, size // 2, size - 64, size - 1, size + 1, size + 64, size + 4096]

    check_lengths(tmp_path / "dataset", names, lengths)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SLICES))
def test_every_length_of_the_other_files(first: int, tiny: DatasetFiles, tmp_path: Path) -> None:
    tiny.save(tmp_path / "dataset")
    names = names_of(tiny, "index/", "shards/")
    check_lengths(tmp_path / "dataset", names, lambda size: list(range(first, size, SLICES)))


def test_every_length_of_covered_files_is_found_by_verification(covered: DatasetFiles, tmp_path: Path) -> None:
    path = tmp_path / "dataset"
    covered.save(path)
    for entry in covered.manifest["files"]:
        file = path / "files" / entry["sha256"]
        data = file.read_bytes()
        for length in [*range(len(data)), len(data) + 1]:
            file.write_bytes((data + b"\0")[:length])
            codes = [finding.code for finding in kvformat.verify(path).findings]
            assert codes == ["E005"] or length == len(data)
        file.write_bytes(data)
    assert kvformat.verify(path).ok
