"""What can be known of an extraction before the model is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from kvformat.errors import make_error
from kvformat.extract.finished import check_comparable, check_plan, check_schema, check_target
from kvformat.extract.options import ExtractionOptions, documents_path, layer_numbers
from kvformat.extract.plan import Plan, make_plan
from kvformat.extract.size import Estimate, estimate_size
from kvformat.extract.staged import Known, staged_nbytes
from kvformat.extract.tag import model_name
from kvformat.extract.tokenise import Tokeniser
from kvformat.storage.readers import Location
from kvformat.storage.remote import Remote
from kvformat.storage.remote_options import RemoteOptions

if TYPE_CHECKING:
    import os

    from kvformat.extract.hf import Description
    from kvformat.read.dataset import Dataset

__all__ = ["estimate", "known_of", "prepare", "size_of"]


def estimate(
    *,
    model: str | os.PathLike[str],
    documents: str | os.PathLike[str],
    out: Location,
    storage_options: Mapping[str, Any] | None = None,
    remote_options: RemoteOptions | None = None,
    spool: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    dtype: str | None = None,
    compute_dtype: str | None = None,
    layers: Sequence[int] | None = None,
    shard_nbytes: int = 1 << 30,
    truncate: int | None = None,
    add_generation_prompt: bool = False,
    special_tokens: bool = True,
) -> Estimate:
    """Size of what :func:`run` would write with the same arguments. Reads configuration and tokenizer, no weights.

    Without the weights it cannot be told for certain which staged work a run would continue. Counted is what agrees in
    everything else, and of several such plans the one with the least.

    Raises
    ------
    InputError
        E300 to E306.
    UsageError
        E081.
    StorageError
        E207 where :func:`run` could not write to ``out``; of an object store that is found out by :func:`run` alone.
    IdentityError
        E118 where another dataset is at ``out``, or one of an unknown context.
    """
    options = ExtractionOptions(
        model=str(model),
        documents=documents_path(documents),
        out=out,
        storage_options=storage_options,
        remote_options=remote_options,
        spool=spool,
        revision=revision,
        dtype=dtype,
        compute_dtype=compute_dtype,
        layers=layer_numbers(layers),
        shard_nbytes=shard_nbytes,
        truncate=truncate,
        add_generation_prompt=add_generation_prompt,
        special_tokens=special_tokens,
    )
    target = options.target()
    described, plan, finished = prepare(options, target)
    size = size_of(plan, described, options, target, known=known_of(described, options))
    return replace(size, finished=finished is not None)


def prepare(
    options: ExtractionOptions, target: Path | Remote, *, probe: bool = False
) -> tuple[Description, Plan, Dataset | None]:
    """Description of the model, plan of the documents, and the dataset of that plan where it is finished already.

    With ``probe`` an object store is tried first, see :func:`kvformat.extract.finished.check_target`. Errors as for
    :func:`estimate`; what can be refused with little work is refused first.
    """
    try:
        from kvformat.extract.hf import check_device, describe
    except ModuleNotFoundError as error:
        raise make_error("E205", f"extraction needs {error.name}: pip install 'kvformat[hf]'") from error
    check_device(options.device)
    finished = check_target(target, probe=probe)
    described = describe(
        options.model,
        revision=options.revision,
        layers=options.layers,
        dtype=options.dtype,
        compute_dtype=options.compute_dtype,
    )
    if finished is not None:
        check_schema(finished, described.schema)
    tokeniser = Tokeniser.load(
        options.model,
        revision=described.revision,
        special_tokens=options.special_tokens,
        add_generation_prompt=options.add_generation_prompt,
        truncate=options.truncate,
        max_tokens=described.max_tokens,
        vocab_size=described.vocab_size,
    )
    plan = make_plan(options.documents, tokeniser)
    if finished is not None:
        check_plan(finished, plan)
        check_comparable(finished, options.context)
    return described, plan, finished


def known_of(described: Description, options: ExtractionOptions, **more: str) -> Known:
    """What is known of a run's plan before the model is loaded; ``more`` members of its tag."""
    tag = {
        "compute_dtype": described.compute_dtype,
        "model": model_name(options.model),
        "revision": options.revision or "",
        **more,
    }
    return Known(schema=described.schema, shard_nbytes=options.shard_nbytes, members=tag)


def size_of(
    plan: Plan, described: Description, options: ExtractionOptions, target: Path | Remote, *, known: Known
) -> Estimate:
    """Size of the dataset of a plan."""
    return estimate_size(
        plan.records(),
        documents=len(plan),
        name_nbytes=plan.name_nbytes,
        schema=described.schema,
        out=options.space(target),
        shard_nbytes=options.shard_nbytes,
        staged_nbytes=staged_nbytes(target, known),
        spooled=not isinstance(target, Path),
        family=described.family,
        compute_dtype=described.compute_dtype,
    )
