"""Parquet files, read row group by row group."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from kvformat.errors import make_error
from kvformat.extract.documents.arrow import check_columns, chosen, objects_of

__all__ = ["ParquetRows"]

_BATCH = 1024


class ParquetRows:
    """A :class:`~kvformat.extract.documents.reading.Reader` of one Parquet file, or of all files of a directory.

    Parameters
    ----------
    path
        A file, or a directory whose ``*.parquet`` files are read in the order of their names.
    columns
        By member, the column it comes from, where that is not called like the member. Other columns are not read.

    Raises
    ------
    DependencyError
        E205 without pyarrow.
    StorageError
        E203 where a file cannot be read as Parquet.
    """

    noun = "row"

    def __init__(self, path: Path, *, columns: Mapping[str, str] | None = None) -> None:
        check_columns(columns)
        try:
            self._parquet: Any = import_module("pyarrow.parquet")
        except ImportError as error:
            raise make_error("E205", "Parquet needs pyarrow: pip install 'kvformat[data]'", path=path) from error
        self.location = str(path)
        self._columns = columns
        self._files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
        self._first = [0]
        for file in self._files:
            with self._open(file) as opened:
                self._first.append(self._first[-1] + int(opened.metadata.num_rows))
        self._rows = 0
        self._size = sum(file.stat().st_size for file in self._files)

    def __iter__(self) -> Iterator[object]:
        """One object a row; E300 where a column is missing."""
        self._rows = 0
        for file in self._files:
            with self._open(file) as opened:
                columns = chosen(opened.schema_arrow.names, self._columns, file)
                batches = opened.iter_batches(batch_size=_BATCH, columns=sorted(set(columns.values())))
                for batch in self._reading(batches, file):
                    yield from objects_of(batch, columns)
                    self._rows += int(batch.num_rows)

    def place(self, ordinal: int) -> str:
        """Number of the row, from 0 in each file."""
        number = bisect_right(self._first, ordinal) - 1
        row = f"row {ordinal - self._first[number]}"
        return row if len(self._files) == 1 else f"{self._files[number].name} {row}"

    def done(self) -> tuple[int, int]:
        """Bytes, as if all rows were of one size."""
        return self._size * self._rows // max(self._first[-1], 1), self._size

    def _open(self, file: Path) -> Any:
        try:
            return self._parquet.ParquetFile(file)
        except (OSError, ValueError) as error:
            raise _unreadable(file, error) from error

    @staticmethod
    def _reading(batches: Iterator[Any], file: Path) -> Iterator[Any]:
        while True:
            try:
                batch = next(batches, None)
            except (OSError, ValueError) as error:
                raise _unreadable(file, error) from error
            if batch is None:
                return
            yield batch


def _unreadable(file: Path, error: Exception) -> Exception:
    return make_error("E203", f"the Parquet file cannot be read: {error}", path=file)
