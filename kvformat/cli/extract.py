"""``kvformat extract``: keys and values of a model over documents, published as a dataset."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kvformat.cli import (
    extracted,
    model_options,
    options,
    output,
    own_share,
    plan_option,
    ray_options,
    source_options,
    spool_option,
)
from kvformat.cli.busy import Machine, hint
from kvformat.cli.group import INTERRUPTED
from kvformat.cli.headers import header_nbytes, header_warning
from kvformat.cli.load_time import load_time
from kvformat.cli.progress import meter
from kvformat.cli.quiet import quiet_libraries
from kvformat.cli.watch import Watch
from kvformat.errors import KVFormatError, make_error
from kvformat.spec.paths import ROOT

__all__ = ["extract"]

_SOON_S = 5.0


def extract(
    *,
    model: options.Model,
    documents: Annotated[
        str | None,
        typer.Option(
            "--documents",
            metavar="SRC",
            help="Where documents come from: JSON Lines, Parquet, a saved data set, file.py:FUNCTION, or a documents "
            "file (*.kvdocs).",
        ),
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option("--plan", metavar="DIR", help="In place of --documents: the directory `kvformat plan` wrote."),
    ] = None,
    out: options.Out,
    column: source_options.Columns = None,
    spool: spool_option.Spool = None,
    storage_option: options.StorageOptions = None,
    revision: options.Revision = None,
    checkpoint: model_options.Checkpoint = None,
    select: model_options.Select = None,
    rename: model_options.Rename = None,
    preset: model_options.Preset = None,
    weights: model_options.Weights = None,
    checkpoint_dtype: model_options.CheckpointDtype = None,
    adapter: model_options.AdapterDir = None,
    adapter_mode: model_options.AdapterMode = None,
    dtype: options.Dtype = None,
    compute_dtype: options.ComputeDtype = None,
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="Where the model runs: cpu, cuda (the rank's own), cuda:0.")
    ] = "cpu",
    attn_implementation: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Attention implementation, such as sdpa or eager [default: the model's]."),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Threads of the model on the CPU [default: torch's: $OMP_NUM_THREADS, else every core; torchrun sets "
            "1, Ray its --ray-cpus]. On a machine shared with others, give the number of free cores: with more, they "
            "wait for each other, and it can take many times as long. All workers need the same: the last bits depend "
            "on it.",
        ),
    ] = None,
    layers: options.Layers = None,
    key_stage: model_options.KeyStage = "attention",
    quantise: model_options.Quantise = None,
    images: model_options.Images = False,
    shard_size: options.ShardSize = "1GiB",
    order: source_options.Order = "given",
    batch_size: source_options.BatchSize = 1,
    batch_tokens: source_options.BatchTokens = None,
    accept_batches: Annotated[
        bool,
        typer.Option("--accept-batches", help="Compute documents together even where that changes the last bits."),
    ] = False,
    truncate: options.Truncate = None,
    skip_too_long: source_options.SkipTooLong = False,
    add_generation_prompt: options.AddGenerationPrompt = False,
    special_tokens: options.SpecialTokens = True,
    unknown_context: Annotated[
        bool,
        typer.Option(
            "--unknown-context",
            help="Record that what determines the values is unknown, instead of deriving it: for models "
            "of other families.",
        ),
    ] = False,
    rank: Annotated[
        int | None,
        typer.Option(min=0, metavar="R", help="Which worker this is, counted from 0 [default: $RANK, else 0]."),
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="How many workers there are [default: $WORLD_SIZE, else 1].")
    ] = None,
    engine: Annotated[
        Literal["process", "ray"],
        typer.Option(help="Compute in this process, or in workers of a Ray cluster, a task a shard."),
    ] = "process",
    ray_address: ray_options.Address = None,
    ray_workers: ray_options.Workers = None,
    ray_cpus: ray_options.Cpus = 1.0,
    ray_gpus: ray_options.Gpus = 0.0,
    on_error: Annotated[
        Literal["fail", "skip"],
        typer.Option(help="At a document the model cannot take, or gives NaN for: stop, or go on without it."),
    ] = "fail",
    allow_skips: Annotated[
        bool,
        typer.Option(
            "--allow-skips", help="Publish although documents were skipped; the manifest lists them, with the reasons."
        ),
    ] = False,
    allow_non_finite: Annotated[
        list[str] | None,
        typer.Option(metavar="COMPONENT", help="Component, such as k, that may hold NaN or infinities; repeatable."),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Extract K and V of a model over documents.

    Needs --model, --out, and --documents or --plan; all else has a default that suits a first run. The model is any
    Hugging Face decoder with a K/V cache; the dataset is published when all documents are done.

    Interrupted, the same command resumes: finished shards are kept. On a finished dataset it changes nothing
    and exits with 0, when plan and context are equal. An unknown context equals nothing: there it fails with E118.
    To a URL each finished shard is uploaded at once; any machine resumes.

    Several workers share the shards, with nothing between them but the place they write to: start them with torchrun
    (torchrun --nproc-per-node 8 -m kvformat extract ...), or each with --rank and --world-size. A plan, made before,
    spares each of them reading and tokenising all documents.
    """
    if (documents is None) == (plan is None):
        raise make_error("E081", "give --documents SRC or --plan DIR, one of them")
    if plan is not None:
        plan_option.refuse_settled(
            {
                "--column": (column, None),
                "--shard-size": (shard_size, "1GiB"),
                "--order": (order, "given"),
                "--batch-size": (batch_size, 1),
                "--batch-tokens": (batch_tokens, None),
                "--truncate": (truncate, None),
                "--skip-too-long": (skip_too_long, False),
                "--add-generation-prompt": (add_generation_prompt, False),
                "--no-special-tokens": (special_tokens, True),
            }
        )
    storage_options = options.parse_storage_options(storage_option, "--storage-option")
    parsed = options.parse(dtype=dtype, compute_dtype=compute_dtype, layers=layers, shard_size=shard_size)
    source = model_options.parse_checkpoint(
        checkpoint, select=select, rename=rename, preset=preset, weights=weights, dtype=checkpoint_dtype
    )
    workers = ray_options.parse(
        engine=engine,
        address=ray_address,
        workers=ray_workers,
        cpus=ray_cpus,
        gpus=ray_gpus,
        rank=rank,
        world_size=world_size,
    )
    quiet_libraries(terminal=output.is_terminal(sys.stderr))
    _tell_spool(out, spool)
    try:
        from kvformat.extract import run
        from kvformat.loader.world import world_of

        world = world_of(rank, world_size)
        before = Machine.now()
        with meter(silent=world.rank > 0) as shown:
            watch = Watch(shown)
            dataset = run(
                model=model,
                documents=documents,
                plan=plan,
                out=out,
                columns=source_options.parse_columns(column),
                spool=spool,
                storage_options=storage_options,
                revision=revision,
                checkpoint=source,
                adapter=adapter,
                adapter_mode=adapter_mode,
                device=device,
                attn_implementation=attn_implementation,
                threads=threads,
                key_stage=key_stage,
                quantise=quantise,
                images=images,
                order=order,
                batch_size=batch_size,
                batch_tokens=batch_tokens,
                accept_batches=accept_batches,
                truncate=truncate,
                too_long="skip" if skip_too_long else "refuse",
                add_generation_prompt=add_generation_prompt,
                special_tokens=special_tokens,
                context="unknown" if unknown_context else "derive",
                rank=world.rank,
                world_size=world.size,
                ray=workers,
                on_error=on_error,
                allow_skips=allow_skips,
                allow_non_finite=tuple(allow_non_finite or ()),
                progress=watch,
                **parsed,
            )
    except KeyboardInterrupt:
        output.report_other("interrupted", _left(out, storage_options), as_json=as_json)
        raise typer.Exit(INTERRUPTED) from None
    if world.rank > 0:  # of the dataset, the first one tells for all
        own_share.tell(watch, world, dataset, as_json=as_json)
        return
    warning = header_warning(
        shards=dataset.manifest.totals.shards, headers=header_nbytes(dataset), nbytes=dataset.nbytes
    )
    if warning is not None and watch.extracted:
        output.complain(warning)
    saved = None if watch.spent is None else load_time(dataset, watch.spent)
    advice = None
    if watch.spent is not None and workers is None and device.startswith("cpu"):
        from kvformat.extract.reasoner import threads_used

        advice = hint(before, threads=threads or threads_used(), spent=watch.spent)
    if as_json:
        output.emit_json(extracted.document(dataset, watch, world, saved) | {"hint": advice})
    else:
        output.emit(*extracted.lines(dataset, watch, saved), *([] if advice is None else [f"    {advice}"]))
        if world.size > 1:
            output.emit(own_share.line(watch, world))


def _tell_spool(out: str, spool: str | None) -> None:
    """Say where disk space is needed, and what may be left behind by a killed run."""
    from kvformat.storage.location import resolve
    from kvformat.write.spool_places import spool_directory

    if isinstance(resolve(out), str):
        output.complain(f"shards wait for their upload in {output.plain(spool_directory(spool))}")


def _left(out: str, storage_options: dict[str, Any]) -> str:
    """What an interrupted run left behind."""
    from kvformat.cli.kept import any_kept
    from kvformat.cli.staged import any_finished
    from kvformat.storage.readers import remote_of
    from kvformat.storage.remote_options import RemoteOptions

    # Whoever interrupts does not wait for a store that may be the reason.
    soon = RemoteOptions(attempt_timeout_s=_SOON_S, deadline_s=_SOON_S)
    try:
        place = remote_of(out, storage_options=storage_options, remote_options=soon)
        if (place / ROOT).exists() if isinstance(place, Path) else place.stat(ROOT) is not None:
            return "the dataset is published; the same command says whether it is the one that was wanted"
        kept = any_finished(place) if isinstance(place, Path) else any_kept(place)
    except KVFormatError as error:
        if error.code == "E208":
            return "finished shards, if any, are kept, the same command resumes after them"
        kept = False  # interrupted before the location was looked at
    if kept:
        return "finished shards are kept, the same command resumes after them"
    return "no shard was finished, the same command begins anew"
