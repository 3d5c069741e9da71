"""The run of a staging directory, and its covered files: written down by the first worker, compared by the others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvformat.errors import make_error
from kvformat.spec.manifest import CoveredFile
from kvformat.storage.faults import translated
from kvformat.storage.local_write import LocalFiles
from kvformat.write.run import RunIdentity, SameFile
from kvformat.write.run_files import agree_on_files
from kvformat.write.staging import COVERED, place_file

__all__ = ["LocalRun"]


class LocalRun:
    """``run.json`` and ``files/`` of a staging directory, two below the dataset's.

    Parameters
    ----------
    token
        Of the worker: in the names of what it has in work.

    Attributes
    ----------
    began
        Whether this worker wrote the run down.
    """

    def __init__(self, files: LocalFiles, path: Path, token: str) -> None:
        self._files = files
        self._path = path
        self._token = token
        self.began = False

    def agree(
        self, run: RunIdentity, covered: Mapping[str, bytes], same_file: SameFile | None
    ) -> tuple[RunIdentity, Mapping[str, bytes]]:
        """Write down the run and its covered files, or find that those that are there agree.

        Returns
        -------
        run, covered
            Those that count: of the worker that began.

        Raises
        ------
        IdentityError
            E120 where the run that is there is another one.
        DamageError
            E116 where it cannot be read; E002 where the staging is removed meanwhile.
        """
        self._files.make_dir(self._path / COVERED)
        path = self._path / "run.json"
        first = self._written(path)
        if first is None:
            for file in run.files:  # before whoever reads of them can look for them
                self._store(file, covered[file.name])
            self.began = place_file(self._files, path, run.encode(), token=self._token)
            first = self._written(path)
            if first is None:
                raise make_error("E002", "the staging was removed: start again", path=path)
        found, agreed = agree_on_files(first, run, covered, self._stored, same_file, self._path)
        for file in first.files:
            self._store(file, agreed[file.name])
        for place in (self._path, *self._path.parents[:2]):  # a killed worker may not have come so far
            self._files.sync_dir(place)
        return found, agreed

    def _written(self, path: Path) -> RunIdentity | None:
        with translated(path):
            try:
                return RunIdentity.decode(path.read_bytes(), path=path)
            except FileNotFoundError:
                return None

    def _stored(self, file: CoveredFile) -> bytes | None:
        path = self._path / COVERED / file.sha256
        with translated(path):
            try:
                return path.read_bytes()
            except FileNotFoundError:
                return None

    def _store(self, file: CoveredFile, content: bytes) -> None:
        path = self._path / COVERED / file.sha256
        if not place_file(self._files, path, content, token=self._token) and self._stored(file) != content:
            message = "a staged file with this name has other content: run `kvformat clean` and start again"
            raise make_error("E116", message, path=path)
