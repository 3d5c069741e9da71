"""What a source is, told from how it is named."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from kvformat.errors import make_error
from kvformat.extract.documents.function import FunctionItems, is_function, load_function
from kvformat.extract.documents.json_lines import JsonLines
from kvformat.extract.documents.parquet import ParquetRows
from kvformat.extract.documents.reading import Reader
from kvformat.extract.documents.saved import SavedRows, is_saved
from kvformat.extract.places import local_place
from kvformat.write.prepared import SUFFIX, is_plan

__all__ = ["SUFFIX", "DocumentsSource", "check_source", "is_documents_file", "open_source"]

DocumentsSource = str | os.PathLike[str] | Callable[[], Iterable[Mapping[str, Any]]]
"""A path, ``module:function``, ``file.py:function``, or a function that yields objects."""


def is_documents_file(source: object) -> TypeGuard[str | os.PathLike[str]]:
    """Whether a source is a documents file, in which everything is tokenised already."""
    return isinstance(source, str | os.PathLike) and os.fsdecode(source).endswith(SUFFIX)


def open_source(source: DocumentsSource, *, columns: Mapping[str, str] | None = None) -> Reader:
    """Open a source of documents.

    Parameters
    ----------
    source
        A file whose name ends with ``.parquet``, a directory of such files, a directory that ``save_to_disk`` of
        Hugging Face ``datasets`` wrote, ``module:function`` or ``file.py:function``, a function; any other path is
        one of JSON Lines.
    columns
        By member (``id``, ``text``, ``messages``, ``token_ids``), the column it comes from, in Parquet and data sets.

    Raises
    ------
    UsageError
        E081 for anything else, such as a plan, and for columns of a source that has none.
    InputError
        E300 where a column or a function is missing.
    StorageError
        E203 where it cannot be read.
    DependencyError
        E205 where the library it needs is not installed.
    """
    check_source(source)
    path = _path(source)
    if path is not None and path.is_dir() and is_saved(path):
        return SavedRows(path, columns=columns)
    if path is not None and (path.suffix == ".parquet" or (path.is_dir() and any(path.glob("*.parquet")))):
        return ParquetRows(path, columns=columns)
    if columns:
        raise make_error("E081", "columns are named of Parquet files and of data sets on disk, and of nothing else")
    if path is not None:
        text = str(path)
        return load_function(text) if is_function(text) and not path.exists() else JsonLines(path)
    if callable(source):
        return FunctionItems(source)
    raise make_error(
        "E081",
        f"documents must be a path, module:function or a function, found {source!r:.80}; write objects as JSON Lines, "
        "or yield them from a function",
    )


def check_source(source: object) -> None:
    """Refuse what is no source by its name: an empty one, a URL, a plan, a Python file without its function; E081."""
    path = _path(source)
    if path is None:
        return
    assert isinstance(source, str | os.PathLike)
    local_place(source, what="a source of documents")
    if is_plan(path):
        message = (
            "that is a plan: give it to `kvformat extract` as --plan, in place of documents; its documents alone are "
            "its documents.kvdocs"
        )
        raise make_error("E081", message, path=path)
    if path.suffix == ".py":
        message = f"a Python file is given with the function that yields the documents: {path.name}:FUNCTION"
        raise make_error("E081", message, path=path)


def _path(source: object) -> Path | None:
    if isinstance(source, str | os.PathLike) and isinstance(os.fspath(source), str):
        return Path(source)
    return None
