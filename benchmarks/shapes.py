"""The corpora the benchmarks read and write: seeded, so that every run and every contender has the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.memory import page_aligned

if TYPE_CHECKING:
    import torch

__all__ = ["LARGE", "SHAPES", "SMALL", "Corpus", "Outline", "Record", "Shape"]

_POOL_ITEMS = 1 << 24
_ITEM_NBYTES = 2


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Geometry of a model and of the documents it read.

    Parameters
    ----------
    num_layers, num_kv_heads, head_dim
        ``k`` and ``v`` of a record are ``[num_layers, tokens, num_kv_heads, head_dim]``, BF16.
    num_records
        Records in the corpus.
    mean_tokens, sigma
        Lognormal token counts: their mean, and the deviation of their logarithm.
    """

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_records: int
    mean_tokens: float
    sigma: float

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token: K and V of every layer."""
        return 2 * _ITEM_NBYTES * self.num_layers * self.num_kv_heads * self.head_dim

    def tokens(self) -> list[int]:
        """Token count of each record."""
        rng = np.random.default_rng(20_240_601)
        drawn = rng.lognormal(mean=0.0, sigma=self.sigma, size=self.num_records)
        scaled = drawn * (self.mean_tokens / drawn.mean())
        return [max(4, int(count)) for count in scaled]

    def scaled(self, fraction: float) -> Shape:
        """The same geometry with fewer records, for a trial run."""
        return Shape(
            name=self.name,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            num_records=max(4, int(self.num_records * fraction)),
            mean_tokens=self.mean_tokens,
            sigma=self.sigma,
        )


LARGE = Shape(name="large", num_layers=36, num_kv_heads=8, head_dim=128, num_records=24, mean_tokens=200.0, sigma=0.7)
SMALL = Shape(name="small", num_layers=12, num_kv_heads=2, head_dim=64, num_records=5_000, mean_tokens=20.0, sigma=0.6)
SHAPES = {shape.name: shape for shape in (LARGE, SMALL)}


@dataclass(frozen=True, kw_only=True)
class Record:
    """One record in anonymous memory; everything is a view of the corpus.

    Parameters
    ----------
    payload
        ``k`` then ``v``, flat uint8.
    token_ids
        int32 ``[tokens]``.
    """

    index: int
    name: str
    shape: Shape
    num_tokens: int
    payload: np.ndarray
    token_ids: np.ndarray

    @property
    def component_nbytes(self) -> int:
        """Bytes of ``k``, and of ``v``."""
        return self.payload.nbytes // 2

    @property
    def slab_nbytes(self) -> int:
        """Bytes of one layer of ``k``."""
        return self.component_nbytes // self.shape.num_layers

    @property
    def dims(self) -> tuple[int, int, int, int]:
        """Shape of ``k``, and of ``v``."""
        return (self.shape.num_layers, self.num_tokens, self.shape.num_kv_heads, self.shape.head_dim)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``k`` and ``v`` as BF16 torch tensors over the payload."""
        import torch

        flat = torch.from_numpy(self.payload).view(torch.bfloat16)
        k, v = flat.view(2, *self.dims).unbind(0)
        return k, v


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A corpus without its bytes: what a reader in another process has to know.

    Parameters
    ----------
    nbytes_of
        Payload bytes of each record.
    dims
        Shape of ``k``, and of ``v``, of each record.
    """

    shape: Shape
    nbytes_of: list[int]
    dims: list[tuple[int, int, int, int]]

    def __len__(self) -> int:
        return len(self.nbytes_of)


class Corpus:
    """All records of a shape in one block of anonymous memory, each record's payload contiguous.

    Values are normally distributed and finite. A record copies a window of one pool of them, so that making 0.7 GB
    takes a second; windows start at different places, so that records differ.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.tokens = shape.tokens()
        self.nbytes_of = [count * shape.token_nbytes for count in self.tokens]
        self.offsets = np.concatenate(([0], np.cumsum(self.nbytes_of))).tolist()
        rng = np.random.default_rng(7)
        pool = rng.standard_normal(_POOL_ITEMS, dtype=np.float32).view(np.uint32) >> 16
        items = np.tile(pool.astype(np.uint16), 2)
        self.blob = page_aligned(self.offsets[-1])
        self._ids: list[np.ndarray] = []
        for index, nbytes in enumerate(self.nbytes_of):
            target = self.payload(index).view(np.uint16)
            start, filled = int(rng.integers(_POOL_ITEMS)), 0
            while filled < target.size:
                take = min(target.size - filled, _POOL_ITEMS)
                target[filled : filled + take] = items[start : start + take]
                filled += take
            self._ids.append(rng.integers(0, 150_000, nbytes // shape.token_nbytes, dtype=np.int32))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Payload bytes of all records."""
        return self.blob.nbytes

    @property
    def dims(self) -> list[tuple[int, int, int, int]]:
        """Shape of ``k``, and of ``v``, of each record."""
        return [record.dims for record in self.records]

    def outline(self) -> Outline:
        """The corpus without its bytes."""
        return Outline(shape=self.shape, nbytes_of=self.nbytes_of, dims=self.dims)

    @property
    def max_nbytes(self) -> int:
        """Payload bytes of the longest record."""
        return max(self.nbytes_of)

    def payload(self, index: int) -> np.ndarray:
        """``k`` then ``v`` of record ``index``, flat uint8, a view."""
        return self.blob[self.offsets[index] : self.offsets[index + 1]]

    def record(self, index: int) -> Record:
        """Record ``index``."""
        return Record(
            index=index,
            name=f"sample-{index:06d}",
            shape=self.shape,
            num_tokens=self.tokens[index],
            payload=self.payload(index),
            token_ids=self._ids[index],
        )

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    @cached_property
    def records(self) -> list[Record]:
        """Every record, in order."""
        return [self.record(index) for index in range(len(self))]
