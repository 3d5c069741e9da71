"""Mutations of files as such: missing, odd, of another size or digest (E002 to E007)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from kvformat.spec import limits
from kvformat.spec.tables import TABLES
from kvformat.testing.dataset_files import DatasetFiles
from kvformat.testing.mutations.edits import Edit, Found, Mutation, put, root

__all__ = ["MUTATIONS"]


def _first_part(table: str) -> Callable[[DatasetFiles], str]:
    return lambda files: files.part_paths(table)[0]


_WHERE: dict[str, tuple[Callable[[DatasetFiles], str], Found]] = {
    "manifest": (DatasetFiles.manifest_path, "open"),
    "covered-file": (lambda files: f"files/{files.manifest['files'][-1]['sha256']}", "verify"),
    "shard": (lambda files: files.shard_paths()[0], "touch"),
    **{f"{table}-part".replace("_", "-"): (_first_part(table), "touch") for table in TABLES},
}
"""By kind of file, its path and when it is first opened."""


def _remove(directory: Path, file: Path) -> None:
    """Remove the file and the folders it leaves empty, which no version control system would keep."""
    file.unlink()
    for folder in file.parents:
        if folder == directory or any(folder.iterdir()):
            break
        folder.rmdir()


def _make_link(directory: Path, file: Path) -> None:
    """Move the file out of the dataset, and put a link to it in its place: all bytes are there."""
    moved = directory.parent / "moved"
    file.rename(moved)
    file.symlink_to(os.path.relpath(moved, file.parent))


def _make_folder(_: Path, file: Path) -> None:
    data = file.read_bytes()
    file.unlink()
    file.mkdir()
    (file / "content").write_bytes(data)


def _make_fifo(_: Path, file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _truncate(_: Path, file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _empty(_: Path, file: Path) -> None:
    file.write_bytes(b"")


def _extend(_: Path, file: Path) -> None:
    file.write_bytes(file.read_bytes() + bytes(4096))


def _flip(_: Path, file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _act(path: Callable[[DatasetFiles], str], action: Callable[[Path, Path], None]) -> Edit:
    def apply(files: DatasetFiles) -> None:
        files.actions[path(files)] = action

    return apply


def _on_files() -> Iterator[Mutation]:
    everywhere: list[tuple[str, str, Callable[[Path, Path], None], bool]] = [
        ("E002", "missing", _remove, True),
        ("E003", "is-a-link", _make_link, True),
        ("E003", "is-a-folder", _make_folder, False),
        ("E003", "is-a-pipe", _make_fifo, False),
        ("E005", "truncated", _truncate, True),
        ("E005", "empty", _empty, False),
        ("E005", "extended", _extend, False),
    ]
    for code, what, action, vector in everywhere:
        for where, (path, found) in _WHERE.items():
            yield Mutation(
                code=code,
                name=f"{where}-{what}",
                apply=_act(path, action),
                base="model-context",
                found=found,
                vector=vector and where in ("manifest", "covered-file", "shard", "rows-part"),
            )
    for what, action, vector in (
        ("is-a-link", _make_link, True),
        ("is-a-folder", _make_folder, False),
        ("is-a-pipe", _make_fifo, False),
    ):
        yield Mutation(code="E003", name=f"root-{what}", apply=_act(lambda _: "kvformat.json", action), vector=vector)
    for where, (path, found) in _WHERE.items():
        if where != "shard":
            yield Mutation(
                code="E006",
                name=f"{where}-flipped",
                apply=_act(path, _flip),
                base="model-context",
                found=found,
                vector=where in ("manifest", "covered-file", "names-part"),
            )


def _nothing(_: DatasetFiles) -> None:
    """The dataset is sound."""


def _other_digest(files: DatasetFiles) -> None:
    digest = files.root["manifest"]["sha256"]
    files.root["manifest"]["sha256"] = digest[:-1] + ("0" if digest[-1] != "0" else "1")
    files.reseal("root")


MUTATIONS = (
    *_on_files(),
    Mutation(code="E004", name="root-too-large", apply=root(put("x" * limits.MAX_ROOT_NBYTES, "x"))),
    Mutation(
        code="E004",
        name="manifest-too-large",
        apply=root(put(limits.MAX_MANIFEST_NBYTES + 1, "manifest", "size")),
    ),
    Mutation(code="E005", name="root-states-less", apply=root(put(1, "manifest", "size")), vector=False),
    Mutation(code="E006", name="root-states-other-digest", apply=_other_digest),
    Mutation(code="E007", name="another-id-pinned", apply=_nothing, expected_id="0" * 64),
    Mutation(
        code="E007",
        name="id-cut-short",
        apply=_nothing,
        expected_id="",
        vector=False,
    ),
)
