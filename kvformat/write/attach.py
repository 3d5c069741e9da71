"""Joining what is staged of a plan without the model that made it: everything to seal it is there."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from kvformat.errors import make_error
from kvformat.spec.paths import STAGING
from kvformat.storage.faults import translated
from kvformat.storage.local_write import LocalFiles
from kvformat.storage.remote import Remote
from kvformat.write.found import FoundRun
from kvformat.write.opening import find_runs, open_workshop
from kvformat.write.planned import Planned
from kvformat.write.run import RunIdentity, differences, run_differs
from kvformat.write.staging import COVERED
from kvformat.write.workshop import Workshop

__all__ = ["attach_workshop"]


def attach_workshop(
    target: Path | Remote,
    planned: Planned,
    *,
    spool: str | os.PathLike[str] | None = None,
    files: LocalFiles | None = None,
    keep_open: bool = True,
) -> Workshop:
    """Join the one run of a plan that is staged; where it is one of several, the one that is complete.

    Parameters
    ----------
    target, spool, files, keep_open
        As for :func:`kvformat.write.opening.open_workshop`.

    Raises
    ------
    ConflictError
        E119 where nothing of the plan is staged.
    IdentityError
        E120 where several runs are complete.
    DamageError
        E116 where a covered file is missing or damaged.
    """
    place = target if isinstance(target, Path) else target.path("")
    found = [one for one in find_runs(target, spool=spool) if one.run.plan == planned.digest]
    if not found:
        raise make_error(
            "E119",
            f"nothing of plan {planned.digest[:16]} is staged here: run its workers first; `kvformat status` shows "
            "what there is",
            path=place,
        )
    run = _chosen(found)
    return open_workshop(
        target,
        run,
        planned,
        covered={file.name: _covered(target, run, file.sha256, file.size) for file in run.files},
        phase="seal",
        spool=spool,
        files=files,
        keep_open=keep_open,
        published=True,
    )


def _chosen(found: Sequence[FoundRun]) -> RunIdentity:
    complete = [one for one in found if one.num_finished >= one.run.num_shards]
    if len(complete) > 1:
        first, second = complete[:2]
        raise run_differs(differences(first.run, second.run), second.place)
    return (complete or sorted(found, key=lambda one: -one.num_finished))[0].run


def _covered(target: Path | Remote, run: RunIdentity, sha256: str, size: int) -> bytes:
    name = f"{STAGING}/{run.key}/{COVERED}/{sha256}"
    if isinstance(target, Path):
        path: Path | str = target / STAGING / f"{run.key}-workers" / COVERED / sha256
        with translated(path):
            content = Path(path).read_bytes()
    else:
        path = target.path(name)
        content = target.read(name, nbytes=size)
    if hashlib.sha256(content).hexdigest() != sha256:
        raise make_error("E116", "the staged file is damaged: run `kvformat clean` and start again", path=path)
    return content
