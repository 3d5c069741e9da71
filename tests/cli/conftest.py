"""Small datasets, and the command line run in this process or in one of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvformat.cli.app import app
from tests.cli.datasets import Result, write

REPOSITORY = Path(__file__).resolve().parent.parent.parent

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def _quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others do on this machine changes nothing that is printed."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))


@pytest.fixture
def run() -> Run:
    """Run the command line in this process."""

    def invoke(*args: object, input: str | None = None) -> Result:  # noqa: A002 - as the runner calls it
        done = CliRunner().invoke(app, [str(arg) for arg in args], prog_name="kvformat", input=input)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return Result(done.exit_code, done.stdout, done.stderr)

    return invoke


@pytest.fixture
def process() -> Run:
    """Run the command line in a process of its own, off a terminal."""

    def start(*args: object, env: dict[str, str] | None = None, **options: Any) -> Result:
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        done = subprocess.run(
            command(args), env={**environment(), **(env or {})}, text=True, timeout=120, check=False, **options
        )
        return Result(done.returncode, done.stdout or "", done.stderr or "")

    return start


def command(args: Sequence[object]) -> list[str]:
    return [sys.executable, "-m", "kvformat", *(str(arg) for arg in args)]


def environment() -> dict[str, str]:
    colours = {"FORCE_COLOR", "NO_COLOR", "COLUMNS"}
    kept = {name: value for name, value in os.environ.items() if name not in colours}
    return {**kept, "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "error", "TERM": "xterm-256color"}


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of a known model; read only."""
    return write(tmp_path_factory.mktemp("published") / "dataset")


@pytest.fixture
def dataset(published: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may damage."""
    return Path(shutil.copytree(published, tmp_path / "dataset"))


@pytest.fixture
def snapshot() -> Callable[[Path], dict[str, bytes]]:
    """All files below a directory with their bytes."""

    def take(root: Path) -> dict[str, bytes]:
        return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}

    return take
