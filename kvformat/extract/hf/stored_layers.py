"""Which layers of a decoder are stored, in which form, and which of its tensors reach them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvformat.extract.hf.loading import watchable_attention
from kvformat.extract.hf.options import check_dtype, latent_widths, wanted_layers
from kvformat.extract.hf.stack import decoder_stack
from kvformat.extract.key_stages import KeyStages, find_stages
from kvformat.extract.probe import LayerForm, probe, reachable_state
from kvformat.extract.shapes import Slot, cached_schema, slots
from kvformat.extract.weights import reaching_tensors
from kvformat.tensors import torch_dtype

if TYPE_CHECKING:
    import torch
    from torch import nn

    from kvformat.spec.schema import Schema, Stage

__all__ = ["StoredLayers", "stored_layers"]


class StoredLayers(NamedTuple):
    """What of a decoder is stored.

    Attributes
    ----------
    stack_name, stack
        All of its layers, and the name of their list.
    last
        The highest layer that is stored.
    forms, slots
        By model layer that is stored, what it writes into the cache, and where that goes.
    schema
        Of the records.
    dtype
        Storage dtype.
    stages
        Where keys of an earlier stage are taken; None for those attention consumes.
    reached
        Names of the decoder's tensors that reach them.
    """

    stack_name: str
    stack: nn.ModuleList
    last: int
    forms: Mapping[int, LayerForm]
    slots: Mapping[int, Slot]
    schema: Schema
    dtype: torch.dtype
    stages: KeyStages | None
    reached: frozenset[str]

    def state(self, decoder: nn.Module) -> dict[str, torch.Tensor]:
        """The decoder's tensors that reach what is stored, by name inside it."""
        return reaching_tensors(reachable_state(decoder), stack=self.stack_name, last=self.last, reached=self.reached)


def stored_layers(decoder: Any, *, layers: Sequence[int] | None, dtype: str, key_stage: Stage) -> StoredLayers:
    """Run a decoder on a few tokens, and see what its layers write into the cache.

    Parameters
    ----------
    layers, dtype, key_stage
        As for :meth:`kvformat.extract.hf.HuggingFaceExtractor.load`; the dtype is not left to the model.

    Raises
    ------
    InputError
        E302 for a model whose keys and values these are not; E303 for an incomplete cache.
    UsageError
        E081 for layers the model has not, and for another dtype than BF16, F16 and F32.
    """
    storage = check_dtype(dtype, "storage")
    num_layers = int(decoder.config.num_hidden_layers)
    name, stack = decoder_stack(decoder, num_layers)
    wanted = wanted_layers(layers, num_layers)
    stages = find_stages(stack, wanted, key_stage)
    with watchable_attention(decoder):
        probed = probe(decoder, wanted, latent=latent_widths(decoder.config), stages=stages)
    return StoredLayers(
        stack_name=name,
        stack=stack,
        last=wanted[-1],
        forms=probed.forms,
        slots=slots(probed.forms),
        schema=cached_schema(probed.forms, dtype=storage, key_stage=key_stage),
        dtype=torch_dtype(storage),
        stages=stages,
        reached=probed.reached,
    )
