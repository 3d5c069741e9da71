"""The part of ``kvformat verify`` that computes records again, and how it shows what it found."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from kvformat.cli import model_options, options, output
from kvformat.cli.progress import meter
from kvformat.cli.quiet import quiet_libraries
from kvformat.errors import InputError, make_error

if TYPE_CHECKING:
    from kvformat.extract.audit_report import AuditReport, ComponentDeviation
    from kvformat.extract.checkpoint import CheckpointSource
    from kvformat.read.dataset import Dataset

__all__ = ["Recomputation", "document", "recompute", "show"]


class Recomputation(Struct, frozen=True, kw_only=True):
    """What was asked for; None where an option was not given."""

    share: str
    model: str | None
    revision: str | None
    checkpoint: str | None
    select: str | None
    rename: list[str] | None
    preset: str | None
    weights: str | None
    checkpoint_dtype: str | None
    seed: int | None
    device: str | None
    compute_dtype: str | None
    attn_implementation: str | None
    adapter: str | None
    documents: str | None

    @classmethod
    def of(cls, share: str | None, **asked: Any) -> Recomputation | None:
        """The options together; None where nothing is to be computed again.

        Raises
        ------
        UsageError
            E081 where one of them is given and the share is not, or the share without a model.
        """
        if share is None:
            given = [f"--{name.replace('_', '-')}" for name, value in asked.items() if value is not None]
            if given:
                raise make_error("E081", f"{', '.join(given)}: only together with --recompute, such as --recompute 1%")
            return None
        if asked.get("model") is None:
            raise make_error("E081", "--recompute needs the model that made the dataset: --model DIR_OR_ID")
        return cls(share=share, **asked)


def recompute(location: str, asked: Recomputation, *, storage_options: Mapping[str, Any]) -> AuditReport:
    """Load the model and compute the sample again.

    Raises
    ------
    KVFormatError
        Whatever loading the model and :func:`kvformat.extract.audit` raise.
    """
    from kvformat.extract.audit import audit
    from kvformat.extract.inputs import require_inputs, require_media_sources
    from kvformat.extract.sampling import parse_amount
    from kvformat.read.opening import open_dataset

    fraction, count = parse_amount(asked.share, "--recompute")
    compute_dtype = options.parse_dtype(asked.compute_dtype, "--compute-dtype")
    checkpoint = model_options.parse_checkpoint(
        asked.checkpoint,
        select=asked.select,
        rename=asked.rename,
        preset=asked.preset,
        weights=asked.weights,
        dtype=asked.checkpoint_dtype,
    )
    dataset = open_dataset(location, storage_options=storage_options)
    require_inputs(dataset)
    require_media_sources(dataset, asked.documents)
    quiet_libraries(terminal=output.is_terminal(sys.stderr))
    with meter() as shown:
        shown.begin("loading the model")
        extractor, tokenizer = _load(dataset, asked, compute_dtype, checkpoint)
        shown.begin("computing again")
        return audit(
            dataset,
            extractor,
            fraction=fraction,
            count=count,
            seed=asked.seed or 0,
            tokenizer=tokenizer,
            documents=asked.documents,
            progress=lambda done, total: shown.update(done, total=total),
        )


def _load(
    dataset: Dataset, asked: Recomputation, compute_dtype: str | None, checkpoint: CheckpointSource | None
) -> tuple[Any, Any]:
    """Extractor of what the dataset stores, and the tokenizer where there is one."""
    from kvformat.extract.again import extractor_for

    assert asked.model is not None
    extractor = extractor_for(
        dataset,
        asked.model,
        revision=asked.revision,
        compute_dtype=compute_dtype,
        device=asked.device or "cpu",
        attn_implementation=asked.attn_implementation,
        adapter=asked.adapter,
        checkpoint=checkpoint,
        documents=asked.documents,
    )
    from kvformat.extract.hf.tokenizer import load_tokenizer

    try:
        return extractor, load_tokenizer(asked.model, revision=asked.revision)
    except InputError as error:
        output.complain(f"no tokenizer is compared: {error.message}")
        return extractor, None


def document(report: AuditReport) -> dict[str, Any]:
    """The report as JSON members; what is infinite is absent."""
    import msgspec

    found: dict[str, Any] = msgspec.to_builtins(report)
    found["findings"] = [output.finding(f.code, f.message, f.path, f.record, f.layer) for f in report.findings]
    for component in found["components"]:
        component["layers"] = [
            {name: value for name, value in layer.items() if not isinstance(value, float) or math.isfinite(value)}
            for layer in component["layers"]
        ]
    return found


def show(report: AuditReport) -> None:
    """Print the report."""
    from kvformat.cli.tables import heading, table

    parts: list[Any] = []
    for component in report.components:
        parts.append(heading(_title(component)))
        if all(layer.equal_records == report.computed for layer in component.layers):
            continue
        rows = table(*_COLUMNS, right=_COLUMNS)
        for layer in component.layers:
            rows.add_row(
                str(layer.layer),
                str(layer.equal_records),
                *(f"{value:.2e}" for value in (layer.max_abs, layer.rms, layer.relative_max, layer.relative_rms)),
                f"{layer.worst_rms:.2e} ({layer.worst_record})",
            )
        parts.append(rows)
    if parts:
        output.render(*parts)
    for finding in report.findings:
        where = output.place(None, finding.record, finding.layer)
        output.emit(f"differs [{finding.code}]: {output.one_line(finding.message)}" + (f" ({where})" if where else ""))
    if report.num_findings > len(report.findings):
        output.emit(f"and {report.num_findings - len(report.findings):,} more")
    for note in report.notes:
        output.emit(f"note: {output.one_line(note)}")
    counted = output.counted(report.computed, "record")
    verdict = "ok" if report.ok else "DIFFERENT"
    output.emit(
        f"{verdict}: {counted} of {report.records:,} computed again (seed {report.seed}), {report.tokens:,} tokens; "
        f"{report.equal:,} equal bit by bit, {report.beyond:,} beyond the bounds"
    )


# The last three over the layer's RMS, which is what the bound is for.
_COLUMNS = ("layer", "equal", "largest", "RMS", "largest relative", "RMS relative", "of the worst record")


def _title(component: ComponentDeviation) -> str:
    whose = "recorded" if component.bound_recorded else "default"
    kind = "" if component.quantisation is None else f", quantisation {component.quantisation}"
    exact = "" if any(layer.max_abs for layer in component.layers) else ": no difference"
    bound = f"{whose} bound {component.bound:.3g} of the relative RMS of any record"
    return f"{component.name} ({component.role}), {bound}{kind}{exact}"
