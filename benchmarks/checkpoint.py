"""The Reasoner out of a DCP checkpoint in which it is half: bytes read of its files, and time, beside torch's load.

The other half are the Generator's twins of its tensors, as a Mixture-of-Transformers has them. Every contender reads
into tensors that are there before, as loading does; the files lie in the page cache. Bytes are counted by the system,
over all reads of the process.
"""

from __future__ import annotations

import statistics
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import torch.distributed.checkpoint as dcp
import typer
from rich.table import Table
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from benchmarks.harness import (
    Bar,
    Contender,
    alternate,
    console,
    print_bars,
    print_facts,
    print_notes,
    print_table,
    workspace,
)
from kvformat.extract.checkpoint import CheckpointSource
from kvformat.extract.checkpoint.filling import open_checkpoint
from kvformat.extract.checkpoint.matching import ModelNames, TensorForm

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LAYERS, _HIDDEN, _WIDTH, _KV, _VOCAB, _FILES = 24, 1024, 3072, 512, 16_384, 4
_OURS, _SAME, _ALL = "kvformat", "torch, the same tensors", "torch, everything"
_TARGET = 0.55


def names(layers: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a decoder with grouped queries and a gated MLP."""
    found: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (_VOCAB, _HIDDEN), "norm.weight": (_HIDDEN,)}
    for layer in range(layers):
        for part, shape in {
            "input_layernorm": (_HIDDEN,),
            "mlp.down_proj": (_HIDDEN, _WIDTH),
            "mlp.gate_proj": (_WIDTH, _HIDDEN),
            "mlp.up_proj": (_WIDTH, _HIDDEN),
            "post_attention_layernorm": (_HIDDEN,),
            "self_attn.k_proj": (_KV, _HIDDEN),
            "self_attn.o_proj": (_HIDDEN, _HIDDEN),
            "self_attn.q_proj": (_HIDDEN, _HIDDEN),
            "self_attn.v_proj": (_KV, _HIDDEN),
        }.items():
            found[f"layers.{layer}.{part}.weight"] = shape
    return found


def save(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Save the checkpoint; bytes of its files."""
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, shape in shapes.items():
        twin = name.replace(".weight", "_moe_gen.weight")
        for full in (name, twin):
            values = torch.randn(shape, generator=generator)
            state[f"net.language_model.model.{full}"] = values.bfloat16()
    dcp.save(state, storage_writer=FileSystemWriter(path, thread_count=_FILES, sync_files=False))
    return sum(file.stat().st_size for file in path.iterdir())


def contenders(path: Path, shapes: Mapping[str, tuple[int, ...]], counted: dict[str, int]) -> list[Contender]:
    """Ours, torch with the same tensors, torch with all of them."""
    forms = {name: TensorForm("BF16", shape) for name, shape in shapes.items()}
    model = ModelNames(forms=forms, needed=forms.keys(), prefixes=("",), stack="layers")
    source = CheckpointSource(kind="dcp", path=path, preset="mot")
    targets = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    same = {f"net.language_model.model.{name}": tensor for name, tensor in targets.items()}
    twins = {name.replace(".weight", "_moe_gen.weight"): torch.zeros_like(tensor) for name, tensor in same.items()}
    nbytes = sum(tensor.nbytes for tensor in targets.values())

    def ours(_work: Sequence[int]) -> int:
        before = read_so_far()
        with open_checkpoint(source, model) as filling:
            stated = filling.into(targets)
        counted[_OURS] = read_so_far() - before
        counted["stated"] = stated
        return nbytes

    def theirs(name: str, state: dict[str, torch.Tensor]) -> Contender:
        def run(_work: Sequence[int]) -> int:
            before = read_so_far()
            dcp.load(dict(state), storage_reader=FileSystemReader(path))
            counted[name] = read_so_far() - before
            return sum(tensor.nbytes for tensor in state.values())

        return Contender(name=name, run=run)

    return [
        Contender(name=_OURS, run=ours, verify="CRC-32", note="four threads"),
        theirs(_SAME, same),
        theirs(_ALL, same | twins),
    ]


def read_so_far() -> int:
    """Bytes this process has asked files for and got."""
    return int(Path("/proc/self/io").read_text(encoding="ascii").split()[1])


def main(
    rounds: Annotated[int, typer.Option(help="Rounds that are counted.")] = 5,
    fraction: Annotated[float, typer.Option(help="Part of the layers, for a trial run.")] = 1.0,
    *,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the data under .bench/.")] = False,
) -> None:
    """Bytes and time to read the Reasoner of a DCP checkpoint in which it is half."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    shapes = names(max(1, round(_LAYERS * fraction)))
    counted: dict[str, int] = {}
    with workspace("checkpoint", keep=keep) as home:
        print_facts(home)
        size = save(home / "dcp", shapes)
        field = contenders(home / "dcp", shapes, counted)
        found = alternate(field, rounds=rounds, work=lambda _: [0])
    tensors = f"{len(shapes)} of {2 * len(shapes)} tensors, {_FILES} files, {size / 1e9:.2f} GB"
    print_table(
        f"Reasoner of a DCP checkpoint, {tensors}", found, against=[_SAME, _ALL], unit="us", note="x: times as fast"
    )
    print_notes(field)
    table = Table(title="bytes read", title_justify="left")
    for heading in ("contender", "bytes", "of the checkpoint", "median s"):
        table.add_column(heading, justify="left" if heading == "contender" else "right")
    for series in found:
        name = series.contender.name
        share = counted[name] / size
        table.add_row(name, f"{counted[name]:,}", f"{share:.3f}", f"{statistics.median(series.seconds):.2f}")
    console().print(table)
    share = counted["stated"] / size
    bars = [
        Bar(
            what="bytes read of a checkpoint in which the Reasoner is half",
            target=f"<= {_TARGET}",
            found=f"{share:.3f} stated, {counted[_OURS] / size:.3f} by the system",
            met=max(share, counted[_OURS] / size) <= _TARGET,
        )
    ]
    print_bars(bars)


if __name__ == "__main__":
    typer.run(main)
