"""A proxy's page in place of any one answer: what is published is whole all the same."""

from __future__ import annotations

import pytest

import kvformat
from kvformat.spec.paths import ROOT
from kvformat.storage.remote import Remote
from kvformat.storage.remote_options import RemoteOptions
from kvformat.storage.store import Stat
from kvformat.testing.faulty_store import ERROR_BODY, FaultyStore, Operation, Rule, altered, answered
from kvformat.testing.memory_store import MemoryStore
from tests.write.make import ids, kv, writer

MOST_CALLS = 200


def remote(store) -> Remote:
    return Remote("memory://test", connect=lambda *_: store, options=RemoteOptions(deadline_s=20.0))


def page(operation: Operation) -> Stat:
    """HEAD of a page that says 200 to everything."""
    return Stat(operation.name, len(ERROR_BODY))


def published(store, spool) -> None:
    with writer(remote(store), shard_slots=2, resume=True, spool=spool, files={"a": b"x", "empty": b""}) as out:
        for number in range(5):
            out.add(f"{number}", kv(3 + number, 0), token_ids=ids(3 + number))


@pytest.fixture
def expected(tmp_path) -> dict[str, bytes]:
    store = MemoryStore()
    published(store, tmp_path / "undisturbed")
    return store.objects


@pytest.mark.parametrize(
    ("verb", "effect"),
    [
        ("stat", page),
        ("stat", lambda operation: Stat(operation.name, 0)),
        ("get_all", answered(ERROR_BODY)),
        ("get_all", answered(b"")),
        ("get_all", altered(lambda data: bytes([byte ^ 1 for byte in data[:1]]) + data[1:])),
    ],
    ids=["page of HEAD", "empty HEAD", "page", "nothing", "flipped"],
)
def test_one_answer_that_lies(expected, tmp_path, verb, effect) -> None:
    for nth in range(MOST_CALLS):
        below = MemoryStore()
        store = FaultyStore(below, [Rule(verb, effect, nth=nth)])
        published(store, tmp_path / "spool")
        assert below.objects == expected, nth
        if sum(called == verb for called, _ in store.calls) <= nth:
            assert nth > 3
            return
    raise AssertionError


def test_no_root_is_made_upon_a_heads_word(expected, tmp_path) -> None:
    """Nor is a place taken for one with a dataset."""
    below = MemoryStore()
    published(FaultyStore(below, [Rule("stat", page, ROOT, nth=range(3))]), tmp_path / "spool")
    assert below.objects == expected
    assert kvformat.verify(remote(below)).ok


def test_a_large_object_in_the_roots_place_is_none_of_ours(expected, tmp_path) -> None:
    below = MemoryStore(objects={ROOT: bytes(1 << 20)})
    with pytest.raises(kvformat.KVFormatError, match="E100"):
        published(below, tmp_path / "spool")
    assert list(below.objects) == [ROOT]
    assert expected
