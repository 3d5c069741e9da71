from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from kvformat.cli.app import app
from kvformat.cli.options import parse_dtype, parse_layers, parse_size
from kvformat.cli.output import layers_text, one_line, plain, rate_text, size_text
from kvformat.errors import UsageError


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("0", [0]),
        ("0-3,12", [0, 1, 2, 3, 12]),
        (" 12, 0-3 ", [0, 1, 2, 3, 12]),
        ("7-7", [7]),
        ("65535", [65535]),
        (None, None),
    ],
)
def test_layers(text: str | None, layers: list[int] | None) -> None:
    assert parse_layers(text) == layers


@pytest.mark.parametrize(
    "text", ["", ",", "0,", "3-1", "-1", "1-", "a", "0x1", "1.5", "0-3,2", "1,1", "65536", "0-99999", "٣", "0--3"]
)
def test_no_layers(text: str) -> None:
    with pytest.raises(UsageError, match="E081"):
        parse_layers(text)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("1073741824", 1 << 30),
        ("64B", 64),
        ("1GiB", 1 << 30),
        ("1 gib", 1 << 30),
        ("500MB", 500_000_000),
        ("64K", 64 << 10),
        ("1.5M", 3 << 19),
        ("0.1GB", 100_000_000),
        ("2TiB", 2 << 40),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text, "--shard-size") == nbytes


@pytest.mark.parametrize(
    "text", ["", "0", "0.2", "-1", "1e9", "GiB", "1 GiB B", "1PB", "1,5M", "1" * 40, "٣", ".5M", "nan"]
)
def test_no_sizes(text: str) -> None:
    with pytest.raises(UsageError, match="E081"):
        parse_size(text, "--shard-size")


@pytest.mark.parametrize(
    ("text", "dtype"), [("BF16", "BF16"), ("bf16", "BF16"), ("f16", "F16"), ("F32", "F32"), (None, None)]
)
def test_dtypes(text: str | None, dtype: str | None) -> None:
    assert parse_dtype(text, "--dtype") == dtype


@pytest.mark.parametrize("text", ["", "int8", "F8_E4M3", "bf", "fp16", "bfloat16", "float32"])
def test_no_dtypes(text: str) -> None:
    with pytest.raises(UsageError, match="E081"):
        parse_dtype(text, "--dtype")


@pytest.mark.parametrize("layers", ["0", "0-3,12", "1,3,5-6", "0-65535"])
def test_layers_are_written_as_they_are_read(layers: str) -> None:
    assert layers_text(parse_layers(layers) or ()) == layers


def test_sizes_for_people() -> None:
    numbers = (0, 1, 999, 1000, 999_499, 999_500, 1_234_567, 1 << 40, 10**18)
    assert [size_text(number) for number in numbers] == [
        "0 bytes",
        "1 bytes",
        "999 bytes",
        "1 kB",
        "999 kB",
        "1 MB",
        "1.23 MB",
        "1.1 TB",
        "1e+03 PB",
    ]


def test_rates_for_people() -> None:
    """In the unit that suits: never zero where something was moved."""
    rates = (0, 0.4, 1234.5, 448_000, 9_999_999, 123_456_789, 2_345_678_901)
    assert [rate_text(rate) for rate in rates] == [
        "0 bytes/s",
        "0 bytes/s",
        "1.23 kB/s",
        "448 kB/s",
        "10 MB/s",
        "123 MB/s",
        "2.35 GB/s",
    ]


def test_text_for_a_terminal() -> None:
    assert plain("a\x1b[31m\r\n\tb\u202e [red] é 名") == "a\\x1b[31m\\r\\n\\tb\\u202e [red] é 名"
    assert plain("\udcff") == "\\udcff"
    assert one_line("a\n  b\tc\x07") == "a b c\\x07"


LAUNCHERS = {"--array", "--gpus-per-task", "--nproc-per-node", "--requeue"}
"""Options of torchrun and sbatch."""


def test_every_option_and_command_a_text_names_exists(repository: Path) -> None:
    """Messages, help and README: a remedy that does not exist is worse than none."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    parameters = [parameter for command in commands.values() for parameter in command.params]
    options = {"--help", "--version"}.union(*(parameter.opts + parameter.secondary_opts for parameter in parameters))
    for path in [repository / "README.md", *sorted((repository / "kvformat").rglob("*.py"))]:
        text = path.read_text(encoding="utf-8")
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))
        assert named - LAUNCHERS <= options, path
        assert set(re.findall(r"`kvformat ([a-z-]+)", text)) <= set(commands), path
    readme = (repository / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^kvformat ([a-z-]+)", readme, re.MULTILINE)) == set(commands)
