"""The whole job of one worker: documents or a plan, and a model, in; a published dataset out."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from kvformat.errors import make_error
from kvformat.extract.checkpoint import CheckpointSource
from kvformat.extract.documents.opening import DocumentsSource
from kvformat.extract.model_job import run_model
from kvformat.extract.options import (
    ContextKind,
    ModelOptions,
    PlanOptions,
    RayOptions,
    SourceOptions,
    TargetOptions,
    WorkOptions,
    context_kind,
    layer_numbers,
)
from kvformat.extract.prepare import PlanGiven
from kvformat.extract.progress import Progress, Silent
from kvformat.loader.world import world_of
from kvformat.read.dataset import Dataset
from kvformat.spec.context import Context
from kvformat.spec.schema import Stage
from kvformat.storage.readers import Location
from kvformat.storage.remote_options import RemoteOptions

__all__ = ["run", "source_given"]


def run(
    *,
    model: str | os.PathLike[str],
    documents: DocumentsSource | None = None,
    plan: PlanGiven | None = None,
    out: Location,
    columns: Mapping[str, str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    remote_options: RemoteOptions | None = None,
    spool: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    checkpoint: CheckpointSource | None = None,
    adapter: str | os.PathLike[str] | None = None,
    adapter_mode: Literal["merge", "apply"] | None = None,
    dtype: str | None = None,
    compute_dtype: str | None = None,
    device: str = "cpu",
    attn_implementation: str | None = None,
    layers: Sequence[int] | None = None,
    key_stage: Stage = "attention",
    quantise: str | None = None,
    images: bool = False,
    shard_nbytes: int = 1 << 30,
    order: Literal["given", "length"] = "given",
    batch_size: int = 1,
    batch_tokens: int | None = None,
    accept_batches: bool = False,
    truncate: int | None = None,
    too_long: Literal["refuse", "skip"] = "refuse",
    add_generation_prompt: bool = False,
    special_tokens: bool = True,
    context: ContextKind | Context = "derive",
    rank: int | None = None,
    world_size: int | None = None,
    threads: int | None = None,
    ray: RayOptions | None = None,
    on_error: Literal["fail", "skip"] = "fail",
    allow_skips: bool = False,
    allow_non_finite: Collection[str] = (),
    progress: Progress | None = None,
) -> Dataset:
    """Extract K and V of a model over documents and publish them, alone or as one of several workers.

    Workers need no connection to each other, only the same place to write to: each makes its share of the shards, then
    what others have not begun, and returns once the dataset is published. Interrupted, the same call resumes: finished
    shards are kept, whichever worker made them, and the number of workers may be another one. With other weights, or
    anything else that changes the values, a single worker begins anew beside what is staged; several refuse. On a
    finished dataset it returns that, when plan and context are equal; an unknown context equals nothing, so with one
    it refuses.

    Parameters
    ----------
    model, revision
        Directory, or hub id and its branch, tag or commit.
    documents, columns
        Where documents come from, see :func:`kvformat.extract.make_plan`: JSON Lines of objects with ``id`` and one of
        ``text``, ``messages``, ``token_ids``; Parquet; a saved data set; a function; a documents file.
    plan
        In place of documents: a plan, or the directory it was saved in, which settles ``layers``, ``dtype``,
        ``key_stage``, ``quantise``, ``images``, ``shard_nbytes``, ``order``, ``batch_size`` and ``batch_tokens``.
    out
        Where the dataset goes: local directory, ``file://`` URL, or URL of an object store such as
        ``s3://bucket/dataset``. For workers on several machines, a place that all of them reach.
    storage_options, remote_options, spool
        Of an object store; as for :func:`kvformat.create`.
    checkpoint, adapter, adapter_mode, dtype, compute_dtype, device, attn_implementation, layers, key_stage, context
        As for :meth:`kvformat.extract.HuggingFaceExtractor.load`. On ``"cuda"``, each process of a machine takes the
        GPU of its ``LOCAL_RANK``, where the environment tells that.
    quantise
        Store in 8 bits, by a scheme of :class:`kvformat.extract.QuantisingExtractor`.
    images
        Documents may have images, which the model takes.
    shard_nbytes
        A shard closes before its data would exceed this many bytes.
    order
        Of the records within a shard: as the documents came (``given``), or by length, so that more go together.
    batch_size, batch_tokens
        Most documents, and most tokens, of one forward. Only documents of equal length are put together; nothing is
        padded. It is tried at the start whether they get the bits they get alone; where not, they are computed alone,
        with a warning (W007).
    accept_batches
        Compute documents together even so. It is recorded in the provenance.
    truncate, too_long
        Keep the first ``truncate`` tokens of a longer document; without it, one beyond the model's positions is
        refused, or left out and listed.
    add_generation_prompt, special_tokens
        As for :class:`kvformat.extract.tokenise.Tokeniser`.
    rank, world_size
        Which worker this is, of how many: by default ``RANK`` and ``WORLD_SIZE`` of the environment, else 0 of 1.
    threads
        Threads the model computes with on the CPU; the last bits of K and V depend on them.
    ray
        Have workers of a Ray cluster make the shards, a task a shard, in place of this process.
    on_error
        What becomes of a document that the model cannot take, or gives NaN for: ``"fail"``, or ``"skip"`` to go on
        without it.
    allow_skips
        Publish although documents were skipped; the manifest lists them with the reasons.
    allow_non_finite
        Components that may hold NaN or infinities.
    progress
        Told how the job gets on.

    Returns
    -------
    Dataset
        The published dataset, open.

    Raises
    ------
    UsageError
        E081.
    InputError
        E300 to E306, E308 to E310, E104.
    DamageError
        E307 for a plan.
    ConflictError
        E117 where workers of another plan are at work there; E119 where documents were skipped and that is not
        allowed, or nothing is left of a shard.
    StorageError
        E200 when space is short: before the model is loaded, and again where loading it shows that it continues less.
        E207 where ``out`` cannot be written to, E209 where an object store cannot commit, before anything is read.
    IdentityError
        E118 where another dataset is at ``out``, or one that cannot be compared; E120 where other workers of this plan
        have another model or other settings.
    """
    source = source_given(
        documents,
        plan,
        columns=columns,
        truncate=truncate,
        too_long=too_long,
        add_generation_prompt=add_generation_prompt,
        special_tokens=special_tokens,
    )
    world = world_of(rank, world_size)
    return run_model(
        ModelOptions(
            model=str(model),
            revision=revision,
            checkpoint=checkpoint,
            adapter=None if adapter is None else str(adapter),
            adapter_mode=adapter_mode,
            dtype=dtype,
            compute_dtype=compute_dtype,
            device=_own_device(device),
            attn_implementation=attn_implementation,
            layers=layer_numbers(layers),
            key_stage=key_stage,
            quantise=quantise,
            images=images,
            context=context_kind(context),
        ),
        source,
        PlanOptions(shard_nbytes=shard_nbytes, order=order, batch_size=batch_size, batch_tokens=batch_tokens),
        TargetOptions(out=out, storage_options=storage_options, remote_options=remote_options, spool=spool),
        WorkOptions(
            world=world,
            threads=threads,
            accept_batches=accept_batches,
            on_error=on_error,
            allow_skips=allow_skips,
            allow_non_finite=tuple(allow_non_finite),
        ),
        progress or Silent(),
        ray,
    )


def source_given(
    documents: DocumentsSource | None, plan: PlanGiven | None, **options: Any
) -> SourceOptions | PlanGiven:
    """What was given of documents and plan, just one of which must be; ``options`` are those of documents.

    Raises
    ------
    UsageError
        E081.
    """
    if (documents is None) == (plan is None):
        raise make_error("E081", "give either documents or a plan")
    if plan is None:
        assert documents is not None
        return SourceOptions(documents=documents, **options)
    if SourceOptions(documents="", **options) != SourceOptions(documents=""):
        raise make_error("E081", "the documents of a plan are tokenised already: leave their options out")
    return plan


def _own_device(device: str) -> str:
    """The device of this process: of several on one machine, each has a GPU of its own."""
    local = os.environ.get("LOCAL_RANK", "")
    return f"cuda:{int(local)}" if device == "cuda" and local.isdigit() else device
