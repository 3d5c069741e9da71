"""The options of a Ray cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvformat.errors import make_error

if TYPE_CHECKING:
    from kvformat.extract.options import RayOptions

__all__ = ["Address", "Cpus", "Gpus", "Workers", "parse"]

Address = Annotated[
    str | None, typer.Option("--ray-address", metavar="ADDRESS", help="Of a cluster [default: $RAY_ADDRESS].")
]
Workers = Annotated[
    int | None, typer.Option("--ray-workers", min=1, metavar="N", help="Workers at most [default: what fits].")
]
Cpus = Annotated[float, typer.Option("--ray-cpus", min=0, metavar="N", help="Cores of one worker.")]
Gpus = Annotated[float, typer.Option("--ray-gpus", min=0, metavar="N", help="GPUs of one worker.")]


def parse(*, engine: str, address: str | None, workers: int | None, cpus: float, gpus: float) -> RayOptions | None:
    """Options of the cluster; None for another engine.

    Raises
    ------
    UsageError
        E081 where a cluster's options are given without one.
    """
    if engine != "ray":
        if (address, workers, cpus, gpus) != (None, None, 1.0, 0.0):
            raise make_error("E081", "--ray-address, --ray-workers, --ray-cpus and --ray-gpus go with --engine ray")
        return None
    from kvformat.extract.options import RayOptions

    return RayOptions(address=address, num_workers=workers, num_cpus=cpus, num_gpus=gpus)
