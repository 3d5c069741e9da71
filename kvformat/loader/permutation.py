"""A counter-based permutation: any position of it at once, from a seed of 64 bits (SPEC.md, C.2).

No generator of numpy or torch takes part, so no release of theirs changes an order, and no state of theirs is touched.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["ROUNDS", "Words", "mix", "permute", "seeds"]

Words = NDArray[np.uint64]

ROUNDS = 16
"""From 16 on, the 24 orders of four items differ in probability by less than one in 40,000."""

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_27, _30, _31 = (np.uint64(n) for n in (27, 30, 31))
_ZERO, _ONE = np.uint64(0), np.uint64(1)


def mix(words: Words) -> Words:
    """The output of SplitMix64 for each state in an array (Steele, Lea and Flood, 2014)."""
    z = words + _STEP
    z ^= z >> _30
    z *= _FIRST
    z ^= z >> _27
    z *= _SECOND
    z ^= z >> _31
    return z


def seeds(key: int, major: int | Words, minor: int | Words = 0) -> Words:
    """Seeds of the permutations that two numbers tell apart; ``[n]`` for arrays, ``[1]`` for integers."""
    return mix(mix(_words(key) + _words(major)) + _words(minor))


def permute(positions: NDArray[np.int64], sizes: int | NDArray[np.int64], seed: Words) -> NDArray[np.int64]:
    """Where a permutation of 0 to n - 1 takes each position.

    Parameters
    ----------
    positions
        ``[k]``, each at least 0 and below its size.
    sizes
        The n of each position's permutation, or one n for all; at most 2^52.
    seed
        ``[k]`` or ``[1]``: the seed of each position's permutation.

    Returns
    -------
    numpy.ndarray
        ``[k]``.
    """
    if not len(positions):
        return positions
    limit = _words(sizes)
    bits = _bit_length(limit - _ONE)
    low_bits = bits >> _ONE
    high_mask = (_ONE << (bits - low_bits)) - _ONE
    low_mask = (_ONE << low_bits) - _ONE
    found = positions.astype(np.uint64)
    # Of a domain of 2^bits, less than half lies beyond n; who lands there walks on until back below n.
    at = np.arange(len(found))
    while len(at):
        walked = _feistel(found[at], low_bits, high_mask, low_mask, seed)
        found[at] = walked
        outside = walked >= limit
        at = at[outside]
        limit, low_bits, high_mask, low_mask, seed = (
            words if len(words) == 1 else words[outside] for words in (limit, low_bits, high_mask, low_mask, seed)
        )
    return found.astype(np.int64)


def _feistel(words: Words, low_bits: Words, high_mask: Words, low_mask: Words, seed: Words) -> Words:
    high, low = words >> low_bits, words & low_mask
    key = seed
    for number in range(ROUNDS):
        round_key = mix(key)
        key = key + _STEP
        if number % 2:
            low ^= mix(high + round_key) & low_mask
        else:
            high ^= mix(low + round_key) & high_mask
    return (high << low_bits) | low


def _bit_length(words: Words) -> Words:
    # Exact below 2^53: the exponent of the binary64.
    return np.frexp(words.astype(np.float64))[1].astype(np.uint64)


def _words(value: int | NDArray[np.int64] | Words) -> Words:
    # Arrays, never scalars: those warn where they wrap around.
    return np.array([value], np.uint64) if isinstance(value, int) else value.astype(np.uint64)
