"""Whether batches of a dataset do in attention, and in the model, what the live model's own cache does."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import kvformat
from kvformat.loader import gather

__all__ = ["rows"]


class Live:
    """A model that runs, and what it makes of a document.

    Parameters
    ----------
    model
        Any decoder of transformers.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        # Newer releases of transformers call it `cache`, and warn of the older name.
        accepted = inspect.signature(model.forward).parameters
        self._argument = "cache" if "cache" in accepted else "past_key_values"

    def run(self, ids: torch.Tensor, cache: Any = None, **options: Any) -> Any:
        """Output of a forward over ids, ``[records, tokens]``, behind a cache."""
        given = {} if cache is None else {self._argument: cache}
        with torch.inference_mode():
            return self._model(input_ids=ids, use_cache=True, **given, **options)

    def cache(self, ids: torch.Tensor) -> Any:
        """The cache a forward over one document leaves."""
        output = self.run(ids[None])
        return output.cache if hasattr(output, "cache") else output.past_key_values


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Attention of one query a head over ``[1, heads, tokens, head_dim]``; ``mask`` bool ``[1, tokens]``."""
    given = None if mask is None else mask[:, None, None]
    return scaled_dot_product_attention(query, keys, values, attn_mask=given, enable_gqa=True)


def rows(dataset: kvformat.Dataset, model: Any, numbers: Sequence[int]) -> tuple[dict[str, str], list[str]]:
    """Lines for a table, and what differed that must not.

    Parameters
    ----------
    numbers
        Records to compare, in one batch.
    """
    live = Live(model)
    ids = [dataset[number].extra("token_ids", copy=True).long() for number in numbers]  # noqa: S610 -- no database
    caches = [live.cache(document) for document in ids]
    heads = model.config.num_attention_heads
    layers, dim = len(caches[0].layers), caches[0].layers[0].keys.shape[-1]
    query = torch.randn(1, heads, 1, dim, generator=torch.Generator().manual_seed(0)).to(
        caches[0].layers[0].keys.dtype
    )
    packed, padded, cached = (gather(dataset, records=numbers, layout=name) for name in ("packed", "padded", "hf"))
    past = cached.past_key_values()
    furthest = dict.fromkeys(("packed", "padded", "hf"), 0.0)
    for layer in range(layers):
        for at, cache in enumerate(caches):
            wanted = attend(query, cache.layers[layer].keys, cache.layers[layer].values, None)
            first, end = packed.cu_seqlens[at : at + 2].tolist()
            row = slice(at, at + 1)
            given = {
                "packed": (*(_heads(packed.slab(r, layer=layer)[None, first:end]) for r in ("key", "value")), None),
                "padded": (*(_heads(padded.slab(r, layer=layer)[row]) for r in ("key", "value")), padded.mask[row]),
                "hf": (past.layers[layer].keys[row], past.layers[layer].values[row], cached.mask[row]),
            }
            for name, (keys, values, mask) in given.items():
                distance = (attend(query, keys, values, mask) - wanted).abs().max().item()
                furthest[name] = max(furthest[name], distance)
    agreeing, distance, live_distance = next_tokens(dataset, live, numbers, ids)
    wrong = [] if furthest["packed"] == 0 else ["attention over a packed batch"]
    wrong += [f"attention over a batch, layout {name}" for name in ("padded", "hf") if furthest[name] > 0.05]
    wrong += [] if agreeing == len(numbers) else ["next-token logits behind a stored cache"]
    return {
        "attention, packed batch": f"equal to the live cache bit for bit ({layers} layers, {len(numbers)} records)"
        if furthest["packed"] == 0
        else f"DIFFERENT by {furthest['packed']:.2g}",
        "attention, padded and hf": f"equal within {max(furthest['padded'], furthest['hf']):.1g}"
        " (a mask takes another kernel)",
        "next-token logits": f"{agreeing} of {len(numbers)} continuations from an hf batch equal those from the live"
        " cache bit for bit",
        "... and of the whole prompt": f"{distance:.2g} away at most; from the live cache {live_distance:.2g}"
        " (rounding of the longer input)",
    }, wrong


def next_tokens(
    dataset: kvformat.Dataset, live: Live, numbers: Sequence[int], ids: Sequence[torch.Tensor]
) -> tuple[int, float, float]:
    """Logits of the next token behind each record, continued from a batch.

    Returns
    -------
    tuple
        For how many records they equal those from the live model's own cache to the bit; how far they are from those
        of the whole prompt at most; and how far those from the live cache are.
    """
    agreeing, furthest = 0, [0.0, 0.0]
    for number, document in zip(numbers, ids, strict=True):
        following = document[:1]
        whole = live.run(torch.cat([document, following])[None]).logits[0, -1]
        stored = gather(dataset, records=[number], layout="hf").past_key_values()
        found = [live.run(following[None], cache).logits[0, -1] for cache in (stored, live.cache(document))]
        agreeing += bool(torch.equal(*found))
        distances = [(logits - whole).abs().max().item() for logits in found]
        furthest = [max(both) for both in zip(furthest, distances, strict=True)]
    return agreeing, furthest[0], furthest[1]


def _heads(tensor: torch.Tensor) -> torch.Tensor:
    """``[1, tokens, heads, head_dim]`` as attention takes it."""
    return tensor.transpose(1, 2).contiguous()
