"""What lies staged, in words, and what to do with it."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from kvformat.cli import output

if TYPE_CHECKING:
    from kvformat.cli.staged import StagedWork

__all__ = ["STATES", "lines"]

STATES = {"live": "a writer is at work", "abandoned": "no writer holds it", "unknown": "no leases here"}


def lines(work: StagedWork, location: str, *, unpublished: bool) -> list[str]:
    """A few lines for people.

    Parameters
    ----------
    location
        Of the dataset, for a command.
    unpublished
        Whether nothing is published there.
    """
    return [*_what(work), *_next_step(work, location, unpublished=unpublished)]


def _what(work: StagedWork) -> list[str]:
    records = "" if work.records is None else f", {output.counted(work.records, 'record')}"
    counts = f"{output.counted(work.shards, 'shard')}{records}"
    finished = f"{counts}, {output.size_text(work.nbytes)}"
    other = " of another plan" if work.of_plan is False else ""
    lines = [
        f"staged work{other}, {work.state} ({_meaning(work)}): {output.plain(work.path)}",
        f"    finished: {finished}; {output.size_text(work.total_nbytes)} with what is begun",
    ]
    if work.shared is not None:
        from kvformat.cli import shared_work

        return [*lines, *shared_work.lines(work.shared, work.nbytes)]
    plan = work.plan
    name = output.plain(work.path).rpartition("/")[2]
    if plan is None and name.startswith("copy-"):
        return [
            lines[0],
            f"    a copy of dataset {name[5:]}, {output.size_text(work.total_nbytes)}; copy again to go on",
        ]
    if plan is None:
        return [*lines, "    plan: not readable"]
    shards = f"shards of {output.size_text(plan.shard_nbytes)}"
    lines.append(f"    plan: schema {plan.schema[:16]}, context {plan.context[:16]}, {shards}")
    return [*lines, f"    tag: {output.plain(plan.tag)}"] if plan.tag else lines


def _meaning(work: StagedWork) -> str:
    if work.state == "live" and work.shared is not None and work.shared.loading:
        return "running, loading the model"
    return STATES[work.state]


def _next_step(work: StagedWork, location: str, *, unpublished: bool) -> list[str]:
    """What to do with work nobody is at."""
    if work.state != "abandoned":
        return []
    drop = f"`kvformat clean {shlex.quote(output.plain(location))}`"
    if not unpublished:
        return [f"    next: {drop} removes it, as something is published here"]
    if work.shared is not None and work.shared.finished == work.shared.num_shards:
        step = "the same `kvformat extract` command, or `kvformat seal`, publishes it"
    elif work.shared is not None:
        step = "the same `kvformat extract` command goes on with it"
    elif work.plan is not None:
        step = "the same program goes on with it, where it resumes"
    else:
        return [f"    next: {drop} drops it"]
    return [f"    next: {step}; {drop} drops it"]
