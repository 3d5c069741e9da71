"""Where a plan and a documents file lie: on local file systems, and nothing else is written or looked for there."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvformat.errors import make_error
from kvformat.storage.location import local_path
from kvformat.write.prepared import SUFFIX

__all__ = ["local_place", "plan_place"]

_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+)://")


def local_place(given: str | os.PathLike[str], *, what: str) -> Path:
    """The path of something that is kept on local file systems alone, a ``file://`` URL included.

    Parameters
    ----------
    what
        It, for the message: ``a plan``.

    Raises
    ------
    UsageError
        E081 for any other URL, an empty path, and the root of all directories.
    """
    url = _URL.match(str(given))
    if url and url[1].lower() not in ("file", "local"):
        # The whole URL might show credentials.
        message = f"{what} is kept on a local file system, found a URL ({url[1]}://...)"
        raise make_error("E081", f"{message}: copy it here, or choose a directory that all workers share")
    if not str(given):
        raise make_error("E081", f"{what} needs a path, found an empty one")
    whole = local_path(given)
    if not whole.name:
        raise make_error("E081", f"{what} needs a name of its own: choose a path below this directory", path=whole)
    return whole if url else Path(given)


def plan_place(given: str | os.PathLike[str]) -> Path:
    """The directory of a plan that is to be opened.

    Raises
    ------
    UsageError
        E081 as :func:`local_place`, and for a documents file.
    """
    path = local_place(given, what="a plan")
    if path.name.endswith(SUFFIX) and not path.is_dir():
        message = (
            "that is a documents file, not the directory of a plan: `kvformat extract` takes it as --documents, and "
            "`kvformat plan` makes a plan of it"
        )
        raise make_error("E081", message, path=path)
    return path
