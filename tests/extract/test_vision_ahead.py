"""Images are loaded beside the model, within bounds, and as if they were loaded when they are asked for."""

from __future__ import annotations

import gc
import json
import threading
import weakref

import pytest
import torch

from kvformat.errors import InputError, make_error
from kvformat.extract import reasoner, run
from kvformat.extract.documents import write_documents
from kvformat.extract.hf.images import Patches
from kvformat.extract.hf.images_ahead import ImagesAhead
from kvformat.extract.hf.vision_tokenise import VisionTokeniser
from kvformat.spec.document import Media
from tests.vision import picture, save_vision

NBYTES = 100


def entry(number: int, *, first: int = 0, count: int = 4) -> Media:
    return Media(scheme="pixels", first=first, count=count, digest=bytes([number]) * 32)


class Source:
    """Loads images that tell which one they are, once each is let through."""

    def __init__(self, *, open_: bool = True, missing: tuple[int, ...] = ()) -> None:
        self.begun: list[int] = []
        self.threads: set[int] = set()
        self.changed = threading.Condition()
        self.gate = threading.Event()
        self.missing = set(missing)
        if open_:
            self.gate.set()

    def nbytes(self, entry: Media) -> int:
        return NBYTES

    def load(self, entry: Media) -> Patches:
        number = entry.digest[0]
        with self.changed:
            self.begun.append(number)
            self.threads.add(threading.get_ident())
            self.changed.notify_all()
        assert self.gate.wait(60)
        if number in self.missing:
            raise make_error("E309", f"image {number} is not there", path=f"{number}.png")
        return Patches(values=torch.full((1, 2), float(number)), grid=(1, 1, 1))

    def wait_for(self, *numbers: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: set(numbers) <= set(self.begun), 60)


def number_of(patches: Patches) -> int:
    return int(patches.values[0, 0])


def test_what_is_foreseen_is_loaded_by_other_threads_before_anyone_asks() -> None:
    source = Source()
    ahead = ImagesAhead(source, threads=2)
    ahead.expect([entry(1)], [entry(2), entry(3)])
    source.wait_for(1, 2, 3)
    assert threading.get_ident() not in source.threads
    assert [number_of(ahead.take(entry(number))) for number in (1, 2, 3)] == [1, 2, 3]
    assert sorted(source.begun) == [1, 2, 3]


def test_what_was_not_foreseen_is_loaded_at_once() -> None:
    source = Source()
    assert number_of(ImagesAhead(source).take(entry(7))) == 7
    assert source.threads == {threading.get_ident()}


def test_what_is_asked_for_does_not_depend_on_what_was_foreseen() -> None:
    source = Source()
    ahead = ImagesAhead(source, threads=3)
    order = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    found = []
    for at, number in enumerate(order):
        guess = [entry(n) for n in (order[at + 1 :] if at % 3 else [99, 98])]  # wrong now and then
        ahead.expect([entry(number)], guess)
        found.append(number_of(ahead.take(entry(number))))
    assert found == order


def test_memory_is_bounded() -> None:
    source = Source()
    ahead = ImagesAhead(source, max_nbytes=3 * NBYTES, threads=1)
    ahead.expect([entry(0)], [entry(number) for number in range(1, 9)])
    assert len(ahead._loading) == 4
    source.wait_for(0, 1, 2, 3)
    for number in range(4):
        ahead.take(entry(number))
    assert source.begun == [0, 1, 2, 3]
    ahead.expect([entry(4), entry(5), entry(6), entry(7)])  # what is asked for next is loaded in any case
    source.wait_for(4, 5, 6, 7)


def test_few_wait_for_a_thread() -> None:
    source = Source(open_=False)
    ahead = ImagesAhead(source, threads=2)
    ahead.expect([entry(0)], [entry(number) for number in range(1, 200)])
    assert len(ahead._loading) == 8
    source.gate.set()
    assert number_of(ahead.take(entry(0))) == 0


def test_an_image_of_several_documents_is_loaded_once_and_kept_as_long_as_it_is_expected() -> None:
    source = Source()
    ahead = ImagesAhead(source, threads=1)
    ahead.expect([entry(1), entry(1, first=9)], [entry(2), entry(1)])
    for _ in range(3):
        assert number_of(ahead.take(entry(1))) == 1
    assert number_of(ahead.take(entry(2))) == 2
    assert source.begun == [1, 2]
    assert ahead._loading == {}
    ahead.take(entry(1))
    assert source.begun == [1, 2, 1]


def test_what_is_not_expected_any_more_is_forgotten() -> None:
    source = Source(open_=False)
    ahead = ImagesAhead(source, threads=1)
    ahead.expect([entry(0)], [entry(1), entry(2)])
    source.wait_for(0)
    ahead.expect([entry(0)], [entry(3)])
    source.gate.set()
    assert number_of(ahead.take(entry(0))) == 0
    assert number_of(ahead.take(entry(3))) == 3
    assert source.begun == [0, 3]  # 1 and 2 had not begun


def test_an_error_is_of_whoever_asks_and_each_gets_its_own() -> None:
    source = Source(missing=(2,))
    ahead = ImagesAhead(source, threads=1)
    ahead.expect([entry(1)], [entry(2), entry(2), entry(3)])
    source.wait_for(1, 2, 3)
    assert number_of(ahead.take(entry(1))) == 1
    with pytest.raises(InputError, match="image 2") as first:
        ahead.take(entry(2))
    with pytest.raises(InputError, match="image 2") as second:
        ahead.take(entry(2))
    assert first.value is not second.value
    assert number_of(ahead.take(entry(3))) == 3
    source.missing.clear()
    ahead.expect([entry(2)])
    assert number_of(ahead.take(entry(2))) == 2


def test_images_of_one_digest_and_another_size_are_told_apart() -> None:
    source = Source()
    ahead = ImagesAhead(source, threads=1)
    ahead.expect([entry(1, count=4)], [entry(1, count=8)])
    ahead.take(entry(1, count=4))
    ahead.take(entry(1, count=8))
    assert source.begun == [1, 1]


def test_nothing_waits_when_it_is_dropped() -> None:
    source = Source(open_=False)
    ahead = ImagesAhead(source, threads=1)
    ahead.expect([entry(0)], [entry(1), entry(2)])
    source.wait_for(0)
    gone, pool = weakref.ref(ahead), ahead._pool
    waiting = [loading.patches for number, loading in enumerate(ahead._loading.values()) if number]
    del ahead
    gc.collect()
    assert gone() is None
    assert all(future.cancelled() for future in waiting)
    source.gate.set()
    pool.shutdown()
    assert source.begun == [0]


def test_an_extraction_is_the_same_and_skips_the_right_documents(tmp_path, monkeypatch) -> None:
    model = save_vision(tmp_path / "model")
    lines = []
    for number in range(8):
        picture(24, 16, seed=number % 5).save(tmp_path / f"{number}.png")  # some are of several documents
        content = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": "what is it?"[number:]}]
        lines.append({"id": f"d{number}", "messages": [{"role": "user", "content": content}]})
    lines.insert(3, {"id": "plain", "text": "only text"})
    (tmp_path / "d.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    tokeniser = VisionTokeniser.load(model, base=tmp_path)
    documents = tmp_path / "d.kvdocs"
    write_documents(tmp_path / "d.jsonl", documents, tokeniser)
    (tmp_path / "3.png").unlink()
    picture(24, 16, seed=99).save(tmp_path / "4.png")
    options = {
        "model": model,
        "documents": documents,
        "images": True,
        "on_error": "skip",
        "shard_nbytes": 1 << 17,
        "allow_skips": True,
    }
    found = run(out=tmp_path / "ahead", **options)
    skipped = {one.name: one.reason for one in found.manifest.skipped}
    assert skipped.keys() == {"d3", "d4"}
    assert "3.png" in skipped["d3"] or "cannot be read" in skipped["d3"]
    assert "not the image that was planned" in skipped["d4"]
    monkeypatch.setattr(reasoner, "Following", lambda _plan: None)
    assert run(out=tmp_path / "alone", **options).id == found.id
    with pytest.raises(InputError) as caught:
        run(out=tmp_path / "none", **(options | {"on_error": "fail"}))
    assert (caught.value.code, caught.value.record) == ("E309", "d3")
