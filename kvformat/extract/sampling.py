"""Which records an audit looks at: a function of the dataset, a seed and how many are wanted."""

from __future__ import annotations

import hashlib
import math
import re
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from kvformat.errors import make_error
from kvformat.loader.permutation import permute, seeds
from kvformat.spec import canonical, limits

__all__ = ["parse_amount", "sample_records"]

_PERCENT = re.compile(r"([0-9]{1,3})(?:\.([0-9]{1,9}))? ?%", re.ASCII)
_COUNT = re.compile(r"[0-9]{1,15}", re.ASCII)


def sample_records(
    dataset_id: str,
    num_records: int,
    *,
    fraction: float | Fraction | None = None,
    count: int | None = None,
    seed: int = 0,
) -> NDArray[np.int64]:
    """Numbers of the sampled records, ascending, ``[n]`` int64.

    A larger sample of the same dataset and seed holds a smaller one.

    Parameters
    ----------
    fraction
        Share of the records, above 0, at most 1, rounded up; 0.01 where neither it nor ``count`` is given.
    count
        Number of records; all of them where there are fewer.
    seed
        0 to 2^53 - 1.

    Raises
    ------
    UsageError
        E081.
    """
    if fraction is not None and count is not None:
        raise make_error("E081", "a sample has a fraction or a count, not both")
    if count is None:
        wanted = math.ceil(num_records * _share(0.01 if fraction is None else fraction))
    else:
        wanted = min(_whole(count, "count", 1), num_records)
    seed = _whole(seed, "seed", 0)
    key = hashlib.sha256(b"kvf1/audit\0" + canonical.encode({"dataset": dataset_id, "seed": seed})).digest()
    word = int.from_bytes(key[:8], "little")
    return np.sort(permute(np.arange(wanted, dtype=np.int64), num_records, seeds(word, 0)))


def parse_amount(text: str, option: str) -> tuple[Fraction | None, int | None]:
    """Fraction or count of a text such as ``1%``, ``0.5%`` or ``200``; the other is None.

    Raises
    ------
    UsageError
        E081 for anything else, for nothing at all, and for more than 100 %.
    """
    percent = _PERCENT.fullmatch(text.strip())
    if percent is not None:
        decimals = percent[2] or ""
        share = Fraction(int(percent[1] + decimals), 100 * 10 ** len(decimals))
        if 0 < share <= 1:
            return share, None
    elif _COUNT.fullmatch(text.strip()) is not None and int(text) > 0:
        return None, int(text)
    raise make_error("E081", f"{option} must be a share or number of records such as 1% or 200, found {text!r:.80}")


def _whole(value: object, what: str, least: int) -> int:
    if isinstance(value, int) and least <= value <= limits.MAX_INTEGER:
        return value
    raise make_error("E081", f"{what} must be an integer of {least} to 2^53-1, found {value!r:.80}")


def _share(fraction: object) -> Fraction:
    # Through its decimal digits: 0.07 of 100 records are 7, where the binary value next to it gives 8.
    if isinstance(fraction, int | float | Fraction) and 0 < fraction <= 1:
        return Fraction(str(fraction))
    raise make_error("E081", f"fraction must be above 0 and at most 1, found {fraction!r:.80}")
