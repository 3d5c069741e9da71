"""Whether a worker is of the run that is staged, covered files included. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec.structs import replace

from kvformat.errors import make_error
from kvformat.spec.manifest import CoveredFile
from kvformat.write.run import RunIdentity, SameFile, differences, run_differs

__all__ = ["agree_on_files"]


def agree_on_files(
    first: RunIdentity,
    own: RunIdentity,
    covered: Mapping[str, bytes],
    stored: Callable[[CoveredFile], bytes | None],
    same_file: SameFile | None,
    place: Path | str,
) -> tuple[RunIdentity, dict[str, bytes]]:
    """The run that counts, which is the first one, and its covered files by label.

    Parameters
    ----------
    covered
        One's own covered files.
    stored
        Content of a covered file of the first run; None where it is missing.
    same_file
        Whether two contents mean the same although their bytes differ.

    Raises
    ------
    IdentityError
        E120 where the runs differ.
    DamageError
        E116 where a file of the first run is missing or damaged.
    """
    mine = {file.name: file.sha256 for file in own.files}
    agreed = {}
    for file in first.files:
        content = covered.get(file.name)
        if content is not None and mine.get(file.name) == file.sha256:
            agreed[file.name] = content
        elif content is not None and same_file is not None:
            theirs = stored(file)
            if theirs is None or hashlib.sha256(theirs).hexdigest() != file.sha256:
                raise make_error(
                    "E116",
                    f"the staged file {file.name!r} is missing or damaged: run `kvformat clean` and start again",
                    path=place,
                )
            if same_file(file.name, theirs, content):
                agreed[file.name] = theirs
    # What means the same is no difference; the first run's bytes count.
    same = agreed.keys() == mine.keys() and len(agreed) == len(first.files)
    found = differences(own, replace(first, files=own.files) if same else first)
    if found:
        raise run_differs(found, place)
    return first, agreed
