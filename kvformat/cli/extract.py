"""``kvformat extract``: keys and values of a model over documents, published as a dataset."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvformat.cli import options, output, spool_option
from kvformat.cli.group import INTERRUPTED
from kvformat.cli.headers import header_nbytes, header_warning
from kvformat.cli.progress import Meter, meter
from kvformat.cli.quiet import quiet_libraries
from kvformat.errors import KVFormatError

if TYPE_CHECKING:
    from kvformat.extract import Phase
    from kvformat.read.dataset import Dataset

__all__ = ["Watch", "extract"]

_SOON_S = 5.0
_PHASES = {
    "read": "reading documents",
    "load": "loading the model",
    "identify": "hashing the weights",
    "extract": "extracting",
    "publish": "publishing",
}


def extract(
    *,
    model: options.Model,
    documents: options.Documents,
    out: options.Out,
    spool: spool_option.Spool = None,
    storage_option: options.StorageOptions = None,
    revision: options.Revision = None,
    dtype: options.Dtype = None,
    compute_dtype: options.ComputeDtype = None,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="Where the model runs, such as cuda:0.")] = "cpu",
    batch_size: Annotated[
        int, typer.Option(min=1, metavar="N", help="Most documents of one forward; only equal lengths go together.")
    ] = 1,
    attn_implementation: Annotated[
        str | None, typer.Option(metavar="NAME", help="Attention implementation, such as sdpa or eager.")
    ] = None,
    layers: options.Layers = None,
    shard_size: options.ShardSize = "1GiB",
    truncate: options.Truncate = None,
    add_generation_prompt: options.AddGenerationPrompt = False,
    special_tokens: options.SpecialTokens = True,
    unknown_context: Annotated[
        bool,
        typer.Option("--unknown-context", help="Declare unknown what determines the values, instead of deriving it."),
    ] = False,
    allow_non_finite: Annotated[
        list[str] | None,
        typer.Option(metavar="COMPONENT", help="Component that may hold NaN or infinities; repeatable."),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Extract K and V of a model over documents.

    The model is any Hugging Face decoder with a K/V cache; the dataset is published when all documents are done.
    Interrupted, the same command resumes at the last finished shard. On a finished dataset it changes nothing
    and exits with 0, when plan and context are equal. An unknown context equals nothing: there it fails with E118.
    To a URL each finished shard is uploaded at once; any machine resumes.
    """
    storage_options = options.parse_storage_options(storage_option, "--storage-option")
    parsed = options.parse(dtype=dtype, compute_dtype=compute_dtype, layers=layers, shard_size=shard_size)
    quiet_libraries(terminal=output.is_terminal(sys.stderr))
    _tell_spool(out, spool)
    try:
        from kvformat.extract import run

        with meter() as shown:
            watch = Watch(shown)
            dataset = run(
                model=model,
                documents=documents,
                out=out,
                spool=spool,
                storage_options=storage_options,
                revision=revision,
                device=device,
                batch_size=batch_size,
                attn_implementation=attn_implementation,
                truncate=truncate,
                add_generation_prompt=add_generation_prompt,
                special_tokens=special_tokens,
                context="unknown" if unknown_context else "derive",
                allow_non_finite=tuple(allow_non_finite or ()),
                progress=watch,
                **parsed,
            )
    except KeyboardInterrupt:
        output.report_other("interrupted", _left(out, storage_options), as_json=as_json)
        raise typer.Exit(INTERRUPTED) from None
    warning = header_warning(
        shards=dataset.manifest.totals.shards, headers=header_nbytes(dataset), nbytes=dataset.nbytes
    )
    if warning is not None and watch.extracted:
        output.complain(warning)
    if as_json:
        output.emit_json(_document(dataset, watch))
    else:
        output.emit(*_lines(dataset, watch))


class Watch:
    """Turns what a job reports into progress, and counts for the summary. Rates are of what was computed in this run.

    Attributes
    ----------
    extracted
        Whether anything had to be written.
    tokens, nbytes
        Computed in this run; ``resumed_nbytes`` are those an interrupted run had left.
    """

    def __init__(self, shown: Meter, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._shown = shown
        self._clock = clock
        self._begun = clock()
        self._ended: float | None = None
        self.extracted = False
        self.tokens = self.nbytes = self.resumed_nbytes = 0

    def phase(self, name: Phase, *, tokens: int = 0, nbytes: int = 0) -> None:
        """A phase begins."""
        what = _PHASES.get(name, name)
        if name == "extract":
            self.extracted = True
            self._begun = self._clock()
            self._shown.begin(f"{what} {tokens:,} tokens", total=nbytes)
            return
        if self.extracted and self._ended is None:
            self._ended = self._clock()
        self._shown.begin(what)

    def advance(self, *, tokens: int, nbytes: int, computed: bool) -> None:
        """A record is there."""
        if computed:
            self.tokens += tokens
            self.nbytes += nbytes
        else:
            self.resumed_nbytes += nbytes
        self._shown.update(self.nbytes + self.resumed_nbytes, note=self.rates())

    @property
    def seconds(self) -> float:
        """How long extraction took, or takes so far."""
        return max((self._clock() if self._ended is None else self._ended) - self._begun, 1e-9)

    def rates(self) -> str:
        """Tokens and gigabytes a second."""
        return f"{self.tokens / self.seconds:,.0f} tokens/s, {self.nbytes / self.seconds / 1e9:.3f} GB/s"


def _tell_spool(out: str, spool: str | None) -> None:
    """Say where disk space is needed, and what may be left behind by a killed run."""
    from kvformat.storage.location import resolve
    from kvformat.write.spool import spool_directory

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
        kept = any_finished(place) if isinstance(place, Path) else any_kept(place)
    except KVFormatError as error:
        if error.code == "E208":
            return "finished shards, if any, are kept, the same command resumes after them"
        kept = False  # interrupted before the location was looked at
    if kept:
        return "finished shards are kept, the same command resumes after them"
    return "no shard was finished, the same command begins anew"


def _document(dataset: Dataset, watch: Watch) -> dict[str, Any]:
    return {
        "ok": True,
        "location": dataset.location,
        "id": dataset.id,
        "records": len(dataset),
        "names": dataset.num_names,
        "tokens": dataset.num_tokens,
        "nbytes": dataset.nbytes,
        "already_finished": not watch.extracted,
        "computed_tokens": watch.tokens,
        "computed_nbytes": watch.nbytes,
        "resumed_nbytes": watch.resumed_nbytes,
        "seconds": round(watch.seconds, 3) if watch.extracted else 0,
    }


def _lines(dataset: Dataset, watch: Watch) -> list[str]:
    done = "published" if watch.extracted else "already finished, with equal plan and context"
    counts = ", ".join(
        output.counted(count, noun)
        for count, noun in ((len(dataset), "record"), (dataset.num_names, "name"), (dataset.num_tokens, "token"))
    )
    lines = [
        f"{done}: {output.plain(dataset.location)}",
        f"    id {dataset.id}",
        f"    {counts}, {output.size_text(dataset.nbytes)}",
    ]
    if not watch.extracted:
        largest = max(dataset.index.shard(ordinal).size for ordinal in range(dataset.manifest.totals.shards))
        lines.append(
            f"    its shards are of up to {output.size_text(largest)}; shard size, batch size, device and attention "
            "implementation were not compared"
        )
    else:
        kept = f", {output.size_text(watch.resumed_nbytes)} kept from before" if watch.resumed_nbytes else ""
        lines.append(f"    computed {output.size_text(watch.nbytes)} in {watch.seconds:.1f} s: {watch.rates()}{kept}")
    return lines
