"""Training batches: kvformat's loaders against a bare copy and every peer behind its own loader; and ``gather``.

A round is several epochs in a global random order, taken in one go. A batch counts as delivered when its packed K and
V are tensors in the consumer's process and one value of each has been read.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import loaders, ours, peers
from benchmarks.command import run_command
from benchmarks.contenders import Open, check_records, opened, reason
from benchmarks.harness import (
    Bar,
    Contender,
    Series,
    alternate,
    best_peer,
    missing_bars,
    print_missing,
    print_notes,
    print_table,
)
from benchmarks.loaders import Delivered, Order, Plan, Stream
from benchmarks.peers._loading import pack_into, reader_views
from benchmarks.shapes import Corpus, Shape

PLANS = {"large": Plan(batch_size=4, epochs=4), "small": Plan(batch_size=64, epochs=2)}
MODES: tuple[ours.Verify, ...] = ("off", "first")
WORKERS = (2, 0)
"""Workers first: they are forks, and LMDB opens an environment once in a process and what it was forked from."""
COPY, COPY2 = "memcpy, 1 thread", "memcpy, 2 threads"
KVLOADER, PADDED = "kvformat KVLoader, packed", "kvformat KVLoader, padded"
DATALOADER = "kvformat DataLoader, packed, 2 workers"
GATHER = "kvformat gather by name"
TWO_WORKERS = ", 2 workers"
_PLAIN_NOTE = "torch's DataLoader over its reader, opened in each worker, packed there into shared memory"


def titled(name: str, verify: str) -> str:
    """Name of a row of kvformat, whose modes are rows of their own."""
    return f"{name} ({verify})"


# ----------------------------------------------------------------------------------------------------------- loaders


def consume(stream: Stream, token_nbytes: int) -> Callable[[Order], int]:
    def run(order: Order) -> int:
        tokens = 0
        for batch in stream(order):
            tokens += sum(batch.lengths)
            batch.k[-1, -1].view(-1)[-1].item()
            batch.v[-1, -1].view(-1)[-1].item()
            del batch  # before the next one is asked for
        return tokens * token_nbytes

    return run


def measure_loaders(corpus: Corpus, path: Path, *, rounds: int, names: Sequence[str]) -> list[Bar]:
    shape, plan = corpus.shape, PLANS[corpus.shape.name]
    orders = [plan.order(len(corpus), number) for number in range(-1, rounds)]
    target = peers.Destination(max(sum(corpus.nbytes_of[n] for n in batch) for order in orders for batch in order))
    contenders = [
        Contender(name=COPY, run=loaders.bare(corpus, target, num_threads=1), bare=True),
        Contender(name=COPY2, run=loaders.bare(corpus, target, num_threads=2), bare=True),
    ]
    missing: list[tuple[str, str]] = []
    copied = {}
    with ExitStack() as stack:
        # Before kvformat has threads: the workers of peers are forks of this process.
        for name in names:
            home = path / name
            home.mkdir()
            try:
                contenders += _peer(name, home, corpus, plan, stack)
            except Exception as error:  # noqa: BLE001 - whatever a peer raises, it is said that and why it is missing
                missing.append((name, reason(error)))
                shutil.rmtree(home, ignore_errors=True)
        home = path / "kvformat"
        home.mkdir()
        ours.write(home, corpus.records)
        kept = list(loaders.kvformat_loaders(home, plan, MODES))
        for entry in kept:
            loaders.check(entry.stream, corpus, plan)
            name = titled(entry.name, entry.verify)
            run = consume(entry.stream, shape.token_nbytes)
            contenders.append(Contender(name=name, run=run, verify=entry.verify, note=entry.note))
        found = alternate(contenders, rounds=rounds, work=lambda number: orders[number + 1])
        for entry in kept:
            if entry.name == KVLOADER:
                stats = entry.loader.stats()
                copied[entry.verify] = stats.nbytes_copied / stats.nbytes
        del kept, entry
        stack.callback(gc.collect)
    title = (
        f"batches of {plan.batch_size} records, {shape.name}: {plan.epochs} epochs of {len(corpus):,} records "
        f"a round, {plan.epochs * corpus.nbytes / 1e9:.2f} GB, global random order"
    )
    best, best_two = best_peer(found), best_peer(_two_workers(found))
    against = [COPY, *dict.fromkeys(s.contender.name for s in (best, best_two) if s)]
    note = "x: times as fast, by time for the same records; padding is not counted as bytes"
    print_table(title, found, against=against, unit="GB/s", note=note)
    print_notes(contenders)
    print_missing(missing)
    return _loader_bars(shape, found, copied) + missing_bars(shape.name, missing)


def _peer(name: str, home: Path, corpus: Corpus, plan: Plan, stack: ExitStack) -> list[Contender]:
    module = peers.load(name)
    # A loader that starts over at each epoch gets one long epoch instead.
    repeats = plan.epochs if getattr(module, "REPEATED", False) else 1
    module.write(home, corpus.records * repeats, "load")
    found = []
    for num_workers in WORKERS:
        loader = loaders.open_peer(module, home, corpus, plan, num_workers=num_workers)
        stack.callback(loader.close)
        stream = loaders.stream_of(loader)
        loaders.check(stream, corpus, plan)
        found.append(
            Contender(
                name=f"{module.NAME}, {num_workers} workers",
                run=consume(stream, corpus.shape.token_nbytes),
                verify="none",
                note=getattr(module, "LOADER_NOTE", _PLAIN_NOTE) if num_workers else "",
            )
        )
    return found


def _two_workers(found: Sequence[Series]) -> list[Series]:
    return [series for series in found if series.contender.name.endswith(TWO_WORKERS)]


def _loader_bars(shape: Shape, found: Sequence[Series], copied: dict[str, float]) -> list[Bar]:
    bars = [
        Bar(
            what=f"{shape.name}: bytes copied per batch byte, packed, verify={verify}",
            target="1",
            found=f"{ratio:.4f}",
            met=ratio == 1,
        )
        for verify, ratio in copied.items()
    ]
    if shape.name != "large":
        return bars
    by_name = {series.contender.name: series for series in found}
    best, best_two = best_peer(found), best_peer(_two_workers(found))
    wanted = (
        (KVLOADER, by_name[COPY], 1.4),
        (KVLOADER, best, 6.0),
        (PADDED, by_name[COPY], 0.8),
        (DATALOADER, by_name[COPY], 0.5),
        (DATALOADER, best_two, 2.5),
    )
    for verify in MODES:
        for name, other, target in wanted:
            series = by_name[titled(name, verify)]
            if other is not None:
                bars.append(_bar(f"{shape.name}: {series.contender.name}", series, other, target))
    return bars


def _bar(what: str, series: Series, other: Series, target: float) -> Bar:
    ratio = series.speed_over(other)
    return Bar(
        what=f"{what}, against {other.contender.name}",
        target=f">= {target:.2f}",
        found=f"{ratio:.2f}",
        met=ratio >= target,
    )


# ------------------------------------------------------------------------------------------------------------ gather


class Packing:
    """A reused batch buffer whose pages exist."""

    def __init__(self, corpus: Corpus, nbytes: int) -> None:
        self.destination = peers.Destination(nbytes)
        shape = corpus.shape
        self._items = self.destination.array.view(np.uint16)
        self._dims = (2, shape.num_layers, -1, shape.num_kv_heads, shape.head_dim)

    def batch(self, nbytes: int) -> np.ndarray:
        """uint16 ``[2, layers, sum of tokens, heads, head_dim]`` at the start of the buffer."""
        return self._items[: nbytes // 2].reshape(self._dims)


def peer_gather(reader: peers.Reader, corpus: Corpus, packing: Packing) -> Callable[[Sequence[int]], np.ndarray]:
    def gather(numbers: Sequence[int]) -> np.ndarray:
        target = packing.batch(sum(corpus.nbytes_of[number] for number in numbers))
        pack_into(target, [reader_views(views) for views in reader.views_of(numbers)])
        return target

    return gather


def kvformat_gather(dataset: Any, corpus: Corpus, kind: str) -> Callable[[Sequence[int]], Delivered]:
    from kvformat.loader import gather

    names = [record.name for record in corpus.records]

    def by_name(numbers: Sequence[int]) -> Delivered:
        batch = gather(dataset, [names[number] for number in numbers], layout="packed")
        return Delivered(batch.components["k"], batch.components["v"], batch.num_tokens)

    def by_number(numbers: Sequence[int]) -> Delivered:
        batch = gather(dataset, records=numbers, layout="packed")
        return Delivered(batch.components["k"], batch.components["v"], batch.num_tokens)

    return by_name if kind == "name" else by_number


def measure_gather(corpus: Corpus, path: Path, *, rounds: int, names: Sequence[str]) -> list[Bar]:
    shape, plan = corpus.shape, PLANS[corpus.shape.name]._replace(epochs=1)
    orders = [plan.order(len(corpus), number) for number in range(-1, rounds)]
    longest = max(sum(corpus.nbytes_of[n] for n in batch) for order in orders for batch in order)
    packing = Packing(corpus, max(longest, corpus.max_nbytes))
    check = check_records(corpus, packing.destination)
    contenders = [Contender(name=COPY, run=loaders.bare(corpus, packing.destination, num_threads=1), bare=True)]
    with opened(corpus, path, "read", modes=MODES, check=check, names=names) as field:
        for entry in field.readers:
            contenders += _gatherers(entry, corpus, packing, orders[0])
        found = alternate(contenders, rounds=rounds, work=lambda number: orders[number + 1])
    best = best_peer(found)
    title = (
        f"gather of {plan.batch_size} records, {shape.name}, {len(orders[0])} times a round, "
        f"{corpus.nbytes / len(orders[0]) / 1e6:.1f} MB each"
    )
    against = [COPY, *([best.contender.name] if best else [])]
    note = "peers: their reader's access, copied into one reused packed buffer; kvformat: a batch that stays valid"
    print_table(title, found, against=against, unit="GB/s", note=note)
    print_missing(field.missing)
    if shape.name != "small":
        return missing_bars(f"{shape.name}, gather", field.missing)
    by_name = {series.contender.name: series for series in found}
    bars = []
    for verify in MODES:
        series = by_name[titled(GATHER, verify)]
        bars.append(_bar(f"{shape.name}: {series.contender.name}", series, by_name[COPY], 0.6))
        if best is not None:
            bars.append(_bar(f"{shape.name}: {series.contender.name}", series, best, 1.0))
    return bars + missing_bars(f"{shape.name}, gather", field.missing)


def _gatherers(entry: Open, corpus: Corpus, packing: Packing, order: Order) -> Iterator[Contender]:
    """Contenders of one reader, each having shown that it packs what was written."""
    if entry.bare:
        return
    if isinstance(entry.reader, ours.KvformatReader):
        for kind in ("name", "number"):
            gather = kvformat_gather(entry.reader.dataset, corpus, kind)
            loaders.check(_each(gather), corpus, PLANS[corpus.shape.name]._replace(epochs=1))

            def run(order: Order, gather: Callable[[Sequence[int]], Delivered] = gather) -> int:
                return sum(_nbytes(gather(numbers)) for numbers in order)

            name = titled(f"kvformat gather by {kind}", entry.verify)
            yield Contender(name=name, run=run, verify=entry.verify)
        return
    pack = peer_gather(entry.reader, corpus, packing)
    for numbers in order:
        expected = np.concatenate(
            [corpus.payload(number).view(np.uint16).reshape(2, *corpus.record(number).dims) for number in numbers], 2
        )
        packing.destination.array[: expected.nbytes] = 0xA5
        if not np.array_equal(pack(numbers), expected):
            raise ValueError(f"{entry.name}: other bytes than were written")

    def run_peer(order: Order) -> int:
        return sum(pack(numbers).nbytes for numbers in order)

    yield Contender(name=entry.name, run=run_peer, verify=entry.verify, note=entry.note)


def _nbytes(batch: Delivered) -> int:
    return batch.k.nbytes + batch.v.nbytes


def _each(gather: Callable[[Sequence[int]], Delivered]) -> Stream:
    def stream(order: Order) -> Iterator[Delivered]:
        for numbers in order:
            yield gather(numbers)

    return stream


# ------------------------------------------------------------------------------------------------------------ script


def measure(shape: Shape, path: Path, *, rounds: int, names: Sequence[str]) -> list[Bar]:
    corpus = Corpus(shape)
    bars: list[Bar] = []
    for part, folder in ((measure_loaders, path / "load"), (measure_gather, path / "gather")):
        folder.mkdir()
        bars += part(corpus, folder, rounds=rounds, names=names)
        shutil.rmtree(folder)
    return bars


if __name__ == "__main__":
    run_command("Training batches through loaders, and gathered.", measure, name="loader", rounds=9)
