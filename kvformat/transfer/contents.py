"""What a dataset consists of: its files, each with the digest that proves it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from msgspec import Struct

from kvformat.errors import make_error
from kvformat.read.check_index import check_shards
from kvformat.read.index import IndexReader
from kvformat.read.opening import load_manifest
from kvformat.spec import limits, tables
from kvformat.spec.manifest import Manifest, ManifestRef, parse_root
from kvformat.spec.paths import ROOT, covered_path, manifest_path, part_path, shard_path
from kvformat.storage.readers import Reader

__all__ = ["Contents", "Item", "contents_of", "require_root"]


class Item(Struct, frozen=True, kw_only=True):
    """A file other than the root.

    Attributes
    ----------
    name
        Path in the dataset; it holds the digest, or the first half of a shard's.
    sha256
        In hexadecimal.
    code
        Of the error where the content is another: E077 for a shard, else E006.
    """

    name: str
    nbytes: int
    sha256: str
    code: str = "E006"


class Contents(Struct, frozen=True, kw_only=True):
    """A dataset as files.

    Attributes
    ----------
    id
        SHA-256 of ``root``, the bytes of its root.
    records
        Their number.
    items
        All other files, each once.
    """

    id: str
    root: bytes
    records: int
    items: tuple[Item, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all files together."""
        return len(self.root) + sum(item.nbytes for item in self.items)


def contents_of(reader: Reader) -> Contents:
    """The files of a published dataset. Root, manifest and the table of shards are read and proved.

    Raises
    ------
    KVFormatError
        As :func:`kvformat.open`; E052, E020 of a table of shards that is none.
    """
    identity, manifest, _ = load_manifest(reader)
    root = require_root(reader, identity)
    reference = parse_root(root, path=reader.path(ROOT)).manifest
    items = {item.name: item for item in _items(reader, manifest, reference)}  # two labels may have one content
    return Contents(id=identity, root=root, records=manifest.totals.records, items=tuple(items.values()))


def require_root(reader: Reader, identity: str) -> bytes:
    """The root's bytes, which must still be those of a dataset id; E007."""
    root = reader.read(ROOT, max_nbytes=limits.MAX_ROOT_NBYTES)
    found = hashlib.sha256(root).hexdigest()
    if found != identity:
        raise make_error(
            "E007",
            f"the source was replaced meanwhile: what is copied has the id {identity}, now {found} is there; find out "
            "what replaced it, and copy again",
            path=reader.path(ROOT),
        )
    return root


def _items(reader: Reader, manifest: Manifest, reference: ManifestRef) -> Iterator[Item]:
    yield Item(name=manifest_path(reference.sha256), nbytes=reference.size, sha256=reference.sha256)
    for table in tables.TABLES:
        for part in manifest.parts(table):
            yield Item(name=part_path(part.sha256), nbytes=part.size, sha256=part.sha256)
    for file in manifest.files:
        yield Item(name=covered_path(file.sha256), nbytes=file.size, sha256=file.sha256)
    index = IndexReader(reader, manifest, verify=True)
    for fault in check_shards(index, manifest):
        raise fault
    for number, start in enumerate(index.shards.starts[:-1]):
        columns = index.shards.part(number).arrays
        for position, (digest, size) in enumerate(zip(columns["sha256"], columns["size"].tolist(), strict=True)):
            sha256 = digest.tobytes()
            name = shard_path(start + position, sha256)
            yield Item(name=name, nbytes=size, sha256=sha256.hex(), code="E077")
