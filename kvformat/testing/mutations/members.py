"""Mutations of members and values of root and manifest, and of totals (E016 to E020, E041, E045)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvformat.testing.dataset_files import DatasetFiles
from kvformat.testing.mutations.edits import Edit, Mutation, Step, drop, manifest, put, root, totals

__all__ = ["MUTATIONS"]

Place = tuple[Step, ...]
_OBJECTS: dict[str, Place] = {
    "manifest": (),
    "schema": ("schema",),
    "component": ("schema", "components", 0),
    "axis": ("schema", "components", 0, "axes", 1),
    "extra": ("schema", "extras", 0),
    "index": ("index",),
    "part": ("index", "rows", 0),
    "names-part": ("index", "names", 0),
    "lookup-part": ("index", "name_keys", 0),
    "totals": ("totals",),
    "context": ("context",),
    "model": ("context", "model"),
    "weights": ("context", "model", "weights"),
    "sizes": ("context", "model", "sizes"),
    "scalars": ("context", "model", "scalars"),
    "rope-group": ("context", "model", "rope", 0),
    "covered-file": ("files", 0),
    "skipped": ("skipped", 0),
    "text": ("text",),
    "canary": ("text", "canary"),
}
_REQUIRED: dict[str, tuple[str, ...]] = {
    "manifest": (
        "context", "files", "format", "header_size", "index", "provenance", "schema", "shard_slots", "skipped", "text",
        "totals", "version",
    ),
    "schema": ("components", "dims", "extras", "shared"),
    "component": ("axes", "codec", "dtype", "layers", "name", "role"),
    "axis": ("name", "size"),
    "extra": ("axes", "dtype", "name"),
    "index": ("document_keys", "name_keys", "names", "rows", "shards"),
    "part": ("count", "sha256", "size"),
    "names-part": ("nbytes",),
    "lookup-part": ("first_key",),
    "totals": ("names", "nbytes", "records", "shards", "tokens"),
    "context": ("kind",),
    "model": (
        "adapters", "compute_dtype", "family", "norm_eps", "qk_norm", "rope", "scalars", "sizes", "weights", "windows",
    ),
    "weights": ("scheme", "sha256"),
    "sizes": ("head_dim", "hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads"),
    "rope-group": ("interleaved", "kind", "layers", "rotary_dim", "theta"),
    "covered-file": ("name", "sha256", "size"),
    "skipped": ("input", "name", "reason"),
    "canary": ("text", "token_ids"),
}  # fmt: skip
_LONG = "a" * 65

# Place, name, value that has not the type, form or range demanded there.
_VALUES: tuple[tuple[Place, str, Any], ...] = (
    (("format",), "other-format", "kvformat2"),
    (("version",), "major-zero", "0.9"),
    (("version",), "three-numbers", "1.0.0"),
    (("version",), "minor-with-zeros", "1.00"),
    (("version",), "minor-of-5-digits", "1.10000"),
    (("version",), "final-newline", "1.0\n"),
    (("version",), "version-a-number", 1),
    (("requires",), "no-features", []),
    (("requires",), "features-a-string", "later"),
)
_MANIFEST_VALUES: tuple[tuple[Place, str, Any], ...] = (
    (("header_size",), "header-size-a-string", "4096"),
    (("shard_slots",), "no-slots", 0),
    (("shard_slots",), "slots-10001", 10_001),
    (("shard_slots",), "slots-true", True),
    (("totals", "records"), "records-a-string", "2"),
    (("totals", "tokens"), "tokens-true", True),
    (("provenance",), "provenance-an-array", []),
    (("provenance", "torch"), "provenance-a-number", 2),
    (("extensions",), "extensions-an-array", [1]),
    (("index", "rows"), "parts-an-object", {}),
    (("index", "rows", 0, "sha256"), "digest-upper-case", "A" * 64),
    (("index", "rows", 0, "sha256"), "digest-short", "a" * 63),
    (("index", "rows", 0, "sha256"), "digest-with-newline", "a" * 64 + "\n"),
    (("index", "rows", 0, "sha256"), "digest-a-path", "../" * 21 + "a"),
    (("index", "name_keys", 0, "first_key"), "first-key-short", "0"),
    (("index", "name_keys", 0, "first_key"), "first-key-a-number", 0),
    (("files", 0, "name"), "label-upper-case", "Empty"),
    (("files", 0, "name"), "label-empty", ""),
    (("files", 0, "name"), "label-too-long", _LONG),
    (("files", 0, "size"), "covered-file-of-2-to-48", 2**48),
    (("schema", "components"), "no-components", []),
    (("schema", "components", 0, "role"), "unknown-role", "query"),
    (("schema", "components", 0, "stage"), "unknown-stage", "rotated"),
    (("schema", "components", 0, "axes"), "no-axes", []),
    (("schema", "components", 0, "axes"), "8-axes", [{"name": f"a{n}", "size": 1} for n in range(8)]),
    (("schema", "components", 0, "axes", 1, "size"), "size-true", True),
    (("schema", "components", 0, "axes", 1, "size"), "size-an-array", [2]),
    (("schema", "components", 0, "layers"), "layers-an-integer", 2),
    (("schema", "components", 0, "layers", 0), "layer-a-string", "0"),
    (("schema", "components", 0, "quant"), "quant-a-string", "k_scale"),
    (("schema", "extras", 0, "axes"), "extra-of-9-axes", [{"name": f"a{n}", "size": 1} for n in range(9)]),
    (("schema", "extras", 0, "axes"), "extra-without-axes", []),
    (("schema", "dims"), "dims-a-string", "tokens"),
    (("schema", "shared"), "shared-an-object", {}),
    (("context", "kind"), "unknown-kind", "guess"),
    (("context", "model", "compute_dtype"), "compute-dtype-f64", "F64"),
    (("context", "model", "family"), "family-upper-case", "Llama"),
    (("context", "model", "family"), "family-empty", ""),
    (("context", "model", "qk_norm"), "unknown-qk-norm", "rms"),
    (("context", "model", "norm_eps"), "real-a-string", "1e-5"),
    (("context", "model", "norm_eps"), "real-an-integer", 0),
    (("context", "model", "norm_eps"), "real-upper-case", "3EE4F8B588E368F1"),
    (("context", "model", "weights", "scheme"), "unknown-scheme", "kvf-tensors-2"),
    (("context", "model", "sizes", "head_dim"), "no-head-dim", 0),
    (("context", "model", "sizes", "vocab_size"), "no-vocabulary", 0),
    (("context", "model", "rope", 0, "kind"), "rope-dynamic", "dynamic"),
    (("context", "model", "rope", 0, "interleaved"), "interleaved-one", 1),
    (("context", "model", "rope", 0, "rotary_dim"), "no-rotary-dim", 0),
    (("context", "model", "windows"), "no-window", [{"layers": [0], "size": 0}]),
    (("text", "add_generation_prompt"), "flag-one", 1),
    (("text", "tokenizer"), "tokenizer-a-name", "llama"),
    (("text", "truncate"), "truncate-to-none", 0),
    (("text", "canary", "token_ids"), "token-id-of-2-to-31", [2**31]),
    (("skipped", 0, "input"), "input-a-string", "0"),
    (("skipped", 0, "input"), "input-of-2-to-48", 2**48),
)
_CHOSEN = {
    "minor-with-zeros", "no-features", "no-slots", "digest-a-path", "no-components", "8-axes", "size-true",
    "rope-dynamic",
}  # fmt: skip


def _unknown() -> Iterator[Mutation]:
    yield Mutation(code="E016", name="root", apply=root(put(1, "comment")))
    yield Mutation(
        code="E016", name="root-manifest", apply=root(put("manifest.json", "manifest", "path")), vector=False
    )
    for name, place in _OBJECTS.items():
        yield Mutation(
            code="E016",
            name=f"in-{name}" if place else name,
            apply=manifest(put(1, *place, "comment")),
            base="model-context",
            vector=name in ("manifest", "component"),
        )
    last = put({"last": 4, "first": 0}, "schema", "components", 0, "axes", 0, "size")
    yield Mutation(code="E016", name="in-last", apply=manifest(last), base="sliding-window", vector=False)
    yield Mutation(code="E016", name="reserved-derived-from", apply=manifest(put("0" * 64, "derived_from")))
    first_key = put("0" * 16, "index", "rows", 0, "first_key")
    yield Mutation(code="E016", name="first-key-of-rows", apply=manifest(first_key), vector=False)
    null = put([], "sums")
    yield Mutation(code="E016", name="empty-value", apply=manifest(null), vector=False)


def _missing() -> Iterator[Mutation]:
    for name in ("format", "manifest", "version"):
        yield Mutation(code="E017", name=f"root-{name}", apply=root(drop(name)), vector=name == "manifest")
    for name in ("sha256", "size"):
        yield Mutation(code="E017", name=f"root-manifest-{name}", apply=root(drop("manifest", name)), vector=False)
    chosen = {"manifest-totals", "component-layers", "names-part-nbytes"}
    for where, names in _REQUIRED.items():
        for name in names:
            yield Mutation(
                code="E017",
                name=f"{where}-{name}".replace("_", "-"),
                apply=manifest(drop(*_OBJECTS[where], name)),
                base="model-context",
                vector=f"{where}-{name}" in chosen,
            )
    last = put({}, "schema", "components", 0, "axes", 0, "size")
    yield Mutation(code="E017", name="last", apply=manifest(last), base="sliding-window", vector=False)
    scale = put({}, "schema", "components", 0, "quant")
    yield Mutation(code="E017", name="quant-scale", apply=manifest(scale), base="int8-with-scales", vector=False)


def _values() -> Iterator[Mutation]:
    def in_both(place: Place, value: Any) -> Edit:
        def apply(files: DatasetFiles) -> None:
            put(value, *place)(files.root)
            put(value, *place)(files.manifest)
            files.reseal("manifest")

        return apply

    for place, name, value in _VALUES:
        yield Mutation(code="E018", name=f"root-{name}", apply=in_both(place, value), vector=name in _CHOSEN)
        yield Mutation(code="E018", name=f"manifest-{name}", apply=manifest(put(value, *place)), vector=False)
    for name, value in (("digest", "0" * 65), ("path", "../../x")):
        yield Mutation(code="E018", name=f"root-{name}", apply=root(put(value, "manifest", "sha256")), vector=False)
    yield Mutation(code="E018", name="root-size", apply=root(put("1", "manifest", "size")), vector=False)
    yield Mutation(code="E018", name="root-manifest-an-array", apply=root(put([], "manifest")), vector=False)
    for place, name, value in _MANIFEST_VALUES:
        yield Mutation(
            code="E018",
            name=name,
            apply=manifest(put(value, *place)),
            base="model-context",
            vector=name in _CHOSEN,
        )


def _agreement() -> Iterator[Mutation]:
    yield Mutation(code="E019", name="manifest-version", apply=manifest(put("1.1", "version")))
    yield Mutation(code="E019", name="root-version", apply=root(put("1.1", "version")))
    yield Mutation(code="E019", name="manifest-requires", apply=manifest(put(["later"], "requires")))


def _totals() -> Iterator[Mutation]:
    for name in ("names", "records", "shards"):
        for step in (1, -1):
            sign = "more" if step > 0 else "less"
            yield Mutation(
                code="E020",
                name=f"{sign}-{name}",
                apply=manifest(totals(name, step)),
                base="two-shards",
                vector=step > 0,
            )
    for name in ("tokens", "nbytes"):
        yield Mutation(code="E020", name=f"more-{name}", apply=manifest(totals(name, 1)), found="verify")
    for table in ("document_keys", "name_keys", "names", "rows", "shards"):
        count = put(1, "index", table, 0, "count")
        yield Mutation(
            code="E020",
            name=f"count-of-{table}".replace("_", "-"),
            apply=manifest(count),
            base="two-shards",
            vector=table == "name_keys",
        )
        yield Mutation(
            code="E020",
            name=f"no-{table}".replace("_", "-"),
            apply=manifest(put([], "index", table)),
            vector=False,
        )
    yield Mutation(code="E020", name="no-records", apply=_without_records)


def _without_records(files: DatasetFiles) -> None:
    """A dataset of nothing, whose totals agree."""
    for table in files.parts:
        files.parts[table] = []
        files.manifest["index"][table] = []
    files.manifest["totals"] = dict.fromkeys(files.manifest["totals"], 0)
    files.shards = []
    files.reseal("manifest")


def _header_size() -> Iterator[Mutation]:
    for name, size in (("more", 8192), ("none", 0), ("odd", 4097)):
        yield Mutation(code="E041", name=f"stated-{name}", apply=manifest(put(size, "header_size")), vector=False)
    yield Mutation(code="E041", name="larger-headers", apply=_larger_headers)
    yield Mutation(code="E041", name="other-slots", apply=manifest(put(1000, "shard_slots")))


def _larger_headers(files: DatasetFiles) -> None:
    """Headers one block larger than they must be, in every shard and in the manifest."""
    old = files.header_size
    new = files.manifest["header_size"] = old + 4096
    for shard, data in enumerate(files.shards):
        length = (new - 8).to_bytes(8, "little")
        files.shards[shard] = bytearray(length + data[8:old] + b" " * 4096 + data[old:])
    files.reseal("shards")


def _skipped() -> Iterator[Mutation]:
    def skipped(*rows: tuple[int, str, str]) -> Edit:
        return manifest(put([{"input": n, "name": name, "reason": reason} for n, name, reason in rows], "skipped"))

    for name, rows in (
        ("out-of-order", ((9, "a", "long"), (8, "b", "long"))),
        ("input-twice", ((9, "a", "long"), (9, "b", "long"))),
        ("without-name", ((9, "", "long"),)),
        ("without-reason", ((9, "a", ""),)),
        ("name-too-long", ((9, "\u00fc" * 256 + "x", "long"),)),
    ):
        yield Mutation(code="E045", name=name, apply=skipped(*rows))


MUTATIONS = (
    *_unknown(),
    *_missing(),
    *_values(),
    *_agreement(),
    *_totals(),
    *_header_size(),
    *_skipped(),
)
