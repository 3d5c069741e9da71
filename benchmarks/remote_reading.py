"""Records of a remote dataset, read without a cache, against bare GETs of the same bytes; and requests a record."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import kvformat
from benchmarks import loaders, ours
from benchmarks.harness import Bar, Contender, print_notes
from benchmarks.loaders import Delivered, Order, Plan
from benchmarks.peers import Destination
from benchmarks.remote_clients import CLIENTS, Piece, place, split
from benchmarks.remote_measure import best_of, measure_all, print_metered, ratio_bar
from benchmarks.remote_origin import RING_NBYTES, Limits
from benchmarks.remote_server import Origin
from benchmarks.shapes import Corpus
from kvformat.loader import BatchSampler, KVLoader
from kvformat.storage.connect import connect
from kvformat.storage.remote import Remote
from kvformat.storage.remote_options import RemoteOptions

__all__ = ["measure_reading", "measure_requests", "publish"]

REQUEST_NBYTES = RemoteOptions().request_nbytes
AHEAD_NBYTES = 256 << 20
_SLACK = 1
_COALESCED = 0.1
KVLOADER, READ_INTO, PLAIN = "kvformat KVLoader, packed", "kvformat read_into, announced", "kvformat, record by record"


def publish(origin: Origin, corpus: Corpus, home: Path, bucket: str, *, shard_nbytes: int) -> tuple[Path, str]:
    """Write the corpus as a dataset, and copy it to the server; both places."""
    home.mkdir()
    ours.write(home, corpus.records, shard_nbytes=shard_nbytes)
    url = f"s3://{bucket}/ds"
    kvformat.copy(home / "ds", url, target_options=origin.options)
    return home / "ds", url


# ------------------------------------------------------------------------------------------------------------- reading


class Fresh:
    """An open dataset of which, at the start of each round, nothing is here; its memory is, as amid a long epoch."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.dataset = kvformat.open(url, storage_options=options, verify="first")

    def renew(self) -> None:
        """Before a round, not timed: drop the records that are kept in memory."""
        self.dataset.forget()
        self.dataset.shards.let_go()  # they would not be fetched again


def loader_stream(fresh: Fresh) -> Callable[[Order], Iterator[Delivered]]:
    def stream(order: Order) -> Iterator[Delivered]:
        loader = KVLoader(fresh.dataset, order, layout="packed", prefetch_nbytes=AHEAD_NBYTES)
        for batch in loader:
            found = batch.components
            yield Delivered(found["k"], found["v"], batch.num_tokens)
            del batch, found

    return stream


def read_in_order(fresh: Fresh, corpus: Corpus, target: Destination) -> Callable[[Order], Iterator[tuple[int, int]]]:
    layers = corpus.shape.num_layers
    wanted = [(name, [(0, layers)]) for name in ("k", "v")]

    def read(order: Order) -> Iterator[tuple[int, int]]:
        dataset = fresh.dataset
        numbers = [number for batch in order for number in batch]
        told = coming = 0
        for position, number in enumerate(numbers):
            while told < len(numbers) and (coming < AHEAD_NBYTES or told <= position):
                coming += dataset.announce([numbers[told]], wanted)
                told += 1
            nbytes = dataset.read_into(number, target.view)
            coming -= nbytes
            yield number, nbytes

    return read


def read_plainly(fresh: Fresh, order: Order) -> int:
    total = 0
    for batch in order:
        for number in batch:
            record = fresh.dataset[number]
            for name in ("k", "v"):
                tensor = record.component(name)
                tensor[-1].view(-1)[-1].item()
                total += tensor.nbytes
    return total


def _consume(stream: Callable[[Order], Iterator[Delivered]], token_nbytes: int, order: Order) -> int:
    tokens = 0
    for batch in stream(order):
        tokens += sum(batch.lengths)
        batch.k[-1, -1].view(-1)[-1].item()
        del batch
    return tokens * token_nbytes


def pieces_of(url: str, options: dict[str, Any]) -> list[list[tuple[str, int, int]]]:
    """The ranges of each record, in requests as large as kvformat's."""
    dataset = kvformat.open(url, storage_options=options)
    prefix = url.removeprefix("s3://").partition("/")[2]
    found = []
    for number in range(len(dataset)):
        shard = dataset.shards.holding(number)
        assert shard.origin is not None
        found.append(split(f"{prefix}/{shard.row.path}", shard.origin, dataset[number].nbytes, REQUEST_NBYTES))
    return found


def measure_reading(
    origin: Origin, corpus: Corpus, local: Path, url: str, limits: Limits, *, rounds: int
) -> list[Bar]:
    """The table, and the bars against the best bare client and ``cat_ranges``."""
    bucket = url.removeprefix("s3://").partition("/")[0]
    plan = Plan(batch_size=4, epochs=1)
    ranges = pieces_of(url, origin.options)
    payload = corpus.nbytes
    ring, target = Destination(RING_NBYTES), Destination(corpus.max_nbytes)
    fresh = Fresh(url, origin.options)
    stream, read = loader_stream(fresh), read_in_order(fresh, corpus, target)
    fresh.renew()
    loaders.check(stream, corpus, plan)
    fresh.renew()
    for number, nbytes in read(plan.order(len(corpus), -1)):
        if not np.array_equal(target.array[:nbytes], corpus.payload(number)):
            raise ValueError(f"record {number}: other bytes than were written")

    def order_of(number: int) -> list[list[int]]:
        return plan.order(len(corpus), number)

    contenders = [
        Contender(
            name=KVLOADER,
            run=partial(_consume, stream, corpus.shape.token_nbytes),
            verify="first",
            cache="none",
            before=fresh.renew,
            note=f"batches of {plan.batch_size}, prefetch_nbytes={AHEAD_NBYTES >> 20} MiB, 2 threads",
        ),
        Contender(
            name=READ_INTO,
            run=lambda order: sum(nbytes for _, nbytes in read(order)),
            verify="first",
            cache="none",
            before=fresh.renew,
            note=f"one reused buffer, {AHEAD_NBYTES >> 20} MiB announced ahead",
        ),
        Contender(
            name=PLAIN,
            run=partial(read_plainly, fresh),
            verify="first",
            cache="none",
            before=fresh.renew,
            note="component('k') and ('v') of one after the other, nothing ahead",
        ),
    ]
    with ExitStack() as stack:
        for client, make in CLIENTS.items():
            in_flight = limits.get[client]
            fetch = stack.enter_context(make(origin.s3, bucket, ring, in_flight))
            _check_client(client, fetch, ranges[0], local, ring, url)

            def run(order: Order, fetch: Callable[[Sequence[Piece]], None] = fetch) -> int:
                fetch(place([part for batch in order for number in batch for part in ranges[number]]))
                return payload

            contenders.append(
                Contender(name=client, run=run, cache="none", bare=True, note=f"{in_flight} requests in flight")
            )
        found = measure_all(contenders, server_pid=origin.pid, rounds=rounds, work=order_of)
    by_name = {series.contender.name: series for series in found}
    bare = best_of([series for series in found if series.contender.bare])
    title = (
        f"records read uncached, {corpus.shape.name}: {len(corpus)} records, {payload / 1e9:.2f} GB a round, "
        f"requests of {REQUEST_NBYTES >> 20} MiB, random order; {rounds} rounds"
    )
    note = "kvformat keeps nothing from round to round but memory, and hashes every byte; GB/s of K and V for all"
    print_metered(title, found, against=[bare.contender.name, "s3fs cat_ranges"], note=note)
    print_notes(contenders)
    bars = []
    for name in (KVLOADER, READ_INTO):
        bars.append(ratio_bar("large, uncached", by_name[name], bare, 0.85))
        bars.append(ratio_bar("large, uncached", by_name[name], by_name["s3fs cat_ranges"], 1.2))
    return bars


def _check_client(
    name: str,
    fetch: Callable[[Sequence[Piece]], None],
    ranges: Sequence[tuple[str, int, int]],
    local: Path,
    ring: Destination,
    url: str,
) -> None:
    prefix = url.removeprefix("s3://").partition("/")[2]
    pieces = place(ranges)
    ring.array[:] = 0xA5
    fetch(pieces)
    for key, start, nbytes, at in pieces:
        with (local / key.removeprefix(f"{prefix}/")).open("rb") as file:
            file.seek(start)
            if file.read(nbytes) != bytes(ring.view[at : at + nbytes]):
                raise ValueError(f"{name}: other bytes than were written")


# ------------------------------------------------------------------------------------------------------------ requests


class _Counting:
    """A store that notes each ranged request; everything else is the store's."""

    def __init__(self, store: Any, seen: list[tuple[str, int, int]]) -> None:
        self._store = store
        self._seen = seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, name: str, start: int, nbytes: int, *, timeout_s: float) -> Any:
        """As the store's."""
        self._seen.append((name, start, nbytes))
        return self._store.get(name, start, nbytes, timeout_s=timeout_s)


def measure_requests(origin: Origin, corpus: Corpus, url: str, cache_home: Path) -> list[Bar]:
    """Requests of one epoch, a record: at most, where records are large; on average, where they are small."""
    if corpus.shape.name == "large":
        return [_large_requests(origin, corpus, url)]
    return [
        _small_requests(origin, url, cache=kvformat_cache(cache_home / "requests", unit="auto"), window=16),
        _small_requests(origin, url, cache=None, window=1),
    ]


def kvformat_cache(directory: Path, *, unit: str) -> Any:
    """Options of a cache without a limit that matters here."""
    from kvformat.storage.cache_options import CacheOptions

    return CacheOptions(dir=str(directory), max_nbytes=32 << 30, unit=unit)  # type: ignore[arg-type]  # one of three


class _Connect:
    """Makes stores that note their requests in one list; it pickles, as the location of a dataset does."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int]] = []

    def __call__(self, *args: Any) -> Any:
        return _Counting(connect(*args), self.seen)


def _counted(origin: Origin, url: str, cache: Any) -> tuple[Any, list[tuple[str, int, int]]]:
    connecting = _Connect()
    remote = Remote(url, storage_options=origin.options, connect=connecting)
    return kvformat.open(remote, cache=cache), connecting.seen


def _large_requests(origin: Origin, corpus: Corpus, url: str) -> Bar:
    dataset, seen = _counted(origin, url, None)
    extents: dict[str, list[tuple[int, int, int]]] = {}
    for number in range(len(dataset)):
        shard = dataset.shards.holding(number)
        extents.setdefault(shard.row.path, []).append((shard.origin, dataset[number].nbytes, number))
    starts = {path: [start for start, _, _ in entries] for path, entries in extents.items()}
    order = Plan(batch_size=4, epochs=1).order(len(corpus), 0)
    for batch in KVLoader(dataset, order, layout="packed", prefetch_nbytes=AHEAD_NBYTES):
        del batch
    asked: Counter[int] = Counter()
    for name, start, _ in seen:
        if name in extents:
            asked[extents[name][bisect.bisect_right(starts[name], start) - 1][2]] += 1
    over = [
        asked[number] - -(-nbytes // REQUEST_NBYTES) for entries in extents.values() for _, nbytes, number in entries
    ]
    return Bar(
        what=f"large, uncached: requests of a record beyond ceil(bytes / {REQUEST_NBYTES >> 20} MiB), the most of any",
        target=f"<= {_SLACK}",
        found=f"{max(over)} ({sum(asked.values())} requests, {len(corpus)} records)",
        met=max(over) <= _SLACK and min(asked.values()) > 0,
    )


def _small_requests(origin: Origin, url: str, *, cache: Any, window: int) -> Bar:
    dataset, seen = _counted(origin, url, cache)
    sampler = BatchSampler(dataset, batch_size=64, shuffle="window", window_shards=window, seed=5)
    records = 0
    for batch in KVLoader(dataset, sampler, layout="packed"):
        records += len(batch)
        del batch
    ratio = len(seen) / records
    kept = "no cache" if cache is None else "cache, unit auto"
    return Bar(
        what=f"small, window shuffle of {window} shards, {kept}: ranged requests a record",
        target=f"<= {_COALESCED}",
        found=f"{ratio:.3f} ({len(seen)} requests, {records:,} records)",
        met=ratio <= _COALESCED,
    )
