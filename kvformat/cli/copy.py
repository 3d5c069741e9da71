"""``kvformat copy``: a dataset brought to another place, proved on the way."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvformat.cli import options, output
from kvformat.cli.group import INTERRUPTED
from kvformat.cli.progress import Lines, Meter, meter

if TYPE_CHECKING:
    from kvformat.transfer.copying import CopyReport

__all__ = ["Watch", "copy"]

_LEFT = "stopped on request: files that are in their places stay, and the same command goes on from there"


def copy(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Dataset: a directory or URL.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="Where the copy goes: a directory or URL.")],
    *,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Files under way at once [default: processors, 2 to 8].")
    ] = None,
    spool: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="For files on their way between two URLs, --threads shards at once [default: the user's cache].",
        ),
    ] = None,
    storage_option: options.StorageOptions = None,
    source_option: options.SourceOptions = None,
    target_option: options.TargetOptions = None,
    as_json: options.AsJson = False,
) -> None:
    """Copy a dataset.

    The copy has the same dataset id. Every file is proved by its SHA-256 on the way, and nothing at the target is
    replaced. Interrupted or failed, the same command goes on where it stopped. Where the target holds the same dataset
    already, nothing is copied, and it is verified at level 2.
    """
    both = options.parse_storage_options(storage_option, "--storage-option")
    source_options = both | options.parse_storage_options(source_option, "--source-option")
    target_options = both | options.parse_storage_options(target_option, "--target-option")
    try:
        from kvformat.transfer.copying import copy as bring

        with meter(phases=False) as shown:
            watch = Watch(shown)
            report = bring(
                source,
                target,
                source_options=source_options,
                target_options=target_options,
                threads=threads,
                spool=spool,
                progress=watch,
            )
            seconds = watch.seconds
    except KeyboardInterrupt:
        output.report_other("interrupted", _LEFT, as_json=as_json)
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        output.emit_json(_document(report, seconds))
    else:
        output.emit(*_lines(report, seconds))


class Watch:
    """Turns what a copy reports into progress, with its rate, and on lines the time that is left.

    Attributes
    ----------
    seconds
        Since it was made.
    """

    def __init__(self, shown: Meter, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._shown = shown
        self._clock = clock
        self._begun = clock()
        shown.begin("copying")

    @property
    def seconds(self) -> float:
        """How long it takes so far."""
        return max(self._clock() - self._begun, 1e-9)

    def __call__(self, done: int, total: int) -> None:
        """So many bytes are at the target, of so many."""
        rate = done / self.seconds
        note = output.rate_text(rate)
        if isinstance(self._shown, Lines) and done:  # a bar shows it by itself
            note += f", {_duration((total - done) / rate)} left"
        self._shown.update(done, total=total, note=note)


def _duration(seconds: float) -> str:
    """As ``1:02:03``, or ``2:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _document(report: CopyReport, seconds: float) -> dict[str, Any]:
    import msgspec

    return {"ok": True, **msgspec.to_builtins(report), "seconds": round(seconds, 3)}


def _lines(report: CopyReport, seconds: float) -> list[str]:
    lines = [
        f"{'already there' if report.already_there else 'copied'}: {output.plain(report.location)}",
        f"    id {report.id}",
        f"    {output.counted(report.records, 'record')}, {output.size_text(report.nbytes)} in all files",
    ]
    if report.already_there:
        return [*lines, "    verified at level 2: index, sizes and headers, not values; see `kvformat verify`"]
    copied = output.size_text(report.copied_nbytes)
    before = f", {output.size_text(report.skipped_nbytes)} there before" if report.skipped_nbytes else ""
    rate = output.rate_text(report.copied_nbytes / seconds)
    return [*lines, f"    copied {copied} in {seconds:.1f} s: {rate}{before}"]
