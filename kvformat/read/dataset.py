"""An open dataset: a sequence of records."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, Literal

from kvformat.errors import make_error
from kvformat.read.index import IndexReader
from kvformat.read.pools import pool_of
from kvformat.read.ranks import AllGather, ask_same
from kvformat.read.record import Record
from kvformat.spec.context import Context, Text, differences
from kvformat.spec.layout import Layout, Placement
from kvformat.spec.manifest import Manifest
from kvformat.spec.schema import SHARED_ROLES, Schema
from kvformat.storage.readers import Reader
from kvformat.storage.remote_read import RemoteReader
from kvformat.tensors import writable_bytes

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from kvformat.read.stored import Wanted

__all__ = ["LEVELS", "Dataset", "Place", "Verify"]

Verify = Literal["first", "always", "off"]
LEVELS = {"off": 0, "first": 1, "always": 2}


Place = tuple[Placement, "NDArray[np.uint8] | None", int, "Record | None"]
"""Layout of a record; the mapped shard, ``[nbytes]`` uint8, where nothing is left to verify, else None; start of the
record in it, in bytes; and the record, where it had to be made."""


class Dataset:
    """A published dataset. Made by :func:`kvformat.open`; a sequence of records.

    Safe to use in threads, and after fork. It pickles to its location, options and id, whatever its size.

    Attributes
    ----------
    id
        Dataset id: SHA-256 of the root, 64 hexadecimal digits.
    location
        Where it was opened: the directory, or the URL without what belongs to its client.
    manifest
        Everything but tables and values.
    attached
        What layers above keep with it, by a name of their own; neither pickled nor looked at.
    verify_s
        Seconds this process has spent on hashing values. (Threads that add at once may lose a little.)
    """

    def __init__(
        self,
        reader: Reader,
        *,
        location: Any,
        dataset_id: str,
        manifest: Manifest,
        layout: Layout,
        options: dict[str, Any],
    ) -> None:
        self.location = reader.location
        self.id = dataset_id
        self.manifest = manifest
        self.layout = layout
        self.level = LEVELS[options["verify"]]
        self.index = IndexReader(reader, manifest, verify=self.level > 0)
        self.reader = reader
        self.attached: dict[str, object] = {}
        self.verify_s = 0.0
        self._source = location
        self._options = options
        schema = manifest.schema
        self.num_dims = len(schema.dims)
        self.num_components = len(schema.components)
        self.slabs = {c.name: len(c.layers) for c in schema.components} | {e.name: 1 for e in schema.extras}
        self.scales = frozenset(c.quant.scale for c in schema.components if c.quant is not None)
        self._slab_of = _slab_map(schema)
        self._layers = {c.name: c.layers for c in schema.components}
        self._length = manifest.totals.records
        self.shards = pool_of(self, options["max_open_files"])

    # -- what it is ----------------------------------------------------------------------------------------------

    @property
    def schema(self) -> Schema:
        """Which tensors every record has."""
        return self.manifest.schema

    @property
    def context(self) -> Context:
        """What determined the values."""
        return self.manifest.context

    @property
    def text(self) -> Text:
        """How text became token ids."""
        return self.manifest.text

    @property
    def provenance(self) -> Mapping[str, str]:
        """Library versions and the like: recorded, never compared."""
        return self.manifest.provenance

    @property
    def num_names(self) -> int:
        """Number of names; at least the number of records."""
        return self.manifest.totals.names

    @property
    def num_tokens(self) -> int:
        """Tokens of all records together."""
        return self.manifest.totals.tokens

    @property
    def nbytes(self) -> int:
        """Bytes of all shards together."""
        return self.manifest.totals.nbytes

    @property
    def opened_as(self) -> str:
        """Location, id and options but for credentials: the same in every process that opened it alike."""
        shown = {name: value for name, value in sorted(self._options.items()) if name != "storage_options"}
        return f"{self.location} {self.id} {shown}"

    def require(self, context: Context) -> None:
        """Refuse the dataset unless its context equals another, field by field.

        Raises
        ------
        IdentityError
            E083 naming the fields that differ. An unknown context equals nothing.
        UsageError
            E081 for something that is no context.
        """
        given: object = context
        if not isinstance(given, Context):
            raise make_error(
                "E081", f"expected a Context, found {type(given).__name__}; a dataset's is its `.context`"
            )
        found = differences(self.context, context)
        if found:
            raise make_error("E083", f"the contexts differ: {'; '.join(found)}", path=self.location)

    def assert_same_across(self, all_gather_object: AllGather) -> None:
        """Refuse to go on unless every rank of a job has opened this dataset. A collective call: on every rank.

        Where opening may fail on one rank alone, :func:`kvformat.loader.open_across` also tells the others.

        Parameters
        ----------
        all_gather_object
            Takes an object and returns those of all ranks, in rank order. This library makes no process group, and
            finds none: the function is where the caller's comes in. mpi4py's ``comm.allgather`` is one.

        Raises
        ------
        IdentityError
            E087 on every rank, naming the ranks of each id.
        UsageError
            E081 where the function returns something else.

        Examples
        --------
        With an initialised ``torch.distributed``, on a group of the ``gloo`` backend, or of any that moves objects::

            def all_gather_object(obj):
                found = [None] * torch.distributed.get_world_size()
                torch.distributed.all_gather_object(found, obj)
                return found

            dataset.assert_same_across(all_gather_object)
        """
        ask_same(self.id, all_gather_object, path=self.location)

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"<kvformat.Dataset {self.location} ({len(self):,} records, id {self.id[:16]})>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self._source, {**self._options, "expected_id": self.id})

    # -- records -------------------------------------------------------------------------------------------------

    def __getitem__(self, key: int | str) -> Record:
        number = key if type(key) is int else self._number(key)
        if not 0 <= number < self._length:
            number = self._wrap(number)
        return Record(self, number, self.shards.holding(number))

    def __iter__(self) -> Iterator[Record]:
        for number in range(self._length):
            yield self[number]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.index.find_name(name) is not None

    def find(self, *, document: bytes) -> Record | None:
        """The record of a document digest (32 bytes), or None."""
        given: object = document
        if not isinstance(given, bytes) or len(document) != 32:
            raise make_error("E081", "a document digest is 32 bytes; see kvformat.document_digest")
        number = self.index.find_document(document)
        return None if number is None else self[number]

    # -- copies --------------------------------------------------------------------------------------------------

    def read_into(self, key: int | str, out: Any) -> int:
        """Copy all components of a record into a reused buffer, in one pass; returns the number of bytes.

        The quickest way from storage to a buffer of one's own: no tensor is made. The bytes are the record's *body*,
        as stored: its components one behind the other by descending item size, and in the order of the schema where
        that is equal, so K and then V of :meth:`Schema.uniform`. (Where components have different item sizes, extras
        in between are copied along.) :meth:`tensors_in` gives the tensors.

        Parameters
        ----------
        key
            Number or name of the record.
        out
            Where to copy to, at the start of it: a contiguous CPU tensor of any dtype, a numpy array, or any other
            writable buffer. A memoryview of bytes costs least; page-aligned memory is copied into fastest.

        Raises
        ------
        LookupFailedError
            E080 without such a record.
        DamageError
            E053, E054, E070 to E074 where the bytes are not those that were written. ``out`` may hold them then.
        ValueError
            E081 where ``out`` cannot be written to, or is too small.
        """
        if type(key) is int and 0 <= key < self._length and type(out) is memoryview:
            pool = self.shards
            shard = pool.listed[bisect_right(pool.firsts, key)]
            if shard is not None:
                at = 2 * (key - shard.first)
                end = shard.spans[at + 1]
                if not end:
                    return Record(self, key, shard).copy_body(writable_bytes(out))
                start = shard.spans[at]
                nbytes = end - start
                try:
                    if out.contiguous:
                        out[:nbytes] = shard.memory[start:end]  # type: ignore[index]  # spans are of mapped shards
                        return nbytes
                except (TypeError, ValueError, NotImplementedError):
                    pass  # not bytes, not writable, too small, or released: said below
        return self[key].copy_body(writable_bytes(out))

    def read_slab_into(self, key: int | str, role: str, layer: int, out: Any) -> int:
        """Copy one layer of a record into a reused buffer; returns the number of bytes.

        Parameters
        ----------
        key
            Number or name of the record.
        role, layer
            As for :meth:`Record.slab`.
        out
            As for :meth:`read_into`; the slab's bytes are row-major, for K and V ``[tokens, heads, head_dim]``.

        Raises
        ------
        KVFormatError
            As :meth:`read_into` and :meth:`Record.slab`.
        """
        name, row = self._slab_of.get((role, layer)) or self.slab_of(role, layer)
        if type(key) is int and 0 <= key < self._length and type(out) is memoryview:
            pool = self.shards
            shard = pool.listed[bisect_right(pool.firsts, key)]
            if shard is not None:
                slot = key - shard.first
                if shard.spans[2 * slot + 1]:
                    placement, start = shard.places[slot]  # type: ignore[misc]  # known of a record with a span
                    placed = placement.tensors[name]
                    nbytes = placed.slab_nbytes
                    start += placed.offset + row * nbytes
                    try:
                        if out.contiguous:
                            out[:nbytes] = shard.memory[start : start + nbytes]  # type: ignore[index]  # as above
                            return nbytes
                    except (TypeError, ValueError, NotImplementedError):
                        pass  # as above
        return self[key].copy_slab(writable_bytes(out), name, row)

    def places(self, numbers: Sequence[int], bits: int, wanted: Wanted) -> list[Place]:
        """Where records lie, in one go: what packing many small records spends its time on.

        Parameters
        ----------
        numbers
            Numbers of records.
        bits
            Tensors wanted, as :attr:`Placed.bit` numbers them.
        wanted
            What is wanted of them.
        """
        found: list[Place] = []
        if self.reader.is_remote and len(numbers) > 1:
            self.shards.announce(numbers, wanted)
        listed, firsts, level = self.shards.listed, self.shards.firsts, self.level
        for number in numbers:
            shard = listed[bisect_right(firsts, number)] if 0 <= number < self._length else None
            if shard is not None and shard.memory is not None and level != 2:
                slot = number - shard.first
                place = shard.places[slot]
                checks = shard.checks
                if place is not None and checks.steps[slot] and (level == 0 or checks.flags[slot] & bits == bits):
                    found.append((place[0], shard.array, place[1], None))
                    continue
            record = self[number]
            record.advise(wanted)
            found.append((record.placement, record.proved(bits), record.start, record))
        return found

    def announce(self, numbers: Sequence[int], wanted: Wanted) -> int:
        """Have what is wanted of records fetched meanwhile, where it is elsewhere.

        Returns
        -------
        int
            Bytes that are on their way for it, and not for an earlier call.
        """
        return self.shards.announce(numbers, wanted) if self.reader.is_remote else 0

    def forget(self) -> None:
        """Drop what was announced and not used."""
        self.shards.forget()

    @property
    def ahead_nbytes(self) -> int | None:
        """Bytes worth announcing ahead of their use: half of a cache; None without one."""
        most = self.reader.cache_nbytes if isinstance(self.reader, RemoteReader) else None
        return None if most is None else most // 2

    def tensors_in(self, buffer: Any, key: int | str) -> dict[str, torch.Tensor]:
        """Components of a record whose body :meth:`read_into` copied to the start of ``buffer``.

        Returns
        -------
        dict
            By component name, views of ``buffer``, ``[layers, *axes]``.
        """
        return self[key].tensors_in(writable_bytes(buffer))

    def names(self) -> Iterator[tuple[str, int]]:
        """All names with the number of their record, by record."""
        return self.index.all_names()

    def _number(self, key: Any) -> int:
        if isinstance(key, str):
            number = self.index.find_name(key)
            if number is None:
                raise make_error("E080", f"no record is named {key!r}", path=self.location, record=key)
            return number
        try:
            return index(key)
        except TypeError:
            raise make_error("E081", f"records are looked up by number or name, found {type(key).__name__}") from None

    def _wrap(self, key: int) -> int:
        wrapped = key + self._length if key < 0 else key
        if not 0 <= wrapped < self._length:
            raise make_error("E080", f"record {key} of {self._length}", path=self.location)
        return wrapped

    # -- the schema, looked up ---------------------------------------------------------------------------------------

    def slab_of(self, role: str, layer: int) -> tuple[str, int]:
        """Component and row that hold a role's model layer; E082 where none does."""
        found = self._slab_of.get((role, layer))
        if found is None:
            layers = sorted(covered for known, covered in self._slab_of if known == role)
            if not layers:
                roles = ", ".join(sorted({known for known, _ in self._slab_of})) or "none"
                raise make_error("E082", f"no role {role!r}; the schema has {roles}", layer=layer)
            raise make_error("E082", f"role {role!r} has no layer {layer!r}; it covers {layers}", layer=layer)
        return found

    def layer_of(self, tensor: str, row: int) -> int | None:
        """Model layer of a component's row; None for an extra."""
        layers = self._layers.get(tensor)
        return None if layers is None else layers[row]

    def twin_of(self, tensor: str, layer: int | None) -> tuple[str, int] | None:
        """For a key slab the value slab of its layer, and the other way round."""
        role = next((c.role for c in self.schema.components if c.name == tensor), None)
        other = {"key": "value", "value": "key"}.get(role or "")
        return None if other is None or layer is None else self._slab_of.get((other, layer))


def _slab_map(schema: Schema) -> dict[tuple[str, int], tuple[str, int]]:
    found: dict[tuple[str, int], tuple[str, int]] = {}
    for component in schema.components:
        if component.role == "other":
            continue
        for row, layer in enumerate(component.layers):
            found[component.role, layer] = (component.name, row)
    for shared in schema.shared:
        for role in SHARED_ROLES:
            if (role, shared.source) in found:
                found[role, shared.layer] = found[role, shared.source]
    return found


def _reopen(location: Any, options: dict[str, Any]) -> Dataset:
    from kvformat.read.opening import open_dataset

    return open_dataset(location, **options)
