"""What can be known of an extraction before the model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvformat.errors import make_error
from kvformat.extract.plan import Plan, make_plan
from kvformat.extract.size import Estimate, estimate_size
from kvformat.extract.tokenise import Tokeniser
from kvformat.storage.location import local_path

if TYPE_CHECKING:
    import os

    from kvformat.extract.hf import Description

__all__ = ["estimate", "prepare", "size_of"]


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

    Raises
    ------
    InputError
        E300 to E306.
    """
    described, plan = prepare(
        model=model,
        documents=documents,
        revision=revision,
        dtype=dtype,
        compute_dtype=compute_dtype,
        layers=layers,
        truncate=truncate,
        add_generation_prompt=add_generation_prompt,
        special_tokens=special_tokens,
    )
    return size_of(plan, described, local_path(out), shard_nbytes)


def prepare(
    *,
    model: str | os.PathLike[str],
    documents: str | os.PathLike[str],
    revision: str | None,
    dtype: str | None,
    compute_dtype: str | None,
    layers: Sequence[int] | None,
    truncate: int | None,
    add_generation_prompt: bool,
    special_tokens: bool,
) -> tuple[Description, Plan]:
    """Description of the model, and plan of the documents; parameters and errors as for :func:`estimate`."""
    try:
        from kvformat.extract.hf import describe
    except ModuleNotFoundError as error:
        raise make_error("E205", f"extraction needs {error.name}: pip install 'kvformat[hf]'") from error
    described = describe(str(model), revision=revision, layers=layers, dtype=dtype, compute_dtype=compute_dtype)
    tokeniser = Tokeniser.load(
        str(model),
        revision=revision,
        special_tokens=special_tokens,
        add_generation_prompt=add_generation_prompt,
        truncate=truncate,
        max_tokens=described.max_tokens,
        vocab_size=described.vocab_size,
    )
    return described, make_plan(Path(documents), tokeniser)


def size_of(plan: Plan, described: Description, out: Path, shard_nbytes: int) -> Estimate:
    """Size of a plan's dataset at ``out``."""
    return estimate_size(
        plan.records(),
        documents=len(plan),
        name_nbytes=plan.name_nbytes,
        schema=described.schema,
        out=out,
        shard_nbytes=shard_nbytes,
        family=described.family,
        compute_dtype=described.compute_dtype,
    )
