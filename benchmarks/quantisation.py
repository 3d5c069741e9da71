"""What storing keys and values in 8 bits loses, on a real model and real text.

Everything is computed in float32 on the CPU, so that what is found is the loss of storage alone; a row says what
storing BF16 loses. Documents are consecutive pieces of text files. A document's first tokens are the context, whose
K and V are stored and given back to the model; its last ones are predicted from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.logging import disable_progress_bar

from kvformat.extract import HuggingFaceExtractor
from kvformat.extract.capture import cache_argument
from kvformat.extract.quant_math import quantise
from kvformat.loader.hf import cache_of
from kvformat.read.dequantise import dequantise_into
from kvformat.spec.document import Document

_SHARED = {"channel": (1,), "token": (3,), "head": (1, 3)}
Grain = str | None


class Way(NamedTuple):
    """One way to store: a dtype, and what a scale of K and of V is for; None where there are no scales."""

    dtype: str
    key: Grain = None
    value: Grain = None

    @property
    def name(self) -> str:
        """What a table calls it."""
        return self.dtype if self.key is None else f"{self.dtype}, K by {self.key}, V by {self.value}"

    def stored(self, values: torch.Tensor, grain: Grain) -> tuple[torch.Tensor, int]:
        """Values ``[layers, tokens, heads, head_dim]`` as they are read back, float32, and the bytes they take."""
        if grain is None:
            return values.bfloat16().float(), 2 * values.numel()
        made = quantise(values, shared=_SHARED[grain], dtype=self.dtype)
        out = torch.empty_like(values)
        dequantise_into(out, made.stored, made.scale)
        return out, made.stored.numel() + 4 * made.scale.numel()


WAYS = (
    Way("BF16"),
    Way("I8", "channel", "token"),
    Way("I8", "token", "token"),
    Way("I8", "channel", "channel"),
    Way("F8_E4M3", "head", "head"),
    Way("F8_E4M3", "channel", "token"),
    Way("F8_E4M3", "token", "token"),
    Way("F8_E5M2", "head", "head"),
)


class Loss(NamedTuple):
    """What one document loses: tensors by layer, errors over the RMS or the largest magnitude of what was there."""

    key_rms: torch.Tensor
    key_max: torch.Tensor
    value_rms: torch.Tensor
    value_max: torch.Tensor
    cosine: torch.Tensor
    output: torch.Tensor
    nbytes: float
    divergence: float
    agreement: float


class Bench:
    """A model, and the attention of it."""

    def __init__(self, path: Path, *, context: int) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
        self.model.eval()
        self.extractor = HuggingFaceExtractor.of(self.model, context="unknown")
        self.argument = cache_argument(self.model)
        self.context = context

    def losses(self, ids: list[int]) -> list[Loss]:
        """Loss of each way, for one document."""
        (found,) = self.extractor.extract([Document.of(ids[: self.context])])
        key, value = found.components["k"], found.components["v"]
        queries = self._queries(ids[: self.context])
        wanted = _attention(queries, key, value)
        reference = self._predicted(ids, key, value)
        return [self._loss(way, ids, (key, value), queries, wanted, reference) for way in WAYS]

    def _loss(
        self,
        way: Way,
        ids: list[int],
        kv: tuple[torch.Tensor, torch.Tensor],
        queries: Sequence[torch.Tensor],
        wanted: torch.Tensor,
        reference: torch.Tensor,
    ) -> Loss:
        (key, key_nbytes), (value, value_nbytes) = way.stored(kv[0], way.key), way.stored(kv[1], way.value)
        output = _attention(queries, key, value)
        predicted = self._predicted(ids, key, value)
        divergence = functional.kl_div(predicted, reference, log_target=True, reduction="none").sum(-1)
        return Loss(
            key_rms=_rms(key - kv[0]) / _rms(kv[0]),
            key_max=_largest(key - kv[0]) / _largest(kv[0]),
            value_rms=_rms(value - kv[1]) / _rms(kv[1]),
            value_max=_largest(value - kv[1]) / _largest(kv[1]),
            cosine=1 - functional.cosine_similarity(output, wanted, dim=-1).flatten(1).mean(1),
            output=_rms(output - wanted) / _rms(wanted),
            nbytes=(key_nbytes + value_nbytes) / (kv[0].numel() + kv[1].numel()),
            divergence=float(divergence.mean()),
            agreement=float((predicted.argmax(-1) == reference.argmax(-1)).float().mean()),
        )

    def _predicted(self, ids: list[int], key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Log probabilities ``[tokens, vocabulary]`` of what follows each token behind the context."""
        cache = cache_of(*(tensor.transpose(1, 2)[:, None].contiguous() for tensor in (key, value)))
        rest = torch.tensor([ids[self.context :]])
        with torch.inference_mode():
            logits = self.model(input_ids=rest, use_cache=True, **{self.argument: cache}).logits[0]
        found: torch.Tensor = logits.double().log_softmax(-1)
        return found

    def _queries(self, ids: list[int]) -> list[torch.Tensor]:
        """What each layer asks with, ``[heads, tokens, head_dim]``, times the scale of its attention."""
        seen: list[torch.Tensor] = []
        mapping: Any = ALL_ATTENTION_FUNCTIONS._global_mapping  # noqa: SLF001 -- what a model registers, it reads here
        plain = mapping["sdpa"]

        def recording(module: Any, query: torch.Tensor, key: Any, value: Any, *args: Any, **options: Any) -> Any:
            seen.append(query[0] * options["scaling"])
            return plain(module, query, key, value, *args, **options)

        mapping["sdpa"] = recording
        try:
            with torch.inference_mode():
                self.model(input_ids=torch.tensor([ids]), use_cache=False)
        finally:
            mapping["sdpa"] = plain
        return seen


def _attention(queries: Sequence[torch.Tensor], key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of each layer, ``[layers, heads, tokens, head_dim]``."""
    return torch.stack(
        [
            functional.scaled_dot_product_attention(
                query[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], is_causal=True, scale=1, enable_gqa=True
            )[0]
            for query, k, v in zip(queries, key, value, strict=True)
        ]
    )


def _rms(values: torch.Tensor) -> torch.Tensor:
    return values.flatten(1).double().square().mean(1).sqrt()


def _largest(values: torch.Tensor) -> torch.Tensor:
    return values.flatten(1).double().abs().amax(1)


def _show(found: Sequence[Sequence[Loss]]) -> None:
    console = Console(width=160)
    table = Table(title="mean over documents (and layers); 'worst' is the largest of a layer of a document")
    heads = (
        "bytes a value",
        "K rms",
        "worst",
        "V rms",
        "worst",
        "output rms",
        "1 - cosine",
        "KL, nats",
        "same top token",
    )
    for head in ("stored", *heads):
        table.add_column(head, justify="left" if head == "stored" else "right")
    for way, losses in zip(WAYS, zip(*found, strict=True), strict=True):
        keys, values = (torch.stack([getattr(loss, f"{name}_rms") for loss in losses]) for name in ("key", "value"))
        table.add_row(
            way.name,
            f"{_mean(losses, lambda loss: loss.nbytes):.3f}",
            f"{keys.mean():.2e}",
            f"{keys.max():.2e}",
            f"{values.mean():.2e}",
            f"{values.max():.2e}",
            f"{_mean(losses, lambda loss: float(loss.output.mean())):.2e}",
            f"{_mean(losses, lambda loss: float(loss.cosine.mean())):.2e}",
            f"{_mean(losses, lambda loss: loss.divergence):.2e}",
            f"{_mean(losses, lambda loss: loss.agreement):.4f}",
        )
    console.print(table)
    for way in (WAYS[1], WAYS[4]):
        losses = [of_document[WAYS.index(way)] for of_document in found]
        table = Table(title=f"{way.name}: by layer, the largest of any document")
        for head in ("layer", "K rms", "K max", "V rms", "V max"):
            table.add_column(head, justify="right")
        names = ("key_rms", "key_max", "value_rms", "value_max")
        columns = [torch.stack([getattr(loss, name) for loss in losses]).amax(0) for name in names]
        for layer in range(len(columns[0])):
            table.add_row(str(layer), *(f"{column[layer]:.2e}" for column in columns))
        console.print(table)


def _mean(losses: Sequence[Loss], of: Callable[[Loss], float]) -> float:
    return math.fsum(map(of, losses)) / len(losses)


def main(
    model: Annotated[Path, typer.Option(help="Directory of a decoder whose layers all have K and V of one shape.")],
    text: Annotated[list[Path], typer.Option(help="Text files; documents are consecutive pieces of them.")],
    documents: Annotated[int, typer.Option(help="Documents to measure, spread over the text.")] = 12,
    context: Annotated[int, typer.Option(help="Tokens whose K and V are stored.")] = 448,
    predicted: Annotated[int, typer.Option(help="Tokens behind them that are predicted.")] = 64,
) -> None:
    """Measure what 8-bit storage loses."""
    disable_progress_bar()
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    length = context + predicted
    pieces = []
    for path in text:
        ids = tokenizer(path.read_text(encoding="utf-8"), verbose=False)["input_ids"]
        pieces += [ids[at : at + length] for at in range(0, len(ids) - length + 1, length)]
    step = max(1, len(pieces) // documents)
    chosen = pieces[::step][:documents]
    if not chosen:
        raise typer.BadParameter(f"no text has {length} tokens")
    bench = Bench(model, context=context)
    print(f"{len(chosen)} documents of {context} + {predicted} tokens, of {len(pieces)} in {len(text)} files")
    _show([bench.losses(ids) for ids in chosen])


if __name__ == "__main__":
    typer.run(main)
