"""What a user says of a cache."""

from __future__ import annotations

import os
from typing import Literal, get_args

from msgspec import Struct
from msgspec.structs import force_setattr

from kvformat.errors import make_error

__all__ = ["CacheOptions"]

Unit = Literal["auto", "record", "shard"]


class CacheOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A directory on a local disk in which all processes of a node keep what they fetched of remote datasets.

    Attributes
    ----------
    dir
        Directory of its own: one that does not exist, is empty, or was made by a cache. Taken from a path or a
        string, with ``~``, and kept as an absolute path.
    max_nbytes
        Most bytes of content, those being fetched included, over all processes that use the directory.
    unit
        What is fetched, verified and dropped as one: a record or a whole shard. ``auto`` leaves it to the reader.
    min_free_nbytes
        Bytes of the file system that stay free: nothing is kept where fewer would be left.
    """

    dir: str
    max_nbytes: int
    unit: Unit = "auto"
    min_free_nbytes: int = 1 << 30

    def __post_init__(self) -> None:
        """Check and complete the values."""
        path = _absolute(self.dir)
        if path is None:
            raise make_error("E081", f"dir must be the path of a directory, found {self.dir!r}")
        force_setattr(self, "dir", path)
        for name in ("max_nbytes", "min_free_nbytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise make_error("E081", f"{name} must be a number of bytes, found {value!r}")
        if self.unit not in get_args(Unit):
            raise make_error("E081", f"unit must be one of {', '.join(get_args(Unit))}, found {self.unit!r}")


def _absolute(given: object) -> str | None:
    path = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path:
        return None
    return os.path.abspath(os.path.expanduser(path))
