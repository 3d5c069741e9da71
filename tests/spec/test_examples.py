"""The worked example of SPEC.md: taken from its text, put together, read, and computed again."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import xxhash

import kvformat
from tests.spec.reference import SPEC, reference_reader, script

TEXT = (SPEC / "SPEC.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(kvf-\S+) (\S+)(?: path=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINE = re.compile(
    r"([0-9a-f]{8}): (?:= (?P<text>.*)|(?P<byte>[0-9a-f]{2}) x (?P<times>[0-9]+) *(?:;.*)?|(?P<hex>[^;=x]+)(?:;.*)?)"
)
TABLES = ("shards", "rows", "names", "document_keys", "name_keys")


class Block(NamedTuple):
    kind: str
    path: str
    body: str


# ------------------------------------------------------------------------------------------------ from text to bytes


def blocks(text: str) -> dict[str, Block]:
    """The blocks of the annex by label."""
    found = list(BLOCK.finditer(text))
    assert len({match[2] for match in found}) == len(found) == text.count("```kvf-")
    return {match[2]: Block(match[1], match[3] or "", match[4]) for match in found}


def expanded(block: Block) -> bytes:
    """The bytes a block of JSON or of hexadecimal digits stands for; ValueError where it is none."""
    if block.kind == "kvf-json":
        return block.body.replace("\n", "").encode()
    if block.kind != "kvf-hex":
        raise ValueError(block.kind)
    data = b""
    for line in block.body.splitlines():
        match = LINE.fullmatch(line)
        if match is None or int(match[1], 16) != len(data):
            raise ValueError(f"not a line at offset {len(data):x}: {line}")
        if match["text"] is not None:
            data += match["text"].encode("ascii")
        elif match["byte"] is not None:
            data += bytes.fromhex(match["byte"]) * int(match["times"])
        else:
            data += bytes.fromhex(match["hex"])
    return data


def assembled(text: str) -> dict[str, bytes]:
    """Every file of the dataset by path."""
    return {block.path: expanded(block) for block in blocks(text).values() if block.path}


def save(text: str, path: Path) -> None:
    for name, data in assembled(text).items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


def values(text: str) -> dict[str, str]:
    """What the blocks of values state, by name."""
    lines = [line for block in blocks(text).values() if block.kind == "kvf-values" for line in block.body.splitlines()]
    found = dict(line.rsplit(maxsplit=1) for line in lines)
    assert len(found) == len(lines)
    return {name.strip(): value for name, value in found.items()}


# ------------------------------------------------------------------------------------------------ what was given


def inputs(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(blocks(text)["inputs"].body)
    return found


def given_records(text: str) -> list[dict[str, Any]]:
    """Records as they were given: names in order of input, token ids, and the bytes of ``k`` and ``v``."""
    records = []
    for call in inputs(text)["calls"]:
        if "add" in call:
            tensors = {name: bytes.fromhex(call[name]) for name in ("k", "v")}
            records.append({"names": [call["add"]], "token_ids": call["token_ids"], **tensors})
        elif "alias" in call:
            next(record for record in records if call["of"] in record["names"])["names"].append(call["alias"])
    return records


# ------------------------------------------------------------------------------------------------ the checks
# Each raises where the text is not what it must be.


def check_library(text: str, scratch: Path) -> None:
    """What the library writes from the inputs of the annex is what its blocks say."""
    given = blocks(text)
    bodies = {label: given[label].body for label in ("inputs", "schema", "context")}
    script("make_examples").write(scratch / "written", **bodies)
    written = {
        file.relative_to(scratch / "written").as_posix(): file.read_bytes()
        for file in (scratch / "written").rglob("*")
        if file.is_file()
    }
    assert assembled(text) == written


def check_reference_reader(text: str, scratch: Path) -> None:
    """The reference reader finds the stated values in the assembled dataset."""
    save(text, scratch / "dataset")
    stated = values(text)
    dataset = reference_reader().read(scratch / "dataset", stated["dataset id"])
    assert (dataset.id, dataset.warnings) == (stated["dataset id"], [])
    for number, (record, given) in enumerate(zip(dataset.records, given_records(text), strict=True)):
        tokens = len(given["token_ids"])
        assert record.names == given["names"]
        assert record.document == stated[f"document digest of record {number}"]
        assert record.dims == {"tokens": tokens}
        assert record.tensors == {
            "k": ("BF16", (2, tokens, 1, 2), given["k"]),
            "v": ("BF16", (2, tokens, 1, 2), given["v"]),
            "token_ids": ("I32", (tokens,), struct.pack(f"<{tokens}i", *given["token_ids"])),
        }


def check_package(text: str, scratch: Path) -> None:
    """The package opens the assembled dataset, reads the stated values, and verifies it at level 4."""
    save(text, scratch / "dataset")
    stated = values(text)
    report = kvformat.verify(scratch / "dataset", level=4, expected_id=stated["dataset id"])
    assert (report.ok, report.findings, report.warnings) == (True, (), ())
    dataset = kvformat.open(scratch / "dataset", expected_id=stated["dataset id"])
    assert len(dataset) == len(given_records(text))
    for number, given in enumerate(given_records(text)):
        for name in given["names"]:
            assert dataset[name].index == number
        record = dataset[number]
        assert record.names == given["names"]
        assert record.extra("token_ids").tolist() == given["token_ids"]
        assert record.document.hex() == stated[f"document digest of record {number}"]
        assert record.fingerprint is not None
        assert record.fingerprint.hex() == stated[f"fingerprint of record {number}"]


def check_values(text: str, scratch: Path) -> None:
    """Every stated digest, key and sum, by hashlib and xxhash alone."""
    del scratch
    assert dict(computed(text)) == values(text)
    given = blocks(text)
    manifest, root = json.loads(expanded(given["manifest"])), json.loads(expanded(given["root"]))
    assert root["manifest"] == {"sha256": sha256(given["manifest"]), "size": len(expanded(given["manifest"]))}
    assert manifest["schema"] == json.loads(expanded(given["schema"]))
    assert manifest["context"] == json.loads(expanded(given["context"]))
    assert manifest["context"]["model"]["weights"]["sha256"] == sha256(given["weights"])
    for table in TABLES:
        [part] = manifest["index"][table]
        assert (part["sha256"], part["size"]) == (sha256(given[table]), len(expanded(given[table])))
        assert given[table].path == f"index/{part['sha256']}.safetensors"
    for file in manifest["files"]:
        assert (file["sha256"], file["size"]) == (sha256(given[file["name"]]), len(expanded(given[file["name"]])))
        assert given[file["name"]].path == f"files/{file['sha256']}"
    assert given["manifest"].path == f"manifest/{sha256(given['manifest'])}.json"
    assert given["root"].path == "kvformat.json"
    assert given["shard"].path == f"shards/00000/00000000-{sha256(given['shard'])[:16]}.safetensors"
    tensors = json.loads(expanded(given["weights"]))["tensors"]
    assert [(t["name"], t["shape"], t["sha256"]) for t in tensors] == [
        (t["name"], t["shape"], hashlib.sha256(bytes.fromhex(t["bytes"])).hexdigest()) for t in inputs(text)["weights"]
    ]


def computed(text: str) -> Iterator[tuple[str, str]]:
    given = blocks(text)
    schema = hashlib.sha256(b"kvf1/schema\0" + expanded(given["schema"])).digest()
    context = hashlib.sha256(b"kvf1/context\0" + expanded(given["context"])).digest()
    yield "schema digest", schema.hex()
    yield "context digest", context.hex()
    data = b""
    for number, record in enumerate(given_records(text)):
        ids, tokens = record["token_ids"], len(record["token_ids"])
        document = b"kvf1/document\0" + struct.pack(f"<Q{tokens}IBBI", tokens, *ids, 0, 0, 0)
        assert document == expanded(given[f"document_{number}"])
        digest = hashlib.sha256(document).digest()
        yield f"document digest of record {number}", digest.hex()
        identity = b"kvf1/fingerprint\0" + context + schema + digest
        yield f"fingerprint of record {number}", hashlib.sha256(identity).hexdigest()
        yield f"document key of record {number}", digest.hex()[:16]
        half = len(record["k"]) // 2
        stored_ids = struct.pack(f"<{tokens}i", *ids)
        slabs = {
            "k of layer 0": record["k"][:half],
            "k of layer 1": record["k"][half:],
            "v of layer 0": record["v"][:half],
            "v of layer 1": record["v"][half:],
            "token_ids": stored_ids,
        }
        sums = b""
        for name, slab in slabs.items():
            sums += struct.pack("<Q", xxhash.xxh3_64_intdigest(slab))
            yield f"record {number}, {name}", xxhash.xxh3_64_hexdigest(slab)
        record_sum = xxhash.xxh3_128_hexdigest(b"kvf1.rec" + struct.pack("<Q", tokens) + sums)
        yield f"record {number}, record_sum", record_sum
        data += (sums + stored_ids + record["k"] + record["v"]).ljust(4096, b"\0")
        for name in record["names"]:
            yield f"name key of {name}", xxhash.xxh3_64_hexdigest(name.encode())
    assert expanded(given["shard"])[4096:] == data
    for label in ("inv_freq", "weights", *TABLES):
        yield f"SHA-256 of {label}", sha256(given[label])
    yield "SHA-256 of the shard", sha256(given["shard"])
    yield "SHA-256 of the manifest", sha256(given["manifest"])
    yield "dataset id", sha256(given["root"])


def sha256(block: Block) -> str:
    return hashlib.sha256(expanded(block)).hexdigest()


CHECKS = (check_values, check_reference_reader, check_package, check_library)
Check = Callable[[str, Path], None]


def reported(check: Check, text: str, scratch: Path) -> bool:
    """Whether a check finds fault with a text."""
    scratch.mkdir()
    try:
        check(text, scratch)
    except Exception:
        return True
    return False


# ------------------------------------------------------------------------------------------------ the text as it is


@pytest.mark.parametrize("check", CHECKS)
def test_the_example_is_what_it_says(check: Check, tmp_path: Path) -> None:
    check(TEXT, tmp_path)


def test_the_blocks_are_those_the_generator_makes() -> None:
    assert script("make_examples").render(TEXT) == TEXT, "run: python spec/make_examples.py"


def test_every_kind_of_file_has_an_example() -> None:
    named = {block.path.partition("/")[0] for block in blocks(TEXT).values() if block.path}
    assert named == {"kvformat.json", "manifest", "files", "index", "shards"}
    assert set(TABLES) <= blocks(TEXT).keys()
    assert sum(len(data) for data in assembled(TEXT).values()) < 32_768


# ------------------------------------------------------------------------------------------------ a text that is wrong


def places(text: str, label: str) -> list[int]:
    """Positions of the characters of a block that count: no white space, no comment; its path too."""
    match = next(match for match in BLOCK.finditer(text) if match[2] == label)
    found = [*range(match.start(3), match.end(3))] if match[3] else []
    at = match.start(4)
    for line in match[4].splitlines(keepends=True):
        end = line.find(";") if match[1] == "kvf-hex" and not line.startswith(": = ", 8) else -1
        found += [at + i for i, c in enumerate(line if end < 0 else line[:end]) if not c.isspace()]
        at += len(line)
    return found


def flipped(text: str, at: int) -> str:
    """Another character of the same kind in a place."""
    other = chr(ord(text[at]) ^ 1)
    return text[:at] + (other if other.isalnum() == text[at].isalnum() else "0") + text[at + 1 :]


FILES = sorted(label for label, block in blocks(TEXT).items() if block.path)
VALUES = sorted(label for label, block in blocks(TEXT).items() if block.kind == "kvf-values")
HASHED = ["context", "document_0", "document_1", "schema"]


@pytest.mark.parametrize("label", sorted(blocks(TEXT)))
def test_a_flipped_character_anywhere_is_reported(label: str, tmp_path: Path) -> None:
    where = places(TEXT, label)
    for number, at in enumerate({*where[:: max(1, len(where) // 16)], where[0], where[-1]}):
        text = flipped(TEXT, at)
        assert text != TEXT
        found = any(reported(check, text, tmp_path / f"{number}-{check.__name__}") for check in CHECKS)
        assert found, f"character {at} of SPEC.md: {TEXT[at - 20 : at + 20]!r}"


@pytest.mark.parametrize("label", FILES)
@pytest.mark.parametrize("check", CHECKS)
def test_each_check_finds_a_flipped_character_of_a_file(check: Check, label: str, tmp_path: Path) -> None:
    where = places(TEXT, label)
    assert reported(check, flipped(TEXT, where[len(where) // 2]), tmp_path / "half")
    assert reported(check, flipped(TEXT, where[-2]), tmp_path / "end")


@pytest.mark.parametrize("label", [*VALUES, *HASHED])
def test_the_computed_values_find_a_flipped_character(label: str, tmp_path: Path) -> None:
    start = next(match.start(4) for match in BLOCK.finditer(TEXT) if match[2] == label)
    lines = blocks(TEXT)[label].body.splitlines(keepends=True)
    for number, line in enumerate(lines):
        at = start + sum(map(len, lines[:number])) + (line.rstrip().rfind(" ") + 1 if label in VALUES else 11)
        assert reported(check_values, flipped(TEXT, at), tmp_path / str(number)), line


@pytest.mark.parametrize("what", ['"k": "80', '"token_ids": [1', '"of": "clip-', '"device": "cp', '"shard_slots": '])
def test_the_library_writes_something_else_from_other_inputs(what: str, tmp_path: Path) -> None:
    at = TEXT.index(what) + len(what)
    assert reported(check_library, flipped(TEXT, at), tmp_path / "x")


@pytest.mark.parametrize(
    "line",
    ["00000001: 00", "00000000: 0", "00000000: 00 x", "00000000: 00 x -1", "00000000 00", "0: 00", "00000000: zz", ""],
)
def test_a_line_that_is_none_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        expanded(Block("kvf-hex", "", line + "\n"))


# ------------------------------------------------------------------------------------------------ files of the example


def codes_of(path: Path) -> tuple[list[str], list[str]]:
    """Faults and warnings that verification reports."""
    report = kvformat.verify(path)
    return [finding.code for finding in report.findings], [finding.code for finding in report.warnings]


@pytest.mark.parametrize("name", ["manifest", "index", "files", "shards", "shards/00000"])
def test_a_directory_may_be_a_link_and_is_reported(name: str, tmp_path: Path) -> None:
    path = tmp_path / "dataset"
    save(TEXT, path)
    (path / name).rename(tmp_path / "elsewhere")
    (path / name).symlink_to(tmp_path / "elsewhere")
    assert reference_reader().read(path).warnings == ["W001"]
    assert codes_of(path) == ([], ["W001"])


@pytest.mark.parametrize(("target", "code"), [("nowhere", "E002"), ("dataset/shards", "E003")])
def test_a_directory_that_is_a_link_to_nothing(target: str, code: str, tmp_path: Path) -> None:
    path = tmp_path / "dataset"
    save(TEXT, path)
    (path / "shards").rename(tmp_path / "elsewhere")
    (path / "shards").symlink_to(tmp_path / target)
    assert reference_reader().check(path)[0][0] == code
    assert codes_of(path) == ([code], ["W001"])


@pytest.mark.parametrize(
    ("damaged", "missing", "first"),
    [
        ("rows", "shard", "E006"),
        ("rows", "shards", "E002"),
        ("weights", "shard", "E006"),
        ("weights", "names", "E002"),
    ],
)
def test_files_are_looked_at_in_their_order(damaged: str, missing: str, first: str, tmp_path: Path) -> None:
    """Codes do not rank faults of different files; verification reports both."""
    path = tmp_path / "dataset"
    save(TEXT, path)
    given = blocks(TEXT)
    data = bytearray(expanded(given[damaged]))
    data[-1] ^= 1
    (path / given[damaged].path).write_bytes(data)
    (path / given[missing].path).unlink()
    assert reference_reader().check(path)[0][0] == first
    if (damaged, missing) != ("rows", "shard"):  # without its rows nothing is known of a shard
        assert codes_of(path)[0] == ["E002", "E006"]
