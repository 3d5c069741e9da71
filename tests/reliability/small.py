"""A small dataset with everything a publication consists of, made the same way again and again."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

import kvformat
from kvformat.storage.local_write import LocalFiles

__all__ = ["NUM_RECORDS", "Unsynced", "check_complete", "create", "fill", "tensors", "tree"]

SCHEMA = kvformat.Schema.uniform(num_layers=2, num_kv_heads=1, head_dim=4, dtype="F16")
NUM_RECORDS = 7
COVERED = {"notes": b"made by a test", "tokenizer": b"{}"}


class Unsynced(LocalFiles):
    """For runs whose durability is not the question."""

    def sync(self, fd: int, path: Path) -> None:
        """Trust the machine."""


def create(
    location: Path, *, files: LocalFiles | None = None, resume: bool = False, variant: int = 0, tag: str = ""
) -> kvformat.Writer:
    """A writer whose shards hold two records each."""
    return kvformat.create(
        location,
        schema=SCHEMA,
        context=kvformat.Context.unknown(),
        provenance={"variant": f"{variant}"},
        files=COVERED,
        shard_slots=2,
        resume=resume,
        tag=tag,
        filesystem=files,
    )


def tensors(record: int, *, variant: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Components and token ids of a record."""
    num_tokens = 3 + 5 * record
    generator = np.random.default_rng([record, variant])
    components = {name: generator.standard_normal((2, num_tokens, 1, 4)).astype(np.float16) for name in ("k", "v")}
    return components, np.arange(num_tokens, dtype=np.int32) + record


def fill(writer: kvformat.Writer, *, variant: int = 0) -> None:
    """All adds of the dataset: records, another name for two of them, a document given twice, a skipped one."""
    for record in range(NUM_RECORDS):
        components, token_ids = tensors(record, variant=variant)
        writer.add(f"clip-{record}", components, token_ids=token_ids)
    writer.alias("alias-of-2", "clip-2")
    writer.add("again-4", *tensors(4, variant=variant)[:1], token_ids=tensors(4)[1])
    writer.skip("empty", "no tokens")


def fill_many(writer: kvformat.Writer, repeats: int) -> None:
    """So many times the records, each time of other values, with a few names."""
    for repeat in range(repeats):
        for record in range(NUM_RECORDS):
            components, token_ids = tensors(record, variant=repeat)
            writer.add(f"clip-{repeat}-{record}", components, token_ids=token_ids + 1000 * repeat)
        writer.alias(f"alias-{repeat}", f"clip-{repeat}-3")


def check_complete(location: Path, identity: str) -> None:
    """Exactly the dataset with this id is here, and sound."""
    report = kvformat.verify(location)
    assert report.findings == ()
    assert (report.ok, report.id, report.level, report.records) == (True, identity, 4, NUM_RECORDS)
    assert {warning.code for warning in report.warnings} <= {"W002"}
    with_names = dict(kvformat.open(location, expected_id=identity).names())
    assert with_names == {
        **{f"clip-{record}": record for record in range(NUM_RECORDS)},
        "alias-of-2": 2,
        "again-4": 4,
    }


def check_records(location: Path, *, variant: int = 0) -> None:
    """Every record read back, to the bit."""
    dataset = kvformat.open(location)
    for number, record in enumerate(dataset):
        components, token_ids = tensors(number, variant=variant)
        for name, values in components.items():
            assert record.component(name).numpy().tobytes() == values.tobytes()
        assert record.extra("token_ids").tolist() == token_ids.tolist()


def tree(directory: Path) -> dict[str, str]:
    """Everything below a directory: ``dir``, or the digest of a file."""
    return {
        path.relative_to(directory).as_posix(): "dir"
        if path.is_dir()
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
    }
