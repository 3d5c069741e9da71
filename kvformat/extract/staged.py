"""What earlier workers of a plan left that need not be written again."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvformat.storage.remote import Remote
from kvformat.write.opening import find_runs

__all__ = ["staged_nbytes"]

_SHARD = re.compile(r"([0-9]{8})-[0-9a-f]{16}\.shard")
_PART = re.compile(r"[0-9]{8}\.[0-9a-f]{8}\.part")


def staged_nbytes(target: Path | Remote, plan: str, *, key: str | None = None, in_work: bool = False) -> int:
    """Bytes of the finished shards that a run will find at its target, and need not have space for again.

    In an object store nothing is counted: the space a run needs here is that of its spool, whatever is there. Of
    several runs of the plan it can be one only: the one with the least counts, so that too much space may be asked
    for, and never too little.

    Parameters
    ----------
    plan, key
        Digest of the plan; and key of the run, once the model is loaded.
    in_work
        Count shards that live workers have in work as well: their bytes are on the disk already.
    """
    if not isinstance(target, Path):
        return 0
    found = [
        _nbytes(one.place, in_work=in_work)
        for one in find_runs(target)
        if isinstance(one.place, Path) and one.run.plan == plan and key in (None, one.run.key)
    ]
    return min(found, default=0)


def _nbytes(staging: Path, *, in_work: bool) -> int:
    total = 0
    try:
        with os.scandir(staging) as entries:
            names = {entry.name: entry for entry in entries}
        for name, entry in names.items():
            match = _SHARD.fullmatch(name)
            if (match is not None and f"{match[1]}.json" in names) or (in_work and _PART.fullmatch(name)):
                total += entry.stat().st_size
    except FileNotFoundError:  # its workers go on
        return total
    return total
