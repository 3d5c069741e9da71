"""Names, sizes, shards and parts."""

from __future__ import annotations

import numpy as np

from kvformat.testing.dataset_files import DatasetFiles
from kvformat.testing.vectors.case import TOKENS, UNIFORM, Case, Entry, schema_of, usual_entries
from kvformat.testing.vectors.values import component

__all__ = ["CASES", "COLLIDING_NAMES"]

COLLIDING_NAMES = (("qose", "2Ow51le0"), ("rlrn", "7Fp44eb1"), ("siqm", "7Hv04kd5"))
"""Pairs of names with equal XXH3-64: found by inverting the hash of 8-byte inputs."""


def _names_case() -> Case:
    plain = usual_entries(3, 2, 5, 1)
    names = (
        ("caf\u00e9", "cafe\u0301", "\u8ca1\u5bcc", "zzz", "a"),  # composed and decomposed are two names
        ("\U0001f600/\U0001f9d1\u200d\U0001f680", "line\nbreak", "nul\0byte", "\x7f"),
        ("x" * 512, "\u00fc" * 256, "x"),
        (COLLIDING_NAMES[0][1], COLLIDING_NAMES[1][0], COLLIDING_NAMES[0][0], " "),
    )
    entries = tuple(Entry(names=given, document=entry.document) for given, entry in zip(names, plain, strict=True))
    return Case(name="aliases-and-unicode-names", schema=UNIFORM, entries=entries)


def _boundary_case() -> Case:
    hidden = component("h", "hidden", (5,), TOKENS, ("width", 511))
    return Case(
        name="record-without-pad",
        schema=schema_of(hidden, extras=()),
        entries=usual_entries(4, 8),
        options={"shard_slots": 1},
    )


def _cut_tables(files: DatasetFiles) -> None:
    """Parts that no writer of this size would make: every table in several, equal name keys on both sides of a cut."""
    keys = files.table("name_keys")["key"]
    equal = int(np.flatnonzero(keys[1:] == keys[:-1])[0]) + 1
    cuts = {
        "shards": (1, 3),
        "rows": (2, 6),
        "names": (1, 2, 9),
        "document_keys": (3, 4),
        "name_keys": tuple(sorted({equal, len(keys) - 1})),
    }
    for table, where in cuts.items():
        files.set_table(table, files.table(table), cuts=where)
    files.reseal("parts")


def _parts_case() -> Case:
    plain = usual_entries(1, 2, 3, 4, 5, 6, 7)
    extra = [(*pair, f"more-{n}") for n, pair in enumerate(COLLIDING_NAMES)]
    entries = tuple(
        Entry(names=(*entry.names, *(extra[n] if n < len(extra) else ())), document=entry.document)
        for n, entry in enumerate(plain)
    )
    return Case(
        name="tables-in-parts", schema=UNIFORM, entries=entries, options={"shard_slots": 2}, finish=_cut_tables
    )


CASES = (
    _names_case(),
    _boundary_case(),
    _parts_case(),
)
