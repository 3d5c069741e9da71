"""``kvformat estimate``: how large an extraction will be, before any model is loaded."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from kvformat.cli import model_options, options, output, source_options, spool_option
from kvformat.cli.headers import header_warning
from kvformat.cli.quiet import quiet_libraries

if TYPE_CHECKING:
    from kvformat.extract import Estimate

__all__ = ["estimate"]


def estimate(
    *,
    model: options.Model,
    documents: source_options.Source,
    out: options.Out,
    column: source_options.Columns = None,
    spool: spool_option.Spool = None,
    storage_option: options.StorageOptions = None,
    revision: options.Revision = None,
    dtype: options.Dtype = None,
    compute_dtype: options.ComputeDtype = None,
    layers: options.Layers = None,
    key_stage: model_options.KeyStage = "attention",
    quantise: model_options.Quantise = None,
    images: model_options.Images = False,
    shard_size: options.ShardSize = "1GiB",
    order: source_options.Order = "given",
    batch_size: source_options.BatchSize = 1,
    batch_tokens: source_options.BatchTokens = None,
    truncate: options.Truncate = None,
    skip_too_long: source_options.SkipTooLong = False,
    add_generation_prompt: options.AddGenerationPrompt = False,
    special_tokens: options.SpecialTokens = True,
    as_json: options.AsJson = False,
) -> None:
    """Tell how large an extraction will be.

    Counts tokens, bytes and shards, and compares them with the free space. Loads no weights.
    """
    parsed = options.parse(dtype=dtype, compute_dtype=compute_dtype, layers=layers, shard_size=shard_size)
    quiet_libraries(terminal=output.is_terminal(sys.stderr))
    from kvformat import extract

    found = extract.estimate(
        model=model,
        documents=documents,
        out=out,
        columns=source_options.parse_columns(column),
        spool=spool,
        storage_options=options.parse_storage_options(storage_option, "--storage-option"),
        revision=revision,
        key_stage=key_stage,
        quantise=quantise,
        images=images,
        order=order,
        batch_size=batch_size,
        batch_tokens=batch_tokens,
        truncate=truncate,
        too_long="skip" if skip_too_long else "refuse",
        add_generation_prompt=add_generation_prompt,
        special_tokens=special_tokens,
        **parsed,
    )
    warning = header_warning(shards=found.shards, headers=found.header_nbytes, nbytes=found.nbytes)
    if warning is not None and not found.finished:
        output.complain(warning)
    if as_json:
        output.emit_json(_document(found))
    else:
        _show(found)
    if found.finished:
        output.complain("a dataset of these documents is here already: extraction only compares its context")
    if not found.fits:
        needed, free = f"{found.needed_nbytes:,} bytes are needed", f"{found.free_nbytes:,} are free"
        output.complain(f"warning: {needed} and {free}: extraction would refuse")


def _document(found: Estimate) -> dict[str, Any]:
    import msgspec

    return {
        "ok": True,
        **msgspec.to_builtins(found),
        "needed_nbytes": found.needed_nbytes,
        "fits": found.fits,
    }


def _show(found: Estimate) -> None:
    from kvformat.cli.fields import schema_fields
    from kvformat.cli.tables import facts, heading

    per_token = (found.nbytes - found.header_nbytes) / max(found.tokens, 1)
    output.render(
        facts(
            {
                "model": f"{found.family}, computed in {found.compute_dtype}",
                "documents": f"{found.documents:,}, {found.records:,} of them different",
                "tokens": f"{found.tokens:,}, {found.longest:,} in the longest document",
                "forwards": f"{found.groups:,}",
                "shards": f"{found.shards:,}, {output.size_text(found.nbytes)} ({found.nbytes:,} bytes)",
                "headers": f"{output.size_text(found.header_nbytes)} of that",
                "a token": f"{output.size_text(round(per_token))}, padding included, headers not",
                "index": f"at most {output.size_text(found.index_nbytes)}, with room to spare",
                "staged": output.size_text(found.staged_nbytes),
                "needed": output.size_text(found.needed_nbytes),
                "free": f"{output.size_text(found.free_nbytes)}, {'enough' if found.fits else 'NOT ENOUGH'}",
            }
        ),
        heading("schema"),
        facts({name: value for name, value in schema_fields(found.schema).items() if value}),
    )
