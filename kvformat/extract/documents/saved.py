"""Data sets that Hugging Face ``datasets`` saved on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from kvformat.errors import make_error
from kvformat.extract.documents.arrow import check_columns, chosen, objects_of

__all__ = ["SavedRows", "is_saved"]

_BATCH = 1024
_SPLITS = "dataset_dict.json"


class SavedRows:
    """A :class:`~kvformat.extract.documents.reading.Reader` of a directory that ``Dataset.save_to_disk`` wrote.

    Parameters
    ----------
    columns
        By member, the column it comes from, where that is not called like the member. Other columns are not read.

    Raises
    ------
    DependencyError
        E205 without datasets.
    InputError
        E300 for a directory of several splits, and where a column is missing.
    StorageError
        E203 where it cannot be loaded.
    """

    noun = "row"

    def __init__(self, path: Path, *, columns: Mapping[str, str] | None = None) -> None:
        check_columns(columns)
        if (path / _SPLITS).is_file():
            splits = sorted(entry.name for entry in path.iterdir() if entry.is_dir())
            raise make_error(
                "E300", f"there are several splits; name the directory of one of them: {', '.join(splits)}", path=path
            )
        try:
            library: Any = import_module("datasets")
        except ImportError as error:
            raise make_error("E205", "reading it needs datasets: pip install 'kvformat[data]'", path=path) from error
        self.location = str(path)
        try:
            loaded = library.load_from_disk(str(path))
        except Exception as error:  # whatever damaged Arrow files and descriptions lead to
            raise make_error("E203", f"the data set cannot be loaded: {error}", path=path) from error
        self._columns = chosen(loaded.column_names, columns, path)
        self._rows: Any = loaded.select_columns(sorted(set(self._columns.values()))).with_format("arrow")

    def __iter__(self) -> Iterator[object]:
        """One object a row."""
        for table in self._rows.iter(batch_size=_BATCH):
            for batch in table.to_batches():
                yield from objects_of(batch, self._columns)

    def place(self, ordinal: int) -> str:
        """Number of the row, from 0."""
        return f"row {ordinal}"

    def done(self) -> None:
        """Nobody knows."""
        return


def is_saved(path: Path) -> bool:
    """Whether a directory is one that ``save_to_disk`` wrote."""
    return (path / "state.json").is_file() or (path / _SPLITS).is_file()
