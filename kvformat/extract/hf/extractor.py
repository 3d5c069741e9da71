"""The Hugging Face extractor: keys and values of a decoder as its attention consumes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch

from kvformat.errors import make_error
from kvformat.extract.capture import CaptureCache, cache_argument, run_decoder
from kvformat.extract.checkpoint.source import CheckpointSource
from kvformat.extract.hf.adapted_loading import load_adapted
from kvformat.extract.hf.adapters import Adapted, applied_adapter
from kvformat.extract.hf.decoder_context import decoder_context, values_digest
from kvformat.extract.hf.decoder_inputs import check_documents, decoder_inputs
from kvformat.extract.hf.loading import compute_dtype_of, provenance_of, refuse_adapters
from kvformat.extract.hf.options import (
    AdapterMode,
    check_adapter_mode,
    check_device,
    check_dtype,
    check_key_stage,
    max_positions,
)
from kvformat.extract.hf.record_buffers import RecordBuffers
from kvformat.extract.hf.stored_layers import stored_layers
from kvformat.extract.identity import check_history
from kvformat.extract.options import ContextKind, context_kind
from kvformat.interfaces import Extracted
from kvformat.spec.context import Context, Text
from kvformat.spec.schema import Stage

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvformat.spec.document import Document
    from kvformat.spec.schema import Schema

__all__ = ["HuggingFaceExtractor"]


class HuggingFaceExtractor:
    """Extracts K and V of a decoder-only model; an :class:`kvformat.interfaces.Extractor`.

    K and V are what the model hands to its cache: K after its norm and rotary embedding, V as projected, both before
    heads are repeated for grouped queries. That this is what the attention product consumes is checked once, on a few
    tokens, when the extractor is made. Documents are never padded; sliding-window layers give every row.

    Keys of an earlier stage are taken from the modules that put them out; that norm and rotary embedding make the
    cached ones of them, bit for bit, is checked on the same tokens.

    Make one with :meth:`load` or :meth:`of`.
    """

    def __init__(
        self,
        decoder: Any,
        *,
        layers: Sequence[int] | None,
        dtype: str | None,
        text: Text | None,
        context: ContextKind | Context,
        provenance: Mapping[str, str],
        key_stage: Stage = "attention",
        adapted: Adapted | None = None,
    ) -> None:
        if decoder.training:
            raise make_error("E081", "the model is in training mode; call eval() first, dropout would change its keys")
        if adapted is None or adapted.applied is None:
            refuse_adapters(decoder)
        check_history(decoder.config, decoder)
        compute_dtype = compute_dtype_of(decoder)
        stored = stored_layers(
            decoder, layers=layers, dtype=dtype or compute_dtype, key_stage=check_key_stage(key_stage)
        )
        state = stored.state(decoder)
        self._adapted = adapted
        self._decoder = decoder
        self._argument = cache_argument(decoder)
        self._stored = stored
        self._last = stored.last
        self._schema = stored.schema
        self._files: dict[str, bytes] = {}
        self._context = Context.unknown()
        if context_kind(context) == "derive":
            self._context, self._files = decoder_context(
                decoder, stored, state=state, compute_dtype=compute_dtype, adapted=adapted
            )
        elif adapted is not None:
            adapted.split(state)  # refuses one that reaches nothing
        self._text = text or Text()
        self._provenance = dict(provenance)
        self._vocab_size = int(decoder.get_input_embeddings().weight.shape[0])
        self._max_tokens = max_positions(decoder.config)

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        revision: str | None = None,
        dtype: str | None = None,
        compute_dtype: str | None = None,
        device: str | torch.device = "cpu",
        attn_implementation: str | None = None,
        checkpoint: CheckpointSource | str | None = None,
        adapter: str | Path | None = None,
        adapter_mode: AdapterMode | None = None,
        layers: Sequence[int] | None = None,
        key_stage: Stage = "attention",
        text: Text | None = None,
        context: ContextKind | Context = "derive",
    ) -> Self:
        """Load a model and make an extractor of it.

        Parameters
        ----------
        model
            Directory, or hub id.
        revision
            Branch, tag or commit of a hub id.
        dtype
            Storage dtype: BF16, F16 or F32; the compute dtype when absent.
        compute_dtype
            What the model computes in; the dtype its configuration names when absent.
        device
            Where it computes.
        attn_implementation
            As transformers names them (``eager``, ``sdpa``, ...); its own choice when absent.
        checkpoint
            Where weights come from instead of ``model``, which then gives the configuration alone; or its text, such
            as ``dcp:DIR``.
        adapter
            Directory of a LoRA adapter, as peft saves it.
        adapter_mode
            What is done with it: ``merge`` adds it to the weights, whose digest then covers it; ``apply`` computes it
            beside them, in the compute dtype, and the context names it. The two give other bits, and other contexts.
        layers
            Model layers to extract; all when absent. Layers above the highest are neither kept nor run.
        key_stage
            ``raw``: keys as projected; ``normed``: behind the key norm of a family that has one; ``attention``: as
            attention consumes them. Latent attention has ``raw`` and ``attention``, whose latent is normed.
        text
            Recorded with the dataset.
        context
            ``unknown``, or ``Context.unknown()``, skips deriving what determines the values, for a family no context
            is known of.

        Raises
        ------
        InputError
            E302 model refused, E303 cache incomplete, E304 model does not load, E308 checkpoint refused, E310 adapter
            refused.
        UsageError
            E081.
        DependencyError
            E205 for an adapter without peft.
        """
        if dtype is not None:
            check_dtype(dtype, "storage")
        check_key_stage(key_stage)
        context = context_kind(context)
        where = check_device(device)
        loaded = load_adapted(
            model,
            device=where,
            revision=revision,
            compute_dtype=compute_dtype,
            attn_implementation=attn_implementation,
            checkpoint=checkpoint,
            adapter=adapter,
            adapter_mode=adapter_mode,
            layers=layers,
        )
        extractor = cls(
            loaded.decoder,
            layers=layers,
            dtype=dtype,
            text=text,
            context=context,
            provenance=loaded.provenance,
            key_stage=key_stage,
            adapted=loaded.adapted,
        )
        extractor._move(where)
        return extractor

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        *,
        dtype: str | None = None,
        adapter_mode: Literal["apply"] | None = None,
        layers: Sequence[int] | None = None,
        key_stage: Stage = "attention",
        text: Text | None = None,
        context: ContextKind | Context = "derive",
    ) -> Self:
        """Make an extractor of a model that is loaded already; the model is used where it is and never changed.

        Parameters
        ----------
        adapter_mode
            ``apply`` takes a model with the layers of one LoRA adapter, which are refused otherwise.
        dtype, layers, key_stage, text, context
            As for :meth:`load`.

        Raises
        ------
        InputError, UsageError
            As :meth:`load`.
        """
        decoder = model.get_decoder()
        device = next(decoder.parameters()).device
        provenance = provenance_of(decoder, getattr(model.config, "_name_or_path", ""), device)
        adapted: Adapted | None = None
        if adapter_mode is not None:
            if check_adapter_mode(adapter_mode) != "apply":
                raise make_error(
                    "E081", "a model that is loaded is never changed: call merge_and_unload() on it first"
                )
            adapted = applied_adapter(decoder, compute_dtype=compute_dtype_of(decoder))
            provenance["adapter_mode"] = adapter_mode
        return cls(
            decoder,
            layers=layers,
            dtype=dtype,
            text=text,
            context=context,
            provenance=provenance,
            key_stage=key_stage,
            adapted=adapted,
        )

    @property
    def schema(self) -> Schema:
        """Shape and dtype of what :meth:`extract` returns."""
        return self._schema

    @property
    def context(self) -> Context:
        """What determines the values."""
        return self._context

    @property
    def text(self) -> Text:
        """How text became token ids."""
        return self._text

    @property
    def provenance(self) -> Mapping[str, str]:
        """Library versions, device, attention implementation."""
        return self._provenance

    @property
    def files(self) -> Mapping[str, bytes]:
        """Covered files ``weights`` and ``inv_freq``; none for an unknown context."""
        return self._files

    @property
    def max_tokens(self) -> int | None:
        """Positions of the model."""
        return self._max_tokens

    def extract(self, documents: Sequence[Document]) -> Sequence[Extracted]:
        """Components of each document, in order.

        Parameters
        ----------
        documents
            One or more, all with the same number of tokens, causal, without media.

        Returns
        -------
        Sequence[Extracted]
            Tensors ``[layers, tokens, heads, head_dim]`` of the storage dtype on the model's device: views of one
            buffer of this call.

        Raises
        ------
        InputError
            E110 for a document this model does not take, E301 too long, E303 where a layer gave other shapes.
        UsageError
            E081 for documents of different lengths.
        """
        num_tokens = self._check(documents)
        device = next(self._decoder.parameters()).device
        stored = self._stored
        buffers = RecordBuffers(stored, num_documents=len(documents), num_tokens=num_tokens, device=device)

        def sink(layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
            if layer not in stored.slots:
                return
            if stored.stages is not None:
                key, value = stored.stages.take(layer, key, value)
            buffers.put(layer, key, value)

        cache = CaptureCache(sink, stop=lambda layer: layer == stored.last)
        watching = nullcontext() if stored.stages is None else stored.stages.watching()
        with torch.inference_mode(), torch.autocast(device.type, enabled=False), watching:
            run_decoder(self._decoder, cache, argument=self._argument, **self._inputs(documents, device))
        return buffers.records()

    def values_digest(self) -> str:
        """SHA-256 (hex) over what determines the values, for a model no context is known of.

        Covers the weights as loaded, the configuration, library versions, device and settings. Unlike a context it
        says nothing about what these mean, so it serves to continue an interrupted run and is not stored. Each call
        reads all weights: about a second a gigabyte.
        """
        return values_digest(self._decoder, provenance=self._provenance, adapted=self._adapted)

    def _move(self, device: torch.device) -> None:
        """Drop the layers above the last wanted one, then move the rest: they never reach the device."""
        del self._stored.stack[self._last + 1 :]
        self._decoder.requires_grad_(requires_grad=False)
        self._decoder.to(device)

    def _inputs(self, documents: Sequence[Document], device: torch.device) -> dict[str, torch.Tensor]:
        """Forward arguments of documents that :meth:`_check` let through, on ``device``."""
        return decoder_inputs(documents, device)

    def _check(self, documents: Sequence[Document]) -> int:
        """The number of tokens these documents share; E081, E110, E301 for documents this extractor does not take."""
        return check_documents(documents, max_tokens=self._max_tokens, vocab_size=self._vocab_size)
