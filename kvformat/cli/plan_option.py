"""The option that names a plan, what it holds, and how far it is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import Struct

from kvformat.cli import output
from kvformat.errors import KVFormatError, make_error

if TYPE_CHECKING:
    from kvformat.cli.staged import StagedWork
    from kvformat.extract.plan import Plan
    from kvformat.read.dataset import Dataset

__all__ = ["OnePlan", "PlanOfWork", "PlanState", "describe", "difference", "lines", "opened", "refuse_settled"]

PlanOfWork = Annotated[
    str | None, typer.Option("--plan", metavar="PLAN", help="Plan that is worked on here: how far is it?")
]
OnePlan = Annotated[str, typer.Option("--plan", metavar="PLAN", help="Directory of the plan the workers have.")]


class PlanState(Struct, frozen=True, kw_only=True):
    """How far a plan is at a location.

    Attributes
    ----------
    published, differs
        Whether what is published is this plan, and in what it is not; None where nothing is that can be read.
    begun
        Whether work of it is staged.
    finished
        Shards with a receipt, of the staged work that is furthest, or published.
    needed_nbytes, free_nbytes
        What the other shards will take, and the space there is; None where that is not known.
    """

    digest: str
    published: bool | None
    differs: str | None
    begun: bool
    num_shards: int
    num_records: int
    finished: int
    needed_nbytes: int
    free_nbytes: int | None


def opened(path: str) -> Plan:
    """The plan; to be closed. E081 for what cannot be the directory of one."""
    from kvformat.extract.places import plan_place
    from kvformat.extract.plan import open_plan

    return open_plan(plan_place(path))


def difference(dataset: Dataset, plan: Plan) -> str | None:
    """In what a dataset is not what a plan makes, by schema, text, names and documents; None where it is."""
    from kvformat.extract.finished import check_plan, check_schema

    try:
        check_schema(dataset, plan.schema)
        check_plan(dataset, plan)
    except KVFormatError as error:
        if error.code != "E118":
            raise
        found = error.message.removeprefix("a dataset is here already, and ")
        return found.removesuffix("; choose another location")
    return None


def refuse_settled(given: Mapping[str, tuple[object, object]]) -> None:
    """Refuse options that a plan has settled; E081.

    Parameters
    ----------
    given
        By option, the value that was given, and the one it has where none is.
    """
    found = [option for option, (value, usual) in given.items() if value != usual]
    if found:
        raise make_error(
            "E081", f"the plan has settled {', '.join(found)}: leave it out, or make another plan (`kvformat plan`)"
        )


def describe(
    plan: Plan, staging: Sequence[StagedWork], *, published: bool, differs: str | None, place: Path | None
) -> PlanState:
    """Describe how far a plan is.

    Parameters
    ----------
    published, differs
        Whether something is published, and in what it is not this plan.
    place
        The directory it is made in, which need not be there yet; None where space is not known.
    """
    works = [work.shared for work in staging if work.shared is not None and work.of_plan]
    furthest = max(works, key=lambda work: work.finished, default=None)
    finished, needed = 0, plan.nbytes + plan.num_shards * plan.header_size
    if published and differs is None:
        finished, needed = plan.num_shards, 0
    elif furthest is not None:
        finished, needed = furthest.finished, furthest.needed_nbytes
    return PlanState(
        digest=plan.digest,
        published=differs is None if published else None,
        differs=differs,
        begun=furthest is not None,
        num_shards=plan.num_shards,
        num_records=plan.num_records,
        finished=finished,
        needed_nbytes=needed,
        free_nbytes=None if place is None else _free(place),
    )


def lines(state: PlanState) -> list[str]:
    """A line or two for people; none where staged work says it all."""
    name = f"plan {state.digest[:16]}"
    if state.published:
        return [f"{name}: this is what is published"]
    if state.published is not None:
        assert state.differs is not None
        return [f"{name}: what is published is not this plan: {output.plain(state.differs)}"]
    if state.begun:
        return []
    size = f"{output.size_text(state.needed_nbytes)} needed"
    free = "" if state.free_nbytes is None else f", {output.size_text(state.free_nbytes)} free"
    found = [f"{name}: nothing begun, 0 of {output.counted(state.num_shards, 'shard')}, {size}{free}"]
    if state.free_nbytes is not None and state.free_nbytes < state.needed_nbytes:
        found.append(f"    space is short by {output.size_text(state.needed_nbytes - state.free_nbytes)}")
    return found


def _free(place: Path) -> int:
    there = next(path for path in (place, *place.absolute().parents) if os.path.lexists(path))
    return shutil.disk_usage(there).free
