"""``kvformat inspect``: what a dataset is, from which model, and how large; or what a plan or documents file is."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvformat.cli import options, output
from kvformat.cli.group import looking_at_prepared
from kvformat.cli.headers import header_nbytes
from kvformat.errors import make_error

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from kvformat.cli.lengths import Lengths
    from kvformat.read.dataset import Dataset

__all__ = ["inspect"]

_SHOWN = 12
_BAR_WIDTH = 40


def inspect(
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help="Dataset: a directory or URL; a plan; or a documents file (*.kvdocs)."),
    ],
    *,
    record: Annotated[
        str | None, typer.Option(metavar="NAME", help="Show the record with this name instead of the dataset.")
    ] = None,
    number: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Show the record with this number, counted from 0.")
    ] = None,
    values: Annotated[
        bool, typer.Option("--values", help="Of a record, also show token ids and values. They can reveal the prompt.")
    ] = False,
    storage_option: options.StorageOptions = None,
    as_json: options.AsJson = False,
) -> None:
    """Show what a dataset, plan or documents file holds.

    Of a dataset: model, schema, sizes, token lengths, shards, and what else was recorded; or one record. Values and
    token ids are never shown unless --values asks for them.
    """
    if record is not None and number is not None:
        raise make_error("E081", "give --record or --number, not both")
    if values and record is None and number is None:
        raise make_error("E081", "--values shows one record: give --record NAME or --number N")
    storage_options = options.parse_storage_options(storage_option, "--storage-option")
    from kvformat.cli.inspect_prepared import prepared_at, show_prepared
    from kvformat.read.opening import open_dataset

    kind = prepared_at(path)
    if kind is not None:
        if record is not None or number is not None:
            what = {"plan": "a plan", "documents": "a documents file"}[kind]
            raise make_error("E081", f"this is {what}, and --record, --number show what a dataset holds", path=path)
        with looking_at_prepared(as_json=as_json):
            show_prepared(kind, path, as_json=as_json)
        return
    dataset = open_dataset(path, storage_options=storage_options)
    key = record if number is None else number
    if key is not None:
        from kvformat.cli.record import show_record

        show_record(dataset[key], dataset, values=values, as_json=as_json)
    elif as_json:
        output.emit_json(_document(dataset))
    else:
        _show(dataset)


def _lengths(dataset: Dataset) -> Lengths:
    from kvformat.cli.lengths import lengths_of

    rows = dataset.index.rows
    return lengths_of(rows.part(number).arrays["dims"][:, 0] for number in range(len(rows.parts)))


def _shards(dataset: Dataset) -> Iterable[tuple[str, int, int]]:
    """Path, size and records of every shard."""
    for ordinal in range(dataset.manifest.totals.shards):
        row = dataset.index.shard(ordinal)
        yield row.path, row.size, row.end - row.first


def _other_nbytes(dataset: Dataset) -> int:
    manifest = dataset.manifest
    tables = ("shards", "rows", "names", "document_keys", "name_keys")
    return sum(part.size for table in tables for part in manifest.parts(table)) + sum(f.size for f in manifest.files)


# -- JSON -----------------------------------------------------------------------------------------------------------


def _document(dataset: Dataset) -> dict[str, Any]:
    import msgspec

    from kvformat.cli.fields import text_document

    manifest = dataset.manifest
    return {
        "ok": True,
        "kind": "dataset",
        "location": dataset.location,
        "id": dataset.id,
        "version": manifest.version,
        "records": len(dataset),
        "names": dataset.num_names,
        "tokens": dataset.num_tokens,
        "nbytes": dataset.nbytes,
        "header_nbytes": header_nbytes(dataset),
        "index_nbytes": _other_nbytes(dataset),
        "schema": msgspec.to_builtins(manifest.schema),
        "context": msgspec.to_builtins(manifest.context),
        "text": text_document(manifest.text),
        "provenance": dict(manifest.provenance),
        "skipped": msgspec.to_builtins(manifest.skipped),
        "files": msgspec.to_builtins(manifest.files),
        "token_lengths": msgspec.to_builtins(_lengths(dataset)),
        "shards": [{"path": name, "nbytes": size, "records": count} for name, size, count in _shards(dataset)],
    }


# -- for people -----------------------------------------------------------------------------------------------------


def _show(dataset: Dataset) -> None:
    from kvformat.cli.fields import context_fields, text_fields
    from kvformat.cli.tables import facts, heading

    manifest = dataset.manifest
    parts: list[RenderableType] = [facts(_overview(dataset)), heading("schema"), _schema_table(dataset)]
    parts += [heading("tokens of a record"), *_lengths_shown(dataset)]
    parts += [heading("shards"), *_shards_shown(dataset)]
    if dataset.context.model is None:
        parts.append(heading("context: unknown, so nothing can be compared with it"))
    else:
        parts += [heading("context"), facts(context_fields(dataset.context))]
    text = text_fields(dataset.text)
    if text:
        parts += [heading("text"), facts(text)]
    if dataset.provenance:
        parts += [heading("provenance"), facts(dict(sorted(dataset.provenance.items())))]
    if manifest.skipped:
        parts += [heading(f"skipped ({len(manifest.skipped):,})"), facts(_skipped(dataset))]
    output.render(*parts)


def _overview(dataset: Dataset) -> dict[str, str]:
    size, beside = output.size_text(dataset.nbytes), output.size_text(_other_nbytes(dataset))
    headers = header_nbytes(dataset)
    per_token = (dataset.nbytes - headers) / max(dataset.num_tokens, 1)
    return {
        "dataset": dataset.location,
        "id": dataset.id,
        "format": f"kvformat {dataset.manifest.version}",
        "model": _model_text(dataset),
        "records": f"{len(dataset):,} with {output.counted(dataset.num_names, 'name')}",
        "tokens": f"{dataset.num_tokens:,}",
        "size": f"{size} in shards, {beside} beside",
        "headers": f"{output.size_text(headers)} of the shards",
        "a token": f"{output.size_text(round(per_token))}, padding included, headers not",
    }


def _lengths_shown(dataset: Dataset) -> list[RenderableType]:
    from kvformat.cli.lengths import bars
    from kvformat.cli.tables import facts

    lengths = _lengths(dataset)
    width = min(_BAR_WIDTH, max(8, shutil.get_terminal_size().columns - 40))
    measured = {
        "shortest": f"{lengths.shortest:,}",
        "median": f"{lengths.median:,}",
        "mean": f"{lengths.mean:,.1f}",
        "95 %": f"{lengths.p95:,}",
        "longest": f"{lengths.longest:,}",
    }
    return [facts(measured), *(f"   {line}" for line in bars(lengths.bins, width=width, blocks=_can_print("█")))]


def _shards_shown(dataset: Dataset) -> list[RenderableType]:
    from kvformat.cli.tables import facts, table

    shards = list(_shards(dataset))
    sizes, counts = [size for _, size, _ in shards], [count for _, _, count in shards]
    rows = table("path", "size", "records", right=("size", "records"))
    for path, size, count in shards[:_SHOWN]:
        rows.add_row(path, output.size_text(size), f"{count:,}")
    if len(shards) > _SHOWN:
        rows.add_row(f"and {len(shards) - _SHOWN:,} more; --json lists all", "", "")
    measured = {
        "shards": f"{len(shards):,}",
        "size": f"{output.size_text(min(sizes))} to {output.size_text(max(sizes))}",
        "records": f"{min(counts):,} to {max(counts):,} each, {dataset.manifest.shard_slots:,} at most",
    }
    return [facts(measured), rows]


def _model_text(dataset: Dataset) -> str:
    model = dataset.context.model
    if model is None:
        return "unknown"
    sizes = model.sizes
    return (
        f"{model.family}, {sizes.num_hidden_layers} layers, {sizes.num_key_value_heads} K/V heads of "
        f"{sizes.num_attention_heads}, head_dim {sizes.head_dim}, computed in {model.compute_dtype}"
    )


def _schema_table(dataset: Dataset) -> Table:
    from kvformat.cli.fields import axes_text
    from kvformat.cli.tables import table

    schema = dataset.schema
    found = table("name", "role", "stage", "layers", "axes", "dtype", "scale")
    for component in schema.components:
        scale = component.quant.scale if component.quant is not None else ""
        layers = f"{len(component.layers)}: {output.layers_text(component.layers)}"
        found.add_row(
            component.name,
            component.role,
            component.stage or "",
            layers,
            axes_text(component.axes),
            component.dtype,
            scale,
        )
    for extra in schema.extras:
        found.add_row(extra.name, "extra", "", "", axes_text(extra.axes), extra.dtype, "")
    for shared in schema.shared:
        found.add_row("", "shared", "", f"{shared.layer} uses {shared.source}", "", "", "")
    return found


def _skipped(dataset: Dataset) -> dict[str, str]:
    skipped = dataset.manifest.skipped
    found = {one.name: one.reason for one in skipped[:_SHOWN]}
    if len(skipped) > _SHOWN:
        found["..."] = f"and {len(skipped) - _SHOWN:,} more; --json lists all"
    return found


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (AttributeError, UnicodeEncodeError):
        return False
    return True
