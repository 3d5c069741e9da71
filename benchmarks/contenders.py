"""Who takes part: bare operations, kvformat in its modes, and every peer that can be had."""

from __future__ import annotations

import mmap
import shutil
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import ours, peers

if TYPE_CHECKING:
    from benchmarks.shapes import Corpus

__all__ = [
    "MEMMOVE",
    "MMAP",
    "Field",
    "Memory",
    "Open",
    "PlainMmap",
    "check_layers",
    "check_records",
    "opened",
    "reason",
]

MEMMOVE = "memmove"
MMAP = "plain mmap"


@dataclass(frozen=True, kw_only=True)
class Open:
    """A reader with the words a table says about it."""

    name: str
    reader: peers.Reader
    verify: str
    note: str = ""
    bare: bool = False


@dataclass
class Field:
    """Everybody who takes part, and who could not."""

    readers: list[Open] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)


class Memory(peers.ReaderBase):
    """The same bytes in anonymous memory, for ``memmove``."""

    def __init__(self, corpus: Corpus) -> None:
        super().__init__(corpus)
        self._view = memoryview(corpus.blob)
        self._offsets = corpus.offsets

    def views(self, index: int) -> Any:
        """Bare memory has no views."""
        raise NotImplementedError

    def copy_record(self, index: int, destination: peers.Destination) -> int:
        """K then V, as :meth:`benchmarks.peers.Reader.copy_record`."""
        start, end = self._offsets[index], self._offsets[index + 1]
        nbytes = end - start
        destination.view[:nbytes] = self._view[start:end]
        return nbytes

    def copy_layer(self, index: int, layer: int, destination: peers.Destination) -> int:
        """One layer of K, as :meth:`benchmarks.peers.Reader.copy_layer`."""
        start, end = self._offsets[index], self._offsets[index + 1]
        nbytes = (end - start) // 2 // self.num_layers
        start += layer * nbytes
        destination.view[:nbytes] = self._view[start : start + nbytes]
        return nbytes


class PlainMmap(Memory):
    """The same bytes in one flat file, mapped: what any mapped reader can reach at most."""

    def __init__(self, path: Path, corpus: Corpus) -> None:
        super().__init__(corpus)
        file = path / "flat.bin"
        corpus.blob.tofile(file)
        with file.open("rb") as opened_file:
            self._map = mmap.mmap(opened_file.fileno(), 0, access=mmap.ACCESS_READ)
        self._view = memoryview(self._map)

    def close(self) -> None:
        """Release files and mappings."""
        self._view.release()
        self._map.close()


@contextmanager
def opened(
    corpus: Corpus,
    path: Path,
    purpose: peers.Purpose,
    *,
    modes: Sequence[ours.Verify],
    check: Callable[[peers.Reader], None],
    names: Sequence[str] = peers.PEERS,
) -> Iterator[Field]:
    """Write the corpus in every form and open it; each reader has to give the right bytes for every record.

    Parameters
    ----------
    modes
        kvformat's verification modes that take part.
    check
        Raises if a reader returns wrong bytes; touches everything, so that what follows is hot.
    """
    found = Field()
    with ExitStack() as stack:
        memory = Memory(corpus)
        plain = PlainMmap(path, corpus)
        stack.callback(plain.close)
        found.readers += [
            Open(name=MEMMOVE, reader=memory, verify="-", note="same bytes in anonymous memory", bare=True),
            Open(name=MMAP, reader=plain, verify="-", note="one flat file, offsets known", bare=True),
        ]
        home = _folder(path / "kvformat")
        ours.write(home, corpus.records)
        for mode in modes:
            reader = ours.open_reader(home, corpus, mode)
            stack.callback(reader.close)
            found.readers.append(Open(name=f"kvformat {mode}", reader=reader, verify=mode))
        for entry in found.readers:
            check(entry.reader)
        for name in names:
            home = _folder(path / name)
            try:
                module = peers.load(name)
                module.write(home, corpus.records, purpose)
                peer = module.open_reader(home, corpus, purpose)
                check(peer)
            except Exception as error:  # noqa: BLE001 - whatever a peer raises, it is said that and why it is missing
                found.missing.append((name, reason(error)))
                shutil.rmtree(home, ignore_errors=True)
                continue
            stack.callback(peer.close)
            found.readers.append(Open(name=module.NAME, reader=peer, verify="none", note=module.NOTE))
        yield found


def reason(error: BaseException) -> str:
    """One line saying what went wrong and where."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    # What failed in a worker process brings its traceback along: its last line says what it was.
    said = (str(error).strip().splitlines() or [""])[-1]
    return f"{type(error).__name__}: {said} ({Path(place.filename).name}:{place.lineno})"


def check_records(corpus: Corpus, destination: peers.Destination) -> Callable[[peers.Reader], None]:
    """A check that every record is copied as it was written."""

    def check(reader: peers.Reader) -> None:
        for index in range(len(corpus)):
            destination.array[:64] = 0xA5
            nbytes = reader.copy_record(index, destination)
            expected = corpus.payload(index)
            if nbytes != expected.nbytes or not np.array_equal(destination.array[:nbytes], expected):
                raise ValueError(f"record {index}: other bytes than were written")

    return check


def check_layers(corpus: Corpus, destination: peers.Destination) -> Callable[[peers.Reader], None]:
    """A check that layers are copied as they were written: all layers of some records, one layer of the others."""

    def check(reader: peers.Reader) -> None:
        num_layers = corpus.shape.num_layers
        for index, record in enumerate(corpus):
            size = record.slab_nbytes
            for layer in range(num_layers) if len(corpus) <= 100 or index % 100 == 0 else (index % num_layers,):
                destination.array[:64] = 0xA5
                nbytes = reader.copy_layer(index, layer, destination)
                expected = record.payload[layer * size : (layer + 1) * size]
                if nbytes != size or not np.array_equal(destination.array[:nbytes], expected):
                    raise ValueError(f"record {index}, layer {layer}: other bytes than were written")

    return check


def _folder(path: Path) -> Path:
    path.mkdir()
    return path
