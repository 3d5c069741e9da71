"""The manifest of a dataset in the making (SPEC.md, section 7): known beforehand but for tables and totals. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvformat.errors import make_error
from kvformat.spec import canonical, limits
from kvformat.spec.context import Context, Text
from kvformat.spec.manifest import CoveredFile, Manifest, Skipped, Totals, parse_manifest, parse_root
from kvformat.spec.schema import Schema
from kvformat.write.rows import EncodedPart, Tables
from kvformat.write.seal import encode_root, index_of

__all__ = ["Draft"]


class Draft:
    """What a writer was told about the dataset as a whole.

    Made only where a reader would accept the manifest: what it would refuse is refused before hours of work.

    Parameters
    ----------
    root
        For messages.
    covered
        Covered files by label, sorted.

    Raises
    ------
    FormatError
        Whatever :func:`kvformat.spec.manifest.parse_manifest` refuses.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        schema: Schema,
        context: Context,
        text: Text,
        provenance: Mapping[str, str],
        covered: Mapping[str, bytes],
        extensions: Mapping[str, Any] | None,
        version: str,
        header_size: int,
        shard_slots: int,
    ) -> None:
        self._root = root
        self._schema = schema
        self._context = context
        self._text = text
        self._provenance = dict(provenance)
        self._files = tuple(
            CoveredFile(name=name, sha256=hashlib.sha256(data).hexdigest(), size=len(data))
            for name, data in covered.items()
        )
        self._extensions = dict(extensions) if extensions else None
        self._version = version
        self._header_size = header_size
        self._shard_slots = shard_slots
        self.complete(_least_tables(len(schema.dims), header_size))

    def complete(self, tables: Tables, skipped: Sequence[Skipped] = ()) -> tuple[Manifest, list[EncodedPart]]:
        """The manifest over these tables, and the parts it lists.

        Raises
        ------
        InputError
            E111 where it would be too large; otherwise as for the class.
        """
        parts = list(tables.encode(self._version))
        manifest = Manifest(
            context=self._context,
            files=self._files,
            format="kvformat",
            header_size=self._header_size,
            index=index_of(parts),
            provenance=self._provenance,
            schema=self._schema,
            shard_slots=self._shard_slots,
            skipped=tuple(skipped),
            text=self._text,
            totals=Totals(
                names=tables.num_names,
                nbytes=tables.nbytes,
                records=tables.num_records,
                shards=tables.num_shards,
                tokens=tables.tokens,
            ),
            version=self._version,
            extensions=self._extensions,
        )
        # What a reader would refuse must never be published: the writer reads its own manifest first.
        data = canonical.encode(manifest)
        if len(data) > limits.MAX_MANIFEST_NBYTES:
            message = f"the manifest has {len(data)} bytes, at most 64 MiB are allowed"
            raise make_error("E111", message, path=self._root)
        parse_manifest(data, parse_root(encode_root(data, self._version)))
        return manifest, parts


def _least_tables(num_dims: int, header_size: int) -> Tables:
    """Tables of one record, which are as good as any to find out whether the rest of a manifest is sound."""
    tables = Tables(num_dims)
    tables.add_record(offset=0, dims=(1,) * num_dims, document=bytes(32), record_sum=bytes(16))
    tables.add_name(record=0, name=b"a", position=0)
    tables.add_shard(sha256=bytes(32), size=header_size + limits.ALIGNMENT, first_record=0)
    return tables
