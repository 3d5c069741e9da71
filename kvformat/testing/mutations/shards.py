"""Mutations of shards and of the records in them (E061 to E077)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvformat.spec.tables import TABLES
from kvformat.testing.dataset_files import DatasetFiles, Level
from kvformat.testing.mutations.edits import Edit, Found, Mutation

__all__ = ["MUTATIONS"]


# ------------------------------------------------------------------------------------------------------------- headers


def _header(change: Callable[[bytes], bytes]) -> Edit:
    """Change the first shard's header, length included; it keeps its place."""

    def apply(files: DatasetFiles) -> None:
        size = files.header_size
        header = bytes(files.shards[0][:size])
        changed = change(header)
        if len(changed) != size or changed == header:
            raise ValueError("the header must change and keep its length")
        files.shards[0][:size] = changed
        files.reseal("shards")

    return apply


def _swap(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(header: bytes) -> bytes:
        if old not in header:
            raise ValueError(f"{old!r} does not stand in the header")
        changed = header.replace(old, new, 1)
        return changed[: len(header)].ljust(len(header))

    return change


def _length(difference: int) -> Callable[[bytes], bytes]:
    def change(header: bytes) -> bytes:
        length = int.from_bytes(header[:8], "little") + difference
        return length.to_bytes(8, "little") + header[8:]

    return change


def _other_schema(header: bytes) -> bytes:
    at = header.index(b'"schema":"') + len(b'"schema":"')
    return header[:at] + (b"1" if header[at : at + 1] == b"0" else b"0") + header[at + 1 :]


def _exchange(first: bytes, second: bytes) -> Callable[[bytes], bytes]:
    def change(header: bytes) -> bytes:
        return header.replace(first, b"\1").replace(second, first).replace(b"\1", second)

    return change


def _shards_exchanged(files: DatasetFiles) -> None:
    """Two shards of equal size exchanged, and everything said of them, but not their headers' ordinals."""
    size = files.header_size
    one, two = files.shards[0], files.shards[1]
    if len(one) != len(two):
        raise ValueError("the first two shards of this base have different sizes")
    first, second = files.records_of(0), files.records_of(1)
    for column in ("dims", "document", "record_sum"):
        values = files.column("rows", column)
        values[[*first, *second]] = values[[*second, *first]]
    files.shards[0], files.shards[1] = bytearray(two[:]), bytearray(one[:])
    names = files.names()
    rows = list(zip(files.table("names")["record"].tolist(), names, strict=True))
    moved = dict(zip([*first, *second], [*second, *first], strict=True))
    ordered = sorted((moved.get(record, record), given, name) for given, (record, name) in enumerate(rows))
    files.set_names(ordered)
    files.set_document_keys()
    if size != files.header_size:
        raise ValueError("exchanging shards must not move their data")
    files.reseal("shards")


def _headers() -> Iterator[Mutation]:
    for name, difference, vector in (
        ("shorter", -8, True),
        ("longer", 8, True),
        ("zero", -4088, False),
        ("of-2-to-62", 2**62, False),
    ):
        yield Mutation(
            code="E061", name=f"length-{name}", apply=_header(_length(difference)), found="verify", vector=vector
        )
    for code, name, change, vector in (
        ("E062", "other-ordinal", _swap(b'"ordinal":"0"', b'"ordinal":"1"'), True),
        ("E062", "ordinal-99999999", _swap(b'"ordinal":"0"', b'"ordinal":"99999999"'), False),
        ("E062", "other-schema", _other_schema, True),
        ("E063", "newline-at-end", lambda header: header[:-1] + b"\n", True),
        ("E063", "zero-at-end", lambda header: header[:-1] + b"\0", False),
        ("E063", "space-inside", _swap(b'":{"dtype"', b'": {"dtype"'), True),
        ("E063", "other-version", _swap(b'"kvformat":"1.0"', b'"kvformat":"1.1"'), True),
        ("E063", "other-dtype", _swap(b'"BF16"', b'"F16"'), True),
        ("E063", "axes-exchanged", _swap(b'"shape":[2,5,2,4]', b'"shape":[2,2,5,4]'), True),
        ("E063", "tensors-exchanged", _exchange(b"0000/k", b"0000/v"), True),
        ("E063", "other-position", _swap(b'"0000/', b'"0001/'), False),
        ("E063", "position-in-3-digits", _swap(b'"0000/k"', b'"000/k"'), False),
        ("E063", "member-too-many", _swap(b'"data_offsets":', b'"note":1,"data_offsets":'), False),
        ("E063", "metadata-too-many", _swap(b'"ordinal":"0"', b'"made":"by","ordinal":"0"'), False),
        ("E063", "not-json", lambda header: header[:8] + b"x" * (len(header) - 8), False),
        ("E063", "all-spaces", lambda header: header[:8].ljust(len(header)), False),
    ):
        yield Mutation(code=code, name=name, apply=_header(change), found="verify", vector=vector)
    yield Mutation(
        code="E062", name="shards-exchanged", base="several-shards", apply=_shards_exchanged, found="verify"
    )


# ------------------------------------------------------------------------------------------------------------- records


def _tensor(record: int, name: str, change: Callable[[Any], None], *, level: Level = "shards") -> Edit:
    """Change the bytes of a tensor, and seal from ``level`` on."""

    def apply(files: DatasetFiles) -> None:
        data = files.tensor(record, name)
        before = data.tobytes()
        change(data)
        if data.tobytes() == before:
            raise ValueError("the tensor must change")
        files.reseal(level)

    return apply


def _flip(at: int, bit: int = 0) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        data[at] ^= np.uint8(1 << bit)

    return change


def _store(dtype: str, at: int, value: float) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        data.view(dtype)[at] = value

    return change


def _exchange_halves(data: Any) -> None:
    """The slabs of a component of two layers."""
    half = len(data) // 2
    data[:] = np.concatenate((data[half:], data[:half]))


def _kv_exchanged(*, layers: slice) -> Edit:
    def apply(files: DatasetFiles) -> None:
        k, v = (files.tensor(0, name).reshape(2, -1) for name in ("k", "v"))
        k[layers], v[layers] = v[layers].copy(), k[layers].copy()
        files.reseal("shards")

    return apply


def _records_exchanged(files: DatasetFiles) -> None:
    """Two records of the same dims, but not their rows."""
    start = files.locate(0)[1]
    size = files.placement(0).nbytes
    shard = files.shards[0]
    shard[start : start + 2 * size] = shard[start + size : start + 2 * size] + shard[start : start + size]
    files.reseal("shards")


def _row_sum(files: DatasetFiles) -> None:
    files.column("rows", "record_sum")[0, 15] ^= 1
    files.reseal("parts")


def _other_dim(files: DatasetFiles) -> None:
    """One box less than there is: the padding hides it, and the header agrees."""
    files.column("rows", "dims")[2, 2] -= 1
    files.write_headers()
    files.reseal("shards")


def _media_exchanged(data: Any) -> None:
    entries = data.reshape(-1, 49)
    entries[[0, 2]] = entries[[2, 0]]


def _records() -> Iterator[Mutation]:
    masks, positions, zero, uniform = "masks", "positions-3-rows", "dims-of-zero", "one-record"
    int8, fp8 = "int8-with-scales", "fp8-with-scales"
    cases: list[tuple[str, str, str, Edit, Found, bool]] = [
        ("E070", "row-flipped", uniform, _row_sum, "touch", True),
        ("E070", "sums-flipped", uniform, _tensor(0, "sums", _flip(7)), "touch", True),
        ("E070", "records-exchanged", masks, _records_exchanged, "touch", True),
        ("E070", "other-dim", zero, _other_dim, "touch", True),
        ("E071", "one-layer", uniform, _kv_exchanged(layers=slice(1, 2)), "touch", True),
        ("E071", "all-layers", uniform, _kv_exchanged(layers=slice(0, 2)), "touch", True),
        ("E072", "key-flipped", uniform, _tensor(0, "k", _flip(0)), "touch", True),
        ("E072", "value-flipped", uniform, _tensor(0, "v", _flip(-1, 7)), "touch", True),
        ("E072", "zeroed", uniform, _tensor(0, "k", lambda data: data.fill(0)), "touch", False),
        ("E072", "layers-exchanged", uniform, _tensor(0, "k", _exchange_halves), "touch", True),
        ("E072", "latent-flipped", "latent-attention", _tensor(0, "latent", _flip(3)), "touch", False),
        ("E072", "scale-flipped", int8, _tensor(0, "k_scale", _flip(0)), "touch", False),
        ("E072", "hidden-flipped", "hidden-and-state", _tensor(1, "h", _flip(3)), "touch", False),
        ("E073", "token-ids-flipped", uniform, _tensor(0, "token_ids", _flip(0)), "touch", True),
        ("E073", "media-flipped", zero, _tensor(1, "media", _flip(48)), "touch", False),
        ("E073", "boxes-flipped", zero, _tensor(2, "boxes", _flip(-1)), "touch", False),
    ]
    for name, value in (
        ("zero", 0.0),
        ("minus-zero", -0.0),
        ("negative", -1.0),
        ("nan", np.nan),
        ("infinity", np.inf),
    ):
        change = _store("<f4", -1, value)
        cases.append(("E074", name, int8, _tensor(1, "k_scale", change, level="sums"), "touch", name != "minus-zero"))
        cases.append(("E074", f"value-{name}", fp8, _tensor(0, "v_scale", change, level="sums"), "touch", False))
        cases.append(("E074", f"latent-{name}", fp8, _tensor(0, "latent_scale", change, level="sums"), "touch", False))
    for name, base, record, tensor, change, vector in (
        ("other-token", uniform, 0, "token_ids", _store("<i4", 0, 1), True),
        ("negative-token", uniform, 0, "token_ids", _store("<i4", 0, -1), False),
        ("mask-kind-3", masks, 0, "mask", _store("<u8", 0, 3), True),
        ("mask-kind-2-to-63", masks, 0, "mask", _store("<u8", 0, 2**63), False),
        ("prefix-of-zero", masks, 1, "mask", _store("<u8", 1, 0), False),
        ("prefix-of-all", masks, 1, "mask", _store("<u8", 1, 5), False),
        ("prefix-of-2-to-64", masks, 1, "mask", _store("<u8", 1, 2**64 - 1), False),
        ("causal-with-length", masks, 0, "mask", _store("<u8", 1, 2), False),
        ("bidirectional-with-length", masks, 3, "mask", _store("<u8", 1, 2), False),
        ("other-mask", masks, 0, "mask", _store("<u8", 0, 2), False),
        ("other-position", positions, 2, "position_ids", _store("<i4", 0, 9), True),
        ("other-default-position", positions, 0, "position_ids", _store("<i4", 0, 9), False),
        ("other-media-digest", zero, 1, "media", _flip(48), True),
        ("media-scheme-3", zero, 1, "media", lambda data: data.reshape(-1, 49)[:, 0].fill(3), True),
        ("media-beyond-tokens", zero, 1, "media", _flip(1, 3), False),
        ("media-far-beyond", zero, 1, "media", lambda data: data[1:17].fill(255), False),
        ("media-out-of-order", zero, 3, "media", _media_exchanged, False),
    ):
        cases.append(("E075", name, base, _tensor(record, tensor, change, level="sums"), "verify", vector))
    for code, name, base, edit, found, vector in cases:
        yield Mutation(code=code, name=name, base=base, apply=edit, found=found, vector=vector)


def _index_pad(table: str) -> Edit:
    def apply(files: DatasetFiles) -> None:
        part = files.parts[table][0]
        part.data[part.pads[-1]] = 1
        files.reseal("parts")

    return apply


def _sha256(files: DatasetFiles) -> None:
    """Another digest that gives the same file name."""
    files.column("shards", "sha256")[0, 31] ^= 1
    files.reseal("parts")


def _document_digest(files: DatasetFiles) -> None:
    files.column("rows", "document")[0, 31] ^= 1
    files.set_document_keys()
    files.reseal("parts")


def _paddings() -> Iterator[Mutation]:
    for name, record, at in (("first-byte", 0, 0), ("last-byte", 0, -1)):
        yield Mutation(code="E076", name=f"record-{name}", apply=_tensor(record, "pad", _flip(at)), found="verify")
    for table in TABLES:
        yield Mutation(
            code="E076",
            name=f"{table}-part".replace("_", "-"),
            apply=_index_pad(table),
            found="verify",
            vector=table == "names",
        )


MUTATIONS = (
    *_headers(),
    *_records(),
    Mutation(code="E075", name="other-digest", apply=_document_digest, found="verify"),
    *_paddings(),
    Mutation(code="E077", name="other-digest", apply=_sha256, found="verify"),
)
