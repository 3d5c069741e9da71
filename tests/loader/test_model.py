"""Batches of a real model's keys and values do in attention, and in the model itself, what its live cache does."""

from __future__ import annotations

import inspect
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvformat.extract import run
from kvformat.loader import HF, Padded, gather
from tests.models import write_documents

TEXTS = [
    "The keys and values of a frozen transformer are computed once, and a trainable network attends to them.",
    "A short one.",
    "Numbers: one, two, three, four, five, six, seven, eight, nine, ten, eleven.",
]
NAMES = [f"text-{number}" for number in range(len(TEXTS))]


class Live:
    """The model that runs now, and the dataset that was extracted with the same precision."""

    def __init__(self, directory: Path, work: Path, dtype: str) -> None:
        self.dtype = getattr(torch, dtype)
        lines = [{"id": name, "text": text} for name, text in zip(NAMES, TEXTS, strict=True)]
        stored = "F32" if dtype == "float32" else "BF16"
        self.dataset = run(
            model=directory,
            documents=write_documents(work / "docs.jsonl", lines),
            out=work / "ds",
            dtype=stored,
            compute_dtype=stored,
        )
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=self.dtype).eval()
        self.ids = [torch.tensor(ids) for ids in AutoTokenizer.from_pretrained(directory)(TEXTS)["input_ids"]]
        self.next = self.ids[1][:1]
        accepted = inspect.signature(self.model.forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"

    def forward(self, ids: torch.Tensor, cache: Any = None, **options: Any) -> Any:
        given = {} if cache is None else {self._cache_argument: cache}
        with torch.inference_mode():
            return self.model(input_ids=ids, use_cache=True, **given, **options)

    def cache(self, number: int) -> Any:
        output = self.forward(self.ids[number][None])
        return output.cache if hasattr(output, "cache") else output.past_key_values


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def live(request: pytest.FixtureRequest, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Live:
    return Live(smollm2, tmp_path_factory.mktemp(request.param), request.param)


def attend(keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """What one query for each of 9 heads takes from keys and values, ``[1, heads, tokens, head_dim]``."""
    query = torch.randn(1, 9, 1, 64, generator=torch.Generator().manual_seed(5)).to(keys.dtype)
    given = None if mask is None else mask[:, None, None]
    return scaled_dot_product_attention(query, keys, values, attn_mask=given, enable_gqa=True)


def expected(live: Live, number: int, layer: int) -> torch.Tensor:
    held = live.cache(number).layers[layer]
    return attend(held.keys, held.values)


@pytest.mark.parametrize("layer", [0, 17, 29])
def test_attention_over_a_packed_batch(live: Live, layer: int) -> None:
    batch = gather(live.dataset, NAMES)
    ends = batch.cu_seqlens.tolist()
    for number, (first, end) in enumerate(pairwise(ends)):
        key, value = (batch.slab(role, layer=layer)[None, first:end].transpose(1, 2) for role in ("key", "value"))
        assert torch.equal(key, live.cache(number).layers[layer].keys)
        assert torch.equal(attend(key.contiguous(), value.contiguous()), expected(live, number, layer))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("layer", [0, 29])
def test_attention_over_a_padded_and_an_hf_batch(live: Live, layer: int, side: Any) -> None:
    """A mask makes it another kernel, so equal up to rounding; alone, without one, bit for bit."""
    tolerance = {torch.bfloat16: 2e-2, torch.float32: 1e-5}[live.dtype]
    padded = gather(live.dataset, NAMES, layout=Padded(side=side))
    cached = gather(live.dataset, NAMES, layout=HF(side=side))
    held = cached.past_key_values().layers[layer]
    for number, name in enumerate(NAMES):
        wanted = expected(live, number, layer)
        row = slice(number, number + 1)
        key, value = (padded.slab(role, layer=layer)[row].transpose(1, 2) for role in ("key", "value"))
        torch.testing.assert_close(attend(key, value, padded.mask[row]), wanted, rtol=0, atol=tolerance)
        found = attend(held.keys[row], held.values[row], cached.mask[row])
        torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)
        alone = gather(live.dataset, [name], layout=HF(side=side)).past_key_values().layers[layer]
        assert torch.equal(attend(alone.keys, alone.values), wanted)


def test_the_model_goes_on_from_a_batch_as_from_its_own_cache(live: Live) -> None:
    for number, name in enumerate(NAMES):
        stored = gather(live.dataset, [name], layout="hf").past_key_values()
        ours = live.forward(live.next[None], stored).logits
        assert torch.equal(ours, live.forward(live.next[None], live.cache(number)).logits)


@pytest.mark.parametrize("side", ["left", "right"])
def test_next_token_logits_of_a_batch_are_those_of_the_whole_prompt(live: Live, side: Any) -> None:
    batch = gather(live.dataset, NAMES, layout=HF(side=side))
    count = len(NAMES)
    ours = live.forward(
        live.next.expand(count, 1),
        batch.past_key_values(),
        attention_mask=torch.cat([batch.mask, torch.ones(count, 1, dtype=torch.bool)], 1).long(),
        position_ids=torch.tensor(batch.num_tokens)[:, None],
    ).logits[:, -1]
    for number, ids in enumerate(live.ids):
        whole = live.forward(torch.cat([ids, live.next])[None]).logits[0, -1]
        # Logits reach 30 here, and behind the model's own cache they are 0.75 away from those of the whole prompt.
        tolerance = 1.0 if live.dtype == torch.bfloat16 else 1e-3
        torch.testing.assert_close(ours[number], whole, rtol=0, atol=tolerance)
        assert ours[number].argmax() == whole.argmax()


def test_a_cache_is_fresh_each_time(live: Live) -> None:
    batch = gather(live.dataset, NAMES[:1], layout="hf")
    keys = batch["k"].clone()
    first = batch.past_key_values()
    live.forward(live.next[None], first)
    assert first.get_seq_length() == batch.num_tokens[0] + 1
    assert batch.past_key_values().get_seq_length() == batch.num_tokens[0]
    assert torch.equal(batch["k"], keys)
    assert batch.past_key_values().layers[3].keys.data_ptr() == batch["k"][3].data_ptr()
