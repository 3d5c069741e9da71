"""Training loaders as contenders: what each delivers in a round, and the proof that it is what was written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks import ours, peers
from benchmarks.peers._loading import BatchLoader, Collate, DataLoaderOver, Indexed, loader_options, reader_views

if TYPE_CHECKING:
    from benchmarks.shapes import Corpus

__all__ = ["Delivered", "Order", "Plan", "Stream", "bare", "check", "kvformat_loaders", "open_peer"]

Order = Sequence[Sequence[int]]
_KEY_NBYTES = 64


class Plan(NamedTuple):
    """What a round is: ``epochs`` times all records, in batches of ``batch_size``."""

    batch_size: int
    epochs: int

    def order(self, num_records: int, number: int) -> list[list[int]]:
        """The batches of round ``number``: each epoch in a global random order of its own."""
        rng = np.random.default_rng([3, number + 1])
        numbers = np.concatenate([rng.permutation(num_records) for _ in range(self.epochs)]).tolist()
        return [numbers[start : start + self.batch_size] for start in range(0, len(numbers), self.batch_size)]


class Delivered(NamedTuple):
    """A batch in the consumer's hands.

    Parameters
    ----------
    k, v
        Packed ``[layers, sum of tokens, heads, head_dim]``, or padded ``[layers, records, longest, heads, head_dim]``.
    lengths
        Tokens of each record.
    mask
        Of a padded batch, bool ``[records, longest]``.
    """

    k: torch.Tensor
    v: torch.Tensor
    lengths: Sequence[int]
    mask: torch.Tensor | None = None


Stream = Callable[[Order], Iterator[Delivered]]
"""Delivers a round; one with an order of its own takes the number of epochs from its plan."""


def check(stream: Stream, corpus: Corpus, plan: Plan) -> None:
    """Take one round: every record as often as there are epochs, every byte as it was written."""
    found: Counter[int] = Counter()
    index_of = {(r.num_tokens, r.payload[:_KEY_NBYTES].tobytes()): r.index for r in corpus.records}
    if len(index_of) != len(corpus):
        raise ValueError("two records are as long and begin alike")
    for batch in stream(plan.order(len(corpus), -1)):
        k, v = (_bits(tensor) for tensor in (batch.k, batch.v))
        start = 0
        for position, length in enumerate(batch.lengths):
            if batch.mask is None:
                parts = [whole[:, start : start + length] for whole in (k, v)]
                start += length
            else:
                kept = batch.mask[position].numpy()
                parts = [whole[:, position, kept] for whole in (k, v)]
            head = np.ascontiguousarray(parts[0][0]).reshape(-1)[: _KEY_NBYTES // 2].tobytes()
            index = index_of.get((length, head))
            if index is None:
                raise ValueError("a record that was not written")
            expected = corpus.payload(index).view(np.uint16).reshape(2, *corpus.record(index).dims)
            if not all(np.array_equal(part, other) for part, other in zip(parts, expected, strict=True)):
                raise ValueError(f"record {index}: other bytes than were written")
            found[index] += 1
    if found != Counter(dict.fromkeys(range(len(corpus)), plan.epochs)):
        raise ValueError("records are missing, or came too often")


def bare(corpus: Corpus, target: peers.Destination, *, num_threads: int) -> Callable[[Order], int]:
    """The payloads of each batch copied behind each other into one buffer, by as many threads."""
    base = int(corpus.blob.ctypes.data)
    offsets = corpus.offsets

    def copy(pieces: Sequence[tuple[int, int]]) -> None:
        for start, number in pieces:
            peers.memmove(target.address + start, base + offsets[number], offsets[number + 1] - offsets[number])

    def run(order: Order) -> int:
        total = 0
        with ExitStack() as stack:
            spread = stack.enter_context(ThreadPoolExecutor(num_threads)).map if num_threads > 1 else map
            for batch in order:
                pieces, end = [], 0
                for number in batch:
                    pieces.append((end, number))
                    end += offsets[number + 1] - offsets[number]
                # Longest first, dealt out in turn, so that threads end together.
                pieces.sort(key=lambda piece: offsets[piece[1]] - offsets[piece[1] + 1])
                for _ in spread(copy, [pieces[part::num_threads] for part in range(num_threads)]):
                    pass
                total += end
        return total

    return run


def open_peer(module: Any, path: Path, corpus: Corpus, plan: Plan, *, num_workers: int) -> BatchLoader:
    """A peer's own training loader where it has one, else torch's ``DataLoader`` over its reader."""
    outline = corpus.outline()
    if hasattr(module, "open_loader"):
        loader: BatchLoader = module.open_loader(
            path, outline, batch_size=plan.batch_size, epochs=plan.epochs, num_workers=num_workers
        )
        return loader
    return DataLoaderOver(
        Indexed(partial(module.open_reader, path, outline, "load"), len(corpus)),
        Collate(corpus.shape, reader_views),
        num_workers=num_workers,
        context=getattr(module, "CONTEXT", "fork"),
    )


def stream_of(loader: BatchLoader) -> Stream:
    """What a peer's loader delivers."""

    def stream(order: Order) -> Iterator[Delivered]:
        for batch in loader.batches(order):
            k, v = batch.kv.unbind(0)
            yield Delivered(k, v, batch.lengths.tolist())

    return stream


class _Epochs:
    """Several epochs of a sampler as one, so that no loader starts over within a round."""

    def __init__(self, sampler: Any, epochs: int) -> None:
        self._sampler = sampler
        self._epochs = epochs

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._epochs):
            yield from self._sampler

    def __len__(self) -> int:
        return self._epochs * len(self._sampler)


class Ours(NamedTuple):
    """One of kvformat's loaders, with the words a table says about it; ``loader`` is the library's own object."""

    name: str
    verify: ours.Verify
    note: str
    stream: Stream
    loader: Any


def kvformat_loaders(path: Path, plan: Plan, modes: Sequence[ours.Verify]) -> Iterator[Ours]:
    """kvformat's loaders over what :func:`benchmarks.ours.write` wrote, in each mode of verification."""
    from kvformat.loader import BatchSampler, KVDataset, KVLoader
    from kvformat.loader import Collate as KVCollate

    for verify in modes:
        for layout in ("packed", "padded"):
            source = KVDataset(path / "ds", verify=verify)
            sampler = _Epochs(BatchSampler(source.collection, batch_size=plan.batch_size, seed=5), plan.epochs)
            loader: Any = KVLoader(source, sampler, layout=layout, num_threads=2)
            note = "2 threads, BatchSampler with shuffle='global'"
            yield Ours(f"kvformat KVLoader, {layout}", verify, note, _kvformat_stream(loader, layout), loader)
        source = KVDataset(path / "ds", verify=verify)
        sampler = _Epochs(BatchSampler(source.collection, batch_size=plan.batch_size, seed=5), plan.epochs)
        loader = DataLoader(source, batch_sampler=sampler, collate_fn=KVCollate("packed"), **loader_options(2))
        note = "torch's DataLoader(KVDataset, BatchSampler, Collate); packed at first use, in the consumer's process"
        yield Ours("kvformat DataLoader, packed, 2 workers", verify, note, _kvformat_stream(loader, "packed"), loader)


def _kvformat_stream(loader: Any, layout: str) -> Stream:
    def stream(order: Order) -> Iterator[Delivered]:  # noqa: ARG001 - the order is the sampler's
        for batch in loader:
            found = batch.components
            yield Delivered(found["k"], found["v"], batch.num_tokens, batch.mask if layout == "padded" else None)
            del batch, found  # its memory goes into the next one

    return stream


def _bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint16).numpy()
