"""What all commands have in common: exit codes, error lines, JSON, streams, what is imported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import kvformat
from kvformat.cli import inspect as inspect_module
from kvformat.cli.group import exit_code
from kvformat.codes import CODES
from kvformat.errors import make_error
from tests.cli.conftest import REPOSITORY, command, environment
from tests.cli.datasets import Result, flip, write

COMMANDS = ("extract", "estimate", "inspect", "verify", "diff", "copy", "status", "clean")
VECTORS = REPOSITORY / "spec" / "vectors" / "v1"

# ------------------------------------------------------------------------------------------------- what --help costs


def test_help_lists_commands_and_exit_codes(run) -> None:
    result = run("--help")
    assert result.code == 0
    for name in COMMANDS:
        assert f"  {name} " in result.stdout
    for line in ("0    fine", "1    faults", "2    the command", "3    the operation", "130  interrupted"):
        assert line in result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_exit_codes(run, name: str) -> None:
    result = run(name, "--help")
    assert (result.code, result.stderr) == (0, "")
    assert f"Usage: kvformat {name}" in result.stdout
    assert "130  interrupted" in result.stdout


def test_version(run) -> None:
    assert run("--version") == (0, f"kvformat {kvformat.__version__}\n", "")


LOADED = """
import json, sys
from kvformat.cli.main import main
sys.argv = ["kvformat", *json.loads(sys.argv[1])]
try:
    main()
except SystemExit as leaving:
    assert not leaving.code, leaving.code
sys.stderr.write(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def loaded(*args: object) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", LOADED, json.dumps([str(arg) for arg in args])],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=environment(),
    )
    return set(json.loads(done.stderr.splitlines()[-1]))


def test_what_commands_import(published: Path) -> None:
    for args in (["--help"], ["extract", "--help"]):
        assert loaded(*args) & {"torch", "transformers", "rich", "numpy", "fsspec", "grpc"} == set()
    assert loaded("inspect", published) & {"torch", "transformers"} == set()
    assert loaded("inspect", published, "--record", "clip-1", "--json") & {"torch", "rich"} == set()
    assert "torch" in loaded("inspect", published, "--record", "clip-1", "--values")  # the probe sees what is loaded


# ------------------------------------------------------------------------------------------------------- exit codes


@pytest.mark.parametrize("code", [code for code, row in CODES.items() if row.error])
def test_exit_code_of_every_code(code: str) -> None:
    error = make_error(code, "x")
    if CODES[code].error == "UsageError":
        expected = (2, 2)
    elif CODES[code].kind == "reader":
        expected = (1, 3)
    else:
        expected = (3, 3)
    assert (exit_code(error, looking=True), exit_code(error, looking=False)) == expected


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["no-such-command"],
        ["--no-such-option"],
        ["inspect"],
        ["inspect", "a", "b"],
        ["verify", "a", "--level", "0"],
        ["verify", "a", "--level", "5"],
        ["verify", "a", "--level", "x"],
        ["verify", "a", "--threads", "0"],
        ["diff", "a"],
        ["extract", "--model", "m", "--documents", "d"],
        ["inspect", ""],
        ["status", "nosuch://bucket/dataset"],
        ["verify", "nosuch://host/dataset"],
        ["inspect", "a", "--values"],
        ["inspect", "a", "--record", "b", "--number", "0"],
    ],
)
def test_usage_errors_leave_with_2_and_one_line(run, args: list[str]) -> None:
    result = run(*args)
    assert (result.code, result.stdout) == (2, "")
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(("error [E081]: ", "error [E206]: "))


def test_usage_errors_are_json_too(run) -> None:
    result = run("verify", "a", "--level", "9", "--json")
    assert result.code == 2
    assert (result.json["ok"], result.json["error"]["code"]) == (False, "E081")
    assert "`kvformat verify --help`" in result.stderr


def test_json_behind_two_dashes_is_a_path(run) -> None:
    result = run("inspect", "--", "--json")
    assert (result.code, result.stdout) == (3, "")
    assert "error [E001]" in result.stderr


@pytest.mark.parametrize("args", [["inspect"], ["verify"], ["diff", "."], ["status"], ["clean"]])
def test_nothing_there_leaves_with_3(run, tmp_path: Path, args: list[str]) -> None:
    missing = tmp_path / "no\nsuch [red]place"
    result = run(args[0], *(tmp_path for _ in args[1:]), missing)
    assert (result.code, result.stdout) == (3, "")
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error [E001]: ")
    assert args[0] == "diff" or "no\\nsuch [red]place" in result.stderr


@pytest.mark.parametrize("name", ["inspect", "verify", "status"])
def test_nothing_there_as_json(run, tmp_path: Path, name: str) -> None:
    missing = tmp_path / 'quote" [red] \x1b[31m'
    result = run(name, missing, "--json")
    assert result.code == 3
    error = result.json["error"]
    assert (result.json["ok"], error["code"], error["name"]) == (False, "E001", "not-found")
    assert error["path"].startswith(str(missing))
    assert "error [E001]: " in result.stderr


@pytest.mark.parametrize("name", ["inspect", "diff", "status"])
def test_a_fault_that_was_found_leaves_with_1(run, dataset: Path, name: str) -> None:
    flip(dataset / "kvformat.json", 20)
    other = [dataset] if name == "diff" else []
    plain, as_json = run(name, dataset, *other), run(name, dataset, *other, "--json")
    assert plain.code == as_json.code == 1
    assert plain.stderr.startswith("error [E0")
    assert "error [E0" in as_json.stderr
    assert as_json.json["ok"] is False
    assert as_json.json["error"]["path"].endswith("kvformat.json")


def test_interrupt_leaves_with_130(run, monkeypatch, published: Path) -> None:
    def stop(*_args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(inspect_module, "_document", stop)
    result = run("inspect", published, "--json")
    assert (result.code, result.stderr) == (130, "interrupted: stopped on request\n")
    assert result.json == {"ok": False, "error": {"code": "interrupted", "message": "stopped on request"}}


EARLY = """
import runpy, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == stop:
            raise KeyboardInterrupt

how, stop, *sys.argv[1:] = sys.argv[1:]
sys.meta_path.insert(0, Interrupt())
if how == "module":
    runpy.run_module("kvformat", run_name="__main__", alter_sys=True)
else:  # what the script of the installed package does
    from kvformat.cli.main import main
    sys.exit(main())
"""


@pytest.mark.parametrize("how", ["module", "script"])
@pytest.mark.parametrize(
    ("stop", "more"),
    [
        ("kvformat.cli.output", []),
        ("kvformat.cli.app", ["--json"]),
        ("typer", []),
        ("kvformat.cli.verify", ["--json"]),
        ("numpy", ["--json"]),  # by the command itself
        ("rich", []),
    ],
)
def test_an_interrupt_while_modules_are_imported_leaves_with_130(
    stop: str, how: str, more: list[str], published: Path
) -> None:
    args = ["inspect", str(published), *more]
    done = subprocess.run(
        [sys.executable, "-c", EARLY, how, stop, *args],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment(),
    )
    assert (done.returncode, done.stderr) == (130, "interrupted: stopped on request\n")
    expected = {"ok": False, "error": {"code": "interrupted", "message": "stopped on request"}}
    assert (json.loads(done.stdout) if more else done.stdout) == (expected if more else "")


def test_the_entry_point_itself_imports_next_to_nothing() -> None:
    code = "import sys; before = set(sys.modules); import kvformat.cli.main; print(sorted(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=environment()
    )
    assert "kvformat.cli.main" in done.stdout
    assert not any(name in done.stdout for name in ("typer", "msgspec", "kvformat.cli.output", "'json'"))


def test_a_defect_is_no_fault_of_the_dataset(run, monkeypatch, published: Path) -> None:
    def fail(*_args: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(inspect_module, "_document", fail)
    result = run("inspect", published, "--json")
    assert result.code == 3
    assert "Traceback" in result.stderr
    assert result.stderr.endswith("internal: ZeroDivisionError: oops\n")
    assert result.json["error"] == {"code": "internal", "message": "ZeroDivisionError: oops"}


def test_an_error_of_the_system_leaves_with_3(run, monkeypatch, published: Path) -> None:
    def fail(*_args: object) -> None:
        raise PermissionError(13, "Permission denied", "/a/b")

    monkeypatch.setattr(inspect_module, "_document", fail)
    result = run("inspect", published, "--json")
    assert (result.code, result.json["error"]["code"], result.json["error"]["path"]) == (3, "E207", "/a/b")


def test_warnings_of_kvformat_are_lines_and_others_stay(run, monkeypatch, published: Path) -> None:
    result = run("inspect", VECTORS / "warn" / "W003-newer-minor" / "dataset")
    assert result.code == 0
    assert result.stderr.startswith("warning [W003]: ")
    assert len(result.stderr.splitlines()) == 1

    def warn(*_args: object) -> dict[str, object]:
        warnings.warn("[W] mine", DeprecationWarning, stacklevel=1)
        return {}

    monkeypatch.setattr(inspect_module, "_document", warn)
    with pytest.warns(DeprecationWarning, match="mine"):
        run("inspect", published, "--json")

    def look(*_args: object) -> dict[str, object]:
        warnings.warn(kvformat.KVFormatWarning("worth a look", code="W003", path="a/b"), stacklevel=1)
        return {}

    monkeypatch.setattr(inspect_module, "_document", look)
    for _ in range(2):  # shown each time, whatever was shown before
        assert run("inspect", published, "--json").stderr == "warning [W003]: worth a look (path a/b)\n"


# ---------------------------------------------------------------------------------------------------------- streams


def test_off_a_terminal_no_colours_and_no_wrapping(process, tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*(f"a long folder {number}" for number in range(8)))
    path = write(deep / "dataset")
    for args in (["inspect", path], ["verify", path], ["diff", path, path]):
        result: Result = process(*args, env={"COLUMNS": "40"})
        assert (result.code, result.stderr) == (0, "")
        assert "\x1b" not in result.stdout
        assert str(path) in result.stdout


def test_on_a_terminal_headings_are_coloured(published: Path) -> None:
    """The other side of the test above: the same command does colour where somebody sees it."""
    above, below = os.openpty()
    with os.fdopen(above, "rb", buffering=0) as terminal:
        done = subprocess.Popen(
            command(["inspect", published]), stdout=below, stderr=below, env={**environment(), "COLUMNS": "100"}
        )
        os.close(below)
        shown = b""
        try:
            while block := terminal.read(4096):
                shown += block
        except OSError:  # how Linux says that the other side is closed
            pass
        assert done.wait(60) == 0
    assert b"\x1b[1m" in shown


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["--help"], 0),
        (["inspect", "A"], 0),
        (["inspect", "A", "--json"], 0),
        (["verify", "A"], 0),
        (["diff", "A", "A"], 0),
        (["inspect", "A", "--record", "none", "--json"], 3),
    ],
)
def test_a_reader_that_goes_away_is_no_error(process, published: Path, args: list[str], code: int) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    result = process(*(published if arg == "A" else arg for arg in args), stdout=writing)
    os.close(writing)
    assert result.code == code
    assert result.stderr.count("\n") == (1 if code else 0)
    assert "Broken" not in result.stderr


def test_a_full_disk_is_an_error_and_closed_streams_are_none(process, published: Path) -> None:
    with Path("/dev/full").open("w", encoding="ascii") as full:
        result = process("inspect", published, stdout=full)
        assert result.code == 3
        assert result.stderr.startswith("error [E200]: ")
        assert process("inspect", published / "no", stderr=full).code == 3
    closed = f"import os, sys; os.close(1); os.execv(sys.executable, {command(['inspect', published])!r})"
    done = subprocess.run([sys.executable, "-c", closed], env=environment(), timeout=60, check=False)
    assert done.returncode == 0


def test_any_encoding_prints_any_name(process, tmp_path: Path) -> None:
    path = write(tmp_path / "dataset", names=["名前 [red]", "a\x1b[31mb\nc", "c", "d"])
    result = process("inspect", path, "--number", 0, env={"PYTHONIOENCODING": "ascii"})
    assert (result.code, result.stderr) == (0, "")
    assert "\\u540d\\u524d [red]" in result.stdout
    assert "#####" in process("inspect", path, env={"PYTHONIOENCODING": "ascii"}).stdout


def test_a_path_that_is_not_text(process, tmp_path: Path) -> None:
    strange = os.fsdecode(os.fsencode(tmp_path) + b"/strange-\xff")
    path = write(Path(strange))
    for args in (["inspect", path], ["verify", path, "--json"]):
        result = process(*args, env={"PYTHONIOENCODING": "utf-8:strict"})
        assert (result.code, result.stderr) == (0, ""), args
        assert "strange-" in result.stdout


def test_a_signal_stops_a_command(published: Path) -> None:
    """`clean` waits for an answer, so the signal cannot come too late."""
    root = published.parent / "unfinished"
    (root / ".staging" / f"{'0' * 16}-{'0' * 8}").mkdir(parents=True)
    with subprocess.Popen(
        command(["clean", root]), stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as waiting:
        assert waiting.stderr is not None
        while "[y/N]" not in (line := waiting.stderr.readline()):
            assert line
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(60) == 130
        assert waiting.stderr.read() == "interrupted: stopped on request\n"
    assert len(list((root / ".staging").iterdir())) == 1


# ---------------------------------------------------------------------------------------------------------- vectors


@pytest.mark.parametrize("case", sorted([*VECTORS.glob("valid/*"), *VECTORS.glob("warn/*")]), ids=lambda c: c.name)
def test_every_readable_vector(run, case: Path) -> None:
    path = case / "dataset"
    for args in (["inspect"], ["verify"], ["diff", path], ["inspect", "--number", 0, "--values"]):
        assert run(args[0], path, *args[1:]).code == 0
        result = run(args[0], path, *args[1:], "--json")
        assert (result.code, result.json["ok"]) == (0, True)
    if case.parent.name == "warn":
        code = case.name[:4]
        assert code in [warning["code"] for warning in run("verify", path, "--json").json["warnings"]]


@pytest.mark.parametrize("case", sorted(VECTORS.glob("invalid/*")), ids=lambda c: c.name)
def test_every_invalid_vector(run, case: Path) -> None:
    expected = json.loads((case / "expected.json").read_text(encoding="ascii"))
    pinned = ["--expected-id", expected["expected_id"]] if "expected_id" in expected else []
    result = run("verify", case / "dataset", "--json", *pinned)
    assert (result.code, result.json["ok"], result.stderr) == (1, False, "")
    assert expected["code"] in [finding["code"] for finding in result.json["findings"]]
    inspected = run("inspect", case / "dataset", "--json")
    assert (inspected.code, inspected.json["ok"]) in {(0, True), (1, False)}
