"""Publishing: final names for everything staged, then the root (SPEC.md, section 17)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from kvformat.errors import KVFormatError, make_error
from kvformat.spec import canonical
from kvformat.spec.manifest import Index, LookupPart, Manifest, ManifestRef, NamesPart, Part, Root
from kvformat.spec.paths import ROOT, covered_path, manifest_path, part_path
from kvformat.storage.faults import translated
from kvformat.storage.lease import exclusive
from kvformat.storage.local_write import LocalFiles
from kvformat.write.rows import EncodedPart
from kvformat.write.shard import hash_file

__all__ = ["Publication", "Scratch", "encode_root", "index_of", "named_files", "publish", "published_differs"]

_SEAL_TIMEOUT_S = 600.0


def index_of(parts: Iterable[EncodedPart]) -> Index:
    """The manifest's view of encoded parts."""
    found: dict[str, list[Part | NamesPart | LookupPart]] = {name: [] for name in Index.__struct_fields__}
    for part in parts:
        sha256, size = hashlib.sha256(part.data).hexdigest(), len(part.data)
        if part.first_key is not None:
            entry: Part | NamesPart | LookupPart = LookupPart(
                count=part.num_rows, sha256=sha256, size=size, first_key=f"{part.first_key:016x}"
            )
        elif part.nbytes is not None:
            entry = NamesPart(count=part.num_rows, sha256=sha256, size=size, nbytes=part.nbytes)
        else:
            entry = Part(count=part.num_rows, sha256=sha256, size=size)
        found[part.table].append(entry)
    return canonical.convert({name: canonical.plain(entries) for name, entries in found.items()}, Index)


def encode_root(manifest: bytes, version: str, requires: tuple[str, ...] | None = None) -> bytes:
    """Canonical bytes of the root of a manifest."""
    reference = ManifestRef(sha256=hashlib.sha256(manifest).hexdigest(), size=len(manifest))
    return canonical.encode(Root(format="kvformat", manifest=reference, version=version, requires=requires))


def named_files(
    parts: Iterable[EncodedPart], covered: Mapping[str, bytes], manifest: bytes
) -> Iterator[tuple[str, bytes]]:
    """Final name and content of everything but shards and root; the manifest last."""
    for part in parts:
        yield part_path(hashlib.sha256(part.data).hexdigest()), part.data
    for data in covered.values():
        yield covered_path(hashlib.sha256(data).hexdigest()), data
    yield manifest_path(hashlib.sha256(manifest).hexdigest()), manifest


class Scratch(Protocol):
    """Where files are made before they get their final names."""

    def add_file(self, name: str, data: bytes) -> Path:
        """Create a durable file; one of this name that is there already must be equal."""


class Publication:
    """Files with their final names, and what this process created of them."""

    def __init__(self, files: LocalFiles, root: Path) -> None:
        self._files = files
        self._root = root
        self._placed: list[tuple[Path, Path]] = []
        self._folders: list[Path] = []
        self._touched: dict[Path, None] = {}

    def place(self, source: Path, target: str) -> None:
        """Give a staged file its final name; one that is there already must be equal."""
        path = self._root / target
        self._make_dirs(path.parent)
        # Noted before it is done: an interrupt may come in between.
        self._placed.append((source, path))
        made = self._files.link(source, path)
        if not made and not path.samefile(source) and hash_file(path, path) != hash_file(source, source):
            raise make_error(
                "E113", "a file with this name has other content: it is damaged or foreign, move it away", path=path
            )
        self._touched[path.parent] = None

    def sync(self) -> None:
        """Make every directory durable that got an entry."""
        for folder in sorted(self._touched, key=lambda folder: -len(folder.parts)):
            self._files.sync_dir(folder)

    def undo(self) -> None:
        """Remove what :meth:`place` created, newest first: a staged file's other name is ours, another file is not."""
        for source, path in reversed(self._placed):
            if path.exists() and path.samefile(source):
                self._files.unlink(path)
        for folder in reversed(self._folders):
            self._files.remove_dir(folder)

    def _make_dirs(self, folder: Path) -> None:
        if folder in self._touched:
            return
        missing = []
        while folder != self._root:
            # Also of a directory that is there: a killed writer may have made it without syncing its entry.
            self._touched[folder.parent] = None
            if not folder.exists():
                missing.append(folder)
            folder = folder.parent
        for path in reversed(missing):
            self._folders.append(path)
            if not self._files.make_dir(path):
                self._folders.pop()


def publish(
    files: LocalFiles,
    root: Path,
    staging: Scratch,
    *,
    shards: Sequence[tuple[Path, str]],
    parts: Sequence[EncodedPart],
    covered: Mapping[str, bytes],
    manifest: Manifest,
    undo: bool,
) -> bytes:
    """Publish a dataset whose shards are staged; returns the bytes of its root.

    Publishing is serialised by a lease on the dataset's directory, where the file system has leases, so that what a
    failed publication removes is nothing another one relies on.

    Parameters
    ----------
    staging
        Where everything but the shards is made.
    shards
        Staged path and final name of each.
    undo
        Remove what this made, where that can be told, when it fails.

    Raises
    ------
    ConflictError
        E113 where another writer published something else meanwhile.
    StorageError
        E200 to E203, E207.
    """
    manifest_bytes = canonical.encode(manifest)
    root_bytes = encode_root(manifest_bytes, manifest.version, manifest.requires)
    targets = list(shards)
    for target, data in named_files(parts, covered, manifest_bytes):
        targets.append((staging.add_file(target.partition(".")[0].replace("/", "-"), data), target))
    staged_root = staging.add_file(f"root-{hashlib.sha256(root_bytes).hexdigest()}", root_bytes)

    def busy() -> Exception:
        return make_error("E117", "another writer is publishing here for more than ten minutes", path=root)

    with exclusive(root, timeout_s=_SEAL_TIMEOUT_S, refusal=busy) as lease:
        published = root / ROOT
        if published.exists():
            _compare(published, root_bytes)
            return root_bytes
        publication = Publication(files, root)
        try:
            for source, name in targets:
                publication.place(source, name)
            publication.sync()
            files.sync_dir(root)
            files.sync_dir(root.parent)
            if not files.link(staged_root, published):
                _compare(published, root_bytes)
        except BaseException:
            if undo and lease.supported and not published.exists():
                publication.undo()
            raise
        files.sync_dir(root)
    return root_bytes


def _compare(target: Path, root_bytes: bytes) -> None:
    with translated(target):
        found = target.read_bytes()
    if found != root_bytes:
        raise published_differs(target)


def published_differs(root: Path | str) -> KVFormatError:
    """The E113 of a writer that lost: what is published by the root at this path is not its own."""
    return make_error(
        "E113",
        "another writer published a different dataset here; compare with `kvformat diff`, and write elsewhere",
        path=root,
    )
