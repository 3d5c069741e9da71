"""KVDataset and Collate behind PyTorch's loaders: processes, references, damage, resuming."""

from __future__ import annotations

import pickle
import random
import shutil
import threading
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory
from torchdata.stateful_dataloader import StatefulDataLoader

import kvformat
from kvformat.errors import DamageError, KVFormatError
from kvformat.loader.batch import Batch
from kvformat.loader.collection import concat
from kvformat.loader.dataset import Collate, KVDataset
from kvformat.loader.layouts import Packed, Padded
from kvformat.loader.sampler import BatchSampler
from tests.loader.made import make_dataset, num_tokens
from tests.loader.making import flip
from tests.loader.memory import anonymous_nbytes, in_use, shared_names
from tests.loader.resuming import check_every_cut

RECORDS = 14
CUTS = {"one": {"batch_size": 1}, "four": {"batch_size": 4}, "budget": {"max_tokens": 6}}
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # more workers than cores are meant
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata, under a newer torch
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    found = tmp_path_factory.mktemp("dataloader") / "data"
    make_dataset(found, RECORDS, aliases=(3, 3, 11))
    return found


@pytest.fixture
def dataset(path):
    return kvformat.open(path)


def content(batch: Batch):
    """What is compared of a batch: where it stands, what it is of, and that its values are those of its records."""
    expected = torch.cat([torch.full((num_tokens(n),), float(n)) for n in batch.records])
    mask = batch.mask if isinstance(batch.layout, Padded) else slice(None)
    assert torch.equal(batch["k"][0][mask][:, 0, 0].float(), expected)
    assert torch.equal(batch["v"], -batch["k"])
    assert batch.token_ids[mask].tolist() == (expected.int() + 1).tolist()
    return batch.records, batch.names, batch.padding, batch.cursor


def loader_of(source, *, layout="packed", sampler=None, **options):
    sampler = sampler or BatchSampler(source, batch_size=4, seed=2)
    return DataLoader(KVDataset(source), batch_sampler=sampler, collate_fn=Collate(layout), **options)


def wanted_of(source, epochs: int = 1):
    """The order of the sampler alone."""
    sampler = BatchSampler(source, batch_size=4, seed=2)
    name = sampler.collection.name
    return [
        [(list(draw), [name(slot) for slot in draw.slots], draw.padding, draw.cursor) for draw in sampler]
        for _ in range(epochs)
    ]


# --------------------------------------------------------------------------------------------------------- processes


@pytest.mark.parametrize(
    ("workers", "method", "persistent", "layout"),
    [
        (0, None, False, "packed"),
        (0, None, False, "padded"),
        (1, "fork", False, "packed"),
        (3, "fork", True, "packed"),
        (3, "fork", False, "padded"),
        (2, "spawn", True, "packed"),
        (1, "spawn", False, "padded"),
        (2, "forkserver", True, "padded"),
        (1, "forkserver", False, "packed"),
    ],
)
def test_epochs(dataset, workers, method, persistent, layout):
    options = {"multiprocessing_context": method, "persistent_workers": persistent} if workers else {}
    loader = loader_of(dataset, num_workers=workers, layout=layout, **options)
    for epoch in wanted_of(dataset, 2):
        found = []
        for batch in loader:
            assert not shared_names(), "no tensor goes through shared memory"
            found.append(content(batch))
            assert batch._source.collection.datasets == (dataset,), "from the mapping that is open here"
        assert found == epoch


def test_a_location(path, dataset):
    loader = DataLoader(
        KVDataset(path, expected_id=dataset.id, verify="always", io="pread"),
        batch_sampler=BatchSampler(path, batch_size=4, seed=2),
        collate_fn=Collate(Packed()),
        num_workers=2,
    )
    assert [content(batch) for batch in loader] == wanted_of(dataset)[0]
    with pytest.raises(KVFormatError, match="E007"):
        KVDataset(path, expected_id="0" * 64)
    with pytest.raises(KVFormatError, match="verify: options of a location") as caught:
        KVDataset(dataset, verify="off")
    assert caught.value.code == "E081"


def test_several_datasets(dataset, tmp_path):
    both = concat([dataset, make_dataset(tmp_path / "more", 6)])
    loader = loader_of(both, num_workers=2)
    seen = []
    for batch in loader:
        own = [n if n < RECORDS else n - RECORDS for n in batch.records]
        assert [part.unique().tolist() for part in batch["k"].split(batch.num_tokens, 1)] == [[n] for n in own]
        seen += batch.names
    assert sorted(seen) == sorted([name for name, _ in dataset.names()] + [f"more-{n}" for n in range(6)])


@pytest.mark.parametrize("workers", [0, 2])
def test_plain_samplers(dataset, workers):
    """Without a sampler of ours: PyTorch's own batches of numbers."""
    loader = DataLoader(KVDataset(dataset), batch_size=3, collate_fn=Collate(), num_workers=workers)
    found = [content(batch) for batch in loader]
    assert [records for records, *_ in found] == [[n, n + 1, n + 2][: RECORDS - n] for n in range(0, RECORDS, 3)]
    assert {(padding, cursor) for *_, padding, cursor in found} == {(False, None)}


def test_items(dataset):
    items = KVDataset(dataset)
    assert (len(items), len(list(items))) == (RECORDS, RECORDS)
    ref = items[3]
    assert (ref.number, ref.record.index, repr(ref)) == (3, 3, "<kvformat.loader.RecordRef 3>")
    assert pickle.loads(pickle.dumps(ref)).source.collection.datasets == (dataset,)
    assert len(pickle.dumps(ref)) < 1000
    draw = next(iter(BatchSampler(dataset, batch_size=4)))
    refs = pickle.loads(pickle.dumps(items.__getitems__(draw)))
    assert [r.number for r in refs] == list(draw)
    assert (refs.draw.cursor, refs.draw.slots) == (draw.cursor, draw.slots)
    batch = Collate()(refs)
    assert batch.cursor == draw.cursor
    assert batch._content is not None, "without workers it is packed at once"
    for wrong, code in ((RECORDS, "E080"), (-1, "E080"), ("data-3", "E081")):
        with pytest.raises(KVFormatError) as caught:
            items[wrong]
        assert caught.value.code == code
    with pytest.raises(KVFormatError, match="at least one record"):
        Collate()([])


def test_what_goes_through_the_queue(tmp_path, monkeypatch):
    """Four records of a megabyte travel in fewer than four kilobytes (fault 35)."""
    of = kvformat.Schema.uniform(num_layers=36, num_kv_heads=2, head_dim=64)
    with kvformat.create(tmp_path / "data", schema=of, context=kvformat.Context.unknown()) as out:
        for number in range(8):
            value = torch.full((36, 64, 2, 64), float(number), dtype=torch.bfloat16)
            out.add(f"n{number}", {"k": value, "v": value}, token_ids=[number] * 64)
    dataset = kvformat.open(tmp_path / "data")
    real = ForkingPickler.dumps.__func__

    def dumps(cls, obj, protocol=None):
        data = real(cls, obj, protocol)
        if isinstance(obj, tuple) and isinstance(obj[-1], Batch):
            with (tmp_path / "sizes").open("a") as file:
                file.write(f"{len(data)}\n")
        return data

    # Workers are forks: this is what their queues use.
    monkeypatch.setattr(ForkingPickler, "dumps", classmethod(dumps))
    for layout in (Packed(), Padded(layers=tuple(range(0, 36, 2)))):
        for batch in loader_of(dataset, layout=layout, num_workers=2, multiprocessing_context="fork"):
            assert batch.nbytes > 2 << 20
    sizes = [int(line) for line in (tmp_path / "sizes").read_text().split()]
    assert len(sizes) == 4
    assert max(sizes) < 4096


def test_the_process_is_left_as_it_was(dataset):
    random.seed(3)
    np.random.seed(4)  # noqa: NPY002 -- it is the global state that must not change
    torch.manual_seed(5)
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()  # noqa: NPY002 -- as above
    items, collate = KVDataset(dataset), Collate()
    for draw in BatchSampler(dataset, batch_size=4, seed=1):
        content(collate(items.__getitems__(draw)))
    after = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()  # noqa: NPY002 -- as above
    assert after == before
    assert not torch.distributed.is_initialized()


# ------------------------------------------------------------------------------------------------------------ damage


@pytest.mark.parametrize("verify", ["first", "always"])
@pytest.mark.parametrize(("workers", "method"), [(0, None), (2, "fork"), (1, "spawn")])
def test_damage_reaches_the_consumer(path, tmp_path, workers, method, verify):
    """With its class, its code and its record; where there are workers, at the first use of that batch."""
    shutil.copytree(path, tmp_path / "data")
    for tensor, code in (("k", "E072"), ("sums", "E070"), ("token_ids", "E073")):
        fresh = kvformat.open(tmp_path / "data", verify=verify)
        flip(fresh, 6, tensor)
        sampler = BatchSampler(fresh, batch_size=4, seed=2, over="records")
        loader = loader_of(
            fresh, sampler=sampler, num_workers=workers, multiprocessing_context=method, layout="padded"
        )
        good, failed = [], []
        batches = iter(loader)
        while True:
            try:
                batch = next(batches)
                content(batch)
                good += batch.records
            except StopIteration:
                break
            except DamageError as error:
                failed.append((error.code, error.record))
                if not workers:
                    break
                with pytest.raises(DamageError):
                    batch.components  # noqa: B018 -- asked for what it raises
        assert failed == [(code, 6)]
        assert 6 not in good
        if workers:
            assert len(good) == RECORDS - 4 or len(good) == RECORDS - RECORDS % 4
        flip(fresh, 6, tensor)


def test_damage_after_it_was_proved(path, tmp_path):
    """``always`` verifies again in the consumer; so is what was written to meanwhile, whatever was proved of it."""
    shutil.copytree(path, tmp_path / "data")
    for verify in ("first", "always"):
        fresh = kvformat.open(tmp_path / "data", verify=verify)
        sampler = BatchSampler(fresh, batch_size=RECORDS, over="records")
        loader = loader_of(fresh, sampler=sampler, num_workers=1)
        batch = next(iter(loader))
        assert batch._proofs is not None
        flip(fresh, 6, "k")
        with pytest.raises(DamageError) as caught:
            batch["k"]
        assert (caught.value.code, caught.value.record) == ("E072", 6)
        flip(fresh, 6, "k")


def test_what_workers_proved_is_not_hashed_again(path):
    for verify, again in (("first", False), ("always", True), ("off", False)):
        fresh = kvformat.open(path, verify=verify)
        for batch in loader_of(fresh, num_workers=2):
            content(batch)
        assert (fresh.verify_s > 0) == again


# ------------------------------------------------------------------------------------------------------------ pinning


def test_the_thread_that_pins(path, tmp_path, fake_pinned):
    """PyTorch calls ``pin_memory`` of a batch in a thread: it packs there, and an error keeps its class."""
    shutil.copytree(path, tmp_path / "data")
    fresh = kvformat.open(tmp_path / "data")
    flip(fresh, 6, "k")
    items = KVDataset(fresh)
    batches = [Batch(items.source, records, Packed()).prove() for records in ([0, 1], [5, 6])]
    batches.append(Batch(items.source, [7, 6], Packed()))  # damage that no worker saw
    pinned = []
    thread = threading.Thread(target=lambda: pinned.extend(pin_memory(pickle.loads(pickle.dumps(b))) for b in batches))
    thread.start()
    thread.join(timeout=60)
    assert len(pinned) == 3
    assert len(fake_pinned) == 2
    assert content(pinned[0])[0] == [0, 1]
    assert pinned[0].nbytes_copied == pinned[0].nbytes
    for batch in pinned[1:]:
        with pytest.raises(DamageError) as caught:
            batch["k"]
        assert (caught.value.code, caught.value.record) == ("E072", 6)


# ------------------------------------------------------------------------------------------------------------ resuming


class WithDataLoader:
    """DataLoader over the dataset: it fetches ahead, so the state is that after the batch consumed."""

    kind = DataLoader

    def __init__(self, source, workers: int, **options) -> None:
        self.sampler = BatchSampler(source, seed=3, **options)
        self.loader = self.kind(
            KVDataset(source),
            batch_sampler=self.sampler,
            collate_fn=Collate("padded"),
            num_workers=workers,
            persistent_workers=workers > 0,
        )

    def batches(self):
        return self.loader

    def state(self, after):
        return self.sampler.state_dict(after=after)

    def load(self, state) -> None:
        self.sampler.load_state_dict(state)


class WithStatefulDataLoader(WithDataLoader):
    """torchdata's loader, which takes the state by itself."""

    kind = StatefulDataLoader

    def state(self, after):
        return self.loader.state_dict()

    def load(self, state) -> None:
        self.loader.load_state_dict(state)


@pytest.mark.parametrize("kind", [WithDataLoader, WithStatefulDataLoader])
@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("cut", CUTS)
def test_every_cut(tmp_path, kind, workers, cut):
    source = make_dataset(tmp_path / "data", 6 if cut == "one" else 9, aliases=(2,))
    make = lambda: kind(source, workers, **CUTS[cut])  # noqa: E731
    check_every_cut(make, content=content, rest_of_a_whole_epoch=kind is WithStatefulDataLoader)


# ------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("workers", [0, 2])
def test_memory_of_the_consumer_is_flat_over_ten_epochs(tmp_path, workers):
    """Fault 43."""
    of = kvformat.Schema.uniform(num_layers=4, num_kv_heads=2, head_dim=256)
    with kvformat.create(tmp_path / "data", schema=of, context=kvformat.Context.unknown()) as out:
        for number in range(16):
            value = torch.full((4, 128, 2, 256), float(number), dtype=torch.bfloat16)
            out.add(f"n{number}", {"k": value, "v": -value}, token_ids=[number] * 128)
    dataset = kvformat.open(tmp_path / "data")
    options = {"persistent_workers": True} if workers else {}
    loader = loader_of(dataset, num_workers=workers, **options)
    pool, marks = loader.dataset.source.pool(), []
    for _ in range(10):
        for batch in loader:
            assert batch["k"][0, 0, 0, 0] == batch.records[0]
            del batch
        marks.append(anonymous_nbytes())
        assert in_use(pool) == 0
    assert pool.fresh_nbytes < 10 << 20, "a batch has four megabytes"
    assert max(marks[1:]) - marks[0] < 8 << 20
