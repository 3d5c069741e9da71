"""What extraction costs beside the model: forward, copy, hashing and writing beside each other, until durable.

writer     a copy in memory for a model, through the pipeline, against the writer alone fed the same tensors
model      a real model through the pipeline, against its bare forwards over the same batches; with a core left for
           storing, as beside a GPU, and with none, where what storing computes is taken from the model
processes  the first again by two processes, half of the records each, against one; and the disk by bare writers
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
import typer

import kvformat
from benchmarks.harness import (
    Bar,
    Contender,
    alternate,
    console,
    print_bars,
    print_facts,
    print_notes,
    print_table,
    process_table,
    quartiles,
    workspace,
    write_synced,
)
from benchmarks.shapes import SHAPES, Corpus, Record, Shape
from benchmarks.write import SHARD_NBYTES, contender_of, touch_page_cache
from kvformat.extract.meter import PipelineTimes
from kvformat.extract.pipeline import RecordSink, run_groups
from kvformat.interfaces import Extracted
from kvformat.spec.context import Context, Text
from kvformat.spec.document import Document

PARTS = ("writer", "model", "processes")
Part = Literal["writer", "model", "processes"]
MODEL = Path(".models/smollm2")
INFLIGHT_NBYTES = 64 << 20
LENGTHS = (64, 160, 256)
BATCH_TOKENS = 512


# ----------------------------------------------------------------------------------------------- what is extracted


class Planned(NamedTuple):
    """A planned record."""

    record: int
    name: str
    document: Document


class Copying:
    """An extractor with a copy of tensors that lie in memory in the place of a model: the least a model can do."""

    context = Context.unknown()
    text = Text()
    provenance: Mapping[str, str] = {}
    files: Mapping[str, bytes] = {}
    max_tokens = None

    def __init__(self, corpus: Corpus) -> None:
        shape = corpus.shape
        self.schema = kvformat.Schema.uniform(
            num_layers=shape.num_layers, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, dtype="BF16"
        )
        self.planned = [Planned(record.index, record.name, Document.of(record.token_ids)) for record in corpus.records]
        self._records = {id(one.document): record for one, record in zip(self.planned, corpus.records, strict=True)}

    def extract(self, documents: Sequence[Document]) -> list[Extracted]:
        """Copies in fresh memory, as a model's results are."""
        found = []
        for document in documents:
            k, v = self._records[id(document)].tensors()
            found.append(Extracted(components={"k": k.clone(), "v": v.clone()}, extras={}))
        return found


# ------------------------------------------------------------------------------------------------ where records go


class Unencoded:
    """Leaves encoding to the writer, which does it itself; what shards are given directly is a ``RecordEncoder``'s."""

    def encode(
        self, name: str, document: Document, components: Mapping[str, Any], extras: Mapping[str, Any], /
    ) -> Extracted:
        """The tensors as they are."""
        del name, document
        return Extracted(components=components, extras=extras)


class WriterSink:
    """Adds records to a simple writer."""

    def __init__(self, writer: kvformat.Writer) -> None:
        self._writer = writer

    def add(self, planned: Planned, record: Extracted) -> None:
        """Encode and write."""
        self._writer.add(planned.name, record.components, document=planned.document, extras=record.extras)

    def skip(self, planned: Planned, reason: str) -> None:
        """Nothing here is refused."""
        raise ValueError(f"{planned.name}: {reason}")

    def stop(self) -> None:
        """Nothing is waited for that does not end by itself."""


@contextlib.contextmanager
def dataset(path: Path, schema: kvformat.Schema) -> Iterator[tuple[RecordSink[Planned, Any], Any]]:
    """A sink, and the encoder of what it takes; what it was given is durable when the block is left."""
    with kvformat.create(path, schema=schema, context=Context.unknown(), shard_nbytes=SHARD_NBYTES) as writer:
        yield WriterSink(writer), Unencoded()


def extract(
    path: Path, extractor: Any, groups: Sequence[Sequence[Planned]], *, inflight_nbytes: int = INFLIGHT_NBYTES
) -> PipelineTimes:
    """Through the pipeline until durable."""
    with dataset(path, extractor.schema) as (sink, encoder):
        return run_groups(extractor, groups, sink, encoder=encoder, max_inflight_nbytes=inflight_nbytes)


def singles(planned: Sequence[Planned]) -> list[list[Planned]]:
    return [[one] for one in planned]


# --------------------------------------------------------------------------------------------------------- writer


def write_alone(path: Path, schema: kvformat.Schema, records: Sequence[Record], planned: Sequence[Planned]) -> None:
    """The writer fed tensors that lie in memory."""
    with kvformat.create(path, schema=schema, context=Context.unknown(), shard_nbytes=SHARD_NBYTES) as writer:
        for one, record in zip(planned, records, strict=True):
            k, v = record.tensors()
            writer.add(one.name, {"k": k, "v": v}, document=one.document)


def measure_writer(shape: Shape, path: Path, *, rounds: int) -> list[Bar]:
    corpus = Corpus(shape)
    copying = Copying(corpus)
    schema, planned = copying.schema, copying.planned
    whole = memoryview(corpus.blob)
    times: list[PipelineTimes] = []

    def in_turns(home: Path) -> None:
        with kvformat.create(
            home / "ds", schema=schema, context=Context.unknown(), shard_nbytes=SHARD_NBYTES
        ) as writer:
            for one in planned:
                (found,) = copying.extract([one.document])
                writer.add(one.name, found.components, document=one.document)

    alone, piped = "kvformat.create alone", "pipeline, copy for a model"
    contenders = [
        contender_of("raw write + fsync", path / "raw", corpus, lambda h: write_synced(h / "flat", whole), bare=True),
        contender_of(
            alone, path / "alone", corpus, lambda home: write_alone(home / "ds", schema, corpus.records, planned)
        ),
        contender_of("copy, then write, in turns", path / "turns", corpus, in_turns),
        contender_of(
            piped,
            path / "piped",
            corpus,
            lambda home: times.append(extract(home / "ds", copying, singles(planned))),
            note=f"at most {INFLIGHT_NBYTES >> 20} MiB on the way",
        ),
    ]
    prove_equal(path, copying, corpus)
    found = alternate(contenders, rounds=rounds, work=lambda _: [None], warmup=1)
    for contender in contenders:
        if contender.before is not None:
            contender.before()
    title = f"extraction without a model, {shape.name}: {len(corpus):,} records, {corpus.nbytes / 1e9:.2f} GB"
    print_table(title, found, against=[alone], unit="GB/s", note="until durable, all digests included")
    print_notes(contenders)
    print_times(times)
    by_name = {series.contender.name: series for series in found}
    ratio = by_name[piped].speed_over(by_name[alone])
    what = f"{shape.name}: a copy for a model through the pipeline, against the writer alone"
    return [Bar(what=what, target=">= 0.80", found=f"{ratio:.2f}", met=ratio >= 0.8)]


def prove_equal(path: Path, copying: Copying, corpus: Corpus) -> None:
    """Both ways give the same dataset."""
    home = path / "proof"
    home.mkdir()
    write_alone(home / "alone", copying.schema, corpus.records, copying.planned)
    extract(home / "piped", copying, singles(copying.planned))
    one, other = kvformat.open(home / "alone"), kvformat.open(home / "piped")
    if one.id != other.id:
        raise ValueError("the pipeline wrote another dataset than the writer")
    del one, other
    shutil.rmtree(home)


def print_times(times: Sequence[PipelineTimes]) -> None:
    """What the steps of the last run took."""
    last = times[-1]
    waits = f"the model waited {last.blocked_s:.2f} s, storing waited {last.starved_s:.2f} s of {last.elapsed_s:.2f} s"
    console().print(f"last run: {last}; {waits}\n", highlight=False, markup=False)


# ---------------------------------------------------------------------------------------------------------- model


def documents_of(count: int, vocab_size: int) -> list[list[Planned]]:
    """Groups of equal length: as many documents as :data:`BATCH_TOKENS` allows."""
    rng = np.random.default_rng(5)
    groups, record = [], 0
    while record < count:
        tokens = LENGTHS[len(groups) % len(LENGTHS)]
        group = []
        for _ in range(min(BATCH_TOKENS // tokens, count - record)):
            document = Document.of(rng.integers(3, vocab_size, tokens, dtype=np.int64))
            group.append(Planned(record, f"doc-{record:05}", document))
            record += 1
        groups.append(group)
    return groups


def bare_forward(decoder: Any, groups: Sequence[Sequence[Planned]]) -> None:
    """Forwards with the same capture of the cache, whose K and V are dropped."""
    from kvformat.extract.capture import CaptureCache, cache_argument, run_decoder

    last = int(decoder.config.num_hidden_layers) - 1
    argument = cache_argument(decoder)
    for group in groups:
        ids = torch.from_numpy(np.stack([one.document.token_ids for one in group])).to(torch.int64)
        kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        cache = CaptureCache(lambda layer, k, v, kept=kept: kept.update({layer: (k, v)}), stop=lambda at: at == last)
        with torch.inference_mode():
            run_decoder(decoder, cache, argument=argument, input_ids=ids)
        if len(kept) != last + 1:
            raise ValueError("the cache is incomplete")


def measure_model(model: Path, path: Path, *, rounds: int, count: int, threads: int) -> list[Bar]:
    from transformers import AutoModelForCausalLM

    from kvformat.extract import HuggingFaceExtractor

    torch.set_num_threads(threads)
    loaded = AutoModelForCausalLM.from_pretrained(model).eval()
    extractor = HuggingFaceExtractor.of(loaded, context="unknown")
    decoder = loaded.get_decoder()
    groups = documents_of(count, int(loaded.config.vocab_size))
    tokens = sum(one.document.num_tokens for group in groups for one in group)
    nbytes = sum(
        tensor.nbytes for one in extractor.extract([groups[0][0].document]) for tensor in one.components.values()
    )
    nbytes = nbytes // groups[0][0].document.num_tokens * tokens
    home = path / "model"
    times: list[PipelineTimes] = []

    def forward(_: Sequence[int]) -> int:
        bare_forward(decoder, groups)
        return nbytes

    def results(_: Sequence[int]) -> int:
        for group in groups:
            extractor.extract([one.document for one in group])
        return nbytes

    def fresh() -> None:
        shutil.rmtree(home, ignore_errors=True)

    def whole(_: Sequence[int]) -> int:
        times.append(extract(home, extractor, groups))
        return nbytes

    bare, piped = "bare forward", "pipeline"
    contenders = [
        Contender(name=bare, run=forward, cache="-", bare=True, note="the cache is captured and dropped"),
        Contender(name="extractor alone", run=results, cache="-", note="K and V in buffers of their own, dropped"),
        Contender(
            name=piped, run=whole, cache="-", before=fresh, verify="SHA-256, XXH3, finite", note="until durable"
        ),
    ]
    found = alternate(contenders, rounds=rounds, work=lambda _: range(tokens), warmup=1)
    fresh()
    title = (
        f"extraction of {tokens:,} tokens, {sum(map(len, groups))} documents in {len(groups)} batches, "
        f"{loaded.dtype}, {threads} threads on {os.cpu_count()} cores, {nbytes / 1e6:.0f} MB"
    )
    print_table(title, found, against=[bare], unit="us", note="us a token")
    print_notes(contenders)
    print_times(times)
    by_name = {series.contender.name: series for series in found}
    ratio = by_name[piped].speed_over(by_name[bare])
    return [
        Bar(
            what=f"{model.name}, {threads} threads: until durable, against bare forwards of the same batches",
            target=">= 0.95",
            found=f"{ratio:.2f}, {tokens / statistics.median(by_name[piped].seconds):,.0f} tokens a second",
            met=ratio >= 0.95,
        )
    ]


# ------------------------------------------------------------------------------------------------------ processes


class Crew:
    """Processes that hold a corpus each, and do their part when they are told."""

    def __init__(self, shape: str, fraction: float, count: int) -> None:
        task = json.dumps({"shape": shape, "fraction": fraction})
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.extraction", "--child", task],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(count)
        ]
        for process in self._processes:
            _answer(process)

    def work(self, tasks: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
        """Seconds until all of the first processes, a task each, are through, and processor seconds they spent."""
        busy = list(zip(self._processes, tasks, strict=False))
        begin = time.perf_counter()
        for process, task in busy:
            assert process.stdin is not None
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
        spent = sum(_answer(process)["cpu_s"] for process, _ in busy)
        return time.perf_counter() - begin, spent

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def _answer(process: subprocess.Popen[str]) -> dict[str, float]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("a child process ended; see above")
    found: dict[str, float] = json.loads(line)
    return found


def in_child(task: Mapping[str, Any]) -> None:
    """Tell when the corpus is there, then do what each line of input says."""
    torch.set_num_threads(1)
    corpus = Corpus(SHAPES[task["shape"]].scaled(task["fraction"]))
    copying = Copying(corpus)
    print(json.dumps({"records": len(corpus)}), flush=True)
    for line in sys.stdin:
        given = json.loads(line)
        first, end = given["records"]
        home = Path(given["home"])
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), given["cores"])
        before = _cpu_s()
        if given["what"] == RAW:
            write_synced(home / "flat", memoryview(corpus.blob)[corpus.offsets[first] : corpus.offsets[end]])
        else:
            extract(home / "ds", copying, singles(copying.planned[first:end]))
        print(json.dumps({"cpu_s": _cpu_s() - before}), flush=True)


def _cpu_s() -> float:
    spent = resource.getrusage(resource.RUSAGE_SELF)
    return spent.ru_utime + spent.ru_stime


class Took(NamedTuple):
    """Seconds until all of them were through, and processor seconds they spent."""

    seconds: float
    cpu_s: float


RAW, PIPED = "raw write + fsync", "pipeline, copy for a model"
CONFINED = f"{PIPED}, one core each"
WAYS = {RAW: (RAW, False), PIPED: (PIPED, False), CONFINED: (PIPED, True)}


def measure_processes(shape: Shape, path: Path, *, rounds: int, fraction: float) -> list[Bar]:
    corpus = Corpus(shape)
    half = int(np.searchsorted(corpus.offsets, corpus.nbytes / 2))
    shares = {1: [(0, len(corpus))], 2: [(0, half), (half, len(corpus))]}
    crew = Crew(shape.name, fraction, 2)
    found: dict[tuple[str, int], list[Took]] = {(name, count): [] for name in WAYS for count in shares}
    cores = sorted(os.sched_getaffinity(0))
    try:
        for number in range(-1, rounds):
            for name, count in list(found)[:: 1 if number % 2 else -1]:
                what, confined = WAYS[name]
                tasks = []
                for worker, share in enumerate(shares[count]):
                    home = path / f"home-{worker}"
                    home.mkdir()
                    own = [cores[worker % len(cores)]] if confined else cores
                    tasks.append({"what": what, "records": share, "home": str(home), "cores": own})
                os.sync()
                touch_page_cache(path / "touched", corpus.blob)
                took = Took(*crew.work(tasks))
                for task in tasks:
                    shutil.rmtree(task["home"])
                if number >= 0:
                    found[name, count].append(took)
    finally:
        crew.close()
    return _print_processes(shape, corpus.nbytes, len(cores), found)


def _print_processes(
    shape: Shape, nbytes: int, cores: int, found: Mapping[tuple[str, int], Sequence[Took]]
) -> list[Bar]:
    table = process_table(
        f"the same {nbytes / 1e9:.2f} GB by one process and by two, {shape.name}, {cores} cores",
        ["processes", "median GB/s", "p25 - p75", "cores busy", "x one process"],
        caption="raw: a file each, written and synced; until durable",
    )
    gbps = {key: [nbytes / took.seconds / 1e9 for took in series] for key, series in found.items()}
    busy = {key: statistics.median(took.cpu_s / took.seconds for took in series) for key, series in found.items()}
    gain = {
        name: statistics.median(two / one for one, two in zip(gbps[name, 1], gbps[name, 2], strict=True))
        for name in WAYS
    }
    for (name, count), values in gbps.items():
        low, middle, high = quartiles(values)
        verify = "none" if name == RAW else "SHA-256, XXH3, finite"
        ratio = f"{gain[name]:.2f}" if count == 2 else "1"
        spread = f"{low:.2f} - {high:.2f}"
        table.add_row(name, verify, "-", str(count), f"{middle:.2f}", spread, f"{busy[name, count]:.2f}", ratio)
    out = console()
    out.print(table)
    out.print()
    disk = statistics.median(gbps[RAW, 2])
    bars = []
    for name, has in ((PIPED, cores), (CONFINED, 2)):
        allowed = {
            "the disk": disk / statistics.median(gbps[name, 1]),
            "the cores": has / busy[name, 1],
        }
        least = min(allowed, key=lambda what: allowed[what])
        target = min(1.6, allowed[least])
        why = f", all that {least} would allow" if target < 1.6 else ""
        bars.append(
            Bar(
                what=f"{shape.name}: two processes against one, {name}",
                target=f">= {target:.2f}{why}",
                found=f"{gain[name]:.2f}",
                met=gain[name] >= target,
            )
        )
    return bars


# --------------------------------------------------------------------------------------------------------- script


def main(
    rounds: Annotated[int, typer.Option(help="Rounds that are counted.")] = 5,
    part: Annotated[list[str] | None, typer.Option(help=f"{', '.join(PARTS)}; all when absent.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="large or small; both when absent.")] = None,
    fraction: Annotated[float, typer.Option(help="Part of the records, for a trial run.")] = 1.0,
    model: Annotated[Path, typer.Option(help="Directory of the model.")] = MODEL,
    threads: Annotated[
        list[int] | None,
        typer.Option(help="Threads the model computes with; all cores but one, and all, when absent."),
    ] = None,
    child: Annotated[str | None, typer.Option(hidden=True)] = None,
    *,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the data under .bench/.")] = False,
) -> None:
    """Measure what extraction costs beside the model."""
    if child is not None:
        in_child(json.loads(child))
        return
    bars: list[Bar] = []
    with workspace("extraction", keep=keep) as path:
        print_facts(path)
        for chosen in part or PARTS:
            if chosen == "model":
                cores = os.cpu_count() or 1
                for count in threads or sorted({max(1, cores - 1), cores}):
                    documents = max(4, int(96 * fraction))
                    bars += measure_model(model, path, rounds=rounds, count=documents, threads=count)
                continue
            torch.set_num_threads(1)  # copies as the bare operations do them
            for name in shape or list(SHAPES):
                home = path / f"{chosen}-{name}"
                home.mkdir()
                scaled = SHAPES[name].scaled(fraction)
                if chosen == "writer":
                    bars += measure_writer(scaled, home, rounds=rounds)
                else:
                    bars += measure_processes(scaled, home, rounds=rounds, fraction=fraction)
    print_bars(bars)


if __name__ == "__main__":
    typer.run(main)
