"""Every benchmark of the environment of ``kvformat[bench]``, one after the other, each in a process of its own.

Not here are those that measure models and their weights, in the environment of ``kvformat[hf]``: ``extraction``,
``checkpoint`` and ``quantisation``.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import typer

SCRIPTS = (
    "handles",
    "read",
    "slab",
    "open_million",
    "write",
    "loader",
    "sampler",
    "remote",
    "planning",
    "resuming",
)


def main(
    only: Annotated[list[str] | None, typer.Option(help=f"Scripts to run, of {', '.join(SCRIPTS)}.")] = None,
    *,
    trial: Annotated[bool, typer.Option("--trial", help="Few records and rounds: does everything run?")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the data under .bench/.")] = False,
) -> None:
    """Run all benchmarks of this environment; the exit status says whether they ran, not whether bars were met."""
    failed = []
    for script in only or SCRIPTS:
        print(f"\n== benchmarks.{script}", flush=True)
        options = ["--keep"] if keep else []
        if trial:
            options += ["--rounds", "2", "--fraction", "0.05"]
        if subprocess.run([sys.executable, "-m", f"benchmarks.{script}", *options], check=False).returncode:
            failed.append(script)
    if failed:
        print(f"\ndid not run to the end: {', '.join(failed)}")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
