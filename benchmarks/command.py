"""The options all benchmarks over shapes share, and the run over the shapes asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from benchmarks import peers
from benchmarks.harness import Bar, print_bars, print_facts, single_threaded, workspace
from benchmarks.shapes import SHAPES, Shape

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["run_command"]


class Measure(Protocol):
    """Measures one shape in a directory of its own."""

    def __call__(self, shape: Shape, path: Path, *, rounds: int, names: Sequence[str]) -> list[Bar]: ...


def run_command(title: str, measure: Measure, *, name: str, rounds: int) -> None:
    """Run a benchmark as a command.

    Parameters
    ----------
    title
        What ``--help`` says.
    measure
        Called for each shape.
    name
        Of its directory under ``.bench/``.
    rounds
        Default of ``--rounds``.
    """
    default = rounds

    def main(
        rounds: Annotated[int, typer.Option(help="Rounds that are counted.")] = default,
        shape: Annotated[list[str] | None, typer.Option(help="large or small; both when absent.")] = None,
        peer: Annotated[list[str] | None, typer.Option(help="Peers that take part; all when absent.")] = None,
        fraction: Annotated[float, typer.Option(help="Part of the records, for a trial run.")] = 1.0,
        *,
        keep: Annotated[bool, typer.Option("--keep", help="Leave the data under .bench/.")] = False,
    ) -> None:
        single_threaded()
        bars: list[Bar] = []
        with workspace(name, keep=keep) as path:
            print_facts(path)
            for chosen in shape or list(SHAPES):
                home = path / chosen
                home.mkdir()
                bars += measure(SHAPES[chosen].scaled(fraction), home, rounds=rounds, names=peer or peers.PEERS)
        print_bars(bars)

    main.__doc__ = title
    typer.run(main)
