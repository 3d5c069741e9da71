"""Images that are loaded before the model asks for them, by a few threads and within a budget of memory."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvformat.extract.hf.images import Patches

if TYPE_CHECKING:
    from kvformat.spec.document import Media

__all__ = ["AHEAD_NBYTES", "ImageSource", "ImagesAhead"]

AHEAD_NBYTES = 256 << 20
"""A default for the patches of images that nobody asked for yet."""
_MOST_THREADS = 4
_WAITING_PER_THREAD = 4


class ImageSource(Protocol):
    """Loads images; :class:`~kvformat.extract.hf.planned_images.PlannedImages` is one."""

    def nbytes(self, entry: Media) -> int:
        """Bytes of the patches of an entry's image."""

    def load(self, entry: Media) -> Patches:
        """Patches of an entry's image. Threads may call this at the same time."""


class _Key(NamedTuple):
    digest: bytes
    num_tokens: int


class _Loading:
    """An image on its way, and how often it is going to be asked for."""

    __slots__ = ("patches", "uses")

    def __init__(self, patches: Future[Patches]) -> None:
        self.patches = patches
        self.uses = 0


class ImagesAhead:
    """Loads images that are expected, and hands them out. For one thread; what it gives is what the source gives.

    An image that does not load is an error of whoever asks for it, and of nobody else: each asking loads it anew.

    Parameters
    ----------
    source
        Loads the images.
    max_nbytes
        Bytes of patches that are loaded, or being loaded, ahead. What is asked for next is loaded in any case. Each
        thread takes the pixels of one image besides.
    threads
        How many images are loaded at a time; one fewer than there are cores when absent, and at most 4.
    """

    def __init__(self, source: ImageSource, *, max_nbytes: int = AHEAD_NBYTES, threads: int | None = None) -> None:
        self._source = source
        self._max_nbytes = max_nbytes
        self._threads = threads or max(1, min(len(os.sched_getaffinity(0)) - 1, _MOST_THREADS))
        self._pool: ThreadPoolExecutor | None = None
        self._loading: dict[_Key, _Loading] = {}

    def expect(self, now: Iterable[Media], then: Iterable[Media] = ()) -> None:
        """Begin to load, and forget what is not expected any more.

        Parameters
        ----------
        now
            Entries that are asked for next.
        then
            Entries that are likely to be asked for after them, in order: looked at as far as there is room.
        """
        before, self._loading = self._loading, {}
        for entry in now:
            self._begin(entry, before).uses += 1
        room = self._max_nbytes
        for entry in then:
            if _key(entry) not in self._loading:
                room -= self._source.nbytes(entry)
                if room < 0 or (_key(entry) not in before and self._is_busy()):
                    break
            self._begin(entry, before).uses += 1
        for left in before.values():
            left.patches.cancel()

    def take(self, entry: Media) -> Patches:
        """Patches of an entry's image, as soon as it is loaded.

        Raises
        ------
        Exception
            Whatever the source raises for it.
        """
        loading = self._loading.get(_key(entry))
        if loading is None:
            return self._source.load(entry)
        loading.uses -= 1
        try:
            found = loading.patches.result()
        except Exception:
            loading.uses = 0  # the error will name the document that was computed; the next one gets its own
            raise
        finally:
            if loading.uses <= 0:
                self._loading.pop(_key(entry), None)
        return found

    def _begin(self, entry: Media, before: dict[_Key, _Loading]) -> _Loading:
        key = _key(entry)
        loading = self._loading.get(key)
        if loading is None:
            loading = before.pop(key, None) or _Loading(self._threads_of_our_own().submit(self._source.load, entry))
            loading.uses = 0
            self._loading[key] = loading
        return loading

    def _is_busy(self) -> bool:
        """Whether more wait for a thread than should still be loaded when somebody wants an end."""
        waiting = sum(not loading.patches.done() for loading in self._loading.values())
        return waiting >= _WAITING_PER_THREAD * self._threads

    def _threads_of_our_own(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="kvformat-images-ahead")
            weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)
        return self._pool


def _key(entry: Media) -> _Key:
    return _Key(entry.digest, entry.count)
