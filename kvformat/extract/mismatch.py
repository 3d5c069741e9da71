"""In what way two documents differ, told without their values."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvformat.spec.document import Document

__all__ = ["other_inputs", "usual_mistake"]


def usual_mistake(ours: NDArray[np.int32], theirs: NDArray[np.int32]) -> str:
    """What made other token ids of a document, where that can be told from their ends; empty otherwise."""
    if np.array_equal(theirs[1:], ours):
        return ": one token more at the start" + (
            ", its first one twice (BOS doubled?)" if theirs[0] == theirs[1] else ""
        )
    if np.array_equal(ours[1:], theirs):
        return ": the first token is missing (BOS dropped?)"
    shorter, longer = sorted((ours, theirs), key=len)
    whose = "the given one" if longer is ours else "that of the dataset"
    if np.array_equal(longer[: len(shorter)], shorter):
        return f": {whose} ends early (truncated, or an end token?)"
    return f": {whose} lacks the start" if np.array_equal(longer[-len(shorter) :], shorter) else ""


def other_inputs(ours: Document, theirs: Document) -> str:
    """What besides its token ids differs between two documents."""
    found = []
    if (ours.mask, ours.prefix_length) != (theirs.mask, theirs.prefix_length):
        found.append(f"the mask ({ours.mask} in the dataset, {theirs.mask} given)")
    rows = [None if one.position_ids is None else one.position_ids.tolist() for one in (ours, theirs)]
    if rows[0] != rows[1]:
        found.append("the positions")
    if ours.media != theirs.media:
        found.append(f"the media ({len(ours.media)} in the dataset, {len(theirs.media)} given)")
    return f"the token ids are the same, and these are not: {', '.join(found)}"
