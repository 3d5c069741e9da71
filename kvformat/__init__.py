"""kvformat: datasets of the per-layer attention keys and values of a frozen transformer.

Public names are what ``__all__`` lists. Importing this package loads neither torch nor fsspec; names load when used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvformat.errors import (
    ConflictError,
    DamageError,
    DatasetExistsError,
    DatasetNotFoundError,
    DependencyError,
    FormatError,
    IdentityError,
    InputError,
    KVFormatError,
    KVFormatWarning,
    LookupFailedError,
    StorageError,
    UnsupportedError,
    UsageError,
)

if TYPE_CHECKING:
    from kvformat import extract
    from kvformat.read.dataset import Dataset
    from kvformat.read.opening import open_dataset as open
    from kvformat.read.record import Record
    from kvformat.read.verify import Finding, Report, verify
    from kvformat.spec.context import Context, Text
    from kvformat.spec.document import Document, Media, document_digest
    from kvformat.spec.schema import Axis, Component, Extra, Last, Quant, Schema, Shared
    from kvformat.storage.cache_options import CacheOptions
    from kvformat.storage.remote_options import RemoteOptions
    from kvformat.transfer.copying import CopyReport, copy
    from kvformat.write.create import create
    from kvformat.write.writer import Writer

__version__ = "0.1.0"

__all__ = [
    "Axis",
    "CacheOptions",
    "Component",
    "ConflictError",
    "Context",
    "CopyReport",
    "DamageError",
    "Dataset",
    "DatasetExistsError",
    "DatasetNotFoundError",
    "DependencyError",
    "Document",
    "Extra",
    "Finding",
    "FormatError",
    "IdentityError",
    "InputError",
    "KVFormatError",
    "KVFormatWarning",
    "Last",
    "LookupFailedError",
    "Media",
    "Quant",
    "Record",
    "RemoteOptions",
    "Report",
    "Schema",
    "Shared",
    "StorageError",
    "Text",
    "UnsupportedError",
    "UsageError",
    "Writer",
    "copy",
    "create",
    "document_digest",
    "extract",
    "open",
    "verify",
]

_LAZY = {
    "Axis": "kvformat.spec.schema",
    "CacheOptions": "kvformat.storage.cache_options",
    "Component": "kvformat.spec.schema",
    "Context": "kvformat.spec.context",
    "CopyReport": "kvformat.transfer.copying",
    "Dataset": "kvformat.read.dataset",
    "Document": "kvformat.spec.document",
    "Extra": "kvformat.spec.schema",
    "Finding": "kvformat.read.verify",
    "Last": "kvformat.spec.schema",
    "Media": "kvformat.spec.document",
    "Quant": "kvformat.spec.schema",
    "Record": "kvformat.read.record",
    "RemoteOptions": "kvformat.storage.remote_options",
    "Report": "kvformat.read.verify",
    "Schema": "kvformat.spec.schema",
    "Shared": "kvformat.spec.schema",
    "Text": "kvformat.spec.context",
    "Writer": "kvformat.write.writer",
    "copy": "kvformat.transfer.copying",
    "create": "kvformat.write.create",
    "document_digest": "kvformat.spec.document",
    "open": "kvformat.read.opening",
    "verify": "kvformat.read.verify",
}
_OTHER_NAME = {"open": "open_dataset"}
_MODULES = frozenset({"extract"})


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"kvformat.{name}")
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'kvformat' has no attribute {name!r}")
    value = getattr(import_module(module), _OTHER_NAME.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
