"""Which commit a branch or tag of a hub id stands for."""

from __future__ import annotations

import re
from pathlib import Path

from transformers.utils import cached_file

__all__ = ["commit_of"]

_COMMIT = re.compile(r"[0-9a-f]{40}")


def commit_of(model: str | Path, revision: str | None) -> str | None:
    """Commit (40 hexadecimal digits) of a hub id's revision; None for a directory, or where it cannot be found out.

    It is the name of the snapshot folder that the hub's cache, filled by this if need be, has the configuration in:
    neither configurations nor models of transformers 5 tell the commit they came from.
    """
    if Path(model).exists():
        return None
    try:
        found = cached_file(str(model), "config.json", revision=revision or "main")
    except Exception:  # noqa: BLE001 - loading the configuration fails for the same reason, and tells it
        return None
    folder = Path(found or "").parent
    return folder.name if folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name) else None
