"""Publishing in an object store: everything under names that are its content's, then the root where none is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvformat.errors import KVFormatError
from kvformat.spec import canonical, limits
from kvformat.spec.manifest import Manifest
from kvformat.spec.paths import ROOT
from kvformat.storage.remote import Remote
from kvformat.write.parallel import side_by_side
from kvformat.write.rows import EncodedPart
from kvformat.write.seal import encode_root, named_files, published_differs
from kvformat.write.spool import Spool

__all__ = ["publish_objects", "read_root"]


def publish_objects(
    remote: Remote, spool: Spool, *, parts: Sequence[EncodedPart], covered: Mapping[str, bytes], manifest: Manifest
) -> bytes:
    """Upload index parts, covered files and manifest, then the root; returns its bytes. The shards are there already.

    Raises
    ------
    ConflictError
        E113 where another writer published something else meanwhile.
    StorageError
        E200, E203, E207 to E209, E212.
    """
    data = canonical.encode(manifest)
    root = encode_root(data, manifest.version, manifest.requires)
    if not _is_published(remote, root):
        _put_all(remote, spool, list(named_files(parts, covered, data)))
        if not remote.create(ROOT, root):
            raise published_differs(remote.path(ROOT))
    return root


def read_root(remote: Remote) -> bytes | None:
    """What stands in the root's place; None where nothing does.

    It is read, as a proxy between may answer any HEAD with 200: no root is made, or kept back, upon such a word.
    """
    try:
        return remote.read(ROOT, max_nbytes=limits.MAX_ROOT_NBYTES)
    except KVFormatError as error:
        if error.code == "E002":
            return None
        if error.code == "E004":
            return b""
        raise


def _is_published(remote: Remote, root: bytes) -> bool:
    """Whether an equal writer was faster; E113 for another one, read twice: answers may be damaged on the way."""
    found = read_root(remote)
    if found in (None, root):
        return found == root
    again = read_root(remote)
    if again == found:
        raise published_differs(remote.path(ROOT))
    return again == root


def _put_all(remote: Remote, spool: Spool, files: Sequence[tuple[str, bytes]]) -> None:
    """Small ones side by side; large ones one behind the other, each in parts."""
    most = remote.options.request_nbytes
    side_by_side(lambda one: remote.put(*one), [one for one in files if len(one[1]) <= most])
    for name, data in files:
        if len(data) > most:
            with spool.part(data) as path:
                remote.put_file(name, path)
