from __future__ import annotations

import gc
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from kvformat.errors import DamageError, InputError, KVFormatError, StorageError, UsageError
from kvformat.extract.columns import HEADER_NBYTES, write_columns
from kvformat.extract.documents import Documents, DocumentsWriter, open_documents
from kvformat.extract.documents.form import COLUMNS, TABLE, About, document_sum
from kvformat.spec import canonical
from kvformat.spec.context import Text
from kvformat.spec.document import MASKS, Document, Media
from kvformat.spec.manifest import Skipped
from kvformat.storage.local_write import LocalFiles
from kvformat.testing.strategies import documents, names

IMAGE = Media(scheme="source", first=1, count=2, digest=bytes(range(32)))


def of(*ids: int, **more: Any) -> Document:
    return Document.of(ids, **more)


def written(path: Path | None, given: list[tuple[str, Document]], **more: Any) -> Documents:
    with DocumentsWriter(path) as writer:
        for name, document in given:
            writer.add(name, document)
        return writer.finish(**more)


def same(found: Document, given: Document) -> bool:
    return (
        found.to_bytes() == given.to_bytes()
        and found.token_ids.tolist() == given.token_ids.tolist()
        and (found.position_ids is None) == (given.position_ids is None)
        and found.media == given.media
        and (found.mask, found.prefix_length) == (given.mask, given.prefix_length)
    )


def test_documents_come_back_by_number_with_names_and_digests(tmp_path: Path) -> None:
    given = [
        ("a", of(5, 6, 7)),
        ("b", of(1, mask="bidirectional")),
        ("c", of(5, 6, 7, media=[IMAGE])),
        ("d", of(1, 2, 3, position_ids=[[0, 0, 1], [0, 1, 0], [0, 1, 1]])),
        ("é", of(1, 2, 3, mask="prefix", prefix_length=2, position_ids=[4, 5, 6])),
    ]
    found = written(tmp_path / "d.kvdocs", given, text=Text(truncate=9))
    assert (len(found), found.num_names, found.num_inputs, found.text) == (5, 5, 5, Text(truncate=9))
    assert found.num_tokens.tolist() == [3, 1, 3, 3, 3]
    assert found.position_rows.tolist() == [0, 0, 0, 3, 1]
    assert found.num_media().tolist() == [0, 0, 1, 0, 0]
    for number, (name, document) in enumerate(given):
        assert same(found.document(number), document)
        assert (found.digest(number), found.first_name(number)) == (document.digest, name)
    found.check()


def test_equal_documents_become_one_with_all_their_names(tmp_path: Path) -> None:
    with DocumentsWriter(tmp_path / "d.kvdocs") as writer:
        assert [writer.add(n, of(i)) for n, i in (("a", 7), ("b", 8), ("c", 7), ("d", 9), ("e", 8))] == [0, 1, 0, 2, 1]
        assert (writer.num_documents, writer.num_names, writer.num_tokens) == (3, 5, 3)
        found = writer.finish()
    assert len(found) == 3
    assert found.name_document.tolist() == [0, 1, 0, 2, 1]
    assert [found.name(place) for place in range(5)] == [b"a", b"b", b"c", b"d", b"e"]
    assert [found.first_name(number) for number in range(3)] == ["a", "b", "d"]


@given(
    given=st.lists(st.tuples(names(), documents()), min_size=1, max_size=8, unique_by=lambda pair: pair[0]),
)
@settings(max_examples=60)
def test_any_documents_come_back(given: list[tuple[str, Document]]) -> None:
    found = written(None, given)
    assert len(found) == len({document.digest for _, document in given})
    assert list(found.names(np.arange(len(given)))) == [name.encode() for name, _ in given]
    for (name, document), number in zip(given, found.name_document.tolist(), strict=True):
        assert same(found.document(number), document)
        assert found.digest(number) == document.digest, name
    found.check()


@given(document=documents())
def test_a_digest_of_parts_is_that_of_the_document(document: Document) -> None:
    rows = 0 if document.position_ids is None else len(document.position_ids)
    positions = b"" if document.position_ids is None else document.position_ids.tobytes()
    digest = document_sum(
        document.num_tokens,
        memoryview(document.token_ids.tobytes() + positions),
        mask=MASKS.index(document.mask),
        prefix_length=document.prefix_length,
        rows=rows,
        media=memoryview(b"".join(entry.pack() for entry in document.media)),
    )
    assert digest == document.digest


def test_names_are_unique_and_names(tmp_path: Path) -> None:
    with DocumentsWriter(tmp_path / "d.kvdocs") as writer:
        writer.add("a", of(1))
        writer.skip("b", "too long")
        for name in ("a", "b"):
            with pytest.raises(InputError, match="given before") as refused:
                writer.add(name, of(2))
            assert (refused.value.code, refused.value.record) == ("E107", name)
            with pytest.raises(InputError):
                writer.skip(name, "again")
        for bad in ("", "x" * 513, "\ud800", b"a", None):
            with pytest.raises(InputError) as refused:
                writer.add(bad, of(2))  # type: ignore[arg-type]
            assert refused.value.code == "E106"
        found = writer.finish()
    assert (len(found), found.num_names) == (1, 1)


def test_what_is_skipped_counts_as_an_input(tmp_path: Path) -> None:
    with DocumentsWriter(tmp_path / "d.kvdocs") as writer:
        writer.skip("first", "an image is missing")
        writer.add("a", of(1))
        writer.skip("third", "too long")
        writer.add("b", of(2))
        with pytest.raises(UsageError, match="reason"):
            writer.skip("x", "")
        writer.finish()
    found = open_documents(tmp_path / "d.kvdocs")
    assert found.name_input.tolist() == [1, 3]
    assert found.num_inputs == 4
    assert found.skipped == (
        Skipped(input=0, name="first", reason="an image is missing"),
        Skipped(input=2, name="third", reason="too long"),
    )


def test_places_of_media_are_kept_by_digest(tmp_path: Path) -> None:
    other = Media(scheme="pixels", first=3, count=0, digest=bytes(32))
    with DocumentsWriter(tmp_path / "d.kvdocs") as writer:
        writer.add("a", of(1, 2, 3, media=[IMAGE, other]), ["s3://bucket/ä.png", None])
        writer.add("b", of(4, 5, 6, media=[IMAGE]), ["elsewhere.png"])
        writer.add("c", of(4, 5, 6, 7, media=[other]), [os.fsdecode(b"odd\xff.png")])
        with pytest.raises(InputError, match="2 sources are given, and the document has 1 media") as refused:
            writer.add("d", of(4, 5, 6, 8, media=[other]), ["x", "y"])
        assert refused.value.code == "E309"
        writer.add("d", of(9))
        found = writer.finish()
    assert found.media_source(IMAGE.digest) == "s3://bucket/ä.png"
    assert found.media_source(other.digest) == os.fsdecode(b"odd\xff.png")
    assert found.media_source(bytes(31) + b"x") is None


def test_nothing_is_no_documents_file(tmp_path: Path) -> None:
    with DocumentsWriter(tmp_path / "d.kvdocs") as writer, pytest.raises(InputError) as refused:
        writer.finish()
    assert refused.value.code == "E306"
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------------ on disk


def test_equal_documents_give_equal_bytes_in_any_process(tmp_path: Path) -> None:
    code = (
        "import sys; from kvformat.extract.documents import DocumentsWriter\n"
        "from kvformat.spec.document import Document, Media\n"
        "with DocumentsWriter(sys.argv[1]) as writer:\n"
        "    for i in range(40):\n"
        "        media = [Media(scheme='source', first=0, count=1, digest=bytes([i % 7]) * 32)]\n"
        "        writer.add(f'n{i}', Document.of([i % 11, 3], media=media), [f'{i}.png'])\n"
        "    writer.finish()\n"
    )
    found = set()
    for seed in ("0", "1", "random"):
        path = tmp_path / f"{seed}.kvdocs"
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-W", "error", "-c", code, str(path)], check=True, env=environment)
        found.add(path.read_bytes())
    assert len(found) == 1


def test_stock_safetensors_reads_it(tmp_path: Path) -> None:
    written(tmp_path / "d.kvdocs", [("a", of(5, 6)), ("b", of(7))])
    with safe_open(tmp_path / "d.kvdocs", framework="np") as file:
        assert file.get_tensor("inputs").tolist() == [5, 6, 7]
        assert file.get_tensor("tokens").tolist() == [2, 1]
        assert bytes(file.get_tensor("name_bytes")) == b"ab"
        assert file.metadata()["table"] == "documents"


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "d.kvdocs"
    with pytest.raises(KeyboardInterrupt), DocumentsWriter(path) as writer:
        writer.add("a", of(1))
        raise KeyboardInterrupt
    assert list(path.parent.iterdir()) == []
    written(path, [("a", of(1))])
    assert [entry.name for entry in path.parent.iterdir()] == ["d.kvdocs"]


def test_nothing_is_overwritten_and_an_equal_file_is_as_good(tmp_path: Path) -> None:
    path = tmp_path / "d.kvdocs"
    written(path, [("a", of(1))])
    before = path.stat()
    assert same(written(path, [("a", of(1))]).document(0), of(1))
    with pytest.raises(StorageError, match="another documents file is here") as refused:
        written(path, [("a", of(2))])
    assert (refused.value.code, refused.value.path) == ("E207", str(path))
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    data = bytearray(path.read_bytes())
    data[HEADER_NBYTES] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamageError):  # equal by its header, and damaged
        written(path, [("a", of(1))])
    assert [entry.name for entry in tmp_path.iterdir()] == ["d.kvdocs"]


def test_a_temporary_file_leaves_nothing(tmp_path: Path) -> None:
    with DocumentsWriter(folder=tmp_path) as writer:
        writer.add("a", of(1, 2))
        found = writer.finish()
    assert list(tmp_path.iterdir()) == []
    assert same(found.document(0), of(1, 2))
    found.check()
    found.save(LocalFiles(), tmp_path / "kept.kvdocs")
    assert same(open_documents(tmp_path / "kept.kvdocs").document(0), of(1, 2))
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    del found, writer
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) < descriptors


def test_a_named_file_is_linked_and_another_one_of_its_name_is_not(tmp_path: Path) -> None:
    path = tmp_path / "d.kvdocs"
    found = written(path, [("a", of(1, 2))])
    found.save(LocalFiles(), tmp_path / "linked.kvdocs")
    assert (tmp_path / "linked.kvdocs").stat().st_ino == path.stat().st_ino
    path.unlink()
    path.write_bytes(b"another")
    found.save(LocalFiles(), tmp_path / "copied.kvdocs")
    assert same(open_documents(tmp_path / "copied.kvdocs").document(0), of(1, 2))


def test_without_hard_links_it_is_copied(tmp_path: Path) -> None:
    class Linkless(LocalFiles):
        def link(self, source: Path, target: Path) -> bool:
            raise KVFormatError("no links", code="E201")

    written(tmp_path / "d.kvdocs", [("a", of(1, 2))]).save(Linkless(), tmp_path / "copied.kvdocs")
    assert (tmp_path / "copied.kvdocs").read_bytes() == (tmp_path / "d.kvdocs").read_bytes()


# -------------------------------------------------------------------------------------------------------------- damage


def everything_read(path: Path) -> None:
    found = open_documents(path)
    found.check()
    for number in range(len(found)):
        found.document(number)


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    path = tmp_path / "d.kvdocs"
    with DocumentsWriter(path) as writer:
        writer.add("a", of(1, 2, 3, media=[IMAGE], position_ids=[7, 8, 9]), ["there.png"])
        writer.add("b", of(4))
        writer.add("c", of(4))
        writer.skip("d", "because")
        writer.finish(Text(truncate=3))
    everything_read(path)
    return path


def test_every_truncation_is_found_out(sound: Path) -> None:
    data = sound.read_bytes()
    for length in [*range(0, len(data), 61), len(data) - 1]:
        sound.write_bytes(data[:length])
        with pytest.raises(DamageError) as refused:
            everything_read(sound)
        assert (refused.value.code, refused.value.path) == ("E307", str(sound))
        assert "make it again" in refused.value.message
    sound.write_bytes(data + b"\0")
    with pytest.raises(DamageError):
        everything_read(sound)


def test_every_flipped_bit_is_found_out(sound: Path) -> None:
    data = sound.read_bytes()
    used = len(data[:HEADER_NBYTES].rstrip())
    places = [*range(0, used, 17), HEADER_NBYTES - 1, *range(HEADER_NBYTES, len(data), 3)]
    for place in places:
        damaged = bytearray(data)
        damaged[place] ^= 1 << (place % 8)
        sound.write_bytes(damaged)
        with pytest.raises(DamageError) as refused:
            everything_read(sound)
        assert refused.value.code == "E307", place


def test_a_damaged_document_is_named(sound: Path) -> None:
    data = bytearray(sound.read_bytes())
    data[HEADER_NBYTES + 4 * 6] ^= 1  # the ids and positions of the first document come before
    sound.write_bytes(data)
    found = open_documents(sound)
    assert same(found.document(0), of(1, 2, 3, media=[IMAGE], position_ids=[7, 8, 9]))
    for read in (lambda: found.document(1), found.check):
        with pytest.raises(DamageError, match=r"document 1 \('b'\) is not as it was written"):
            read()


def test_another_table_or_version_is_told(tmp_path: Path, sound: Path) -> None:
    data = sound.read_bytes()
    sound.write_bytes(data.replace(b'"table":"documents"', b'"table":"documentz"'))
    with pytest.raises(DamageError, match="a table of 'documentz', expected 'documents'"):
        open_documents(sound)
    sound.write_bytes(data.replace(b'"kvformat":"1.0"', b'"kvformat":"9.0"'))
    with pytest.raises(DamageError, match=r"written by version '9.0', this one reads 1.0"):
        open_documents(sound)
    sound.write_bytes(b"{}" * 8192)
    with pytest.raises(DamageError, match="cannot be read"):
        open_documents(sound)


Columns = dict[str, np.ndarray]


def columns_of(found: Documents) -> Columns:
    return {**found._columns.arrays, "inputs": np.array([4, 5, 6], dtype="<i4")}


FOREIGN: dict[str, Callable[[Columns], object]] = {
    "no tokens": lambda c: c.update(tokens=np.array([3, 0], "<u4")),
    "more tokens": lambda c: c.update(tokens=np.array([2, 2], "<u4")),
    "two rows of positions": lambda c: c.update(position_rows=np.array([0, 2], "u1")),
    "mask": lambda c: c.update(mask=np.array([0, 3], "u1")),
    "columns of other lengths": lambda c: c.update(mask=np.array([0], "u1")),
    "a document without a name": lambda c: c.update(name_document=np.array([0, 0], "<u8")),
    "names in another order": lambda c: c.update(name_document=np.array([1, 0], "<u8")),
    "a name of no document": lambda c: c.update(name_document=np.array([0, 2], "<u8")),
    "inputs in another order": lambda c: c.update(name_input=np.array([1, 0], "<u8")),
    "names beyond the bytes": lambda c: c.update(name_end=np.array([1, 9], "<u8")),
    "names backwards": lambda c: c.update(name_end=np.array([2, 2**63], "<u8")),
    "media beyond the entries": lambda c: c.update(media_end=np.array([0, 1], "<u8")),
    "no description": lambda c: c.update(about=np.array([], "u1")),
    "another description": lambda c: c.update(about=np.frombuffer(b'{"skipped":[]}', "u1")),
}


@pytest.mark.parametrize("change", FOREIGN.values(), ids=FOREIGN)
def test_values_no_writer_makes_are_refused(change: Callable[[Columns], object], tmp_path: Path) -> None:
    columns = columns_of(written(None, [("a", of(4, 5)), ("b", of(6))]))
    change(columns)
    path = tmp_path / "d.kvdocs"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    write_columns(LocalFiles(), fd, path, TABLE, COLUMNS, columns)
    os.close(fd)
    with pytest.raises(DamageError) as refused:
        open_documents(path)
    assert (refused.value.code, refused.value.path) == ("E307", str(path))


def test_ids_beyond_the_vocabulary_are_found_in_the_document_that_has_them(tmp_path: Path) -> None:
    found = written(None, [("a", of(4, 5)), ("b", of(6, 99, position_ids=[500, 700])), ("c", of(1))])
    found.check(vocab_size=100)
    with pytest.raises(InputError, match="document 1: token id 99 is beyond the model's vocabulary of 99") as refused:
        found.check(vocab_size=99)
    assert (refused.value.code, refused.value.record) == ("E300", "b")


@pytest.mark.parametrize("beyond", [2**32, 2**33])
def test_documents_beyond_32_bits_of_offset(beyond: int, tmp_path: Path) -> None:
    """The file is sparse: what lies before the last document is never written, nor read."""
    path = tmp_path / "d.kvdocs"
    last = of(3, 1, 4, 1, 5)
    before = beyond // (4 << 24) + 1
    count = before + 1
    empty = np.zeros(0, dtype=np.uint8)
    digests = b"".join(hashlib.sha256(bytes([n])).digest() for n in range(before)) + last.digest
    name_bytes = b"".join(b"%04d" % n for n in range(count))
    about = canonical.encode(About(skipped=(), text=Text()))
    columns = {
        "tokens": np.array([1 << 24] * before + [5]),
        "position_rows": np.zeros(count),
        "mask": np.zeros(count),
        "prefix_length": np.zeros(count),
        "digest": np.frombuffer(digests, np.uint8).reshape(-1, 32),
        "media_end": np.zeros(count),
        "media": empty.reshape(0, 49),
        "name_document": np.arange(count),
        "name_input": np.arange(count),
        "name_end": 4 * np.arange(1, count + 1),
        "name_bytes": np.frombuffer(name_bytes, np.uint8),
        "source_digest": empty.reshape(0, 32),
        "source_end": empty,
        "source_bytes": empty,
        "about": np.frombuffer(about, np.uint8),
    }
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, last.token_ids.tobytes(), HEADER_NBYTES + before * (4 << 24))
    write_columns(LocalFiles(), fd, path, TABLE, COLUMNS, columns, streamed=before * (1 << 24) + 5)
    os.close(fd)
    assert path.stat().st_size > beyond
    found = open_documents(path)
    assert same(found.document(before), last)
    assert int(found.num_tokens.sum(dtype=np.uint64)) == before * (1 << 24) + 5
    with pytest.raises(DamageError, match=r"document 0 \('0000'\)"):
        found.document(0)
