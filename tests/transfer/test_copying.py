"""``kvformat.copy``: every route, equal bytes, and what it refuses."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

import kvformat
from kvformat.errors import ConflictError, DamageError, DatasetExistsError, IdentityError, StorageError
from kvformat.testing.memory_store import MemoryStore
from kvformat.testing.vectors import VALID
from tests.transfer.places import ROUTES, Place, copied, filled, named, tree

NAMED = ("manifest", "index", "files", "shards")


def flip(data: bytearray) -> None:
    data[len(data) // 2] ^= 1


# -------------------------------------------------------------------------------------------------------- every route


@pytest.mark.parametrize("route", ROUTES, ids="-".join)
def test_a_copy_has_the_same_bytes_and_id(route, source, target, dataset, spool) -> None:
    origin, goal = source(route[0]), target(route[1])
    calls: list[tuple[int, int]] = []
    report = copied(origin, goal, progress=lambda done, total: calls.append((done, total)))
    files = tree(dataset)
    assert goal.files() == files
    nbytes = sum(map(len, files.values()))
    assert report == kvformat.CopyReport(
        id=kvformat.open(dataset).id,
        location=str(goal.path) if route[1] == "local" else goal.url,
        records=8,
        nbytes=nbytes,
        copied_nbytes=nbytes,
        skipped_nbytes=0,
        already_there=False,
    )
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1] == (nbytes, nbytes)
    assert {total for _, total in calls} == {nbytes}
    assert kvformat.verify(goal.location).ok
    assert list(spool.glob("*")) == []
    if route[1] == "local":
        assert {entry.name for entry in goal.path.iterdir()} == {
            "kvformat.json",
            "manifest",
            "index",
            "files",
            "shards",
        }
        assert all(file.stat().st_nlink == 1 for file in goal.path.rglob("*") if file.is_file())


@pytest.mark.parametrize("name", sorted(VALID))
def test_every_valid_dataset_there_and_back(name: str, tmp_path: Path) -> None:
    files = VALID[name].build()
    files.save(tmp_path / "source")
    files.other.clear()
    middle = [Place("remote", tmp_path / "one"), Place("remote", tmp_path / "two")]
    kvformat.copy(tmp_path / "source", middle[0].location)
    kvformat.copy(middle[0].location, middle[1].location)
    kvformat.copy(middle[1].location, tmp_path / "back")
    assert tree(tmp_path / "back") == middle[0].files() == middle[1].files() == files.files()


@pytest.mark.parametrize("route", ROUTES, ids="-".join)
def test_what_the_dataset_does_not_name_is_not_copied(route, source, target, dataset) -> None:
    origin, goal = source(route[0]), target(route[1])
    origin.put("README", b"x")
    origin.put("shards/00000/stray", b"x")
    copied(origin, goal)
    assert goal.files() == tree(dataset)


@pytest.mark.parametrize("threads", [1, 3, 50])
def test_the_number_of_threads_changes_nothing(threads: int, source, target, dataset) -> None:
    origin, goal = source("local"), target("local")
    copied(origin, goal, threads=threads)
    assert goal.files() == tree(dataset)


def test_a_copy_names_urls_and_options_of_each_side(dataset, tmp_path, monkeypatch) -> None:
    seen: set[tuple[str, str]] = set()
    stores: dict[str, dict[str, bytes]] = {}

    def connect(url: str, options: object, _remote_options: object) -> MemoryStore:
        seen.add((url, str(options)))
        return MemoryStore(url, stores.setdefault(url, {}))

    monkeypatch.setattr("kvformat.storage.connect.connect", connect)
    kvformat.copy(dataset, "s3://a/one", target_options={"key": 1})
    kvformat.copy("s3://a/one", "s3://b/two", source_options={"key": 2}, target_options={"key": 3})
    assert stores["s3://b/two"] == tree(dataset)
    assert seen == {
        ("s3://a/one", "{'key': 1}"),
        ("s3://a/one", "{'key': 2}"),
        ("s3://b/two", "{'key': 3}"),
    }


# ------------------------------------------------------------------------------------------- what is at the target


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_a_complete_copy_is_left_alone(kind: str, source, target) -> None:
    origin, goal = source("local"), target(kind)
    first = copied(origin, goal)
    before = goal.files()
    goal.store.calls.clear()
    report = copied(origin, goal)
    assert (report.already_there, report.copied_nbytes, report.skipped_nbytes) == (True, 0, report.nbytes)
    assert (report.id, report.nbytes) == (first.id, first.nbytes)
    assert goal.files() == before
    assert not {call for call, _ in goal.store.calls} & {"put", "create", "begin", "delete"}


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_a_complete_copy_that_is_damaged_is_told(kind: str, source, target, dataset) -> None:
    """As far as level 2 sees: a value that was changed is left to ``kvformat verify``."""
    origin, goal = source("local"), target(kind)
    copied(origin, goal)
    shard = named(dataset)["shards"]
    goal.change(shard, lambda data: data.__setitem__(4100, data[4100] ^ 1))
    assert copied(origin, goal).already_there
    goal.change(shard, bytearray.pop)
    with pytest.raises(DamageError, match="at the target already, but damaged") as caught:
        copied(origin, goal)
    assert (caught.value.code, caught.value.path) == ("E005", goal.full(shard))


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_another_dataset_at_the_target_is_refused(kind: str, source, other, tmp_path) -> None:
    goal = filled(kind, other, tmp_path / "target")
    before = goal.files()
    for wrong in (None, b"{}", b"", bytes(100_000)):
        if wrong is not None:
            goal.put("kvformat.json", wrong)
            before["kvformat.json"] = wrong
        with pytest.raises(DatasetExistsError) as caught:
            copied(source("local"), goal)
        assert (caught.value.code, caught.value.path) == ("E100", goal.full("kvformat.json"))
        assert goal.files() == before


@pytest.mark.parametrize("target_kind", ["local", "remote"])
@pytest.mark.parametrize("source_kind", ["local", "remote"])
@pytest.mark.parametrize("which", NAMED)
@pytest.mark.parametrize("how", [flip, bytearray.pop])
def test_a_file_in_the_way_is_never_replaced(how, which, source_kind, target_kind, source, target, dataset) -> None:
    origin, goal = source(source_kind), target(target_kind)
    name = named(dataset)[which]
    data = bytearray(tree(dataset)[name])
    how(data)
    goal.put(name, bytes(data))
    with pytest.raises(ConflictError) as caught:
        copied(origin, goal)
    assert (caught.value.code, caught.value.path) == ("E113", goal.full(name))
    assert goal.files()[name] == bytes(data)
    assert "kvformat.json" not in goal.files()
    goal.remove(name)
    copied(origin, goal)
    assert goal.files() == tree(dataset)


def test_a_link_in_the_way_is_refused(source, target, dataset, tmp_path) -> None:
    origin, goal = source("local"), target("local")
    name = named(dataset)["shards"]
    place = goal.path / name
    place.parent.mkdir(parents=True)
    place.symlink_to(dataset / name)
    with pytest.raises(kvformat.KVFormatError) as caught:
        copied(origin, goal)
    assert (caught.value.code, caught.value.path) == ("E003", str(place))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_bytes(b"")
    for wrong in ("link", "file", "file/below", "link/below"):
        with pytest.raises(StorageError) as refused:
            copied(origin, Place("local", tmp_path / wrong))
        assert refused.value.code == "E207"
    (goal.path / "kvformat.json").symlink_to(dataset / "kvformat.json")
    with pytest.raises(DatasetExistsError, match="E100"):
        copied(origin, goal)


@pytest.mark.parametrize("kind", ["local", "remote"])
@pytest.mark.parametrize("same", [True, False])
def test_another_that_publishes_meanwhile(same: bool, kind: str, source, target, dataset, other) -> None:
    origin, goal = source("local"), target(kind)
    root = tree(dataset if same else other)["kvformat.json"]

    def publish(done: int, total: int) -> None:
        if done == total - len(tree(dataset)["kvformat.json"]):
            goal.put("kvformat.json", root)

    if same:
        copied(origin, goal, progress=publish)
        assert goal.files() == tree(dataset)
        return
    with pytest.raises(ConflictError, match="E113") as caught:
        copied(origin, goal, progress=publish)
    assert caught.value.path == goal.full("kvformat.json")
    assert goal.files()["kvformat.json"] == root


# --------------------------------------------------------------------------------------------- what is at the source


@pytest.mark.parametrize("route", ROUTES, ids="-".join)
@pytest.mark.parametrize("which", NAMED)
@pytest.mark.parametrize("how", ["flipped", "short", "long", "missing"])
def test_damage_at_the_source_is_never_published(how, which, route, source, target, dataset, spool) -> None:
    origin, goal = source(route[0]), target(route[1])
    name = named(dataset)[which]
    if how == "missing":
        origin.remove(name)
    else:
        origin.change(name, {"flipped": flip, "short": bytearray.pop, "long": lambda data: data.append(0)}[how])
    code = {"missing": "E002", "short": "E005", "long": "E005"}.get(how) or ("E077" if which == "shards" else "E006")
    with pytest.raises(DamageError) as caught:
        copied(origin, goal)
    assert (caught.value.code, caught.value.path) == (code, origin.full(name))
    left = goal.files()
    assert {"kvformat.json", name} & set(left) == set()
    assert left.items() <= tree(dataset).items()  # and no draft
    assert not spool.exists() or list(spool.iterdir()) == []
    origin.put(name, tree(dataset)[name])
    report = copied(origin, goal)
    assert report.skipped_nbytes == sum(map(len, left.values()))
    assert goal.files() == tree(dataset)


@pytest.mark.parametrize("route", ROUTES, ids="-".join)
def test_a_source_that_is_no_dataset(route, target, tmp_path) -> None:
    with pytest.raises(kvformat.DatasetNotFoundError, match="E001"):
        copied(Place(route[0], tmp_path / "nothing"), target(route[1]))
    assert not (tmp_path / "sets").exists()


@pytest.mark.parametrize("route", ROUTES, ids="-".join)
def test_a_table_of_shards_that_is_none(route, target, tmp_path) -> None:
    files = VALID["several-shards"].build()
    files.parts["shards"][0].columns["size"][1] += 1
    files.reseal("parts")
    files.save(tmp_path / "faulty")
    with pytest.raises(kvformat.FormatError, match="E052"):
        copied(filled(route[0], tmp_path / "faulty", tmp_path / "source"), target(route[1]))
    assert not (tmp_path / "sets").exists()


@pytest.mark.parametrize("route", ROUTES, ids="-".join)
def test_a_source_that_is_replaced_meanwhile(route, source, target, other) -> None:
    origin, goal = source(route[0]), target(route[1])
    root = tree(other)["kvformat.json"]
    with pytest.raises(IdentityError, match="E007") as caught:
        copied(origin, goal, progress=lambda *_: origin.put("kvformat.json", root))
    assert caught.value.path == origin.full("kvformat.json")
    assert "kvformat.json" not in goal.files()


def test_a_file_that_is_written_to_while_it_is_uploaded(source, target, dataset, monkeypatch) -> None:
    """It was proved, then changed: what arrived is taken away again."""
    origin, goal = source("local"), target("remote")
    name = named(dataset)["shards"]
    remote = goal.remote()
    put_file = remote.put_file

    def write_to_it(at: str, path: Path, **options: object) -> None:
        if at == name:
            with path.open("r+b") as file:
                file.seek(5000)
                file.write(b"something else")
        put_file(at, path, **options)

    monkeypatch.setattr(remote, "put_file", write_to_it)
    with pytest.raises(IdentityError, match="E007") as caught:
        kvformat.copy(origin.path, remote, threads=1)
    assert caught.value.path == origin.full(name)
    assert {name, "kvformat.json"} & set(goal.files()) == set()


class Flipping(MemoryStore):
    """Flips a bit of what it sends of one object, so many times."""

    def __init__(self, name: str, times: int, objects: dict[str, bytes]) -> None:
        super().__init__("memory://bucket/source", objects)
        self.name = name
        self.times = times
        self.sent = 0

    def get(self, name: str, start: int, nbytes: int, *, timeout_s: float):
        data = super().get(name, start, nbytes, timeout_s=timeout_s)
        if name != self.name:
            return data
        self.sent += 1
        if self.sent > self.times:
            return data
        changed = bytearray(data)
        changed[-1] ^= 1
        return changed


@pytest.mark.parametrize("kind", ["local", "remote"])
@pytest.mark.parametrize("which", ["index", "files", "shards", "manifest"])
def test_damage_on_the_way_is_fetched_once_more(which: str, kind: str, source, target, dataset) -> None:
    origin, goal = source("remote"), target(kind)
    name = named(dataset)[which]
    if which == "shards":
        assert tree(dataset)[name][-1] == 0
    once = Flipping(name, 1, origin.store.objects)
    kvformat.copy(origin.remote(once), goal.location)
    assert goal.files() == tree(dataset)
    assert once.sent >= 2
    always = Flipping(name, 1 << 30, origin.store.objects)
    with pytest.raises(DamageError) as caught:
        kvformat.copy(origin.remote(always), Place(kind, goal.path.with_name("again")).location)
    assert (caught.value.code, caught.value.path) == ("E077" if which == "shards" else "E006", origin.full(name))


def test_damage_on_the_way_back_is_no_foreign_object(source, target, dataset) -> None:
    """What is at the target already is read back, and read once more where it differs."""
    origin, goal = source("remote"), target("remote")
    name = named(dataset)["shards"]
    goal.put(name, tree(dataset)[name])
    once = Flipping(name, 1, goal.store.objects)
    assert kvformat.copy(origin.location, goal.remote(once)).skipped_nbytes == len(tree(dataset)[name])
    assert goal.files() == tree(dataset)


# ------------------------------------------------------------------------------------------------------ other refusals


@pytest.mark.parametrize("threads", [0, -1])
def test_threads_are_at_least_one(threads: int, dataset, tmp_path) -> None:
    with pytest.raises(kvformat.UsageError, match="E081"):
        kvformat.copy(dataset, tmp_path / "target", threads=threads)


def test_a_disk_without_room_is_refused_before_anything_is_copied(source, target, dataset, monkeypatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage._replace(free=10_000))
    origin, goal = source("local"), target("local")
    needed = sum(len(data) for name, data in tree(dataset).items() if name != "kvformat.json")
    with pytest.raises(StorageError, match=f"{needed:,} bytes are to be copied here, 10,000 are free") as caught:
        copied(origin, goal)
    assert (caught.value.code, caught.value.path) == ("E200", str(goal.path))
    assert not goal.path.parent.exists()
    # what is there already needs no room
    for name in [name for name in tree(dataset) if name.startswith("shards/")]:
        goal.put(name, tree(dataset)[name])
    copied(origin, goal)
    assert goal.files() == tree(dataset)


def test_a_spool_without_room_is_refused(source, target, dataset, monkeypatch, spool, tmp_path) -> None:
    usage = shutil.disk_usage("/")
    sizes = sorted(len(data) for name, data in tree(dataset).items() if name.startswith("shards/"))
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage._replace(free=sizes[-1]))
    origin, goal = source("remote"), target("remote")
    with pytest.raises(StorageError, match=f"{sizes[-1] + sizes[-2]:,} bytes wait here at once") as caught:
        copied(origin, goal)
    assert caught.value.code == "E200"
    assert str(caught.value.path).startswith(str(spool))
    assert goal.files() == {}
    copied(origin, goal, threads=1, spool=tmp_path / "elsewhere")
    assert goal.files() == tree(dataset)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_spool_never_holds_more_than_a_file_a_thread(source, target, spool) -> None:
    most = []
    lock = threading.Lock()

    def look(_done: int, _total: int) -> None:
        with lock:
            most.append(len(list(spool.glob("*/*"))))

    copied(source("remote"), target("remote"), threads=2, progress=look)
    assert 1 <= max(most) <= 2


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_two_copies_at_once(kind: str, source, target, dataset) -> None:
    """Into a directory the second is refused while the first is at work; to an object store both bring equal bytes."""
    origin, goal = source("local"), target(kind)
    refused = []

    def again(done: int, _total: int) -> None:
        if not refused:
            refused.append("")
            try:
                copied(origin, goal)
            except ConflictError as error:
                refused[0] = error.code

    if kind == "local":
        copied(origin, goal, progress=again)
        assert refused == ["E117"]
    else:
        copied(origin, goal, progress=again)
        assert refused == [""]
    assert goal.files() == tree(dataset)
