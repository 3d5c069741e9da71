"""Whether a path lies where mapping files is a good idea."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

__all__ = ["prefers_pread"]

# File systems on which a mapped page can fail with SIGBUS, or on which page faults cost a round trip each.
_REMOTE = re.compile(
    r"(nfs\d*|cifs|smb\d*|lustre|9p|afs|beegfs|ceph|gpfs|glusterfs|panfs|orangefs|pvfs2|wekafs|virtiofs|fuse(\..*)?|fuseblk)\Z"
)


@cache
def _types() -> dict[str, str]:
    found = {}
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    for line in lines:
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) > 2 and kind:
            found[fields[2]] = kind[0]
    return found


def prefers_pread(path: str | os.PathLike[str]) -> bool:
    """True on network and FUSE mounts, where files are read instead of mapped."""
    try:
        device = os.stat(path).st_dev
    except OSError:  # opening a file there says what is wrong
        return False
    return bool(_REMOTE.match(_types().get(f"{os.major(device)}:{os.minor(device)}", "")))
