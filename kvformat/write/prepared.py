"""Where a plan and a documents file lie, so that nothing else is written there. Loads nothing."""

from __future__ import annotations

import os
from pathlib import Path

from kvformat.errors import make_error
from kvformat.spec.paths import ROOT

__all__ = ["PLAN_FILES", "SUFFIX", "check_place", "is_plan"]

PLAN_FILES = ("plan.json", "documents.kvdocs", "order.safetensors")
"""Files in the directory of a plan."""

SUFFIX = ".kvdocs"
"""What the name of a documents file ends with."""


def is_plan(path: Path) -> bool:
    """Whether a directory holds the files of a plan; they need not be sound."""
    return all(os.path.isfile(path / name) for name in PLAN_FILES)  # noqa: PTH113 -- Path's raises without permission


def check_place(path: Path, *, what: str) -> None:
    """Refuse to put something where something else is: in a plan, below a dataset, or as ``*.kvdocs``.

    Parameters
    ----------
    path
        Where it goes; need not exist.
    what
        It, for the message: ``a dataset``.

    Raises
    ------
    UsageError
        E081.
    """
    whole = Path(os.path.realpath(path))
    for place in (whole, *whole.parents):
        if is_plan(place):
            message = f"a plan is here, and {what} needs a place of its own: choose another location for it"
            raise make_error("E081", message, path=place)
        if place != whole and os.path.isfile(place / ROOT):  # noqa: PTH113 -- as above
            message = f"a dataset is published here, and {what} is no part of it: choose a location outside of it"
            raise make_error("E081", message, path=place)
    if whole.name.endswith(SUFFIX) or path.name.endswith(SUFFIX):
        message = f"*{SUFFIX} is the name of a documents file: choose another location for {what}"
        raise make_error("E081", message, path=path)
