"""What mutations are made of: edits of the decoded JSON, of its text, of the schema, of tables and of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from msgspec import Struct

from kvformat.testing.dataset_files import DatasetFiles

__all__ = ["Edit", "Found", "Mutation", "chain", "drop", "edit_schema", "manifest", "put", "root", "text", "totals"]

Edit = Callable[[DatasetFiles], None]
Found = Literal["open", "touch", "verify"]
Step = str | int


class Mutation(Struct, frozen=True, kw_only=True):
    """One defect.

    Attributes
    ----------
    code, name
        What a reader must report, and what was done. Together they name a test vector.
    apply
        Introduces the defect and seals the dataset.
    base
        Valid dataset it is applied to, one of :data:`kvformat.testing.vectors.VALID`.
    found
        When a reader finds it at the latest: at opening, when it touches what is concerned, by verification only.
    expected_id
        Dataset id the reader is told to expect.
    vector
        Whether it is a test vector too; not where a file is large or cannot be kept in a version control system.
    """

    code: str
    name: str
    apply: Edit
    base: str = "one-record"
    found: Found = "open"
    expected_id: str | None = None
    vector: bool = True

    @property
    def case(self) -> str:
        """Name of the test vector."""
        return f"{self.code}-{self.name}"


def chain(*edits: Edit) -> Edit:
    """One edit after the other."""

    def apply(files: DatasetFiles) -> None:
        for edit in edits:
            edit(files)

    return apply


def put(value: Any, *steps: Step) -> Callable[[Any], None]:
    """Set a member (or an item) of a decoded value; the steps lead to it."""

    def apply(decoded: Any) -> None:
        _walk(decoded, steps[:-1])[steps[-1]] = value

    return apply


def drop(*steps: Step) -> Callable[[Any], None]:
    """Remove a member (or an item) of a decoded value."""

    def apply(decoded: Any) -> None:
        del _walk(decoded, steps[:-1])[steps[-1]]

    return apply


def root(*changes: Callable[[Any], None]) -> Edit:
    """Change the root."""

    def apply(files: DatasetFiles) -> None:
        for change in changes:
            change(files.root)
        files.reseal("root")

    return apply


def manifest(*changes: Callable[[Any], None]) -> Edit:
    """Change the manifest and seal it."""

    def apply(files: DatasetFiles) -> None:
        for change in changes:
            change(files.manifest)
        files.reseal("manifest")

    return apply


def edit_schema(*changes: Callable[[Any], None]) -> Edit:
    """Change the schema; shard headers and header size follow where the stored records still fit it."""

    def apply(files: DatasetFiles) -> None:
        for change in changes:
            change(files.manifest["schema"])
        files.adopt_schema()
        files.reseal("shards")

    return apply


def text(which: Literal["root", "manifest"], change: Callable[[bytes], bytes]) -> Edit:
    """Change the text of the root or of the manifest, and seal it as it is."""

    def apply(files: DatasetFiles) -> None:
        if which == "root":
            files.root_text = change(files.root_text)
        else:
            files.manifest_text = change(files.manifest_text)
            files.reseal("manifest_text")

    return apply


def totals(name: str, difference: int) -> Callable[[Any], None]:
    """Change one of the manifest's totals."""

    def apply(decoded: Any) -> None:
        decoded["totals"][name] += difference

    return apply


def _walk(decoded: Any, steps: Sequence[Step]) -> Any:
    for step in steps:
        decoded = decoded[step]
    return decoded
