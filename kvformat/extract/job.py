"""The whole job: documents file and model in, published dataset out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from msgspec.structs import replace

from kvformat.errors import make_error
from kvformat.extract.finished import check_context
from kvformat.extract.options import ContextKind, ExtractionOptions, context_kind, documents_path, layer_numbers
from kvformat.extract.plan import Plan, PlannedDocument
from kvformat.extract.prepare import known_of, prepare, size_of
from kvformat.extract.size import Estimate, require_space
from kvformat.extract.staged import staged_nbytes
from kvformat.extract.tag import Identified, Tag, model_name, staging_tag
from kvformat.read.dataset import Dataset
from kvformat.read.opening import open_dataset
from kvformat.spec.context import Context
from kvformat.spec.digests import context_digest
from kvformat.spec.layout import Layout
from kvformat.storage.readers import Location
from kvformat.storage.remote_options import RemoteOptions
from kvformat.write.create import create
from kvformat.write.writer import Writer

if TYPE_CHECKING:
    import os

    from kvformat.extract.hf import HuggingFaceExtractor
    from kvformat.interfaces import Extractor

__all__ = ["Phase", "Progress", "extract_plan", "run"]

Phase = Literal["read", "load", "identify", "extract", "publish"]


class Progress(Protocol):
    """Told how a job gets on; by the thread that runs it."""

    def phase(self, name: Phase, *, tokens: int = 0, nbytes: int = 0) -> None:
        """A phase begins; ``extract`` says how many tokens and bytes of payload there will be.

        ``load`` includes hashing the weights where a context is derived; ``identify`` is the same for an unknown one.
        """

    def advance(self, *, tokens: int, nbytes: int, computed: bool) -> None:
        """A record is there; ``computed`` is False where an interrupted run had made it."""


class _Silent:
    def phase(self, name: Phase, *, tokens: int = 0, nbytes: int = 0) -> None:
        """Say nothing."""

    def advance(self, *, tokens: int, nbytes: int, computed: bool) -> None:
        """Say nothing."""


def run(
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
    device: str = "cpu",
    batch_size: int = 1,
    attn_implementation: str | None = None,
    layers: Sequence[int] | None = None,
    shard_nbytes: int = 1 << 30,
    truncate: int | None = None,
    add_generation_prompt: bool = False,
    special_tokens: bool = True,
    context: ContextKind | Context = "derive",
    allow_non_finite: Collection[str] = (),
    progress: Progress | None = None,
) -> Dataset:
    """Extract K and V of a model over a documents file and publish them.

    Interrupted, the same call resumes at the last finished shard; with other weights, or anything else that changes
    the values, it begins anew beside what is staged. On a finished dataset it returns that, when plan and
    context are equal; an unknown context equals nothing, so with one it refuses.

    Parameters
    ----------
    model, revision
        Directory, or hub id and its branch, tag or commit.
    documents
        JSON Lines: objects with ``id`` and one of ``text``, ``messages``, ``token_ids``.
    out
        Where the dataset goes: local directory, ``file://`` URL, or URL of an object store such as
        ``s3://bucket/dataset``.
    storage_options, remote_options, spool
        Of an object store; as for :func:`kvformat.create`.
    dtype, compute_dtype, device, attn_implementation, layers, context
        As for :meth:`kvformat.extract.HuggingFaceExtractor.load`.
    batch_size
        Most documents of one forward. Only neighbours of equal length are put together; nothing is padded. The last
        bits of K and V depend on it.
    shard_nbytes
        A shard closes before its data would exceed this many bytes.
    truncate
        Keep the first ``truncate`` tokens of a longer document; without it, one beyond the model's positions is
        refused.
    add_generation_prompt, special_tokens
        As for :class:`kvformat.extract.tokenise.Tokeniser`.
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
        E300 to E306, E104.
    StorageError
        E200 when space is short: before the model is loaded, and again where loading it shows that it continues less.
        E207 where ``out`` cannot be written to, E209 where an object store cannot commit, before anything is read.
    IdentityError
        E118 where another dataset is at ``out``, or one that cannot be compared.
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
        device=device,
        batch_size=batch_size,
        attn_implementation=attn_implementation,
        layers=layer_numbers(layers),
        shard_nbytes=shard_nbytes,
        truncate=truncate,
        add_generation_prompt=add_generation_prompt,
        special_tokens=special_tokens,
        context=context_kind(context),
        allow_non_finite=tuple(allow_non_finite),
    )
    return _run(options, progress or _Silent())


def _run(options: ExtractionOptions, report: Progress) -> Dataset:
    target = options.target()
    report.phase("read")
    described, plan, finished = prepare(options, target, probe=True)
    known = known_of(described, options, context=options.context)
    size: Estimate | None = None
    if finished is None:
        size = size_of(plan, described, options, target, known=known)
        require_space(size, options.space(target))
    report.phase("load")
    extractor = _load(options, plan, described.revision)
    if extractor.schema != described.schema:
        raise make_error(
            "E302", "the loaded model caches other shapes than its configuration promised", path=options.model
        )
    if finished is not None:
        check_context(finished, extractor)
        return finished
    tag = Tag(
        attn_implementation=extractor.provenance["attn_implementation"],
        compute_dtype=described.compute_dtype,
        context=options.context,
        device=extractor.provenance["device"],
        model=model_name(options.model),
        revision=options.revision or "",
    )
    whole = _staging_tag(extractor, tag.encode(), report)
    if size is not None:
        # Other weights continue nothing: what was counted above may have to be written again.
        known = replace(known, context=context_digest(extractor.context).hex(), tag=whole)
        require_space(replace(size, staged_nbytes=staged_nbytes(target, known)), options.space(target))
    return _extract(
        extractor,
        plan,
        target,
        spool=options.spool,
        batch_size=options.batch_size,
        shard_nbytes=options.shard_nbytes,
        tag=whole,
        allow_non_finite=options.allow_non_finite,
        report=report,
    )


def _load(options: ExtractionOptions, plan: Plan, revision: str | None) -> HuggingFaceExtractor:
    from kvformat.extract.hf import HuggingFaceExtractor

    return HuggingFaceExtractor.load(
        options.model,
        revision=revision,
        dtype=options.dtype,
        compute_dtype=options.compute_dtype,
        device=options.device,
        attn_implementation=options.attn_implementation,
        layers=options.layers,
        text=plan.text,
        context=options.context,
    )


def extract_plan(
    extractor: Extractor,
    plan: Plan,
    out: Location,
    *,
    spool: str | os.PathLike[str] | None = None,
    batch_size: int = 1,
    shard_nbytes: int = 1 << 30,
    tag: str = "",
    allow_non_finite: Collection[str] = (),
    progress: Progress | None = None,
) -> Dataset:
    """Extract the documents of a plan with any extractor, and publish.

    Parameters
    ----------
    out
        As for :func:`run`; a :class:`~kvformat.storage.remote.Remote` for a URL with options of its own.
    spool
        As for :func:`kvformat.create`.
    tag
        Part of the plan's identity: runs with different tags never continue each other. Where the context is unknown
        and the extractor has no ``values_digest``, nothing else keeps two models apart: name here what determines the
        values.

    Raises
    ------
    KVFormatError
        Whatever extractor and writer raise. Finished shards stay staged, and the same call resumes.
    """
    report = progress or _Silent()
    return _extract(
        extractor,
        plan,
        out,
        spool=spool,
        batch_size=batch_size,
        shard_nbytes=shard_nbytes,
        tag=_staging_tag(extractor, tag, report),
        allow_non_finite=allow_non_finite,
        report=report,
    )


def _staging_tag(extractor: Extractor, tag: str, report: Progress) -> str:
    if extractor.context.kind == "unknown" and isinstance(extractor, Identified):
        report.phase("identify")
    return staging_tag(extractor, tag)


def _extract(
    extractor: Extractor,
    plan: Plan,
    out: Location,
    *,
    spool: str | os.PathLike[str] | None,
    batch_size: int,
    shard_nbytes: int,
    tag: str,
    allow_non_finite: Collection[str],
    report: Progress,
) -> Dataset:
    layout = Layout(extractor.schema)
    lengths = list(plan.records())
    report.phase("extract", tokens=sum(lengths), nbytes=sum(layout.place((length,)).nbytes for length in lengths))
    with create(
        out,
        schema=extractor.schema,
        context=extractor.context,
        text=plan.text,
        provenance=extractor.provenance,
        files=extractor.files,
        shard_nbytes=shard_nbytes,
        resume=True,
        tag=tag,
        spool=spool,
        allow_non_finite=allow_non_finite,
    ) as writer:
        pending: list[PlannedDocument] = []
        for planned in plan:
            if pending and (planned.repeated or len(pending) == batch_size or _tokens(planned) != _tokens(pending[0])):
                _flush(extractor, writer, pending, layout, report)
            if not pending and writer.replay(planned.name, planned.document):
                if not planned.repeated:
                    _advance(report, layout, planned, computed=False)
            else:
                pending.append(planned)
        _flush(extractor, writer, pending, layout, report)
        report.phase("publish")
    return open_dataset(out)


def _flush(
    extractor: Extractor, writer: Writer, pending: list[PlannedDocument], layout: Layout, report: Progress
) -> None:
    """Compute and add what is pending."""
    if not pending:
        return
    extracted = extractor.extract([planned.document for planned in pending])
    for planned, found in zip(pending, extracted, strict=True):
        writer.add(planned.name, found.components, document=planned.document, extras=found.extras)
        _advance(report, layout, planned, computed=True)
    pending.clear()


def _advance(report: Progress, layout: Layout, planned: PlannedDocument, *, computed: bool) -> None:
    tokens = planned.document.num_tokens
    report.advance(tokens=tokens, nbytes=layout.place((tokens,)).nbytes, computed=computed)


def _tokens(planned: PlannedDocument) -> int:
    return planned.document.num_tokens
