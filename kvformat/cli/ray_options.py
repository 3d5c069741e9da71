"""The options of a Ray cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvformat.errors import make_error

if TYPE_CHECKING:
    from kvformat.extract.options import RayOptions

__all__ = ["Address", "Cpus", "Gpus", "Workers", "parse"]

Address = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        metavar="ADDRESS",
        help="Ray cluster to use: host:port, ray://host:port or auto [default: $RAY_ADDRESS, else one that is started "
        "on this machine].",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--ray-workers", min=1, metavar="N", help="Most workers on the cluster [default: as many as have room]."
    ),
]
Cpus = Annotated[
    float,
    typer.Option(
        "--ray-cpus", min=0, metavar="N", help="Cores Ray sets aside for each worker; threads of its model, too."
    ),
]
Gpus = Annotated[
    float,
    typer.Option("--ray-gpus", min=0, metavar="N", help="GPUs Ray sets aside for each worker, such as 1 or 0.5."),
]


def parse(
    *,
    engine: str,
    address: str | None,
    workers: int | None,
    cpus: float,
    gpus: float,
    rank: int | None = None,
    world_size: int | None = None,
) -> RayOptions | None:
    """Options of the cluster; None for another engine.

    Raises
    ------
    UsageError
        E081 where a cluster's options are given without one, or those of workers without a cluster with one.
    """
    if engine != "ray":
        if (address, workers, cpus, gpus) != (None, None, 1.0, 0.0):
            raise make_error("E081", "--ray-address, --ray-workers, --ray-cpus and --ray-gpus go with --engine ray")
        return None
    if (rank, world_size) != (None, None):
        raise make_error(
            "E081",
            "--rank and --world-size are for workers that are started one by one: with --engine ray, start a single "
            "process, and say --ray-workers",
        )
    from kvformat.extract.options import RayOptions

    return RayOptions(address=address, num_workers=workers, num_cpus=cpus, num_gpus=gpus)
