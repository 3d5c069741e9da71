"""Why no dataset is published at a location, and what to do about it."""

from __future__ import annotations

import os
from pathlib import Path

from kvformat.errors import KVFormatError, make_error
from kvformat.spec.paths import ROOT, STAGING

__all__ = ["DATA_WITHOUT_ROOT", "data_without_root", "not_published"]

DATA_WITHOUT_ROOT = (
    f"data lie here without {ROOT}, which is written last: a copy or upload did not finish, or that file was "
    "lost; finish the copy, restore the file from where the data came from, or write the dataset again"
)
"""What it means, and what to do, where data lie without the root that would publish them."""

_DATA = ("manifest", "shards")


def not_published(root: Path) -> KVFormatError:
    """The E001 of a location without ``kvformat.json``."""
    if (root / STAGING).is_dir():
        why = "staged work is; resume it, or see `kvformat status`"
    else:
        why = data_without_root(root) or "check the location"
    return make_error("E001", f"no dataset is published here: {why}", path=root / ROOT)


def data_without_root(root: Path) -> str | None:
    """What it means, and what to do, where data lie at a location without the root that would publish them."""
    if os.path.lexists(root / ROOT) or not any((root / name).is_dir() for name in _DATA):
        return None
    return DATA_WITHOUT_ROOT
