"""A failure on one rank is one on every rank, before the next collective."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kvformat
from kvformat.errors import DamageError, DatasetNotFoundError, IdentityError, KVFormatError, UsageError, make_error
from kvformat.loader.ranks import lockstep, open_across
from kvformat.read.ranks import named
from tests.loader.damage import damaged_copy, records_in_order
from tests.loader.gathering import Ranks
from tests.write.make import ids, kv, writer


def made(path: Path, *, seed: int = 0) -> Path:
    with writer(path) as out:
        for number in range(4):
            out.add(f"sample-{number}", kv(seed=seed + number), token_ids=ids(first=number))
    return path


@pytest.fixture(scope="module")
def same(tmp_path_factory) -> Path:
    return made(tmp_path_factory.mktemp("same") / "dataset")


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    return made(tmp_path_factory.mktemp("other") / "dataset", seed=50)


# -- ids -----------------------------------------------------------------------------------------------------------


def test_one_dataset_on_all_ranks(same: Path) -> None:
    dataset = kvformat.open(same)
    ranks = Ranks(3)
    assert ranks.run(lambda rank, gather: dataset.assert_same_across(gather)) == [None] * 3
    assert max(ranks.messages) < 200


def test_other_datasets_are_named_on_every_rank(same: Path, other: Path) -> None:
    places = [same, other, same, same]
    datasets = [kvformat.open(place) for place in places]
    errors = Ranks(4).run(lambda rank, gather: datasets[rank].assert_same_across(gather))
    assert [type(error) for error in errors] == [IdentityError] * 4
    assert {error.code for error in errors} == {"E087"}
    assert [error.path for error in errors] == [str(place) for place in places]
    ids_of = {place: kvformat.open(place).id for place in places}
    assert f"{ids_of[same]} on ranks 0, 2-3; {ids_of[other]} on rank 1:" in str(errors[1])


def test_a_single_rank(same: Path) -> None:
    kvformat.open(same).assert_same_across(lambda obj: [obj])


@pytest.mark.parametrize("returned", [None, [], "all", [None, None], 3, [("kvformat", "same", "x")]])
def test_a_function_that_does_not_gather(same: Path, returned) -> None:
    with pytest.raises(UsageError, match=r"\[E081\] all_gather_object takes an object and returns"):
        kvformat.open(same).assert_same_across(lambda obj: returned)


def test_ranks_at_different_calls(same: Path) -> None:
    dataset = kvformat.open(same)

    def call(rank: int, gather) -> None:
        if rank == 1:
            dataset.assert_same_across(gather)
        else:
            list(lockstep([1], gather))

    errors = Ranks(3).run(call)
    assert [error.code for error in errors] == ["E087"] * 3
    assert "this one is at 'step 0', rank 1 sent" in str(errors[0])
    assert "this one is at 'same', ranks 0, 2 sent" in str(errors[1])


def test_a_rank_that_sends_something_else(same: Path) -> None:
    with pytest.raises(IdentityError, match=r"\[E087\].*not at the same call.*rank 1 sent 17"):
        kvformat.open(same).assert_same_across(lambda obj: [obj, 17])


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 1], "ranks 0-1"), ([0, 2], "ranks 0, 2"), ([0, 1, 2, 5, 7, 8], "ranks 0-2, 5, 7-8")],
)
def test_ranks_in_words(ranks: list[int], text: str) -> None:
    assert named(ranks) == text


# -- opening -------------------------------------------------------------------------------------------------------


def test_all_open(same: Path) -> None:
    ranks = Ranks(3)
    found = ranks.run(lambda rank, gather: open_across(same, gather, verify="always"))
    assert [dataset.id for dataset in found] == [kvformat.open(same).id] * 3
    assert found[0].level == 2
    assert len(ranks.messages) == 3, "one exchange"


def test_one_rank_cannot_open(same: Path, tmp_path: Path) -> None:
    empty = tmp_path / "nothing"
    places = [same, empty, same]
    errors = Ranks(3).run(lambda rank, gather: open_across(places[rank], gather))
    assert [type(error) for error in errors] == [IdentityError, DatasetNotFoundError, IdentityError]
    assert errors[1].code == "E001"
    assert errors[0].code == "E087"
    assert "rank 1 could not open the dataset: [E001] no dataset is published here" in str(errors[0])
    assert str(empty) in str(errors[2])


def test_several_ranks_cannot_open(same: Path, tmp_path: Path) -> None:
    places = [tmp_path / "a", same, tmp_path / "b"]
    errors = Ranks(3).run(lambda rank, gather: open_across(places[rank], gather))
    assert [error.code for error in errors] == ["E001", "E087", "E001"]
    assert "ranks 0, 2 could not open the dataset; rank 0 with: [E001]" in str(errors[1])


def test_ranks_open_different_datasets(same: Path, other: Path) -> None:
    errors = Ranks(2).run(lambda rank, gather: open_across([same, other][rank], gather))
    assert [error.code for error in errors] == ["E087"] * 2


def test_a_pinned_id_that_differs_on_one_rank(same: Path) -> None:
    pinned = [kvformat.open(same).id, "0" * 64]
    errors = Ranks(2).run(lambda rank, gather: open_across(same, gather, expected_id=pinned[rank]))
    assert [error.code for error in errors] == ["E087", "E007"]


def test_a_foreign_error_travels_as_text(same: Path) -> None:
    options = [{}, {"colour": "red"}]
    errors = Ranks(2).run(lambda rank, gather: open_across(same, gather, **options[rank]))
    assert type(errors[1]) is TypeError
    assert "an error of its own, TypeError: " in str(errors[0])
    assert errors[0].code == "E087"


def test_the_own_error_goes_before_that_of_the_group(tmp_path: Path) -> None:
    def broken(obj) -> list:
        raise RuntimeError("connection closed")

    with pytest.raises(DatasetNotFoundError, match="E001") as raised:
        open_across(tmp_path, broken)
    assert raised.value.__notes__ == ["the other ranks could not be told: RuntimeError: connection closed"]


def test_an_error_of_the_group_passes_where_nothing_else_failed(same: Path) -> None:
    def broken(obj) -> list:
        raise RuntimeError("connection closed")

    with pytest.raises(RuntimeError, match="connection closed"):
        open_across(same, broken)
    with pytest.raises(RuntimeError, match="connection closed"):
        next(lockstep([1], broken))


# -- in step -------------------------------------------------------------------------------------------------------


def until(steps: int, error: Exception | None = None):
    """Batches, and an error after them."""
    yield from range(steps)
    if error is not None:
        raise error


def taken(loader, gather) -> tuple[list, Exception | None]:
    found = []
    try:
        for batch in lockstep(loader, gather):
            found.append(batch)  # noqa: PERF402 -- what came before an error counts
    except Exception as error:
        return found, error
    return found, None


def test_all_batches_in_order() -> None:
    ranks = Ranks(3)
    assert ranks.run(lambda rank, gather: taken(until(5), gather)) == [([0, 1, 2, 3, 4], None)] * 3
    assert len(ranks.messages) == 3 * 6
    assert max(ranks.messages) < 60


def test_a_failing_rank_stops_all_before_the_step() -> None:
    damage = make_error("E072", "the slab has another XXH3", path="/d/shard", record="sample-3", layer=1)
    found = Ranks(3).run(lambda rank, gather: taken(until(5, damage) if rank == 1 else until(9), gather))
    assert [batches for batches, _ in found] == [[0, 1, 2, 3, 4]] * 3
    assert found[1][1] is damage
    for rank in (0, 2):
        error = found[rank][1]
        assert type(error) is IdentityError
        assert (error.code, error.record) == ("E087", "sample-3")
        assert "rank 1 failed to load its batch 5: [E072] the slab has another XXH3" in str(error)


def test_several_ranks_fail() -> None:
    def loader(rank: int):
        return until(2, make_error("E053", "pad", record=rank)) if rank else until(2)

    found = Ranks(3).run(lambda rank, gather: taken(loader(rank), gather))
    assert [error.code for _, error in found] == ["E087", "E053", "E053"]
    assert "ranks 1-2 failed to load its batch 2; rank 1 with: [E053]" in str(found[0][1])
    assert found[0][1].record == 1


def test_a_rank_that_ends_early_ends_all_with_an_error() -> None:
    found = Ranks(3).run(lambda rank, gather: taken(until(2 if rank == 2 else 4), gather))
    assert [batches for batches, _ in found] == [[0, 1]] * 3
    assert [error.code for _, error in found] == ["E087"] * 3
    assert "rank 2 ended after 2 batches, ranks 0-1 did not" in str(found[0][1])


def test_a_loader_that_cannot_start() -> None:
    class Broken:
        def __iter__(self):
            raise OSError("no workers")

    found = Ranks(2).run(lambda rank, gather: taken(Broken() if rank else until(3), gather))
    assert type(found[1][1]) is OSError
    assert "rank 1 failed to load its batch 0: an error of its own, OSError: no workers" in str(found[0][1])


def test_messages_stay_small_whatever_the_error() -> None:
    ranks = Ranks(2)
    ranks.run(lambda rank, gather: taken(until(1, ValueError("x" * 1_000_000)) if rank else until(2), gather))
    assert max(ranks.messages) < 2_500


def test_an_error_that_cannot_be_pickled_travels() -> None:
    class Local(Exception):  # noqa: N818 -- its name does not matter
        def __reduce__(self):
            raise TypeError

    found = Ranks(2).run(lambda rank, gather: taken(until(1, Local("odd")) if rank else until(2), gather))
    assert type(found[1][1]) is Local
    assert "Local: odd" in str(found[0][1])


class Loader:
    """Iterators that can be closed, as a loader's with threads are."""

    def __init__(self, steps: int) -> None:
        self.left, self.closed = steps, 0

    def __iter__(self):
        return Loading(self)


class Loading:
    def __init__(self, loader: Loader) -> None:
        self.loader, self.left = loader, loader.left

    def __iter__(self):
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        self.left -= 1
        return self.left

    def close(self) -> None:
        self.loader.closed += 1


def test_the_iterator_is_closed_after_the_end_a_failure_and_a_break() -> None:
    loaders = [Loader(2), Loader(3)]
    Ranks(2).run(lambda rank, gather: taken(loaders[rank], gather))
    assert [loader.closed for loader in loaders] == [1, 1]
    loader = Loader(3)
    assert list(lockstep(loader, lambda obj: [obj])) == [2, 1, 0]
    assert list(lockstep(loader, lambda obj: [obj])) == [2, 1, 0], "another epoch"
    assert loader.closed == 2
    steps = lockstep(loader, lambda obj: [obj])
    next(steps)
    steps.close()
    assert loader.closed == 3


def test_a_damaged_record_of_a_dataset(same: Path, tmp_path: Path) -> None:
    places = [same, damaged_copy(same, tmp_path / "damaged", record=2)]
    found = Ranks(2).run(lambda rank, gather: taken(records_in_order(kvformat.open(places[rank])), gather))
    assert [batches for batches, _ in found] == [[0, 1]] * 2
    (_, told), (_, own) = found
    assert isinstance(own, DamageError)
    assert isinstance(told, KVFormatError)
    assert told.code == "E087"
    assert (own.record, told.record) == (2, 2)
    assert own.code in str(told)


def test_no_process_group_is_made_and_torch_is_not_loaded(same: Path) -> None:
    code = (
        "import sys\n"
        "from kvformat.loader.ranks import lockstep, open_across\n"
        f"dataset = open_across({str(same)!r}, lambda obj: [obj])\n"
        "dataset.assert_same_across(lambda obj: [obj])\n"
        "assert list(lockstep([1], lambda obj: [obj])) == [1]\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
