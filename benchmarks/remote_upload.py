"""A dataset sent to the server, copied or written there, against bare PUTs of the same files and their digests."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import kvformat
from benchmarks.harness import Bar, Contender, print_notes
from benchmarks.remote_measure import best_of, measure_all, print_metered, ratio_bar
from benchmarks.remote_origin import Limits
from benchmarks.remote_reading import REQUEST_NBYTES
from benchmarks.remote_senders import DIGESTING, SENDERS
from benchmarks.remote_server import Origin
from benchmarks.shapes import Corpus

__all__ = ["measure_upload"]

COPY, CREATE = "kvformat copy", "kvformat create"
UNSIGNED = ", payload unsigned"


class _Bucket:
    """A new bucket for each round; the one before is removed, so that there is room."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self.name = origin.bucket()

    def renew(self) -> None:
        """Before a round, not timed."""
        self.drop()
        self.name = self._origin.bucket()

    def drop(self) -> None:
        """Remove it."""
        self._origin.drop(self.name)


def measure_upload(
    origin: Origin, corpus: Corpus, local: Path, limits: Limits, spool: Path, *, shard_nbytes: int, rounds: int
) -> list[Bar]:
    """The table, and the bars against the best bare client that computes digests."""
    files = [(f"ds/{path.relative_to(local).as_posix()}", path) for path in sorted(local.rglob("*")) if path.is_file()]
    nbytes = sum(path.stat().st_size for _, path in files)
    bucket = _Bucket(origin)
    expected = kvformat.open(local).id

    def copied(_work: object, options: dict[str, Any]) -> int:
        report = kvformat.copy(local, f"s3://{bucket.name}/ds", target_options=options)
        _require(report.id, expected)
        return nbytes

    def created(_work: object, options: dict[str, Any]) -> int:
        with _writer(options, corpus, f"s3://{bucket.name}/ds", spool, shard_nbytes) as writer:
            for record in corpus.records:
                k, v = record.tensors()
                writer.add(record.name, {"k": k, "v": v}, token_ids=record.token_ids)
        return nbytes

    contenders = []
    for kind, options in (("", origin.options), (UNSIGNED, _unsigned(origin.options))):
        contenders += [
            Contender(
                name=COPY + kind,
                run=partial(copied, options=options),
                verify="sent: SHA-256, CRC-32 or MD5",
                before=bucket.renew,
                note="from the local directory, page cache hot; every file proved by its digest on the way",
            ),
            Contender(
                name=CREATE + kind,
                run=partial(created, options=options),
                verify="made: all sums",
                before=bucket.renew,
                note=f"from memory, shards of {shard_nbytes >> 20} MiB through the spool; sums, digests and index too",
            ),
        ]
    for client, make in SENDERS.items():
        send = make(origin.s3, REQUEST_NBYTES, limits.put[client])

        def run(_work: object, send: Callable[..., None] = send) -> int:
            send(bucket.name, files)
            return nbytes

        note = f"multipart, {limits.put[client]} parts in flight"
        contenders.append(Contender(name=client, run=run, before=bucket.renew, bare=True, note=note))
    try:
        for contender in contenders:
            _check(origin, contender, bucket, local)
        found = measure_all(contenders, server_pid=origin.pid, rounds=rounds, work=lambda _: range(1), warmup=0)
    finally:
        bucket.drop()
        shutil.rmtree(spool, ignore_errors=True)
    by_name = {series.contender.name: series for series in found}
    bare = best_of([by_name[name] for name in DIGESTING])
    title = (
        f"upload of a dataset, {corpus.shape.name}: {len(files)} files, {nbytes / 1e9:.2f} GB, parts of "
        f"{REQUEST_NBYTES >> 20} MiB; {rounds} rounds"
    )
    print_metered(title, found, against=["obstore", bare.contender.name])
    print_notes(contenders)
    return [
        ratio_bar(f"{corpus.shape.name}, upload", by_name[name], bare, 0.85)
        for name in (COPY + UNSIGNED, CREATE + UNSIGNED)
    ]


def _unsigned(options: dict[str, Any]) -> dict[str, Any]:
    """Without a SHA-256 of each part in its signature, as over HTTPS; what arrived is compared all the same."""
    return {**options, "config_kwargs": {"s3": {"payload_signing_enabled": False}}}


def _writer(options: dict[str, Any], corpus: Corpus, url: str, spool: Path, shard_nbytes: int) -> kvformat.Writer:
    shape = corpus.shape
    schema = kvformat.Schema.uniform(
        num_layers=shape.num_layers, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, dtype="BF16"
    )
    return kvformat.create(
        url,
        schema=schema,
        context=kvformat.Context.unknown(),
        shard_nbytes=shard_nbytes,
        storage_options=options,
        spool=spool,
    )


def _require(found: str, expected: str) -> None:
    if found != expected:
        raise ValueError(f"the id is {found}, expected {expected}")


def _check(origin: Origin, contender: Contender, bucket: _Bucket, local: Path) -> None:
    """What was sent is the dataset, whole and sound."""
    bucket.renew()
    contender.run(None)
    report = kvformat.verify(
        f"s3://{bucket.name}/ds", expected_id=kvformat.open(local).id, storage_options=origin.options
    )
    if report.findings:
        raise ValueError(f"{contender.name}: {report.findings[0].message}")
