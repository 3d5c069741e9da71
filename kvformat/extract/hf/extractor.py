"""The Hugging Face extractor: keys and values of a decoder as its attention consumes them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
from msgspec import structs

from kvformat.errors import make_error
from kvformat.extract.capture import CaptureCache, cache_argument, run_decoder
from kvformat.extract.checkpoint.source import CheckpointSource
from kvformat.extract.hf.adapters import Adapted, applied_adapter, attach_adapter, load_peft
from kvformat.extract.hf.hub import commit_of
from kvformat.extract.hf.loading import (
    compute_dtype_of,
    decoder_stack,
    load_decoder,
    load_from_checkpoint,
    provenance_of,
    refuse_adapters,
    watchable_attention,
)
from kvformat.extract.hf.options import (
    AdapterMode,
    check_adapter_mode,
    check_device,
    check_dtype,
    check_key_stage,
    latent_widths,
    max_positions,
    wanted_layers,
)
from kvformat.extract.identity import check_history, derive_context, inv_freq_file
from kvformat.extract.key_stages import find_stages
from kvformat.extract.options import ContextKind, context_kind
from kvformat.extract.probe import probe, reachable_state
from kvformat.extract.shapes import cached_schema, slots
from kvformat.extract.weights import reaching_tensors, state_digest, weights_digest, weights_file
from kvformat.interfaces import Extracted
from kvformat.spec import canonical
from kvformat.spec.context import Context, Text, real
from kvformat.spec.schema import Stage
from kvformat.tensors import torch_dtype

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
        config: Any = decoder.config
        check_history(config, decoder)
        compute_dtype = compute_dtype_of(decoder)
        storage = check_dtype(dtype or compute_dtype, "storage")
        num_layers = int(config.num_hidden_layers)
        stack_name, stack = decoder_stack(decoder, num_layers)
        wanted = wanted_layers(layers, num_layers)
        key_stage = check_key_stage(key_stage)
        self._stages = find_stages(stack, wanted, key_stage)
        with watchable_attention(decoder):
            probed = probe(decoder, wanted, latent=latent_widths(config), stages=self._stages)
        base = reaching_tensors(reachable_state(decoder), stack=stack_name, last=wanted[-1], reached=probed.reached)
        low_rank: dict[str, torch.Tensor] = {}
        if adapted is not None:
            base, low_rank = adapted.split(base)
        self._adapted = adapted
        self._decoder = decoder
        self._argument = cache_argument(decoder)
        self._last = wanted[-1]
        self._forms = probed.forms
        self._slots = slots(probed.forms)
        self._storage = torch_dtype(storage)
        self._schema = cached_schema(probed.forms, dtype=storage, key_stage=key_stage)
        self._files: dict[str, bytes] = {}
        self._context = Context.unknown()
        if context_kind(context) == "derive":
            self._files["weights"] = weights_file(base, compute_dtype=compute_dtype)
            derived = derive_context(
                config,
                decoder,
                stack,
                probed.forms,
                compute_dtype=compute_dtype,
                weights=weights_digest(self._files["weights"]),
            )
            assert derived.model is not None, "a derived context is of a known model"
            if self._stages is not None:
                self._stages.check_groups(derived.model.rope)
            if adapted is not None:
                named = adapted.named(low_rank, compute_dtype=compute_dtype)
                derived = Context.of(structs.replace(derived.model, adapters=named))
            self._context = derived
            frequencies = inv_freq_file(self._context, config, decoder)
            if frequencies is not None:
                self._files["inv_freq"] = frequencies
        self._text = text or Text()
        self._provenance = dict(provenance)
        self._vocab_size = int(decoder.get_input_embeddings().weight.shape[0])
        self._max_tokens = max_positions(config)

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
        if adapter is None and adapter_mode is not None:
            raise make_error("E081", f"adapter_mode {adapter_mode!r:.80} is given without an adapter")
        mode = None if adapter is None else check_adapter_mode(adapter_mode)
        if mode is not None:
            load_peft()  # before the model, which takes its time
        context = context_kind(context)
        where = check_device(device)
        commit = commit_of(model, revision)
        how: dict[str, Any] = {
            "revision": commit or revision,
            "compute_dtype": compute_dtype,
            "attn_implementation": attn_implementation,
        }
        recorded: dict[str, str] = {}
        if checkpoint is None:
            decoder = load_decoder(model, **how)
        else:
            restored = load_from_checkpoint(model, checkpoint, layers=layers, **how)
            decoder = restored.module
            recorded |= restored.provenance
        adapted: Adapted | None = None
        if adapter is not None and mode is not None:
            num_layers = int(decoder.config.num_hidden_layers)
            decoder, adapted, found = attach_adapter(
                decoder,
                adapter,
                mode=mode,
                stack=decoder_stack(decoder, num_layers)[0],
                last=wanted_layers(layers, num_layers)[-1],
                compute_dtype=compute_dtype_of(decoder),
            )
            recorded |= found
        extractor = cls(
            decoder,
            layers=layers,
            dtype=dtype,
            text=text,
            context=context,
            provenance=provenance_of(decoder, model, where, commit=commit) | recorded,
            key_stage=key_stage,
            adapted=adapted,
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
        buffers = {
            component.name: torch.empty(
                (len(documents), len(component.layers), num_tokens, *(int(a.size) for a in component.axes[1:])),  # type: ignore[arg-type]
                dtype=self._storage,
                device=device,
            )
            for component in self._schema.components
        }
        seen: set[int] = set()

        def sink(layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
            slot = self._slots.get(layer)
            if slot is None:
                return
            if self._stages is not None:
                key, value = self._stages.take(layer, key, value)
            for name, tensor in ((slot.key, key), (slot.value, value)):
                target = buffers[name][:, slot.row]
                rows = tensor.transpose(1, 2)
                if self._forms[layer].latent:
                    rows = rows.squeeze(2)
                if rows.shape != target.shape:
                    raise make_error(
                        "E303",
                        f"the cache holds {list(rows.shape)} for {name!r}, expected {list(target.shape)}",
                        layer=layer,
                    )
                target.copy_(rows)  # casts to the storage dtype
            seen.add(layer)

        cache = CaptureCache(sink, stop=lambda layer: layer == self._last)
        watching = nullcontext() if self._stages is None else self._stages.watching()
        with torch.inference_mode(), torch.autocast(device.type, enabled=False), watching:
            run_decoder(self._decoder, cache, argument=self._argument, **self._inputs(documents, device))
        missing = self._slots.keys() - seen
        if missing:
            raise make_error("E303", f"layers {sorted(missing)} wrote no K/V into the cache", layer=min(missing))
        return [
            Extracted(components={name: buffer[index] for name, buffer in buffers.items()}, extras={})
            for index in range(len(documents))
        ]

    def values_digest(self) -> str:
        """SHA-256 (hex) over what determines the values, for a model no context is known of.

        Covers the weights as loaded, the configuration, library versions, device and settings. Unlike a context it
        says nothing about what these mean, so it serves to continue an interrupted run and is not stored. Each call
        reads all weights: about a second a gigabyte.
        """
        state = {
            name: tensor
            for name, tensor in self._decoder.state_dict(keep_vars=True).items()
            if isinstance(tensor, torch.Tensor)
        }
        determining: dict[str, object] = {
            "configuration": self._decoder.config.to_json_string(use_diff=False),
            "provenance": self._provenance,
            "state": state_digest(state),
        }
        if self._adapted is not None and self._adapted.applied is not None:
            name, scale = self._adapted.applied
            determining["adapter"] = {"name": name, "scale": real(scale)}
        return hashlib.sha256(canonical.encode(determining)).hexdigest()

    def _move(self, device: torch.device) -> None:
        """Drop the layers above the last wanted one, then move the rest: they never reach the device."""
        _, stack = decoder_stack(self._decoder, int(self._decoder.config.num_hidden_layers))
        del stack[self._last + 1 :]
        self._decoder.requires_grad_(requires_grad=False)
        self._decoder.to(device)

    def _inputs(self, documents: Sequence[Document], device: torch.device) -> dict[str, torch.Tensor]:
        """Forward arguments of documents that :meth:`_check` let through, on ``device``."""
        ids = torch.from_numpy(np.stack([d.token_ids for d in documents])).to(device=device, dtype=torch.int64)
        if all(d.position_ids is None for d in documents):
            return {"input_ids": ids}
        return {"input_ids": ids, "position_ids": _positions(documents, device)}

    def _check(self, documents: Sequence[Document]) -> int:
        """The number of tokens these documents share; E081, E110, E301 for documents this extractor does not take."""
        lengths = {document.num_tokens for document in documents}
        if len(lengths) != 1:
            raise make_error("E081", f"documents of one call must have one length, found {sorted(lengths) or 'none'}")
        (num_tokens,) = lengths
        if self._max_tokens is not None and num_tokens > self._max_tokens:
            raise make_error("E301", f"{num_tokens} tokens, but the model has {self._max_tokens} positions")
        for document in documents:
            if document.mask != "causal" or document.media:
                raise make_error("E110", "this extractor takes causal documents without media only")
            if document.position_ids is not None and len(document.position_ids) != 1:
                raise make_error("E110", "this extractor takes positions of one row only")
            if int(document.token_ids.max()) >= self._vocab_size:
                raise make_error(
                    "E110", f"token id {int(document.token_ids.max())} is beyond the vocabulary of {self._vocab_size}"
                )
        return num_tokens


def _positions(documents: Sequence[Document], device: torch.device) -> torch.Tensor:
    rows = [np.arange(d.num_tokens) if d.position_ids is None else d.position_ids[0] for d in documents]
    return torch.from_numpy(np.stack(rows)).to(device=device, dtype=torch.int64)
