"""KVLoader: order, content, state, failures, threads, and the bytes it may have in work."""

from __future__ import annotations

import gc
import multiprocessing
import random
import signal
import threading
import time
import weakref

import numpy as np
import pytest
import torch

import kvformat
from kvformat.errors import DamageError, IdentityError, KVFormatError
from kvformat.loader import prefetch
from kvformat.loader.batch import Batch
from kvformat.loader.collection import concat, mix
from kvformat.loader.cursor import Cursor
from kvformat.loader.dataset import KVDataset
from kvformat.loader.layouts import Packed, Padded
from kvformat.loader.lookup import gather
from kvformat.loader.prefetch import KVLoader
from kvformat.loader.sampler import BatchSampler
from tests.loader.made import make_dataset, num_tokens
from tests.loader.making import flip
from tests.loader.memory import anonymous_nbytes, in_use, shared_names
from tests.loader.resuming import check_every_cut

RECORDS = 23
CUTS = {"one": {"batch_size": 1}, "four": {"batch_size": 4}, "budget": {"max_tokens": 6}}
LEAST = 1  # bytes ahead: then just one batch is


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("kvloader") / "data", RECORDS, aliases=(3, 3, 17))


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("kvformat-load")}


def content(batch: Batch):
    """What is compared of a batch: where it stands, what it is of, and that its values are those of its records."""
    expected = torch.cat([torch.full((num_tokens(n),), float(n)) for n in batch.records])
    assert torch.equal(batch["k"][0, :, 0, 0].float(), expected)
    assert torch.equal(batch["v"], -batch["k"])
    assert batch.token_ids.tolist() == (expected.int() + 1).tolist()
    return batch.records, batch.names, batch.padding, batch.cursor


# --------------------------------------------------------------------------------------------------- order, content


@pytest.mark.parametrize("ahead", [0, LEAST, 1 << 30])
@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("cut", CUTS)
def test_the_order_of_its_sampler(dataset, cut, num_threads, ahead):
    for options in ({"rank": 0, "world_size": 1}, {"rank": 1, "world_size": 3, "last_step": "pad"}):
        plain = BatchSampler(dataset, seed=4, **CUTS[cut], **options)
        sampler = BatchSampler(dataset, seed=4, **CUTS[cut], **options)
        loader = KVLoader(dataset, sampler, prefetch_nbytes=ahead, num_threads=num_threads)
        assert len(loader) == len(plain)
        for _ in range(2):
            draws = list(plain)
            found = [content(batch) for batch in loader]
            names = [[plain.collection.name(slot) for slot in draw.slots] for draw in draws]
            assert found == [(list(d), n, d.padding, d.cursor) for d, n in zip(draws, names, strict=True)]
        assert not threads()


def test_other_samplers(dataset):
    """Any iterable of lists: of numbers or of names."""
    numbers = [[3, 1], [22], [0, 0, 5]]
    for sampler in (
        numbers,
        [tuple(n) for n in numbers],
        [np.array(n) for n in numbers],
        [[f"data-{n}" for n in batch] for batch in numbers],
        (batch for batch in numbers),
        torch.utils.data.BatchSampler([3, 1, 22, 0], 2, drop_last=False),
    ):
        loader = KVLoader(KVDataset(dataset), sampler)
        found = [batch.records for batch in loader]
        assert found == ([[3, 1], [22, 0]] if isinstance(sampler, torch.utils.data.Sampler) else numbers)
        for call in (loader.state_dict, lambda loader=loader: loader.load_state_dict({})):
            with pytest.raises(KVFormatError, match="use a BatchSampler") as caught:
                call()
            assert caught.value.code == "E081"
    with pytest.raises(TypeError):
        len(KVLoader(dataset, iter(numbers)))


@pytest.mark.parametrize(
    ("draws", "code", "message"),
    [
        ([[1], 5], "E081", "found int"),
        ([[1], "data-3"], "E081", "found str"),
        ([[1], []], "E081", "at least one record"),
        ([[1], [2.0]], "E081", "found float"),
        ([[1], [RECORDS]], "E080", f"1 of 1 records .*: {RECORDS}"),
        ([[1], ["data-1", "gone", "lost"]], "E080", "2 of 3 names .*: 'gone', 'lost'"),
        ([["data-1"], ["data-1", 4]], "E081", "a name is a string"),
    ],
)
def test_samplers_that_make_no_sense(dataset, draws, code, message):
    with pytest.raises(KVFormatError, match=message) as caught:
        list(KVLoader(dataset, draws))
    assert caught.value.code == code
    assert not threads()


def test_a_sampler_that_fails(dataset):
    def draws():
        yield [1]
        raise LookupError("of its own")

    with pytest.raises(LookupError, match="of its own"):
        list(KVLoader(dataset, draws()))
    assert not threads()


def test_refused(dataset, tmp_path):
    for options in ({"num_threads": 0}, {"prefetch_nbytes": -1}, {"layout": "packd"}):
        with pytest.raises(KVFormatError) as caught:
            KVLoader(dataset, [[0]], **options)
        assert caught.value.code == "E081"
    for options, code in (({"layout": Packed(layers=(7,))}, "E082"), ({"layout": Packed(components=("x",))}, "E082")):
        with pytest.raises(KVFormatError) as caught:
            KVLoader(dataset, [[0]], **options)
        assert caught.value.code == code
    with pytest.raises(KVFormatError, match="open it once"):
        KVLoader(dataset.location, [[0]])
    other = make_dataset(tmp_path / "other", RECORDS)
    for source in (other, concat([dataset, other]), concat([other, dataset])):
        with pytest.raises(KVFormatError, match="the sampler draws from another dataset") as caught:
            KVLoader(source, BatchSampler(dataset, batch_size=2))
        assert caught.value.code == "E081"
    again = kvformat.open(dataset.location)
    assert [
        b.records for b in KVLoader(again, BatchSampler(dataset, batch_size=RECORDS, shuffle="none", over="records"))
    ] == [list(range(RECORDS))]


def test_several_datasets(dataset, tmp_path):
    other = make_dataset(tmp_path / "other", 4)
    both = mix({dataset: 3, other: 1})
    loader = KVLoader(both, BatchSampler(both, batch_size=4, num_samples=40))
    for batch in loader:
        own = [n if n < RECORDS else n - RECORDS for n in batch.records]
        assert [part.unique().tolist() for part in batch["k"].split(batch.num_tokens, 1)] == [[n] for n in own]
        assert sum(n >= RECORDS for n in batch.records) == 1
    assert loader.stats().batches == 10


# ------------------------------------------------------------------------------------------------------------ state


class WithKVLoader:
    """The loader under test, as the others are tested for resuming."""

    def __init__(self, source, *, by_itself: bool, num_threads: int, **options) -> None:
        sampler = BatchSampler(source, seed=3, **options)
        self.loader = KVLoader(source, sampler, prefetch_nbytes=1 << 20, num_threads=num_threads)
        self.by_itself = by_itself

    def batches(self):
        return self.loader

    def state(self, after):
        return self.loader.state_dict() if self.by_itself else self.loader.state_dict(after=after)

    def load(self, state) -> None:
        self.loader.load_state_dict(state)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("by_itself", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_every_cut(tmp_path, cut, by_itself, num_threads):
    source = make_dataset(tmp_path / "data", 9, aliases=(2, 7))
    make = lambda: WithKVLoader(source, by_itself=by_itself, num_threads=num_threads, **CUTS[cut])  # noqa: E731
    check_every_cut(make, content=content, rest_of_a_whole_epoch=False)


def test_state_counts_what_was_handed_out(dataset):
    make = lambda: KVLoader(dataset, BatchSampler(dataset, batch_size=4, seed=9))  # noqa: E731
    loader = make()
    first = BatchSampler(dataset, batch_size=4, seed=9).state_dict()
    assert loader.state_dict() == first
    batches = iter(loader)
    assert loader.state_dict() == first
    one = next(batches)
    two = next(batches)
    assert (
        loader.state_dict()
        == loader.state_dict(after=two)
        == BatchSampler(dataset, batch_size=4, seed=9).state_dict(after=two)
    )
    assert loader.state_dict(after=one) != loader.state_dict()
    assert two.cursor < loader.sampler._position, "it packs ahead"
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert [content(batch) for batch in resumed] == [content(batch) for batch in batches]
    end = loader.state_dict()
    assert end["cursor"] == {"epoch": 1, "block": 0, "batch": 0}
    assert loader.state_dict() == resumed.state_dict() == end
    loader.sampler.set_epoch(5)
    assert loader.state_dict()["cursor"]["epoch"] == 5


def test_state_after_an_iteration_was_broken_off(dataset):
    """The next iteration is the next epoch, and its state before the first batch says so."""
    loader = KVLoader(dataset, BatchSampler(dataset, batch_size=4, seed=9))
    batch = next(iter(loader))
    assert loader.state_dict() == loader.state_dict(after=batch)
    assert not threads()
    following = iter(loader)
    seen = []
    real = loader._pack
    loader._pack = lambda batch: seen.append(loader.state_dict()["cursor"]) or real(batch)
    assert next(following).cursor == Cursor(epoch=1, block=0, batch=1)
    assert seen[0] == {"epoch": 1, "block": 0, "batch": 0}
    assert loader.state_dict()["cursor"] == {"epoch": 1, "block": 0, "batch": 1}


def test_state_where_the_first_batch_of_an_epoch_fails(tmp_path):
    """Going on from it meets the same batch again, in whichever epoch."""
    dataset = make_dataset(tmp_path / "data", 6)
    loader = KVLoader(dataset, BatchSampler(dataset, batch_size=6, seed=9))
    for _ in loader:
        pass
    flip(dataset, 3, "k")
    broken = kvformat.open(dataset.location)
    loader = KVLoader(broken, BatchSampler(broken, batch_size=6, seed=9))
    loader.sampler.set_epoch(1)
    with pytest.raises(DamageError):
        next(iter(loader))
    assert loader.state_dict()["cursor"] == {"epoch": 1, "block": 0, "batch": 0}


def test_state_of_another_order_is_refused(dataset):
    loader = KVLoader(dataset, BatchSampler(dataset, batch_size=4, seed=9))
    with pytest.raises(IdentityError) as caught:
        loader.load_state_dict(BatchSampler(dataset, batch_size=4, seed=8).state_dict())
    assert caught.value.code == "E084"
    plain = KVLoader(dataset, [[1]])
    with pytest.raises(KVFormatError, match="has no cursor"):
        loader.state_dict(after=next(iter(plain)))


# --------------------------------------------------------------------------------------------------------- failures


def test_damage_is_raised_at_once(tmp_path, monkeypatch):
    """Fault 44: the sixth batch is damaged, while the others, before it and after it, are still in work."""
    dataset = make_dataset(tmp_path / "data", 12)
    flip(dataset, 5, "v")
    fresh = kvformat.open(dataset.location)
    handed, release, begun, real = threading.Event(), threading.Event(), threading.Barrier(4), Batch.pack

    def pack(batch: Batch, **options) -> Batch:
        if batch.records[0] in {1, 3, 7}:
            begun.wait(timeout=60)
            assert release.wait(timeout=60)  # it is in work for as long as the test likes
        if batch.records[0] == 5:
            begun.wait(timeout=60)
            assert handed.wait(timeout=60)
        return real(batch, **options)

    monkeypatch.setattr(Batch, "pack", pack)
    failed = prefetch._Ahead.close
    monkeypatch.setattr(prefetch._Ahead, "close", lambda work: (release.set(), failed(work)))
    loader = KVLoader(fresh, [[0], [1], [2], [3], [4], [5], [7], [8]], num_threads=4)
    batches = iter(loader)
    assert next(batches).records == [0]
    handed.set()
    with pytest.raises(DamageError) as caught:
        next(batches)
    assert release.is_set()
    assert (caught.value.code, caught.value.record) == ("E072", 5)
    assert not threads()
    assert list(batches) == []
    assert loader.stats().batches == 1


def test_the_cause_of_a_failure_comes_along(dataset, monkeypatch):
    def pack(batch: Batch, **options) -> Batch:
        if batch.records == [3]:
            try:
                raise OSError(5, "the disk")
            except OSError as error:
                raise kvformat.errors.make_error("E203", "no good", record=3) from error
        return batch

    monkeypatch.setattr(Batch, "pack", pack)
    with pytest.raises(KVFormatError, match="no good") as caught:
        list(KVLoader(dataset, [[3]]))
    assert isinstance(caught.value.__cause__, OSError)
    assert any(entry.name == "pack" for entry in caught.traceback), "where it happened"


@pytest.mark.usefixtures("uncollected")
def test_an_interrupt(dataset, monkeypatch):
    """Ctrl-C while the consumer waits: at once, and no thread is left."""
    waiting, release, main = threading.Event(), threading.Event(), threading.main_thread().ident
    pack, wait, close = Batch.pack, prefetch.wait, prefetch._Ahead.close

    def slow(batch: Batch, **options) -> Batch:
        assert batch.records != [2] or release.wait(timeout=60)
        return pack(batch, **options)

    def interrupt() -> None:
        assert waiting.wait(timeout=60)
        for _ in range(50):
            signal.pthread_kill(main, signal.SIGINT)
            if release.wait(timeout=1):  # else it came just before the thread went to sleep, and is not noticed
                break

    def noted(futures, return_when):
        waiting.set()
        return wait(futures, return_when=return_when)

    monkeypatch.setattr(Batch, "pack", slow)
    monkeypatch.setattr(prefetch._Ahead, "close", lambda work: (release.set(), close(work)))
    batches = iter(KVLoader(dataset, [[1], [2], [3]], num_threads=1, prefetch_nbytes=0))
    thread = threading.Thread(target=interrupt)
    thread.start()
    assert next(batches).records == [1]
    monkeypatch.setattr(prefetch, "wait", noted)
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert release.is_set(), "that is, not when the time was up"
    thread.join(timeout=60)
    assert not threads()
    assert list(batches) == []


@pytest.mark.parametrize("how", ["break", "raise", "close", "drop", "throw"])
def test_threads_end_with_the_iteration(dataset, how):
    loader = KVLoader(dataset, [[n] for n in range(RECORDS)])
    batches = iter(loader)
    assert not threads(), "not before the first batch is asked for"
    next(batches)
    assert threads()
    if how == "break":
        for _ in batches:
            break
        del batches
    elif how == "raise":
        with pytest.raises(ZeroDivisionError):
            for _ in batches:
                raise ZeroDivisionError
        del batches
    elif how == "close":
        batches.close()
    elif how == "throw":
        with pytest.raises(KeyboardInterrupt):
            batches.throw(KeyboardInterrupt())
    else:
        del batches
    gc.collect()
    assert not threads()
    assert len(list(loader)) == RECORDS


# ------------------------------------------------------------------------------------------------- how much is ahead


class Watched:
    """Counts the bytes of batches that are packed or in work and were not handed out."""

    def __init__(self, monkeypatch) -> None:
        self.lock, self.now, self.most, self.most_batches, self.count = threading.Lock(), 0, 0, 0, 0
        submit, take = prefetch._Ahead.submit, prefetch._Ahead.take
        monkeypatch.setattr(prefetch._Ahead, "submit", lambda work, batch, n: (self.add(n, 1), submit(work, batch, n)))
        monkeypatch.setattr(prefetch._Ahead, "take", lambda work: self.taken(take(work)))

    def add(self, nbytes: int, count: int) -> None:
        with self.lock:
            self.now += nbytes
            self.count += count
            self.most = max(self.most, self.now)
            self.most_batches = max(self.most_batches, self.count)

    def taken(self, result):
        self.add(-result[0].nbytes, -1)
        return result


@pytest.mark.parametrize("layout", [Packed(), Padded(multiple_of=4), Packed(dtype="F32", components=("k",))])
@pytest.mark.parametrize("most", [0, 100, 200, 1000, 1 << 20])
def test_no_more_is_ahead_than_was_allowed(dataset, monkeypatch, layout, most):
    watched = Watched(monkeypatch)
    sampler = BatchSampler(dataset, batch_size=3, seed=1)
    loader = KVLoader(dataset, sampler, layout=layout, prefetch_nbytes=most, num_threads=4)
    largest = max(batch.nbytes for batch in loader)
    assert watched.now == 0
    assert watched.most <= max(most, largest)
    assert watched.most_batches <= max(1, len(loader))
    if most == 1 << 20:
        assert watched.most_batches == len(loader)
    if most <= 100:
        assert watched.most_batches == 1


def test_what_was_taken_is_made_up_for(dataset, monkeypatch):
    """Before a batch is handed out, as many are in work again as there is room for."""
    watched = Watched(monkeypatch)
    size = gather(dataset, records=[4]).nbytes
    batches = iter(KVLoader(dataset, [[4]] * 10, prefetch_nbytes=3 * size))
    ahead = []
    for batch in batches:
        ahead.append((watched.count, watched.now))
        assert batch.nbytes == size
    assert ahead == [(count, count * size) for count in (3, 3, 3, 3, 3, 3, 3, 2, 1, 0)]


def test_no_more_than_256_batches_are_ahead(dataset, monkeypatch):
    """Else a whole epoch of small batches would be drawn before the first one is handed out."""
    watched, drawn = Watched(monkeypatch), []

    def draws():
        for number in range(2000):
            drawn.append(number)
            yield [number % RECORDS]

    batches = iter(KVLoader(dataset, draws()))
    assert next(batches).records == [0]
    assert len(drawn) <= 258
    assert [batch.records for batch in batches] == [[number % RECORDS] for number in range(1, 2000)]
    assert 200 < watched.most_batches <= 256


def test_while_the_consumer_is_busy_the_next_batch_is_packed(dataset, monkeypatch):
    """Even where there is room for one only."""
    packed, real = threading.Event(), Batch.pack

    def pack(batch: Batch, **options) -> Batch:
        done = real(batch, **options)
        if batch.records == [1]:
            packed.set()
        return done

    monkeypatch.setattr(Batch, "pack", pack)
    batches = iter(KVLoader(dataset, [[0], [1], [2]], prefetch_nbytes=0))
    assert next(batches).records == [0]
    assert packed.wait(timeout=60), "nobody packs while the first one is consumed"
    assert [batch.records for batch in batches] == [[1], [2]]


# ----------------------------------------------------------------------------------------------------------- memory


def test_what_the_consumer_dropped_is_free_while_it_waits(dataset, monkeypatch):
    dropped, take = [], prefetch._Ahead.take
    monkeypatch.setattr(prefetch._Ahead, "take", lambda work: (dropped.append([r() for r in seen]), take(work))[1])
    seen: list[weakref.ref] = []
    for batch in KVLoader(dataset, [[1], [2], [3]]):
        seen.append(weakref.ref(batch))
        del batch
    assert dropped == [[], [None], [None, None]]


def test_what_the_consumer_keeps_is_never_overwritten(dataset):
    choose = random.Random(5)
    kept: list[tuple[torch.Tensor, list[float]]] = []
    loader = KVLoader(dataset, BatchSampler(dataset, batch_size=3, seed=2), num_threads=3)
    for _ in range(12):
        for batch in loader:
            content(batch)
            if choose.random() < 0.4:
                part = choose.choice((batch["k"][:, 1:], batch["v"], batch["k"][0, -1]))
                kept.append((part, part.flatten().tolist()))
            kept = [entry for entry in kept if choose.random() > 0.05]
            assert all(part.flatten().tolist() == was for part, was in kept)
            del batch


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """64 records of a megabyte."""
    path = tmp_path_factory.mktemp("large") / "data"
    of = kvformat.Schema.uniform(num_layers=4, num_kv_heads=2, head_dim=256)
    with kvformat.create(path, schema=of, context=kvformat.Context.unknown()) as out:
        for number in range(64):
            value = torch.full((4, 128, 2, 256), float(number), dtype=torch.bfloat16)
            out.add(f"n{number}", {"k": value, "v": -value}, token_ids=[number] * 128)
    return path


@pytest.mark.parametrize(
    ("io", "verify", "layout"),
    [
        ("mmap", "first", "packed"),
        ("mmap", "first", "padded"),
        ("mmap", "first", "hf"),
        ("mmap", "always", "packed"),
        ("pread", "first", "packed"),
        ("pread", "always", "packed"),
    ],
)
def test_memory_is_flat_over_ten_epochs(large, io, verify, layout):
    """Fault 43: anonymous memory; pages of the mapped files are not the process's."""
    dataset = kvformat.open(large, io=io, verify=verify)
    sampler = BatchSampler(dataset, batch_size=4, seed=2)
    loader = KVLoader(dataset, sampler, layout=layout, prefetch_nbytes=32 << 20)
    pool, marks = loader.source.pool(), []
    for _ in range(10):
        for batch in loader:
            assert batch["k"][0].reshape(-1)[0] == batch.records[0]
            del batch
        marks.append(anonymous_nbytes())
        assert in_use(pool) == 0
    # What is ahead, what the consumer and the generator have, and the gaps between: a tenth of what went through.
    assert loader.stats().fresh_nbytes < 64 << 20
    assert max(marks) - marks[0] < 64 << 20
    assert marks[-1] - max(marks[:5]) < 8 << 20
    stats = loader.stats()
    assert stats.batches == 160
    assert stats.nbytes == 640 * (2 * 4 * 128 * 2 * 256 * 2 + 128 * 4)
    assert (stats.mapped_nbytes > 64 << 20) == (io == "mmap")


# ------------------------------------------------------------------------------------------------------------ stats


@pytest.mark.parametrize("verify", ["off", "first", "always"])
def test_stats_add_up(dataset, verify):
    opened = kvformat.open(dataset.location, io="mmap", verify=verify)
    loader = KVLoader(opened, BatchSampler(opened, batch_size=4, over="records"))
    assert loader.stats().batches == loader.stats().nbytes == loader.stats().elapsed_s == loader.stats().gbps == 0
    handed = [(len(b), sum(b.num_tokens), b.nbytes) for _ in range(2) for b in loader]
    stats = loader.stats()
    assert (stats.batches, stats.records) == (len(handed), 2 * RECORDS)
    assert stats.tokens == sum(tokens for _, tokens, _ in handed) == 2 * opened.num_tokens
    assert stats.nbytes == stats.nbytes_copied == sum(nbytes for _, _, nbytes in handed)
    assert 0 < stats.wait_s <= stats.elapsed_s
    assert stats.pack_s > 0
    assert (stats.verify_s > 0) == (verify != "off")
    assert stats.verify_s <= stats.pack_s
    assert stats.open_shards == opened.shards.num_open == 6
    assert stats.mapped_nbytes == opened.nbytes
    assert stats.records_per_s == stats.records / stats.elapsed_s
    assert stats.gbps == stats.nbytes / stats.elapsed_s / 1e9


def test_waiting_is_counted_and_the_consumers_work_is_not(dataset, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(prefetch.time, "perf_counter", lambda: float(next(clock)))
    loader = KVLoader(dataset, [[0], [1]], num_threads=1, prefetch_nbytes=0)
    monkeypatch.setattr(loader, "_pack", lambda batch: (batch.pack(), 100.0))
    for _ in loader:
        for _ in range(10):
            prefetch.time.perf_counter()
    stats = loader.stats()
    assert (stats.wait_s, stats.pack_s, stats.elapsed_s) == (2.0, 200.0, 13.0)


# -------------------------------------------------------------------------------------------------- fork, RNG, groups


def _iterate(loader: KVLoader, connection) -> None:
    connection.send([content(batch) for batch in loader])
    connection.close()


def test_in_a_forked_child(dataset):
    """A loader that was used, whose threads are at work just now (fault 34)."""
    loader = KVLoader(dataset, BatchSampler(dataset, batch_size=2, seed=6), num_threads=3)
    wanted = [content(batch) for batch in KVLoader(dataset, BatchSampler(dataset, batch_size=2, seed=6))]
    running = iter(KVLoader(dataset, [[n] for n in range(RECORDS)] * 20))
    next(running)
    context = multiprocessing.get_context("fork")
    for _ in range(3):
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_iterate, args=(loader, theirs))
        child.start()
        theirs.close()
        assert ours.poll(60), "the child hangs"
        assert ours.recv() == wanted
        child.join(60)
        assert child.exitcode == 0
    assert len(list(running)) == 20 * RECORDS - 1
    assert [content(batch) for batch in loader] == wanted


def _go_on(batches, connection) -> None:
    try:
        next(batches)
    except KVFormatError as error:
        connection.send((error.code, error.message))
    batches.close()
    connection.close()


def test_an_iteration_of_the_parent_does_not_go_on_in_a_child(dataset):
    """Its threads are not there: it would wait for ever."""
    batches = iter(KVLoader(dataset, [[n] for n in range(RECORDS)], prefetch_nbytes=0))
    next(batches)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_go_on, args=(batches, theirs))
    child.start()
    theirs.close()
    assert ours.poll(60), "the child hangs"
    code, message = ours.recv()
    assert code == "E081"
    assert "before a fork" in message
    child.join(60)
    assert child.exitcode == 0
    assert len(list(batches)) == RECORDS - 1


def test_the_process_is_left_as_it_was(dataset):
    """No random state is touched, no process group made, no shared memory named (faults 6, 35, 36)."""
    random.seed(3)
    np.random.seed(4)  # noqa: NPY002 -- it is the global state that must not change
    torch.manual_seed(5)
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()  # noqa: NPY002 -- as above
    loader = KVLoader(dataset, BatchSampler(dataset, batch_size=4, seed=1))
    for batch in loader:
        content(batch)
    gather(dataset, ["data-1"], layout="hf")
    after = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()  # noqa: NPY002 -- as above
    assert after == before
    assert not torch.distributed.is_initialized()
    assert not shared_names()


def test_pinned(dataset, fake_pinned):
    loader = KVLoader(dataset, [[1, 2], [3]], pin_memory=True)
    assert [content(batch)[0] for batch in loader] == [[1, 2], [3]]
    assert len(fake_pinned) == 2
    assert loader.stats().fresh_nbytes == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device for it")
def test_no_pinned_memory(dataset):
    with pytest.raises(KVFormatError, match="leave pin_memory out") as caught:
        list(KVLoader(dataset, [[1]], pin_memory=True))
    assert caught.value.code == "E081"
    assert not threads()


def test_time_is_monotonic(dataset):
    """Waiting is measured by a clock that nobody sets."""
    assert prefetch.time is time
    assert KVLoader(dataset, [[0]]).stats().wait_s == 0.0


def test_a_state_follows_the_sampler_where_it_was_told_to_go_on_elsewhere(dataset) -> None:
    sampler = BatchSampler(dataset, batch_size=2, seed=3)
    loader = KVLoader(dataset, sampler)
    stale = iter(loader)
    next(stale)
    sampler.set_epoch(5)
    assert loader.state_dict()["cursor"]["epoch"] == 5
    second = loader.state_dict(after=next(iter(loader)))
    stale = iter(loader)
    next(stale)
    loader.load_state_dict(second)
    next(stale)  # an iteration from before goes on, and no state is of it
    assert loader.state_dict() == second
    sampler.load_state_dict({**second, "cursor": {"epoch": 0, "block": 0, "batch": 0}})
    assert loader.state_dict()["cursor"] == {"epoch": 0, "block": 0, "batch": 0}
