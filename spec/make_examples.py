"""Write the blocks of SPEC.md's worked example anew: ``python spec/make_examples.py [PATH]``.

The blocks ``inputs``, ``schema`` and ``context`` of Annex A say what is written. The library writes it, and every
other block is what came of it. Prose stays as it is. A test keeps the two equal.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import kvformat
from kvformat.extract.weights import weights_digest, weights_file
from kvformat.spec import canonical, digests
from kvformat.spec.context import real
from kvformat.spec.tables import TABLES
from kvformat.tensors import from_buffer
from kvformat.testing.dataset_files import DatasetFiles

WIDTH = 116
BLOCK = re.compile(r"^```kvf-(\w+) (\w+)(?: path=(\S*))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Piece(NamedTuple):
    """Bytes with one meaning: shown as hex, as text, or as one byte repeated."""

    data: bytes
    comment: str = ""
    form: str = "hex"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, nargs="?", default=Path(__file__).with_name("SPEC.md"))
    options = parser.parse_args(arguments)
    options.path.write_text(render(options.path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


def render(text: str) -> str:
    """The text with every block as the library would have it."""
    given = {match[2]: match[4] for match in BLOCK.finditer(text)}
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "dataset"
        write(path, given["inputs"], given["schema"], given["context"])
        made = dict(contents(kvformat.open(path), DatasetFiles.load(path)))
    unknown = given.keys() - made.keys() - {"inputs"}
    if unknown or made.keys() - given.keys():
        raise SystemExit(
            f"blocks of the annex and of this script differ: {sorted(unknown | made.keys() - given.keys())}"
        )

    def fresh(match: re.Match[str]) -> str:
        if match[2] == "inputs":
            return match[0]
        file, body = made[match[2]]
        at = f" path={file}" if file else ""
        return f"```kvf-{match[1]} {match[2]}{at}\n{body}```"

    return BLOCK.sub(fresh, text)


def write(path: Path, inputs: str, schema: str, context: str) -> None:
    """Write the dataset of the annex with the library, from the text of its three blocks of inputs."""
    given = json.loads(inputs)
    tensors = {
        entry["name"]: from_buffer(bytearray.fromhex(entry["bytes"]), "BF16").reshape(entry["shape"])
        for entry in given["weights"]
    }
    weights = weights_file(tensors, compute_dtype="BF16")
    frequencies = [
        {"layers": group["layers"], "values": [real(value) for value in group["values"]]}
        for group in given["inv_freq"]
    ]
    stated: Any = json.loads(joined(context))
    stated["model"]["weights"]["sha256"] = weights_digest(weights).sha256
    parsed = canonical.convert(json.loads(joined(schema)), kvformat.Schema)
    shapes = {c.name: [axis.size for axis in c.axes] for c in parsed.components}
    layers = {c.name: len(c.layers) for c in parsed.components}
    with kvformat.create(
        path,
        schema=parsed,
        context=canonical.convert(stated, kvformat.Context),
        provenance=given["provenance"],
        shard_slots=given["shard_slots"],
        files={"weights": weights, "inv_freq": canonical.encode({"groups": frequencies})},
    ) as writer:
        for call in given["calls"]:
            if "alias" in call:
                writer.alias(call["alias"], call["of"])
            elif "skip" in call:
                writer.skip(call["skip"], call["reason"])
            else:
                tokens = len(call["token_ids"])
                values = {
                    name: from_buffer(bytearray.fromhex(call[name]), "BF16").reshape(
                        [layers[name], *(tokens if size == "tokens" else size for size in sizes)]
                    )
                    for name, sizes in shapes.items()
                }
                writer.add(call["add"], values, token_ids=call["token_ids"])


def joined(body: str) -> str:
    """The text of a block of JSON."""
    return body.replace("\n", "")


# -------------------- what the blocks show


def contents(dataset: kvformat.Dataset, files: DatasetFiles) -> Iterator[tuple[str, tuple[str, str]]]:
    """By label, the path where the block is a file, and its body."""
    manifest = dataset.manifest
    yield "schema", ("", wrapped(canonical.encode(manifest.schema)))
    yield "context", ("", wrapped(canonical.encode(manifest.context)))
    for entry, data in zip(manifest.files, files.covered, strict=True):
        yield entry.name, (f"files/{entry.sha256}", wrapped(bytes(data)))
    for number in range(len(dataset)):
        ids = files.tensor(number, "token_ids").view("<i4").tolist()
        document = kvformat.Document.of(ids).to_bytes()
        yield f"document_{number}", ("", hexadecimal(document_pieces(document, ids)))
    yield "shard", (files.shard_paths()[0], hexadecimal(shard_pieces(files)))
    for table in TABLES:
        yield table, (files.part_paths(table)[0], hexadecimal(part_pieces(files, table)))
    yield "manifest", (files.manifest_path(), wrapped(files.manifest_text))
    yield "root", ("kvformat.json", wrapped(files.root_text))
    yield "identities", ("", listed(identities(dataset)))
    yield "sums", ("", listed(sums(dataset, files)))
    yield "keys", ("", listed(keys(dataset, files)))
    yield "chain", ("", listed(chain(files)))


def identities(dataset: kvformat.Dataset) -> Iterator[tuple[str, str]]:
    yield "schema digest", digests.schema_digest(dataset.schema).hex()
    yield "context digest", digests.context_digest(dataset.context).hex()
    for number, record in enumerate(dataset):
        yield f"document digest of record {number}", record.document.hex()
        yield f"fingerprint of record {number}", (record.fingerprint or b"").hex()


def sums(dataset: kvformat.Dataset, files: DatasetFiles) -> Iterator[tuple[str, str]]:
    for number in range(len(dataset)):
        for component in dataset.schema.components:
            data = files.tensor(number, component.name).tobytes()
            step = len(data) // len(component.layers)
            for row, layer in enumerate(component.layers):
                found = digests.slab_sum(data[row * step : (row + 1) * step])
                yield f"record {number}, {component.name} of layer {layer}", f"{found:016x}"
        for extra in dataset.schema.extras:
            found = digests.slab_sum(files.tensor(number, extra.name).tobytes())
            yield f"record {number}, {extra.name}", f"{found:016x}"
        yield f"record {number}, record_sum", files.column("rows", "record_sum")[number].tobytes().hex()


def keys(dataset: kvformat.Dataset, files: DatasetFiles) -> Iterator[tuple[str, str]]:
    for number, record in enumerate(dataset):
        yield f"document key of record {number}", f"{digests.document_key(record.document):016x}"
    for name in files.names():
        yield f"name key of {name.decode()}", f"{digests.name_key(name):016x}"


def chain(files: DatasetFiles) -> Iterator[tuple[str, str]]:
    for label, data in zip((entry["name"] for entry in files.manifest["files"]), files.covered, strict=True):
        yield f"SHA-256 of {label}", hashlib.sha256(data).hexdigest()
    yield "SHA-256 of the shard", hashlib.sha256(files.shards[0]).hexdigest()
    for table in TABLES:
        yield f"SHA-256 of {table}", hashlib.sha256(files.parts[table][0].data).hexdigest()
    yield "SHA-256 of the manifest", hashlib.sha256(files.manifest_text).hexdigest()
    yield "dataset id", files.id


# -------------------- pieces


def document_pieces(document: bytes, ids: list[int]) -> Iterator[Piece]:
    comments = [
        (14, "kvf1/document and a zero byte"),
        (8, f"T = {len(ids)}"),
        *((4, f"token id {token}") for token in ids),
        (1, "mask kind 0, causal"),
        (1, "position kind 0: 0 to T - 1"),
        (4, "M = 0"),
    ]
    at = 0
    for length, comment in comments:
        yield Piece(document[at : at + length], comment)
        at += length
    assert at == len(document)


def header_pieces(data: bytes) -> Iterator[Piece]:
    """Length, JSON and spaces of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    yield Piece(data[:8], f"header length {length:,}")
    text = data[8 : 8 + length].rstrip(b" ")
    bounds = [0, *(match.start() for match in re.finditer(rb',"[^"]*":\{"dtype"', text)), len(text) - 1, len(text)]
    for first, end in pairwise(bounds):
        yield Piece(text[first:end], form="text")
    if len(text) < length:
        yield Piece(data[8 + len(text) : 8 + length], "spaces", "run")


def shard_pieces(files: DatasetFiles) -> Iterator[Piece]:
    data, schema = bytes(files.shards[0]), files.schema
    yield from header_pieces(data)
    summed = [f"{c.name} of layer {layer}" for c in schema.components for layer in c.layers]
    summed += [extra.name for extra in schema.extras]
    parts = {c.name: [f"layer {layer}" for layer in c.layers] for c in schema.components} | {"sums": summed}
    for number in files.records_of(0):
        start = files.locate(number)[1]
        placement = files.placement(number)
        for tensor in placement.tensors.values():
            names = parts.get(tensor.name, [""])
            step = tensor.nbytes // len(names)
            for row, name in enumerate(names):
                first = start + tensor.offset + row * step
                comment = f"record {number}, {tensor.name}" + (f": {name}" if name else "")
                yield Piece(data[first : first + step], comment)
        yield Piece(data[start + placement.end : start + placement.nbytes], f"record {number}, pad", "run")


def part_pieces(files: DatasetFiles, table: str) -> Iterator[Piece]:
    data = bytes(files.parts[table][0].data)
    yield from header_pieces(data)
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    ends = [0, *files.column("names", "end").tolist()] if table == "names" else []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        first, end = (start + offset for offset in entry["data_offsets"])
        if name.endswith(".pad"):
            yield Piece(data[first:end], name, "run")
        elif name == "bytes":
            for row, (a, b) in enumerate(pairwise(ends)):
                yield Piece(data[first + a : first + b], f"bytes[{row}]: {data[first + a : first + b].decode()}")
        else:
            step = (end - first) // entry["shape"][0]
            for row in range(entry["shape"][0]):
                yield Piece(data[first + row * step : first + (row + 1) * step], f"{name}[{row}]")


# -------------------- text


def wrapped(data: bytes) -> str:
    """JSON in lines, broken after commas; joined again they are the file."""
    text, lines = data.decode(), []
    while len(text) > WIDTH:
        cut = text.rfind(",", 0, WIDTH) + 1 or WIDTH
        lines.append(text[:cut])
        text = text[cut:]
    return "\n".join([*lines, text, ""])


def hexadecimal(pieces: Iterator[Piece]) -> str:
    """One line for each piece, or for each 16 bytes of it; offsets first, comments last."""
    lines, at = [], 0
    for piece in pieces:
        comment = f"; {piece.comment}" if piece.comment else ""
        if piece.form == "text":
            lines.append(f"{at:08x}: = {piece.data.decode()}")
        elif piece.form == "run":
            lines.append(f"{at:08x}: {piece.data[:1].hex()} x {len(piece.data)}".ljust(60) + comment)
        else:
            for first in range(0, len(piece.data), 16):
                shown = piece.data[first : first + 16].hex(" ")
                lines.append((f"{at + first:08x}: {shown}".ljust(60) + (comment if first == 0 else "")).rstrip())
        at += len(piece.data)
    return "\n".join([*lines, ""])


def listed(values: Iterator[tuple[str, str]]) -> str:
    """Names and values."""
    return "".join(f"{name.ljust(32)} {value}\n" for name, value in values)


if __name__ == "__main__":
    sys.exit(main())
