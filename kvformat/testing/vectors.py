"""Small valid datasets, one for each thing the format can express, and what a reader finds in each."""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

import kvformat
from kvformat.spec import canonical
from kvformat.spec.context import Adapter, Canary, Model, RopeGroup, Scalars, Sizes, WeightsDigest, Window, real
from kvformat.spec.document import MASKS
from kvformat.spec.schema import ITEM_SIZES, Axis, Component, Extra, Last, Quant, Role, Schema, Shared, Stage
from kvformat.tensors import from_buffer
from kvformat.testing.dataset_files import DatasetFiles

__all__ = ["COLLIDING_NAMES", "VALID", "WARN", "Case", "Entry", "axes", "component", "fill", "shape_of"]

COLLIDING_NAMES = (("qose", "2Ow51le0"), ("rlrn", "7Fp44eb1"), ("siqm", "7Hv04kd5"))
"""Pairs of names with equal XXH3-64: found by inverting the hash of 8-byte inputs."""

Stored = tuple[str, tuple[int, ...], bytes]
"""dtype, shape and bytes of a tensor."""

# -------------------------------------------------------------------------------------------------------------- values


def fill(dtype: str, shape: tuple[int, ...], seed: int, *, positive: bool = False) -> bytes:
    """Bytes of a tensor whose values look random, are finite, and follow from the seed by integer arithmetic."""
    count = math.prod(shape)
    mixed = (np.arange(count, dtype=np.uint64) + np.uint64(seed * 0x9E3779B1)) & np.uint64(0xFFFFFFFF)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = ((mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)) & np.uint64(0xFFFFFFFF)
    mixed ^= mixed >> np.uint64(16)
    if dtype in ("F8_E4M3", "F8_E5M2"):
        finite = np.uint64(0x7F if dtype == "F8_E4M3" else 0x7C)
        return (mixed % finite | (mixed >> np.uint64(24)) & np.uint64(0x80)).astype("u1").tobytes()
    if dtype in ("I8", "U8"):
        return mixed.astype("u1").tobytes()
    if dtype == "I32":
        return (mixed >> np.uint64(1)).astype("<i4").tobytes()
    if dtype == "U64":
        return (mixed * np.uint64(0x9E3779B97F4A7C15)).astype("<u8").tobytes()
    steps = (mixed % np.uint64(255)).astype(np.float32)
    values = (steps + 1) / np.float32(64) if positive else (steps - 127) / np.float32(64)
    if dtype == "F16":
        return values.astype("<f2").tobytes()
    if dtype == "F32":
        return values.astype("<f4").tobytes()
    return (values.view("<u4") >> np.uint32(16)).astype("<u2").tobytes()  # exact: 8 significant bits


def axes(*sizes: tuple[str, int | str | Last]) -> tuple[Axis, ...]:
    """Axes from pairs of name and size."""
    return tuple(Axis(name=name, size=size) for name, size in sizes)


def component(
    name: str,
    role: Role,
    layers: tuple[int, ...],
    *sizes: tuple[str, int | str | Last],
    dtype: str = "BF16",
    stage: Stage | None = None,
    scale: str | None = None,
) -> Component:
    """A component with codec ``raw``."""
    quant = None if scale is None else Quant(scale=scale)
    return Component(
        name=name, role=role, layers=layers, axes=axes(*sizes), dtype=dtype, codec="raw", stage=stage, quant=quant
    )


def shape_of(given: tuple[Axis, ...], dims: Mapping[str, int]) -> tuple[int, ...]:
    """Sizes of axes in a record of these dims."""
    return tuple(
        min(dims["tokens"], axis.size.last)
        if isinstance(axis.size, Last)
        else dims[axis.size]
        if isinstance(axis.size, str)
        else axis.size
        for axis in given
    )


# --------------------------------------------------------------------------------------------------------------- cases


class Entry(Struct, frozen=True, kw_only=True):
    """One record: its names, its document, dims besides ``tokens``, and values that are not the usual ones."""

    names: tuple[str, ...]
    document: kvformat.Document
    dims: Mapping[str, int] = {}
    values: Mapping[str, bytes] = {}


class Case(Struct, frozen=True, kw_only=True):
    """A dataset to be built.

    Attributes
    ----------
    options
        Further arguments of :func:`kvformat.create`.
    skipped
        Names and reasons of documents that are listed as skipped.
    finish
        Changes to what the writer made that keep it valid.
    warnings
        Codes verification warns with.
    """

    name: str
    schema: Schema
    entries: tuple[Entry, ...]
    context: kvformat.Context = kvformat.Context.unknown()
    options: Mapping[str, Any] = {}
    skipped: tuple[tuple[str, str], ...] = ()
    finish: Callable[[DatasetFiles], None] | None = None
    warnings: tuple[str, ...] = ()

    def tensors(self, number: int) -> dict[str, Stored]:
        """Components and extras of a record, as they are to be stored."""
        entry = self.entries[number]
        dims = {"tokens": entry.document.num_tokens, "media": len(entry.document.media), **entry.dims}
        scales = {c.quant.scale for c in self.schema.components if c.quant is not None}
        found: dict[str, Stored] = {}
        stored: list[Component | Extra] = [*self.schema.components, *self.schema.extras]
        for position, tensor in enumerate(stored):
            shape = shape_of(tensor.axes, dims)
            if isinstance(tensor, Component):
                shape = (len(tensor.layers), *shape)
            data = entry.values.get(tensor.name)
            if data is None:
                data = _of_document(tensor.name, shape, entry.document)
            if data is None:
                data = fill(tensor.dtype, shape, 64 * number + position + 1, positive=tensor.name in scales)
            found[tensor.name] = (tensor.dtype, shape, data)
        return found

    def write(self, path: Path) -> None:
        """Write the dataset with the library's writer, without ``finish``."""
        components = {c.name for c in self.schema.components}
        owned = {"token_ids", "position_ids", "mask", "media"}
        with kvformat.create(
            path, schema=self.schema, context=self.context, **{"shard_slots": 4, **self.options}
        ) as writer:
            for name, reason in self.skipped:
                writer.skip(name, reason)
            for number, entry in enumerate(self.entries):
                given = {
                    name: from_buffer(bytearray(data), dtype).reshape(shape)
                    for name, (dtype, shape, data) in self.tensors(number).items()
                }
                writer.add(
                    entry.names[0],
                    {name: value for name, value in given.items() if name in components},
                    document=entry.document,
                    extras={name: value for name, value in given.items() if name not in components | owned},
                )
            for entry in self.entries:
                for name in entry.names[1:]:
                    writer.alias(name, entry.names[0])

    def build(self) -> DatasetFiles:
        """The dataset in memory."""
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "dataset"
            self.write(path)
            files = DatasetFiles.load(path)
        if self.finish is not None:
            self.finish(files)
        return files

    def expected(self, identity: str) -> dict[str, Any]:
        """What a reader must find: built from what was written, not from what was read."""
        records = []
        for number, entry in enumerate(self.entries):
            dims = {"tokens": entry.document.num_tokens, "media": len(entry.document.media), **entry.dims}
            records.append(
                {
                    "names": list(entry.names),
                    "document": hashlib.sha256(entry.document.to_bytes()).hexdigest(),
                    "dims": {dim: dims[dim] for dim in self.schema.dims},
                    "tensors": {
                        name: {"dtype": dtype, "shape": list(shape), "sha256": hashlib.sha256(data).hexdigest()}
                        for name, (dtype, shape, data) in self.tensors(number).items()
                    },
                }
            )
        found: dict[str, Any] = {"id": identity, "records": records}
        return {**found, "warnings": list(self.warnings)} if self.warnings else found


def _of_document(name: str, shape: tuple[int, ...], document: kvformat.Document) -> bytes | None:
    if name == "token_ids":
        return document.token_ids.astype("<i4").tobytes()
    if name == "position_ids":
        rows = document.position_ids
        if rows is None:
            rows = np.arange(document.num_tokens, dtype="<i4")[None]
        return np.broadcast_to(rows, shape).astype("<i4").tobytes()
    if name == "mask":
        return np.array([MASKS.index(document.mask), document.prefix_length], dtype="<u8").tobytes()
    if name == "media":
        return b"".join(entry.pack() for entry in document.media)
    return None


def _ids(tokens: int, seed: int) -> NDArray[np.int32]:
    return np.frombuffer(fill("I32", (tokens,), 1000 + seed), dtype="<i4") % 32_000


def _entries(*tokens: int, **dims: tuple[int, ...]) -> tuple[Entry, ...]:
    return tuple(
        Entry(
            names=(f"clip-{number:04d}",),
            document=kvformat.Document.of(_ids(count, number)),
            dims={dim: sizes[number] for dim, sizes in dims.items()},
        )
        for number, count in enumerate(tokens)
    )


_TOKENS, _HEADS = ("tokens", "tokens"), ("heads", 2)
_IDS = Extra(name="token_ids", axes=axes(_TOKENS), dtype="I32")
_UNIFORM = Schema.uniform(num_layers=2, num_kv_heads=2, head_dim=4)


def _schema(*components: Component, extras: tuple[Extra, ...] = (_IDS,), dims: tuple[str, ...] = ()) -> Schema:
    return Schema(dims=("tokens", *dims), components=components, extras=extras, shared=())


def _kv(layers: tuple[int, ...] = (0, 1), dtype: str = "BF16") -> tuple[Component, Component]:
    width = ("head_dim", 4)
    return (
        component("k", "key", layers, _TOKENS, _HEADS, width, dtype=dtype, stage="attention"),
        component("v", "value", layers, _TOKENS, _HEADS, width, dtype=dtype),
    )


# ------------------------------------------------------------------------------------------- names, sizes, many shards


def _names_case() -> Case:
    plain = _entries(3, 2, 5, 1)
    names = (
        ("caf\u00e9", "cafe\u0301", "\u8ca1\u5bcc", "zzz", "a"),  # composed and decomposed are two names
        ("\U0001f600/\U0001f9d1\u200d\U0001f680", "line\nbreak", "nul\0byte", "\x7f"),
        ("x" * 512, "\u00fc" * 256, "x"),
        (COLLIDING_NAMES[0][1], COLLIDING_NAMES[1][0], COLLIDING_NAMES[0][0], " "),
    )
    entries = tuple(Entry(names=given, document=entry.document) for given, entry in zip(names, plain, strict=True))
    return Case(name="aliases-and-unicode-names", schema=_UNIFORM, entries=entries)


def _boundary_case() -> Case:
    hidden = component("h", "hidden", (5,), _TOKENS, ("width", 511))
    return Case(
        name="record-without-pad",
        schema=_schema(hidden, extras=()),
        entries=_entries(4, 8),
        options={"shard_slots": 1},
    )


def _cut_tables(files: DatasetFiles) -> None:
    """Parts that no writer of this size would make: every table in several, equal name keys on both sides of a cut."""
    keys = files.table("name_keys")["key"]
    equal = int(np.flatnonzero(keys[1:] == keys[:-1])[0]) + 1
    cuts = {
        "shards": (1, 3),
        "rows": (2, 6),
        "names": (1, 2, 9),
        "document_keys": (3, 4),
        "name_keys": tuple(sorted({equal, len(keys) - 1})),
    }
    for table, where in cuts.items():
        files.set_table(table, files.table(table), cuts=where)
    files.reseal("parts")


def _parts_case() -> Case:
    plain = _entries(1, 2, 3, 4, 5, 6, 7)
    extra = [(*pair, f"more-{n}") for n, pair in enumerate(COLLIDING_NAMES)]
    entries = tuple(
        Entry(names=(*entry.names, *(extra[n] if n < len(extra) else ())), document=entry.document)
        for n, entry in enumerate(plain)
    )
    return Case(
        name="tables-in-parts", schema=_UNIFORM, entries=entries, options={"shard_slots": 2}, finish=_cut_tables
    )


# ----------------------------------------------------------------------------------------------------------- the model


def _weights(dtype: str) -> bytes:
    tensors = [
        {"dtype": dtype, "name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "shape": shape}
        for name, shape in (
            ("embed_tokens.weight", [32_000, 16]),
            ("layers.0.self_attn.k_proj.weight", [8, 16]),
            ("layers.0.self_attn.v_proj.weight", [8, 16]),
        )
    ]
    return canonical.encode({"tensors": tensors})


def _model(weights: bytes, **changes: Any) -> Model:
    theta = real(10_000.0)
    usual: dict[str, Any] = {
        "adapters": (),
        "compute_dtype": "BF16",
        "family": "llama",
        "norm_eps": real(1e-5),
        "qk_norm": "none",
        "rope": (RopeGroup(interleaved=False, kind="default", layers=(0, 1), rotary_dim=4, theta=theta),),
        "scalars": Scalars(),
        "sizes": Sizes(head_dim=4, hidden_size=16, num_attention_heads=4, num_hidden_layers=4, num_key_value_heads=2),
        "weights": WeightsDigest(scheme="kvf-tensors-1", sha256=hashlib.sha256(weights).hexdigest()),
        "windows": (),
    }
    return Model(**{**usual, **changes})


def _deep(levels: int) -> Any:
    value: Any = []
    for number in range(levels - 1):
        value = {"a": value} if number % 2 else [value]
    return value


def _model_case() -> Case:
    weights = _weights("BF16")
    groups = [{"layers": [0, 1], "values": [real(1.0), real(0.01)]}]
    return Case(
        name="model-context",
        schema=_UNIFORM,
        entries=_entries(4, 6),
        context=kvformat.Context.of(_model(weights)),
        skipped=(("too-long-1", "4,096 tokens and more"), ("\u00fcbergro\u00df", "not UTF-8")),
        options={
            "files": {
                "weights": weights,
                "inv_freq": canonical.encode({"groups": groups}),
                "notes.txt": b"free \xff bytes\n",
                "empty": b"",
            },
            "text": kvformat.Text(
                add_generation_prompt=False,
                canary=Canary(text='caf\u00e9 "\\\b\f\n\r\t\x01\x7f', token_ids=(1, 2**31 - 1)),
                chat_template=hashlib.sha256(b"template").hexdigest(),
                special_tokens=True,
                tokenizer=hashlib.sha256(b"tokenizer").hexdigest(),
                truncate=4096,
            ),
            "provenance": {"torch": "2.13.0", "device": "cpu", "": ""},
            # Inside the manifest and `extensions`, 30 levels more: the deepest nesting there may be.
            "extensions": {"deep": _deep(30), "flags": [True, False, 0, 2**53 - 1, "", {}, []]},
        },
    )


def _rope_case() -> Case:
    weights = _weights("F32")
    one, two = real(1.0), real(2.5)
    usual: dict[str, Any] = {"interleaved": True, "rotary_dim": 4, "theta": real(500_000.0)}
    rope = (
        RopeGroup(kind="linear", layers=(0, 7), factor=two, **usual),
        RopeGroup(
            kind="llama3",
            layers=(1,),
            factor=two,
            low_freq_factor=one,
            high_freq_factor=real(4.0),
            original_max_position=8192,
            sections=(1, 1, 0),
            **usual,
        ),
        RopeGroup(
            kind="longrope",
            layers=(2,),
            long_factor=(one, two),
            short_factor=(one, one),
            original_max_position=4096,
            attention_factor=one,
            **usual,
        ),
        RopeGroup(
            kind="yarn",
            layers=(3, 4),
            factor=two,
            beta_fast=real(32.0),
            beta_slow=one,
            original_max_position=4096,
            attention_factor=real(0.0),
            mscale=one,
            mscale_all_dim=one,
            truncate=False,
            **usual,
        ),
        RopeGroup(kind="proportional", layers=(5,), **usual),
    )
    sizes = Sizes(
        head_dim=4,
        hidden_size=16,
        num_attention_heads=4,
        num_hidden_layers=8,
        num_key_value_heads=2,
        first_dense_layers=0,
        num_shared_experts=0,
        num_experts=4,
        vocab_size=32_000,
    )
    model = _model(
        weights,
        activation="gelu_pytorch_tanh",
        adapters=(Adapter(scale=real(-0.5), scheme="kvf-tensors-1", sha256=hashlib.sha256(b"adapter").hexdigest()),),
        compute_dtype="F32",
        family="gemma3_text",
        qk_norm="rms_head",
        rope=rope,
        scalars=Scalars(attention_scale=real(0.0625), attention_softcap=real(50.0), embedding_scale=real(4.0)),
        sizes=sizes,
        windows=(Window(layers=(0, 2), size=4), Window(layers=(1,), size=512)),
    )
    return Case(
        name="rope-kinds",
        schema=_UNIFORM,
        entries=_entries(2),
        context=kvformat.Context.of(model),
        options={"files": {"weights": weights}},
    )


# ------------------------------------------------------------------------------------------------------- heterogeneous


def _sliding_case() -> Case:
    width = ("head_dim", 4)
    local = ("tokens", Last(last=4))
    schema = _schema(
        component("k_local", "key", (0, 1, 3), local, _HEADS, width, stage="attention"),
        component("v_local", "value", (0, 1, 3), local, _HEADS, width),
        component("k_global", "key", (2,), _TOKENS, _HEADS, width, stage="attention"),
        component("v_global", "value", (2,), _TOKENS, _HEADS, width),
    )
    return Case(name="sliding-window", schema=schema, entries=_entries(9, 4, 3, 1))


def _mla_case() -> Case:
    schema = _schema(
        component("latent", "latent", (0, 1, 2), _TOKENS, ("rank", 12), stage="normed"),
        component("rope_key", "rope_key", (0, 1, 2), _TOKENS, ("width", 4), stage="attention"),
    )
    return Case(name="latent-attention", schema=schema, entries=_entries(5, 2))


def _shared_case() -> Case:
    schema = Schema(
        dims=("tokens",),
        components=_kv((0, 3)),
        extras=(_IDS,),
        shared=(Shared(layer=1, source=0), Shared(layer=2, source=0), Shared(layer=65_535, source=3)),
    )
    return Case(name="shared-layers", schema=schema, entries=_entries(3, 6))


def _hidden_case() -> Case:
    schema = _schema(
        *_kv((2, 7)),
        component("h", "hidden", (7,), _TOKENS, ("width", 6), dtype="F32"),
        component("s", "state", (2,), _HEADS, ("rows", 3), ("columns", 3), dtype="F32"),
        component("gate", "other", (2, 7), _TOKENS, dtype="I8"),
        component("route", "other", (2,), _TOKENS, ("choices", 2), dtype="F16"),
    )
    return Case(name="hidden-and-state", schema=schema, entries=_entries(2, 4))


def _int8_case() -> Case:
    width, one = ("head_dim", 4), ("head_dim", 1)
    schema = _schema(
        component("k", "key", (0, 1), _TOKENS, _HEADS, width, dtype="I8", stage="raw", scale="k_scale"),
        component("v", "value", (0, 1), _TOKENS, _HEADS, width, dtype="I8", scale="v_scale"),
        component("k_scale", "key_scale", (0, 1), ("tokens", 1), _HEADS, width, dtype="F32"),
        component("v_scale", "value_scale", (0, 1), _TOKENS, _HEADS, one, dtype="F32"),
    )
    return Case(name="int8-with-scales", schema=schema, entries=_entries(3, 5))


def _fp8_case() -> Case:
    width = ("head_dim", 4)
    schema = _schema(
        component("k", "key", (0,), _TOKENS, _HEADS, width, dtype="F8_E4M3", stage="attention", scale="k_scale"),
        component("v", "value", (0,), _TOKENS, _HEADS, width, dtype="F8_E5M2", scale="v_scale"),
        component("k_scale", "key_scale", (0,), ("t", 1), ("h", 1), ("d", 1), dtype="F32"),
        component("v_scale", "value_scale", (0,), _TOKENS, _HEADS, ("d", 4), dtype="F32"),
        component("latent", "latent", (1,), _TOKENS, ("rank", 6), dtype="I8", stage="raw", scale="latent_scale"),
        component("latent_scale", "other", (1,), _TOKENS, ("rank", 1), dtype="F32"),
    )
    return Case(name="fp8-with-scales", schema=schema, entries=_entries(3, 5))


# ------------------------------------------------------------------------------------------------ documents and extras


def _media(count: int) -> tuple[kvformat.Media, ...]:
    schemes: tuple[Any, ...] = ("source", "pixels", "opaque")
    return tuple(
        kvformat.Media(scheme=schemes[n % 3], first=n // 2, count=n, digest=hashlib.sha256(bytes([n])).digest())
        for n in range(count)
    )


def _dims_case() -> Case:
    extras = (
        _IDS,
        Extra(name="media", axes=axes(("media", "media"), ("entry", 49)), dtype="U8"),
        Extra(name="boxes", axes=axes(("boxes", "boxes"), ("corner", 4)), dtype="F32"),
        Extra(name="pairs", axes=axes(_TOKENS, ("boxes", "boxes")), dtype="U8"),
        Extra(name="grid", axes=axes(("media", "media"), ("thw", 3)), dtype="I32"),
        Extra(name="caption_id", axes=axes(("one", 1)), dtype="U64"),
    )
    schema = _schema(
        *_kv((0,)),
        component("patches", "hidden", (0, 4), ("boxes", "boxes"), ("width", 3)),
        extras=extras,
        dims=("media", "boxes"),
    )
    entries = tuple(
        Entry(
            names=(f"clip-{n}",),
            document=kvformat.Document.of(_ids(4, n), media=_media(media)),
            dims={"boxes": boxes},
        )
        for n, (media, boxes) in enumerate([(0, 0), (2, 0), (0, 3), (3, 1)])
    )
    return Case(name="dims-of-zero", schema=schema, entries=entries)


def _positions_case(rows: int, name: str) -> Case:
    extras = (_IDS, Extra(name="position_ids", axes=axes(("rows", rows), _TOKENS), dtype="I32"))
    plain = np.arange(4, dtype="<i4")
    given: list[NDArray[np.int32] | None] = [None, plain + 7, np.stack([plain, plain // 2, plain % 2])[:rows], -plain]
    entries = tuple(
        Entry(names=(f"clip-{n}",), document=kvformat.Document.of(_ids(4, n), position_ids=positions))
        for n, positions in enumerate(given)
    )
    return Case(name=name, schema=_schema(*_kv((0,)), extras=extras), entries=entries)


def _masks_case() -> Case:
    extras = (_IDS, Extra(name="mask", axes=axes(("kind_and_length", 2)), dtype="U64"))
    ids = _ids(5, 1)
    documents = (
        kvformat.Document.of(ids),
        kvformat.Document.of(ids, mask="prefix", prefix_length=1),
        kvformat.Document.of(ids, mask="prefix", prefix_length=4),
        kvformat.Document.of(ids, mask="bidirectional"),
    )
    entries = tuple(Entry(names=(f"clip-{n}",), document=document) for n, document in enumerate(documents))
    return Case(name="masks", schema=_schema(*_kv((0,)), extras=extras), entries=entries)


def _dtypes_case() -> Case:
    components = tuple(
        component(f"c_{dtype.lower()}", "other", (0, 2), _TOKENS, ("width", 3), dtype=dtype)
        for dtype in ("I8", "F8_E5M2", "BF16", "F32", "F16", "F8_E4M3")
    )
    extras = tuple(
        Extra(name=f"x_{dtype.lower()}", axes=axes(_TOKENS, ("width", 3)), dtype=dtype) for dtype in sorted(ITEM_SIZES)
    )
    return Case(name="every-dtype", schema=_schema(*components, extras=(_IDS, *extras)), entries=_entries(3, 1))


def _patterns_case() -> Case:
    schema = _schema(
        component("k", "key", (0,), _TOKENS, ("heads", 8), ("head_dim", 256), stage="attention"),
        component("v", "value", (0,), _TOKENS, ("heads", 1), ("head_dim", 16)),
        component("h", "hidden", (0,), _TOKENS, ("width", 2), dtype="F32"),
        component("o", "other", (0,), _TOKENS, ("width", 8), dtype="F8_E5M2"),
        extras=(),
    )
    patterns = np.arange(65_536, dtype="<u2")
    odd = np.array([0x7FC00001, 0xFFBFFFFF, 0x7F800000, 0xFF800000, 0x80000000, 1], dtype="<u4")
    values = {
        "k": patterns.tobytes(),
        "v": patterns[::-1][: 32 * 16].tobytes(),
        "h": np.resize(odd, 64).tobytes(),
        "o": np.arange(256, dtype="u1").tobytes(),
    }
    entry = Entry(names=("every bf16 pattern",), document=kvformat.Document.of(_ids(32, 1)), values=values)
    return Case(
        name="nan-payloads",
        schema=schema,
        entries=(entry,),
        options={"shard_slots": 1, "allow_non_finite": ("k", "v", "h", "o")},
    )


def _without_ids_case() -> Case:
    schema = Schema.uniform(num_layers=2, num_kv_heads=2, head_dim=4, token_ids=False)
    document = kvformat.Document.of(_ids(2, 9), mask="bidirectional", position_ids=[5, 5], media=_media(2))
    entries = (*_entries(4, 3), Entry(names=("everything unusual",), document=document))
    return Case(name="no-token-ids", schema=schema, entries=entries)


# ------------------------------------------------------------------------------------------------------------ warnings


def _unknown_file(files: DatasetFiles) -> None:
    files.other = {"README.md": b"not of the dataset\n", "shards/00000/note.txt": b"nor this\n"}


def _staging(files: DatasetFiles) -> None:
    files.other = {".staging/0123456789abcdef-01234567/plan.json": b"{}"}


def _newer_minor(files: DatasetFiles) -> None:
    files.set_version("1.7")


_CASES = (
    Case(name="one-record", schema=_UNIFORM, entries=_entries(5)),
    Case(name="uniform-bf16", schema=_UNIFORM, entries=_entries(5, 3)),
    Case(name="two-shards", schema=_UNIFORM, entries=_entries(3, 5, 2), options={"shard_slots": 2}),
    Case(name="several-shards", schema=_UNIFORM, entries=_entries(3, 5, 2, 6, 4), options={"shard_slots": 2}),
    _names_case(),
    _boundary_case(),
    _parts_case(),
    _model_case(),
    _rope_case(),
    _sliding_case(),
    _mla_case(),
    Case(
        name="wide-values",
        schema=Schema.uniform(
            num_layers=2, num_kv_heads=1, head_dim=3, v_head_dim=5, dtype="F16", key_stage="raw", layers=(3, 9)
        ),
        entries=_entries(4, 2),
    ),
    _shared_case(),
    _hidden_case(),
    _int8_case(),
    _fp8_case(),
    _dims_case(),
    _positions_case(1, "positions-1-row"),
    _positions_case(3, "positions-3-rows"),
    _masks_case(),
    _dtypes_case(),
    _patterns_case(),
    _without_ids_case(),
)
_WARN = (
    Case(name="W001-unknown-file", schema=_UNIFORM, entries=_entries(2), finish=_unknown_file, warnings=("W001",)),
    Case(name="W002-staging-left", schema=_UNIFORM, entries=_entries(2), finish=_staging, warnings=("W002",)),
    Case(name="W003-newer-minor", schema=_UNIFORM, entries=_entries(2), finish=_newer_minor, warnings=("W003",)),
)

VALID: dict[str, Case] = {case.name: case for case in _CASES}
"""Valid datasets without warnings, by name."""
WARN: dict[str, Case] = {case.name: case for case in _WARN}
"""Valid datasets that verification warns about, by name: the code comes first."""
