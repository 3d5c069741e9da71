"""Any sequence of reads, with damage and repair between them: whatever was not proved is never given out."""

from __future__ import annotations

import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import kvformat
from kvformat.errors import DamageError
from kvformat.read import copyable
from kvformat.spec.schema import Axis, Component, Last, Schema
from kvformat.testing.strategies import cases
from kvformat.testing.vectors import VALID
from kvformat.testing.vectors.case import Case

OPTIONS = tuple(
    {"io": io, "verify": verify, "max_open_files": limit}
    for io in ("mmap", "pread")
    for verify in ("first", "always", "off")
    for limit in (1, 128)
)
NUMBERS = st.integers(0, 2**20)
WAYS = st.sampled_from(("body", "slab_into", "slab view", "slab out", "view", "out"))
NEAR = st.sampled_from((None, -1, 0, 1))
Slab = tuple[int, str, int]
"""Record, tensor, row: what is proved at once."""


def many_tensors() -> Schema:
    """More tensors than a machine word has bits."""
    axes = (Axis(name="tokens", size=Last(last=2)),)
    return Schema(
        dims=("tokens",),
        components=tuple(
            Component(name=f"h{n}", role="hidden", layers=(2 * n, 2 * n + 1), axes=axes, dtype="BF16", codec="raw")
            for n in range(70)
        ),
        extras=(),
        shared=(),
    )


MANY = Case(name="many", schema=many_tensors(), entries=VALID["no-token-ids"].entries)
NAMED = st.sampled_from([*(case for case in VALID.values() if case.name != "nan-payloads"), MANY])  # small ones


class Reading(RuleBasedStateMachine):
    """Datasets opened in every way over one directory, and the bytes that were written there."""

    @initialize(case=NAMED | cases(), group=st.sampled_from((1, 64, 1 << 18)))
    def build(self, case: Case, group: int) -> None:
        self.group = copyable._GROUP_NBYTES
        copyable._GROUP_NBYTES = group
        self.folder = Path(tempfile.mkdtemp(prefix="kvformat-stateful-"))
        self.path = self.folder / "dataset"
        self.files = case.build()
        self.files.save(self.path)
        self.schema = self.files.schema
        self.layers = {c.name: c.layers for c in self.schema.components}
        self.roles = {c.name: c.role for c in self.schema.components}
        self.names = [*self.layers, *(extra.name for extra in self.schema.extras)]
        self.damaged: dict[tuple[int, str, int], int] = {}
        self.open()

    def open(self) -> None:
        self.datasets = [kvformat.open(self.path, **options) for options in OPTIONS]
        self.proved: list[set[Slab]] = [set() for _ in OPTIONS]

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            copyable._GROUP_NBYTES = self.group
            shutil.rmtree(self.folder)

    # -- reading -----------------------------------------------------------------------------------------------------

    @rule(record=NUMBERS, tensor=NUMBERS, near=NEAR, how=st.sampled_from(("view", "copy", "out")))
    def tensor(self, record: int, tensor: int, near: int | None, how: str) -> None:
        number, name, _ = self.chosen(self.names, record, tensor, 0, near)

        def read(dataset: kvformat.Dataset) -> torch.Tensor:
            if name not in self.layers:
                return dataset[number].extra(name, copy=how == "copy")
            if how != "out":
                return dataset[number].component(name, copy=how == "copy")
            like = self.target(number, name)
            return dataset[number].component(name, out=like)

        self.look(number, lambda dataset: [((number, name), flat(read(dataset)))])

    @rule(
        record=NUMBERS, tensor=NUMBERS, row=st.integers(0, 3), near=NEAR, how=st.sampled_from(("view", "copy", "out"))
    )
    def slab(self, record: int, tensor: int, row: int, near: int | None, how: str) -> None:
        number, name, row = self.chosen(list(self.layers), record, tensor, row, near)
        if self.roles[name] == "other":
            return
        role, layer = self.roles[name], self.layers[name][row]

        def read(dataset: kvformat.Dataset) -> torch.Tensor:
            if how != "out":
                return dataset[number].slab(role, layer=layer, copy=how == "copy")
            return dataset[number].slab(role, layer=layer, out=self.target(number, name)[row])

        self.look(number, lambda dataset: [((number, name, row), flat(read(dataset)))])

    @rule(record=NUMBERS, tensor=NUMBERS, row=st.integers(0, 3), near=NEAR)
    def slab_into(self, record: int, tensor: int, row: int, near: int | None) -> None:
        number, name, row = self.chosen(list(self.layers), record, tensor, row, near)
        if self.roles[name] == "other":
            return
        role, layer = self.roles[name], self.layers[name][row]
        out = memoryview(bytearray(1 << 16))

        def read(dataset: kvformat.Dataset) -> bytes:
            return bytes(out[: dataset.read_slab_into(number, role, layer, out)])

        self.look(number, lambda dataset: [((number, name, row), read(dataset))])

    @rule(record=NUMBERS, tensor=NUMBERS, near=NEAR, exact=st.booleans())
    def body_into(self, record: int, tensor: int, near: int | None, exact: bool) -> None:
        number, _, _ = self.chosen(list(self.layers), record, tensor, 0, near)
        out = memoryview(bytearray(self.files.placement(number).body_nbytes if exact else 1 << 16))

        def read(dataset: kvformat.Dataset) -> list[tuple[Any, bytes]]:
            assert dataset.read_into(number, out) == self.files.placement(number).body_nbytes
            return [((number, name), flat(view)) for name, view in dataset.tensors_in(out, number).items()]

        self.look(number, read)

    @rule(at=st.integers(0, len(OPTIONS) - 1))
    def pickled(self, at: int) -> None:
        self.datasets[at] = pickle.loads(pickle.dumps(self.datasets[at]))
        self.proved[at] = set()

    # -- damage ------------------------------------------------------------------------------------------------------

    @rule(record=NUMBERS, tensor=NUMBERS, at=NUMBERS, bit=st.integers(0, 7), reopen=st.booleans())
    def damage(self, record: int, tensor: int, at: int, bit: int, reopen: bool) -> None:
        number = record % self.length
        name = [*self.names, "sums"][tensor % (len(self.names) + 1)]
        nbytes = self.files.placement(number).tensors[name].nbytes
        if nbytes:
            self.flip(number, name, at % nbytes, 1 << bit)
        if reopen:
            self.open()

    @rule(
        record=st.integers(0, 1), tensor=NUMBERS, row=st.integers(0, 1), near=NEAR, at=NUMBERS, reopen=st.booleans(),
        first=WAYS, second=WAYS,
    )  # fmt: skip
    def damage_between(
        self, record: int, tensor: int, row: int, near: int, at: int, reopen: bool, first: str, second: str
    ) -> None:
        """Read, damage something, and read something near it."""
        if not reopen:
            self.read(first, record, tensor, row, None)
        self.damage(record=record, tensor=tensor % len(self.layers), at=at, bit=0, reopen=reopen)
        self.read(first, record, tensor + 1, row, None)
        self.read(second, record, tensor, row, near)

    def read(self, way: str, record: int, tensor: int, row: int, near: int | None) -> None:
        if way == "body":
            self.body_into(record=record, tensor=0, near=near, exact=False)
        elif way == "slab_into":
            self.slab_into(record=record, tensor=tensor, row=row, near=near)
        elif way.startswith("slab"):
            self.slab(record=record, tensor=tensor, row=row, near=near, how=way.partition(" ")[2])
        else:
            self.tensor(record=record, tensor=tensor, near=near, how=way)

    @precondition(lambda self: self.damaged)
    @rule()
    def repair(self) -> None:
        for (number, name, at), mask in list(self.damaged.items()):
            self.flip(number, name, at, mask)
        assert not self.damaged

    @rule()
    def replace(self) -> None:
        """Other files, of the same bytes."""
        for path in self.files.shard_paths():
            data = (self.path / path).read_bytes()
            (self.path / path).unlink()
            (self.path / path).write_bytes(data)
        self.open()  # who holds the old files goes on with what they held then

    # -- what must hold ----------------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        return len(self.files.column("rows", "offset"))

    def chosen(self, names: list[str], record: int, tensor: int, row: int, near: int | None) -> Slab:
        """A slab of one of the tensors; with ``near`` of a damaged tensor, or of one that many tensors further."""
        places = [place for place in self.damaged if place[1] in names] if near is not None else []
        if places and near is not None:
            number, name, at = places[tensor % len(places)]
            row += at // self.files.placement(number).tensors[name].slab_nbytes
            name = names[(names.index(name) + near) % len(names)]
            return number, name, row % len(self.layers.get(name, (0,)))
        name = names[tensor % len(names)]
        return record % self.length, name, row % len(self.layers.get(name, (0,)))

    def target(self, number: int, name: str) -> torch.Tensor:
        placed = self.files.placement(number).tensors[name]
        like = kvformat.open(self.path, verify="off")[number].component(name)
        return torch.zeros(placed.shape, dtype=like.dtype)

    def look(self, number: int, read: Callable[[kvformat.Dataset], list[tuple[Any, bytes]]]) -> None:
        """Read something of every dataset, and compare it with what was written."""
        for dataset, options, proved in zip(self.datasets, OPTIONS, self.proved, strict=True):
            try:
                found = read(dataset)
            except DamageError:
                assert self.damaged
                assert options["verify"] != "off"
                proved.update(self.sound(number))  # what else the read touched before it met the damage may be proved
                continue
            for slab, right in self.compared(found):
                # Of what was proved and is damaged since then, `first` is told to say nothing.
                assert right or options["verify"] == "off" or (options["verify"] == "first" and slab in proved)
                assert right or self.damaged
                if right:
                    proved.add(slab)

    def sound(self, number: int) -> set[Slab]:
        """Slabs of a record that are not damaged now."""
        tensors = self.files.placement(number).tensors
        damaged = {
            (record, name, at // tensors[name].slab_nbytes) for record, name, at in self.damaged if record == number
        }
        slabs = {(number, name, row) for name in self.names for row in range(len(self.layers.get(name, (0,))))}
        return slabs - damaged

    def compared(self, found: list[tuple[Any, bytes]]) -> Iterator[tuple[Slab, bool]]:
        """Of every slab that was read, whether it is what was written."""
        for (number, name, *rows), data in found:
            step = self.files.placement(number).tensors[name].slab_nbytes
            written = self.files.tensor(number, name).tobytes()
            slabs = rows or range(len(self.layers.get(name, (0,))))
            assert len(data) == len(slabs) * step
            for index, row in enumerate(slabs):
                yield (number, name, row), data[index * step :][:step] == written[row * step :][:step]

    def flip(self, number: int, name: str, at: int, mask: int) -> None:
        shard, start = self.files.locate(number)
        offset = start + self.files.placement(number).tensors[name].offset + at
        with (self.path / self.files.shard_paths()[shard]).open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ mask]))
        left = self.damaged.pop((number, name, at), 0) ^ mask
        if left:
            self.damaged[number, name, at] = left


def flat(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


Reading.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # shrinking may take longer than the suite
)
TestReading = Reading.TestCase
