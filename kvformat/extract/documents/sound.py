"""Whether the columns of a documents file hang together, digests apart: a program of others may have made them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvformat.errors import KVFormatError
from kvformat.extract.columns import ColumnsFile
from kvformat.extract.documents.form import About
from kvformat.spec import canonical, limits
from kvformat.spec.document import MASKS

__all__ = ["about_of", "check_counts", "first_places"]

_OF_ONE_LENGTH = (
    ("tokens", "position_rows", "mask", "prefix_length", "digest", "media_end"),
    ("name_document", "name_input", "name_end"),
    ("source_digest", "source_end"),
)


def about_of(columns: ColumnsFile) -> About:
    """The description; E307 where it cannot be read."""
    try:
        return canonical.convert(canonical.decode(columns.arrays["about"].tobytes()), About)
    except KVFormatError as error:
        columns.refuse(f"its description cannot be read ({error.message})")


def check_counts(columns: ColumnsFile) -> None:
    """Refuse columns that belong together and are of different lengths; E307."""
    counts = columns.counts
    if any(counts[name] != counts[group[0]] for group in _OF_ONE_LENGTH for name in group):
        columns.refuse("columns that belong together are of different lengths")


def first_places(columns: ColumnsFile, inputs_end: NDArray[np.uint64]) -> NDArray[np.intp]:
    """Of each document, the place of its first name among the names: int64 ``[documents]``.

    Parameters
    ----------
    inputs_end
        Where the inputs of each document end, in items.

    Raises
    ------
    DamageError
        E307 for values that no writer makes.
    """
    counts, arrays = columns.counts, columns.arrays
    ends = (
        (inputs_end, counts["inputs"]),
        (arrays["media_end"], counts["media"]),
        (arrays["name_end"], counts["name_bytes"]),
        (arrays["source_end"], counts["source_bytes"]),
    )
    tokens, name_input = arrays["tokens"], arrays["name_input"]
    # Compared as they are: differences of unsigned numbers are never negative.
    sound = all((end[1:] >= end[:-1]).all() and (int(end[-1]) if len(end) else 0) == total for end, total in ends)
    sound = sound and bool(
        ((tokens >= 1) & (tokens <= limits.MAX_TOKENS)).all()
        and np.isin(arrays["position_rows"], (0, 1, 3)).all()
        and (arrays["mask"] < len(MASKS)).all()
        and (name_input[1:] > name_input[:-1]).all()
    )
    # Documents are numbered as their first names come.
    reached = np.maximum.accumulate(arrays["name_document"].astype(np.int64))
    first: NDArray[np.intp] = np.flatnonzero(np.diff(reached, prepend=-1))
    if not sound or len(first) != len(tokens) or (reached[first] != np.arange(len(tokens))).any():
        columns.refuse("it holds values that no writer of documents makes")
    return first
