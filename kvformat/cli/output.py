"""What commands print: results on standard output, everything else on standard error."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from io import StringIO
from typing import TYPE_CHECKING, Any, TextIO

from kvformat.codes import CODES
from kvformat.errors import KVFormatError, KVFormatWarning

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    "complain",
    "counted",
    "emit",
    "emit_json",
    "finding",
    "layers_text",
    "one_line",
    "place",
    "plain",
    "prepare_streams",
    "rate_text",
    "render",
    "report",
    "report_other",
    "size_text",
    "warn",
]

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")
_PIPED_WIDTH = 1 << 16  # a line of a pipe or a file is as long as it needs to be


def prepare_streams() -> None:
    """Let the process print any text: what the encoding lacks is escaped instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def plain(text: object) -> str:
    """One line of text that a terminal shows as it is: control and invisible characters are escaped."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape", "surrogatepass").decode("ascii")
        for character in str(text)
    )


def one_line(text: object) -> str:
    """Text of several lines as one, then as :func:`plain`."""
    return plain(" ".join(str(text).split()))


def counted(count: int, noun: str) -> str:
    """A number of things for people: ``1 shard``, ``2,048 shards``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def size_text(nbytes: int) -> str:
    """A size for people, in decimal units: ``1.23 GB``."""
    size = float(nbytes)
    for unit in _UNITS:
        if size < 999.5 or unit == _UNITS[-1]:
            return f"{nbytes:,} {unit}" if unit == "bytes" else f"{size:.3g} {unit}"
        size /= 1000
    raise AssertionError(nbytes)


def rate_text(nbytes_s: float) -> str:
    """Bytes a second for people, in the unit that suits: ``1.23 GB/s``, ``4.5 MB/s``."""
    return f"{size_text(round(nbytes_s))}/s"


def layers_text(layers: Iterable[int]) -> str:
    """Ascending layer indices as ranges: ``0-3,12``."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


# -- results --------------------------------------------------------------------------------------------------------


def emit(*lines: str) -> None:
    """Print lines on standard output. A reader that went away is no error: the command still ends with its code."""
    _write(sys.stdout, "".join(f"{line}\n" for line in lines))


def emit_json(value: Mapping[str, Any]) -> None:
    """Print a JSON document on standard output: ASCII, so that any name can be printed anywhere."""
    emit(json.dumps(value, indent=2, allow_nan=False))


def render(*renderables: RenderableType) -> None:
    """Print tables and text of rich: coloured on a terminal, plain and unwrapped elsewhere."""
    from rich.console import Console

    terminal = is_terminal(sys.stdout)
    buffer = StringIO()
    console = Console(
        file=buffer,
        force_terminal=terminal,
        width=None if terminal else _PIPED_WIDTH,
        markup=False,  # names and paths hold brackets
        emoji=False,
        highlight=False,
    )
    for renderable in renderables:
        console.print(renderable)
    emit(*(line.rstrip() for line in buffer.getvalue().splitlines()))


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal; a closed one is not."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


# -- errors ---------------------------------------------------------------------------------------------------------


def complain(*lines: str) -> None:
    """Print lines on standard error; where that is gone, nobody is told."""
    with contextlib.suppress(OSError, ValueError):
        _write(sys.stderr, "".join(f"{line}\n" for line in lines))


def report(error: KVFormatError, *, as_json: bool) -> None:
    """Print an error: its code, message and place on standard error, and as JSON on standard output if asked for."""
    _complain_of("error", error.code, error.message, place(error.path, error.record, error.layer))
    if as_json:
        emit_json({"ok": False, "error": finding(error.code, error.message, error.path, error.record, error.layer)})


def warn(warning: KVFormatWarning) -> None:
    """Print a warning as one line on standard error."""
    _complain_of("warning", warning.code, warning.message, place(warning.path, None, None))


def report_other(what: str, message: str, *, as_json: bool) -> None:
    """Print what has no code of its own, ``interrupted`` or ``internal``, as :func:`report` does."""
    complain(f"{what}: {one_line(message)}")
    if as_json:
        emit_json({"ok": False, "error": {"code": what, "message": message}})


def place(path: str | None, record: str | int | None, layer: int | None) -> str:
    """Where something was found: ``path ..., record ..., layer ...``; empty where nobody knows."""
    known = (("path", path), ("record", record), ("layer", layer))
    return ", ".join(f"{label} {plain(value)}" for label, value in known if value is not None)


def finding(
    code: str, message: str, path: str | None, record: str | int | None, layer: int | None
) -> dict[str, str | int | None]:
    """The JSON members of an error, fault or warning."""
    return {
        "code": code,
        "name": CODES[code].name,
        "message": message,
        "path": path,
        "record": record,
        "layer": layer,
    }


def _complain_of(kind: str, code: str, message: str, where: str) -> None:
    complain(f"{kind} [{code}]: {one_line(message)}" + (f" ({where})" if where else ""))


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:  # closed before the process began
        return
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        # Nothing more can be written there, and the interpreter must not find out again when it leaves.
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
