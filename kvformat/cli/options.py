"""The options commands share, and what their values mean."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, TypedDict

import typer

from kvformat.errors import make_error

__all__ = [
    "AddGenerationPrompt",
    "AsJson",
    "ComputeDtype",
    "Dtype",
    "Layers",
    "Model",
    "Out",
    "Parsed",
    "Revision",
    "ShardSize",
    "SourceOptions",
    "SpecialTokens",
    "StorageOptions",
    "TargetOptions",
    "Truncate",
    "parse",
    "parse_dtype",
    "parse_layers",
    "parse_size",
    "parse_storage_options",
]

Model = Annotated[
    str,
    typer.Option("--model", metavar="DIR_OR_ID", help="Model: a directory that save_pretrained wrote, or a hub id."),
]
Out = Annotated[str, typer.Option("--out", metavar="DIR", help="Where the dataset goes: a new directory, or a URL.")]
Revision = Annotated[str | None, typer.Option("--revision", metavar="REV", help="Branch, tag or commit of a hub id.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype", metavar="DTYPE", help="Dtype that is stored: BF16, F16 or F32 [default: that of computation]."
    ),
]
ComputeDtype = Annotated[
    str | None,
    typer.Option(
        "--compute-dtype",
        metavar="DTYPE",
        help="Dtype the model computes in: BF16, F16 or F32 [default: as it is configured].",
    ),
]
Layers = Annotated[
    str | None, typer.Option("--layers", metavar="LIST", help="Layers to store, such as 0-3,12 [default: all].")
]
ShardSize = Annotated[
    str,
    typer.Option(
        "--shard-size",
        metavar="SIZE",
        help="Most bytes of a shard (a file of whole records): 1GiB, 500MB, 1073741824; K, M, G, T are binary.",
    ),
]
Truncate = Annotated[
    int | None,
    typer.Option(
        "--truncate",
        min=1,
        metavar="N",
        help="Keep the first N tokens of each document; without it, one too long for the model is an error.",
    ),
]
AddGenerationPrompt = Annotated[
    bool,
    typer.Option(
        "--add-generation-prompt/--no-add-generation-prompt",
        help="Of messages: end with the opening of an answer, by the chat template.",
    ),
]
SpecialTokens = Annotated[
    bool,
    typer.Option("--special-tokens/--no-special-tokens", help="Of plain text: add the tokenizer's special tokens."),
]
StorageOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        metavar="KEY=VALUE",
        help="Option of a URL's fsspec file system, such as endpoint_url=http://host; repeatable. Integers, true, "
        "false and JSON objects are taken as such. Credentials are better left to the environment.",
    ),
]
SourceOptions = Annotated[
    list[str] | None,
    typer.Option("--source-option", metavar="KEY=VALUE", help="As --storage-option, for SRC alone; it goes before."),
]
TargetOptions = Annotated[
    list[str] | None,
    typer.Option("--target-option", metavar="KEY=VALUE", help="As --storage-option, for DST alone; it goes before."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result, or the error, as JSON.")]

_DTYPES = ("BF16", "F16", "F32")
_SIZE = re.compile(r"([0-9]+)(?:\.([0-9]+))? ?([a-zA-Z]*)", re.ASCII)
_BINARY = {name: 1 << (10 * power) for power, name in enumerate("kmgt", start=1)}
_FACTORS = (
    {"": 1, "b": 1}
    | _BINARY
    | {f"{name}ib": factor for name, factor in _BINARY.items()}
    | {f"{name}b": 1000**power for power, name in enumerate("kmgt", start=1)}
)
_RANGE = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", re.ASCII)


class Parsed(TypedDict):
    """Arguments of extraction that are written in another form on the command line."""

    dtype: str | None
    compute_dtype: str | None
    layers: list[int] | None
    shard_nbytes: int


def parse(*, dtype: str | None, compute_dtype: str | None, layers: str | None, shard_size: str) -> Parsed:
    """Values of the options of those names.

    Raises
    ------
    UsageError
        E081.
    """
    return {
        "dtype": parse_dtype(dtype, "--dtype"),
        "compute_dtype": parse_dtype(compute_dtype, "--compute-dtype"),
        "layers": parse_layers(layers),
        "shard_nbytes": parse_size(shard_size, "--shard-size"),
    }


def parse_dtype(text: str | None, option: str) -> str | None:
    """Name of a dtype as the format writes it; upper and lower case are one.

    Raises
    ------
    UsageError
        E081.
    """
    if text is None:
        return None
    if text.upper() not in _DTYPES:
        raise make_error("E081", f"{option} must be BF16, F16 or F32, found {text!r}")
    return text.upper()


def parse_layers(text: str | None) -> list[int] | None:
    """Layers of a list such as ``0-3,12``, ascending; None for all of them.

    Raises
    ------
    UsageError
        E081 for anything else, a range that runs backwards, or a layer given twice.
    """
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last >= 1 << 16:
            raise make_error(
                "E081", f"--layers must be a list such as 0-3,12 of layers below 65536, found {part!r} in {text!r}"
            )
        found += range(first, last + 1)
    if len(set(found)) != len(found):
        raise make_error("E081", f"--layers {text!r} names a layer twice")
    return sorted(found)


def parse_size(text: str, option: str) -> int:
    """Bytes of a size such as ``1GiB`` (binary), ``500MB`` (decimal) or ``64M`` (binary).

    Raises
    ------
    UsageError
        E081 for anything else, and for less than one byte.
    """
    match = _SIZE.fullmatch(text.strip())
    factor = _FACTORS.get(match[3].lower()) if match else None
    if match is None or factor is None or len(text) > 32:
        raise make_error("E081", f"{option} must be a size such as 1GiB, 500MB or 1073741824, found {text!r}")
    decimals = match[2] or ""
    nbytes: int = int(match[1] + decimals) * factor // 10 ** len(decimals)
    if nbytes < 1:
        raise make_error("E081", f"{option} must be at least one byte, found {text!r}")
    return nbytes


def parse_storage_options(given: Sequence[str] | None, option: str) -> dict[str, Any]:
    """Storage options of texts such as ``endpoint_url=http://host``.

    A value that is JSON for an integer, a boolean or an object is that; any other is text as it stands.

    Raises
    ------
    UsageError
        E081 for anything else, and for a key given twice. What may be a secret does not appear in the message.
    """
    found: dict[str, Any] = {}
    for number, text in enumerate(given or (), start=1):
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise make_error("E081", f"{option} must be KEY=VALUE; the one at place {number} has no key and value")
        if key in found:
            raise make_error("E081", f"{option} gives {key!r} twice")
        found[key] = _storage_value(value)
    return found


def _storage_value(text: str) -> Any:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, int | dict) else text
