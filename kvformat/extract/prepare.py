"""What can be known of an extraction before the model is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from msgspec import structs

from kvformat.errors import make_error
from kvformat.extract.documents.opening import DocumentsSource, check_source
from kvformat.extract.finished import check_comparable, check_plan, check_schema, check_target
from kvformat.extract.options import ModelOptions, PlanOptions, SourceOptions, TargetOptions, layer_numbers
from kvformat.extract.places import plan_place
from kvformat.extract.plan import Plan, make_plan, open_plan
from kvformat.extract.reasoner import describe_reasoner, load_tokeniser, options_of_plan
from kvformat.extract.size import Estimate, Space, space_of
from kvformat.extract.staged import staged_nbytes
from kvformat.spec.schema import Stage
from kvformat.storage.readers import Location
from kvformat.storage.remote import Remote
from kvformat.storage.remote_options import RemoteOptions

if TYPE_CHECKING:
    from kvformat.extract.hf import Description
    from kvformat.read.dataset import Dataset

__all__ = ["PlanGiven", "Prepared", "estimate", "plan_documents", "prepare", "space_for"]

PlanGiven = str | os.PathLike[str] | Plan
"""A plan, or the directory of one."""


class Prepared(NamedTuple):
    """What an extraction goes by.

    Attributes
    ----------
    model
        Its options, with those the plan settled.
    revision
        Commit of a hub id, where it was found out; else as given.
    plan
        What is to be made.
    finished
        The dataset of that plan, where it is there already.
    described
        The model; None where a plan was given, which was made with a description.
    """

    model: ModelOptions
    revision: str | None
    plan: Plan
    finished: Dataset | None
    described: Description | None


def estimate(
    *,
    model: str | os.PathLike[str],
    documents: DocumentsSource,
    out: Location,
    columns: Mapping[str, str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    remote_options: RemoteOptions | None = None,
    spool: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    dtype: str | None = None,
    compute_dtype: str | None = None,
    layers: Sequence[int] | None = None,
    key_stage: Stage = "attention",
    quantise: str | None = None,
    images: bool = False,
    shard_nbytes: int = 1 << 30,
    order: Literal["given", "length"] = "given",
    batch_size: int = 1,
    batch_tokens: int | None = None,
    truncate: int | None = None,
    too_long: Literal["refuse", "skip"] = "refuse",
    add_generation_prompt: bool = False,
    special_tokens: bool = True,
) -> Estimate:
    """Size of what :func:`run` would write with the same arguments. Reads configuration and tokenizer, no weights.

    Without the weights it cannot be told for certain which staged work a run would continue. Counted is what is of
    the same plan, and of several such runs the one with the least.

    Parameters
    ----------
    model, revision
        Directory, or hub id and its branch, tag or commit.
    documents, columns
        Where documents come from; all of them are read and tokenised.
    out
        Where the dataset would go, which need not exist: its free space is what is compared.
    storage_options, remote_options, spool
        Of an object store. What is compared is the free space of the spool then.
    dtype, compute_dtype, layers, key_stage, quantise, images
        What would be stored of a token, and so the bytes it takes.
    shard_nbytes
        A shard closes before its data would exceed this many bytes.
    order, batch_size, batch_tokens
        What would be computed together: the number of forwards depends on it, the size does not.
    truncate, too_long, add_generation_prompt, special_tokens
        How documents become token ids. All as for :func:`run`.

    Returns
    -------
    Estimate
        Counts, bytes, and whether they fit.

    Raises
    ------
    InputError
        E300 to E306, E309.
    UsageError
        E081, also for an ``out`` in the directory of a plan.
    DamageError
        E307 for a documents file.
    DependencyError
        E205 where transformers, or a library that the source needs, is not installed.
    StorageError
        E207 where :func:`run` could not write to ``out``; of an object store that is found out by :func:`run` alone.
    IdentityError
        E118 where another dataset is at ``out``, or one of an unknown context.
    """
    place = TargetOptions(out=out, storage_options=storage_options, remote_options=remote_options, spool=spool)
    target = place.target()
    ready = prepare(
        ModelOptions(
            model=str(model),
            revision=revision,
            dtype=dtype,
            compute_dtype=compute_dtype,
            layers=layer_numbers(layers),
            key_stage=key_stage,
            quantise=quantise,
            images=images,
        ),
        SourceOptions(
            documents=documents,
            columns=columns,
            truncate=truncate,
            too_long=too_long,
            add_generation_prompt=add_generation_prompt,
            special_tokens=special_tokens,
        ),
        PlanOptions(shard_nbytes=shard_nbytes, order=order, batch_size=batch_size, batch_tokens=batch_tokens),
        target,
    )
    plan, described = ready.plan, ready.described
    assert described is not None, "a source was given"
    return Estimate(
        **structs.asdict(space_for(ready, place, target)),
        documents=plan.num_names,
        records=plan.num_records,
        tokens=plan.num_tokens,
        longest=plan.longest,
        shards=plan.num_shards,
        groups=plan.num_groups,
        family=described.family,
        compute_dtype=described.compute_dtype,
        schema=plan.schema,
    )


def prepare(
    model: ModelOptions,
    source: SourceOptions | PlanGiven,
    options: PlanOptions,
    target: Path | Remote,
    *,
    probe: bool = False,
) -> Prepared:
    """Open the plan, or make it; and look whether its dataset is there already.

    With ``probe`` an object store is tried first, see :func:`kvformat.extract.finished.check_target`. What can be
    refused with little work is refused first.

    Raises
    ------
    KVFormatError
        As for :func:`estimate`; E307 where a plan is damaged.
    """
    if isinstance(source, SourceOptions):
        check_source(source.documents)
    elif not isinstance(source, Plan):
        source = plan_place(source)
    finished = check_target(target, probe=probe)
    described = None
    if isinstance(source, SourceOptions):
        described = describe_reasoner(model)
        if finished is not None:
            check_schema(finished, described.schema)
        plan = plan_documents(described, model, source, options)
        revision = described.revision
    else:
        plan = source if isinstance(source, Plan) else open_plan(source)
        model, revision = options_of_plan(model, plan), model.revision
        usual = structs.asdict(PlanOptions())
        settled = [name for name, value in structs.asdict(options).items() if value != usual[name]]
        if settled:
            raise make_error("E081", f"a plan has settled shards and batches: leave out {', '.join(settled)}")
        if finished is not None:
            check_schema(finished, plan.schema)
    if finished is not None:
        check_plan(finished, plan)
        check_comparable(finished, model.context)
    return Prepared(model, revision, plan, finished, described)


def plan_documents(
    described: Description, model: ModelOptions, source: SourceOptions, options: PlanOptions, **more: Any
) -> Plan:
    """The plan of a source; ``more`` as :func:`make_plan` takes it."""
    return make_plan(
        source.documents,
        load_tokeniser(described, model, source),
        schema=described.schema,
        shard_nbytes=options.shard_nbytes,
        shard_slots=options.shard_slots,
        order=options.order,
        batch_size=options.batch_size,
        batch_tokens=options.batch_tokens,
        columns=source.columns,
        too_long=source.too_long,
        **more,
    )


def space_for(
    ready: Prepared, place: TargetOptions, target: Path | Remote, *, key: str | None = None, in_work: bool = False
) -> Space:
    """What the dataset needs and the disk has; ``key`` of the run once it is known."""
    return space_of(
        ready.plan,
        place.space(target),
        staged_nbytes=staged_nbytes(target, ready.plan.digest, key=key, in_work=in_work),
        spooled=not isinstance(target, Path),
        finished=ready.finished is not None,
    )
