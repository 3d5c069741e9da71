"""``kvformat plan``: which record goes to which shard, fixed before any model is loaded."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvformat.cli import model_options, options, output, source_options
from kvformat.cli.counts import plan_facts, shown_facts, told
from kvformat.cli.progress import meter
from kvformat.cli.quiet import quiet_libraries

__all__ = ["plan"]


def plan(
    *,
    documents: source_options.Source,
    model: options.Model,
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Directory of the plan, which is made.")],
    revision: options.Revision = None,
    dtype: options.Dtype = None,
    compute_dtype: options.ComputeDtype = None,
    layers: options.Layers = None,
    key_stage: model_options.KeyStage = "attention",
    quantise: model_options.Quantise = None,
    images: model_options.Images = False,
    shard_size: options.ShardSize = "1GiB",
    shard_slots: Annotated[int, typer.Option(min=1, metavar="N", help="Most records of a shard.")] = 1024,
    order: source_options.Order = "given",
    batch_size: source_options.BatchSize = 1,
    batch_tokens: source_options.BatchTokens = None,
    column: source_options.Columns = None,
    truncate: options.Truncate = None,
    skip_too_long: source_options.SkipTooLong = False,
    add_generation_prompt: options.AddGenerationPrompt = False,
    special_tokens: options.SpecialTokens = True,
    as_json: options.AsJson = False,
) -> None:
    """Plan an extraction for several workers.

    Tokenises documents once, unless they are a documents file, and fixes which record is in which shard, and what is
    computed together. `kvformat extract --plan` then makes the shards. Reads tokenizer and configuration of the
    model, no weights. Equal documents, schema and options give an equal digest.
    An equal plan that is there already is no error; another one is never overwritten.
    """
    parsed = options.parse(dtype=dtype, compute_dtype=compute_dtype, layers=layers, shard_size=shard_size)
    columns = source_options.parse_columns(column)
    quiet_libraries(terminal=output.is_terminal(sys.stderr))
    from kvformat.extract.documents.opening import check_source
    from kvformat.extract.options import ModelOptions, PlanOptions, SourceOptions, layer_numbers
    from kvformat.extract.places import local_place
    from kvformat.extract.prepare import plan_documents
    from kvformat.extract.reasoner import describe_reasoner
    from kvformat.write.prepared import check_place, is_plan

    reasoner = ModelOptions(
        model=model,
        revision=revision,
        dtype=parsed["dtype"],
        compute_dtype=parsed["compute_dtype"],
        layers=layer_numbers(parsed["layers"]),
        key_stage=key_stage,
        quantise=quantise,
        images=images,
    )
    source = SourceOptions(
        documents=documents,
        columns=columns,
        truncate=truncate,
        too_long="skip" if skip_too_long else "refuse",
        add_generation_prompt=add_generation_prompt,
        special_tokens=special_tokens,
    )
    wanted = PlanOptions(
        shard_nbytes=parsed["shard_nbytes"],
        shard_slots=shard_slots,
        order=order,
        batch_size=batch_size,
        batch_tokens=batch_tokens,
    )
    place = local_place(out, what="a plan")
    folder = place.absolute().parent
    # An equal plan that is there already is fine; what is within one is not.
    check_place(folder if is_plan(place) else place, what="a plan")
    check_source(documents)
    described = describe_reasoner(reasoner)
    with meter() as shown:
        made = plan_documents(described, reasoner, source, wanted, folder=folder, progress=told(shown))
        shown.begin("writing the plan")
        made.save(place)
    facts = plan_facts(made, str(place))
    if as_json:
        output.emit_json({"ok": True, **facts})
    else:
        from kvformat.cli.tables import facts as table

        output.render(table(shown_facts(facts)))
