"""What a run is, once its model is loaded: all of the manifest that is known before any value is, and its tag."""

from __future__ import annotations

from typing import NamedTuple

from kvformat.extract.bounds import bounds_file
from kvformat.extract.options import ModelOptions
from kvformat.extract.plan import Plan
from kvformat.extract.reasoner import threads_used
from kvformat.extract.tag import Identified, Tag, staging_tag
from kvformat.interfaces import Extractor
from kvformat.read.error_bounds import LABEL
from kvformat.read.frequencies import frequencies_agree
from kvformat.spec import canonical
from kvformat.write.run import RunIdentity

__all__ = ["Identity", "identity_of", "needs_hashing", "same_file", "tag_of"]


class Identity(NamedTuple):
    """A run, and its covered files by label."""

    run: RunIdentity
    covered: dict[str, bytes]


def needs_hashing(extractor: Extractor) -> bool:
    """Whether :func:`identity_of` will read all weights."""
    return extractor.context.kind == "unknown" and isinstance(extractor, Identified)


def tag_of(extractor: Extractor, model: ModelOptions) -> str:
    """The tag of a model loaded with these options, in a process that computes as it is going to."""
    known = extractor.context.model
    device = extractor.provenance.get("device", "")
    return Tag(
        attn_implementation=extractor.provenance.get("attn_implementation", ""),
        compute_dtype=known.compute_dtype if known is not None else model.compute_dtype or "",
        context=model.context,
        device=device,
        threads=threads_used() if device.startswith("cpu") else None,
    ).encode()


def identity_of(extractor: Extractor, plan: Plan, *, tag: str, batches: str) -> Identity:
    """The run of a plan by an extractor.

    Parameters
    ----------
    tag
        As from :func:`tag_of`, or the caller's own.
    batches
        What is recorded of computing documents together.
    """
    context = extractor.context
    covered = dict(extractor.files)
    if context.model is not None and LABEL not in covered:
        covered[LABEL] = bounds_file(plan.schema, context.model.compute_dtype)
    provenance = dict(extractor.provenance)
    if provenance.get("device", "").startswith("cpu"):
        provenance["threads"] = str(threads_used())
    whole = staging_tag(extractor, tag)
    if plan.batch_size > 1:
        provenance["batches"] = batches
        whole = canonical.encode({"batches": batches, "tag": whole}).decode()
    run = RunIdentity.of(
        plan,
        schema=plan.schema,
        context=context,
        text=plan.text,
        provenance=provenance,
        covered=covered,
        shard_nbytes=plan.shard_nbytes,
        shard_slots=plan.shard_slots,
        num_tokens=plan.num_tokens,
        nbytes=plan.nbytes,
        tag=whole,
    )
    return Identity(run, covered)


def same_file(label: str, staged: bytes, own: bytes) -> bool:
    """Whether two contents of a covered file mean the same although their bytes differ."""
    return label == "inv_freq" and frequencies_agree(staged, own)
