"""What can be known of an extraction before the model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvformat.errors import make_error
from kvformat.extract.options import ExtractionOptions
from kvformat.extract.plan import Plan, make_plan
from kvformat.extract.size import Estimate, estimate_size
from kvformat.extract.staged import Known, staged_nbytes
from kvformat.extract.tokenise import Tokeniser
from kvformat.storage.location import local_path

if TYPE_CHECKING:
    import os

    from kvformat.extract.hf import Description

__all__ = ["estimate", "known_of", "prepare", "size_of"]


def estimate(
    *,
    model: str | os.PathLike[str],
    documents: str | os.PathLike[str],
    out: str | os.PathLike[str],
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
    """
    options = ExtractionOptions(
        model=str(model),
        documents=Path(documents),
        out=local_path(out),
        revision=revision,
        dtype=dtype,
        compute_dtype=compute_dtype,
        layers=None if layers is None else tuple(layers),
        shard_nbytes=shard_nbytes,
        truncate=truncate,
        add_generation_prompt=add_generation_prompt,
        special_tokens=special_tokens,
    )
    described, plan = prepare(options)
    return size_of(plan, described, options, known=known_of(described, options))


def prepare(options: ExtractionOptions) -> tuple[Description, Plan]:
    """Description of the model, and plan of the documents; errors as for :func:`estimate`."""
    try:
        from kvformat.extract.hf import describe
    except ModuleNotFoundError as error:
        raise make_error("E205", f"extraction needs {error.name}: pip install 'kvformat[hf]'") from error
    described = describe(
        options.model,
        revision=options.revision,
        layers=options.layers,
        dtype=options.dtype,
        compute_dtype=options.compute_dtype,
    )
    tokeniser = Tokeniser.load(
        options.model,
        revision=described.revision,
        special_tokens=options.special_tokens,
        add_generation_prompt=options.add_generation_prompt,
        truncate=options.truncate,
        max_tokens=described.max_tokens,
        vocab_size=described.vocab_size,
    )
    return described, make_plan(options.documents, tokeniser)


def known_of(described: Description, options: ExtractionOptions, **more: str) -> Known:
    """What is known of a run's plan before the model is loaded; ``more`` members of its tag."""
    tag = {
        "compute_dtype": described.compute_dtype,
        "model": options.model,
        "revision": options.revision or "",
        **more,
    }
    return Known(schema=described.schema, shard_nbytes=options.shard_nbytes, members=tag)


def size_of(plan: Plan, described: Description, options: ExtractionOptions, *, known: Known) -> Estimate:
    """Size of the dataset of a plan."""
    return estimate_size(
        plan.records(),
        documents=len(plan),
        name_nbytes=plan.name_nbytes,
        schema=described.schema,
        out=options.out,
        shard_nbytes=options.shard_nbytes,
        staged_nbytes=staged_nbytes(options.out, known),
        family=described.family,
        compute_dtype=described.compute_dtype,
    )
