"""The option that names a plan, and what it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvformat.extract.plan import Plan

__all__ = ["OnePlan", "PlanOfWork", "opened"]

PlanOfWork = Annotated[
    str | None, typer.Option("--plan", metavar="PLAN", help="Plan of what workers make, to count its records too.")
]
OnePlan = Annotated[str, typer.Option("--plan", metavar="PLAN", help="Directory of the plan.")]


def opened(path: str) -> Plan:
    """The plan; to be closed."""
    from kvformat.extract.plan import open_plan

    return open_plan(path)
