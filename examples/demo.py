"""Extract a real model over real texts, publish, verify, read back, and compare with the live model bit for bit.

Usage: ``python tools/prepare_smollm2.py .models/smollm2``, then ``python examples/demo.py``; ``make demo`` does both.
The texts are prose paragraphs of the descriptions and licences of the Python packages installed beside this one.
Leaves with 1 when a stored value differs from the live model's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution, distributions
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is a directory: nothing is to be fetched

import torch
from attention import rows as attention_rows
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import kvformat
from kvformat import extract
from kvformat.loader import BatchSampler, KVLoader

REPOSITORY = Path(__file__).resolve().parent.parent
SHORTEST, LONGEST = 160, 600
"""Characters of a text: about 30 to 150 tokens."""
PARTS_OF_A_DATASET = {".staging", "files", "index", "kvformat.json", "manifest", "shards"}
SEED = 0


# ------------------------------------------------------------------------------------------------------------- texts


def documents_of(package: Distribution) -> Iterator[str]:
    """Description and licence files of an installed package."""
    yield str(package.metadata.get_payload() or package.metadata["Description"] or "")
    for path in sorted(package.files or [], key=str):
        if re.search(r"\.dist-info/.*(licen[cs]e|copying|notice|authors)", str(path), flags=re.IGNORECASE):
            yield Path(str(package.locate_file(path))).read_text(encoding="utf-8", errors="ignore")


def paragraphs(text: str) -> Iterator[str]:
    """Paragraphs that read like prose: whole sentences, mostly letters, no markup that stands for itself."""
    for block in re.split(r"\n\s*\n", text.replace("\r", "")):
        prose = " ".join(block.split())
        letters = sum(character.isalpha() or character == " " for character in prose)
        if (
            SHORTEST <= len(prose) <= LONGEST
            and prose[-1] in ".:!?"
            and letters > 0.9 * len(prose)
            and not re.search(r"[<>{}|`]|://|\*\*|::|>>>", prose)
        ):
            yield prose


def gather(most: int) -> list[str]:
    """At most ``most`` texts, none twice, in an order that only the installed packages determine.

    Packages take turns, so that none with a long licence crowds out the others.
    """
    packages = {str(package.metadata["Name"]).lower(): package for package in distributions()}
    by_package = [chain.from_iterable(map(paragraphs, documents_of(packages[name]))) for name in sorted(packages)]
    in_turn = (text for texts in zip_longest(*by_package) for text in texts if text is not None)
    return list(islice(dict.fromkeys(in_turn), most))


# -------------------------------------------------------------------------------------------------------- extraction


class Watch:
    """Shows how the extraction gets on, and remembers how long it took; a :class:`kvformat.extract.Progress`."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("read", total=None)
        self.begun = 0.0
        self.tokens = self.nbytes = 0

    def phase(self, name: extract.Phase, *, tokens: int = 0, nbytes: int = 0) -> None:  # noqa: ARG002 -- protocol
        """A phase begins."""
        self._bar.update(self._task, description=name, total=tokens or None)
        if name == "extract":
            self.begun = time.perf_counter()

    def advance(self, *, tokens: int, nbytes: int, computed: bool) -> None:  # noqa: ARG002 -- protocol
        """A record is there."""
        self.tokens += tokens
        self.nbytes += nbytes
        self._bar.advance(self._task, tokens)

    def elsewhere(self, *, nbytes: int) -> None:
        """No other workers here."""

    def times(self, times: extract.PipelineTimes) -> None:
        """What limits the rate is told by the command line."""


def make_room(location: Path) -> None:
    """Remove the dataset of an earlier run; anything that is no dataset is left alone and refused."""
    if not os.path.lexists(location):
        return
    if (
        location.is_symlink()
        or not location.is_dir()
        or {path.name for path in location.iterdir()} - PARTS_OF_A_DATASET
    ):
        raise SystemExit(f"{location} is not a dataset an earlier run left: move it away, or choose another --out")
    shutil.rmtree(location)


# ----------------------------------------------------------------------------------------------------------- reading


def timed(action: Callable[[], Any]) -> float:
    """Seconds an action takes."""
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def read_all(dataset: kvformat.Dataset, order: list[int], buffers: dict[str, torch.Tensor]) -> int:
    """Copy K and V of records into buffers; bytes copied."""
    nbytes = 0
    for number in order:
        record = dataset[number]
        for name, buffer in buffers.items():
            shape = (buffer.shape[0], record.num_tokens, *buffer.shape[2:])
            # The front of the buffer, so that no record pays for fresh memory.
            size = shape[0] * shape[1] * shape[2] * shape[3]
            out = record.component(name, out=buffer.view(-1)[:size].view(shape))
            nbytes += out.nbytes
    return nbytes


def live_cache(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V, ``[layers, tokens, heads, head_dim]``, of a plain forward over one document, no padding."""
    with torch.inference_mode():
        output = model(input_ids=ids[None], use_cache=True, logits_to_keep=1)
    # Newer releases of transformers call it `cache`, and warn of the older name.
    cache = output.cache if hasattr(output, "cache") else output.past_key_values
    return (
        torch.stack([layer.keys[0].transpose(0, 1) for layer in cache.layers]),
        torch.stack([layer.values[0].transpose(0, 1) for layer in cache.layers]),
    )


def same_bits(stored: torch.Tensor, live: torch.Tensor) -> bool:
    """Whether dtype, shape and every bit agree; unlike ``==``, this tells 0.0 from -0.0."""
    return (
        stored.dtype == live.dtype
        and stored.shape == live.shape
        and torch.equal(stored.contiguous().view(torch.uint8), live.contiguous().view(torch.uint8))
    )


class Comparison:
    """Random records against the live model.

    Attributes
    ----------
    model
        The live model.
    differing
        What differed: record and tensor.
    recompute_s
        Median seconds of a forward, over the records compared.
    load_s, first_s
        Median seconds to copy the same records out of the dataset: verified before, and verified by this access.
    """

    def __init__(self, dataset: kvformat.Dataset, texts: list[str], model_path: Path, numbers: list[int]) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model_path)
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype="auto").eval()
        fresh = kvformat.open(dataset.location, expected_id=dataset.id, verify="first")
        self.model = model
        self.differing: list[str] = []
        times: dict[str, list[float]] = {"recompute": [], "first": [], "load": []}
        self.values = 0
        for number in numbers:
            name = fresh[number].names[0]
            ids = torch.tensor(tokenizer(texts[int(name.removeprefix("text-"))])["input_ids"])
            live = live_cache(model, ids)  # untimed: warms up what this length needs
            times["recompute"].append(timed(lambda ids=ids: live_cache(model, ids)))
            copy = lambda number=number: [fresh[number].component(part, copy=True) for part in ("k", "v")]  # noqa: E731
            times["first"].append(timed(copy))
            times["load"].append(statistics.median(timed(copy) for _ in range(5)))
            record = fresh[number]
            stored_ids = record.extra("token_ids")  # noqa: S610 -- no database
            if not torch.equal(stored_ids, ids.to(torch.int32)):
                self.differing.append(f"{name}: token ids")
            for part, expected in zip(("k", "v"), live, strict=True):
                self.values += expected.numel()
                if not same_bits(record.component(part), expected):
                    self.differing.append(f"{name}: {part}")
        self.recompute_s, self.first_s, self.load_s = (
            statistics.median(times[kind]) for kind in ("recompute", "first", "load")
        )


# -------------------------------------------------------------------------------------------------------------- demo


def write_documents(path: Path, texts: list[str]) -> None:
    lines = (json.dumps({"id": f"text-{n:04}", "text": text}, ensure_ascii=False) for n, text in enumerate(texts))
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def extraction(dataset_at: Path, documents: Path, model: Path, console: Console) -> tuple[kvformat.Dataset, str]:
    """The dataset, and how fast it was made."""
    columns = (TextColumn("{task.description:>8}"), BarColumn(), TextColumn("{task.completed:,.0f} tokens"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as bar:
        watch = Watch(bar)
        dataset = extract.run(model=model, documents=documents, out=dataset_at, progress=watch)
        spent_s = time.perf_counter() - watch.begun
    rates = f"{watch.tokens / spent_s:,.0f} tokens/s, {watch.nbytes / spent_s / 1e6:,.1f} MB/s"
    return dataset, f"{rates} (compute, write, sync, publish; {spent_s:.1f} s)"


def read_rates(dataset: kvformat.Dataset, order: list[int]) -> dict[str, str]:
    """Rates of copying K and V of all records in random order: each slab verified, and verified before."""
    longest = max(record.num_tokens for record in dataset)
    buffers = {}
    for name in ("k", "v"):
        example = dataset[0].component(name)
        buffers[name] = torch.zeros((example.shape[0], longest, *example.shape[2:]), dtype=example.dtype)
    nbytes = read_all(dataset, order, buffers)  # from here on every slab is verified, in the page cache and mapped
    hot_s = statistics.median(timed(lambda: read_all(dataset, order, buffers)) for _ in range(5))
    fresh = kvformat.open(dataset.location, expected_id=dataset.id, verify="first")
    first_s = timed(lambda: read_all(fresh, order, buffers))
    return {
        "read, first access": f"{nbytes / first_s / 1e9:.2f} GB/s (random order, page cache warm, all verified)",
        "read, hot": f"{nbytes / hot_s / 1e9:.2f} GB/s (random order, verified before, copied to a reused buffer)",
    }


def training_rate(dataset: kvformat.Dataset) -> str:
    """Rate of an epoch of packed batches in shuffled order, of several that ran."""
    loader = KVLoader(dataset, BatchSampler(dataset, batch_size=8, seed=SEED), layout="packed")
    rates = []
    for _ in range(6):
        before, begun = loader.stats().nbytes, time.perf_counter()
        for batch in loader:
            del batch
        rates.append((loader.stats().nbytes - before) / (time.perf_counter() - begun) / 1e9)
    stats = loader.stats()
    copies = stats.nbytes_copied / stats.nbytes
    return f"{statistics.median(rates[1:]):.1f} GB/s (KVLoader, 8 records each, packed, {copies:.0f} copy a byte)"


def show(title: str, rows: dict[str, str], console: Console) -> None:
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for label, value in rows.items():
        table.add_row(label, value)
    console.print(table)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=REPOSITORY / ".models" / "smollm2")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "out" / "demo")
    parser.add_argument("--texts", type=int, default=200, help="most documents to extract")
    parser.add_argument("--compare", type=int, default=12, help="records to compare with the live model")
    given = parser.parse_args(arguments)
    if not (given.model / "config.json").is_file():
        parser.error(f"no model in {given.model}: python tools/prepare_smollm2.py {given.model}")
    if given.texts < 1 or given.compare < 1:
        parser.error("--texts and --compare must be at least 1")
    console = Console()
    begun = time.perf_counter()

    texts = gather(given.texts)
    if not texts:
        raise SystemExit("the installed packages have no paragraph to extract")
    given.out.mkdir(parents=True, exist_ok=True)
    location, documents = given.out / "dataset", given.out / "docs.jsonl"
    make_room(location)
    write_documents(documents, texts)
    dataset, rates = extraction(location, documents, given.model, console)

    verifying = time.perf_counter()
    report = kvformat.verify(location, level=4, expected_id=dataset.id)
    verify_s = time.perf_counter() - verifying
    for finding in report.findings:
        console.print(f"[{finding.code}] {finding.message}", markup=False)
    if not report.ok:
        return 1

    order = list(range(len(dataset)))
    random.Random(SEED).shuffle(order)
    reading = read_rates(dataset, order)
    chosen = order[: given.compare]
    compared = Comparison(dataset, texts, given.model, chosen)
    lengths = sorted(record.num_tokens for record in dataset)
    spread = f"{lengths[0]} to {lengths[-1]}, median {statistics.median(lengths):.0f}"
    attention, wrong = attention_rows(dataset, compared.model, chosen)
    compared.differing += wrong
    rows = {
        "records": f"{len(dataset):,}",
        "tokens": f"{dataset.num_tokens:,} ({spread} a record)",
        "size": f"{dataset.nbytes / 1e9:.3f} GB ({dataset.nbytes / dataset.num_tokens:,.0f} bytes a token)",
        "extraction": rates,
        "verification, level 4": f"no faults ({verify_s:.2f} s, {report.nbytes / verify_s / 1e9:.2f} GB/s)",
        **reading,
        "load a record": f"{compared.first_s * 1e3:.2f} ms at first access,"
        f" {compared.load_s * 1e3:.2f} ms again (in the processor's cache)",
        "recompute a record": f"{compared.recompute_s * 1e3:.1f} ms,"
        f" {compared.recompute_s / compared.load_s:,.0f} times a repeated load,"
        f" {compared.recompute_s / compared.first_s:,.0f} times a first one",
        "against the live model": f"DIFFERENT: {', '.join(compared.differing)}"
        if compared.differing
        else f"{len(chosen)} random records equal bit for bit ({compared.values:,} values of K and V)",
        **attention,
        "training batches": training_rate(dataset),
        "all of it took": f"{time.perf_counter() - begun:.0f} s",
    }
    show(f"{given.model.name} over paragraphs of installed packages", rows, console)
    shown = os.path.relpath(location)
    hint = f"    {os.path.relpath(sys.executable)} -m kvformat inspect {shown}"
    console.print(f"The dataset lies in {shown} (id {dataset.id[:16]}). Look at it:", soft_wrap=True, highlight=False)
    console.print(hint, soft_wrap=True, highlight=False)
    return 1 if compared.differing else 0


if __name__ == "__main__":
    raise SystemExit(main())
