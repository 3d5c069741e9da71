"""Opening a dataset of a million records, and finding one of them by name and by document.

The index is synthetic, made of the library's own tables; there are no shards, which opening and finding never touch.
Each measurement is a process of its own, in which everything was imported before.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.contenders import reason
from benchmarks.harness import (
    Bar,
    console,
    print_bars,
    print_facts,
    print_missing,
    process_table,
    quartiles,
    workspace,
)

_LOOKUPS = 20_000
_SLOTS = 1024


def name_of(number: int) -> str:
    return f"clip-{number:09d}"


def document_of(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


# ------------------------------------------------------------------------------------------------------------ building


def build_kvformat(path: Path, count: int) -> None:
    """A dataset of ``count`` records as a writer leaves it, but for the shards."""
    import kvformat
    from kvformat.spec import canonical, limits
    from kvformat.spec.layout import Layout
    from kvformat.spec.manifest import Manifest, Totals
    from kvformat.write.rows import Tables
    from kvformat.write.seal import encode_root, index_of

    schema = kvformat.Schema.uniform(num_layers=36, num_kv_heads=8, head_dim=128)
    layout = Layout(schema)
    header_size = layout.header_size(limits.VERSION, _SLOTS)
    tables = Tables(1)
    offset = 0
    tokens = np.random.default_rng(5).lognormal(5.0, 0.7, count).astype(int) + 1
    for number, length in enumerate(tokens.tolist()):
        tables.add_record(offset=offset, dims=(length,), document=document_of(number), record_sum=bytes(16))
        tables.add_name(record=number, name=name_of(number).encode(), position=number)
        offset += layout.place((length,)).nbytes
        if (number + 1) % _SLOTS == 0 or number + 1 == count:
            first = number // _SLOTS * _SLOTS
            sha256 = hashlib.sha256(b"shard" + first.to_bytes(8, "little")).digest()
            tables.add_shard(sha256=sha256, size=header_size + offset, first_record=first)
            offset = 0
    parts = list(tables.encode(limits.VERSION))
    manifest = Manifest(
        context=kvformat.Context.unknown(),
        files=(),
        format="kvformat",
        header_size=header_size,
        index=index_of(parts),
        provenance={},
        schema=schema,
        shard_slots=_SLOTS,
        skipped=(),
        text=kvformat.Text(),
        totals=Totals(
            names=count, nbytes=tables.nbytes, records=count, shards=tables.num_shards, tokens=tables.tokens
        ),
        version=limits.VERSION,
    )
    data = canonical.encode(manifest)
    for folder in ("index", "manifest"):
        (path / folder).mkdir(parents=True)
    for part in parts:
        (path / "index" / f"{hashlib.sha256(part.data).hexdigest()}.safetensors").write_bytes(part.data)
    (path / "manifest" / f"{hashlib.sha256(data).hexdigest()}.json").write_bytes(data)
    (path / "kvformat.json").write_bytes(encode_root(data, limits.VERSION))


def build_lmdb(path: Path, count: int) -> None:
    """Names to record numbers and back to rows, in LMDB: what an index of the same use takes there."""
    import lmdb

    path.mkdir(parents=True)
    entries = sorted((name_of(number).encode(), number) for number in range(count))
    with lmdb.open(str(path), map_size=1 << 30) as database, database.begin(write=True) as transaction:
        for name, number in entries:
            transaction.put(name, number.to_bytes(8, "little") + document_of(number), append=True)


def build_json(path: Path, count: int) -> None:
    """The kind of index file that sharded dataset libraries keep: an entry a record."""
    path.mkdir(parents=True)
    rows = [{"name": name_of(n), "shard": n // _SLOTS, "index": n % _SLOTS} for n in range(count)]
    (path / "index.json").write_text(json.dumps(rows), encoding="utf-8")


# ----------------------------------------------------------------------------------------------- measuring, in a child


def measure_kvformat(path: Path, count: int, *, verified: bool) -> dict[str, float]:
    import kvformat

    kvformat.open  # noqa: B018 - imports what opening needs, before anything is timed
    numbers = _numbers(count)
    names, documents = [name_of(n) for n in numbers], [document_of(n) for n in numbers]
    before = anonymous_nbytes()
    seconds, dataset = _timed(lambda: kvformat.open(path))
    touched = seconds
    if verified:
        index = dataset.index
        tables = (index.shards, index.rows, index.names, index.document_keys, index.name_keys)

        def touch() -> None:
            for table in tables:
                for number in range(len(table.parts)):
                    table.part(number)

        touched += _timed(touch)[0]
    result = {"open_ms": touched * 1e3, "pickle_nbytes": float(len(pickle.dumps(dataset)))}
    if len(dataset) != count:
        raise ValueError(f"{len(dataset)} records, expected {count}")
    find_name, find_document = dataset.index.find_name, dataset.index.find_document
    first_name, found = _timed(lambda: find_name(names[0]))
    first_document, also = _timed(lambda: find_document(documents[0]))
    if found != numbers[0] or also != numbers[0]:
        raise ValueError("a lookup found another record")
    result["first_lookup_us"] = (first_name + first_document) / 2 * 1e6
    result["name_us"] = _lookups(find_name, names, numbers)
    result["document_us"] = _lookups(find_document, documents, numbers)
    result["anonymous_mb"] = (anonymous_nbytes() - before) / 1e6
    return result


def measure_lmdb(path: Path, count: int) -> dict[str, float]:
    import lmdb

    numbers = _numbers(count)
    names = [name_of(n) for n in numbers]
    before = anonymous_nbytes()

    def opening() -> Any:
        database = lmdb.open(str(path), readonly=True, lock=False, readahead=False)
        return database, database.begin(buffers=True)

    seconds, (database, transaction) = _timed(opening)

    def find(name: str) -> int:
        return int.from_bytes(transaction.get(name.encode())[:8], "little")

    first = _timed(lambda: find(names[0]))[0]
    result = {"open_ms": seconds * 1e3, "first_lookup_us": first * 1e6, "name_us": _lookups(find, names, numbers)}
    result["anonymous_mb"] = (anonymous_nbytes() - before) / 1e6
    transaction.abort()
    database.close()
    return result


def measure_json(path: Path, count: int) -> dict[str, float]:
    import msgspec

    numbers = _numbers(count)
    names = [name_of(n) for n in numbers]
    before = anonymous_nbytes()

    def opening() -> dict[str, int]:
        # The quickest decoder there is, and a dict for finding names.
        rows = msgspec.json.decode((path / "index.json").read_bytes())
        return {row["name"]: row["shard"] * _SLOTS + row["index"] for row in rows}

    seconds, found = _timed(opening)
    result = {"open_ms": seconds * 1e3, "name_us": _lookups(found.__getitem__, names, numbers)}
    result["anonymous_mb"] = (anonymous_nbytes() - before) / 1e6
    return result


LAZY, WHOLE = "kvformat, parts lazy", "kvformat, every part verified"
VERIFY = {LAZY: "part touched", WHOLE: "SHA-256 of all"}
MEASURES: dict[str, tuple[str, Callable[[Path, int], None], Callable[[Path, int], dict[str, float]]]] = {
    LAZY: ("kvformat", build_kvformat, lambda p, n: measure_kvformat(p, n, verified=False)),
    WHOLE: ("kvformat", build_kvformat, lambda p, n: measure_kvformat(p, n, verified=True)),
    "LMDB, names": ("lmdb", build_lmdb, measure_lmdb),
    "JSON, an entry a record": ("json", build_json, measure_json),
}


def _numbers(count: int) -> list[int]:
    return np.random.default_rng(9).integers(count, size=min(_LOOKUPS, count)).tolist()


def _lookups(find: Callable[[Any], int | None], keys: list[Any], numbers: list[int]) -> float:
    begin = time.perf_counter()
    found = [find(key) for key in keys]
    seconds = time.perf_counter() - begin
    if found != numbers:
        raise ValueError("a lookup found another record")
    return seconds / len(keys) * 1e6


def _timed(action: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = action()
    return time.perf_counter() - begin, result


def anonymous_nbytes() -> int:
    """Anonymous memory of this process in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


# -------------------------------------------------------------------------------------------------------------- script


def _in_child(name: str, path: Path, count: int) -> dict[str, float]:
    options = ["--child", name, "--path", str(path), "--count", str(count)]
    command = [sys.executable, "-m", "benchmarks.open_million", *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _print(found: dict[str, dict[str, list[float]]], count: int) -> None:
    columns = {
        "open_ms": "open ms",
        "first_lookup_us": "first lookup us",
        "name_us": "by name us",
        "document_us": "by document us",
        "anonymous_mb": "anonymous MB",
        "pickle_nbytes": "pickle bytes",
    }
    table = process_table(
        f"open {count:,} records, processes of their own, medians (p25 - p75 of open)",
        [*columns.values(), "open, x lazy"],
        caption="x lazy: times as long; first lookup: of the process, verifying parts that are lazy",
    )
    lazy = found[LAZY]["open_ms"]
    for name, values in found.items():
        cells = [f"{statistics.median(values[c]):,.2f}" if c in values else "-" for c in columns]
        low, _, high = quartiles(values["open_ms"])
        cells[0] += f" ({low:,.2f} - {high:,.2f})"
        opens = statistics.median(one / other for one, other in zip(values["open_ms"], lazy, strict=True))
        table.add_row(
            name,
            VERIFY.get(name, "none"),
            "hot",
            *cells,
            f"{opens:.2f}",
            style="bold" if name.startswith("kvformat") else "",
        )
    out = console()
    out.print(table)
    out.print()


def _bars(found: dict[str, dict[str, list[float]]], count: int) -> list[Bar]:
    lazy, verified = (
        {key: statistics.median(values) for key, values in found[name].items()} for name in (LAZY, WHOLE)
    )
    limits = (
        ("open, parts lazy", lazy["open_ms"], 10, "ms"),
        ("open, every part verified", verified["open_ms"], 200, "ms"),
        ("anonymous memory, everything touched", max(lazy["anonymous_mb"], verified["anonymous_mb"]), 10, "MB"),
        ("pickle", lazy["pickle_nbytes"] / 1e3, 10, "kB"),
        ("lookup by name", verified["name_us"], 20, "us"),
        ("lookup by document", verified["document_us"], 20, "us"),
    )
    return [
        Bar(
            what=f"{count:,} records: {what}",
            target=f"<= {limit} {unit}",
            found=f"{value:.2f} {unit}",
            met=value <= limit,
        )
        for what, value, limit, unit in limits
    ]


def main(
    rounds: Annotated[int, typer.Option(help="Processes a contender.")] = 9,
    fraction: Annotated[float, typer.Option(help="Part of the records, for a trial run.")] = 1.0,
    child: Annotated[str | None, typer.Option(hidden=True)] = None,
    path: Annotated[Path | None, typer.Option(hidden=True)] = None,
    count: Annotated[int, typer.Option(hidden=True)] = 1_000_000,
    *,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the data under .bench/.")] = False,
) -> None:
    """Open a dataset of a million records and look records up."""
    if child is not None and path is not None:
        print(json.dumps(MEASURES[child][2](path, count)))
        return
    count = max(1000, int(count * fraction))
    missing: list[tuple[str, str]] = []
    found: dict[str, dict[str, list[float]]] = {}
    with workspace("open", keep=keep) as home:
        print_facts(home)
        ready = []
        for name, (folder, build, _) in MEASURES.items():
            try:
                if not (home / folder).exists():
                    build(home / folder, count)
                _in_child(name, home / folder, count)
            except Exception as error:
                if folder == "kvformat":
                    raise
                missing.append((name, reason(error)))
                continue
            ready.append((name, home / folder))
        os.sync()
        for number in range(rounds):
            for name, folder_path in ready[:: 1 if number % 2 else -1]:
                for key, value in _in_child(name, folder_path, count).items():
                    found.setdefault(name, {}).setdefault(key, []).append(value)
    _print({name: found[name] for name, _ in ready}, count)
    print_missing(missing)
    print_bars(_bars(found, count))


if __name__ == "__main__":
    typer.run(main)
