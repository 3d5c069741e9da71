"""The extractor of vision-language models: K and V of documents with images."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from msgspec.structs import replace

from kvformat.errors import KVFormatError, make_error
from kvformat.extract.checkpoint.source import CheckpointSource
from kvformat.extract.hf.extractor import HuggingFaceExtractor
from kvformat.extract.hf.hub import commit_of
from kvformat.extract.hf.images import ImageProcessor, Patches
from kvformat.extract.hf.loading import compute_dtype_of, provenance_of, refuse_adapters
from kvformat.extract.hf.options import check_device
from kvformat.extract.hf.vision_loading import load_vision_model
from kvformat.extract.hf.vision_tokenise import media_spans
from kvformat.extract.media import MAX_PIXELS, load_image, media_digest, pixels_digest, to_rgb, with_media
from kvformat.extract.probe import reachable_state
from kvformat.extract.towers import check_tower, takes_images, tower_tensors
from kvformat.extract.weights import state_digest, weights_digest, weights_file
from kvformat.interfaces import Extracted
from kvformat.spec import canonical
from kvformat.tensors import torch_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvformat.spec.context import Context
    from kvformat.spec.document import Document, Media

__all__ = ["MediaSource", "VisionExtractor"]

MediaSource = Callable[[bytes], str | None]
"""From the digest of a media entry to the path or URL of its image."""


class VisionExtractor(HuggingFaceExtractor):
    """Extracts K and V of a vision-language model; an :class:`kvformat.interfaces.Extractor`.

    A document's images are read again from where they were when it was planned, and refused where they are others.
    The vision tower runs over them, and the decoder over text and images together, with the positions of the document.
    A document with images is always run alone, whatever else is asked for with it: the bits of the tower's products
    depend on how many patches there are. Documents without images go the way of
    :class:`~kvformat.extract.hf.HuggingFaceExtractor`.

    Its schema has the extras ``position_ids`` and ``media`` besides, and its covered file ``weights`` lists tensors of
    the tower too: it is meant for datasets in which a document has images.

    Parameters
    ----------
    model
        The whole model in evaluation mode.
    images
        The image processor.
    media_source
        Says where images are.
    max_pixels
        A larger image is refused before it is decoded.
    **options
        As for :class:`~kvformat.extract.hf.HuggingFaceExtractor`.
    """

    def __init__(
        self,
        model: Any,
        *,
        images: ImageProcessor,
        media_source: MediaSource,
        max_pixels: int = MAX_PIXELS,
        **options: Any,
    ) -> None:
        whole = _whole(model)
        images.require(whole.config.vision_config)
        refuse_adapters(whole.visual)
        super().__init__(whole.get_decoder(), **options)
        self._whole = whole
        self._images = images
        self._media_source = media_source
        self._max_pixels = max_pixels
        self._image_id = int(whole.config.image_token_id)
        self._schema = with_media(self._schema)
        self._files["image_processor"] = images.file
        if self._context.model is not None:
            self._context = self._with_tower(self._context)

    @classmethod
    def load(  # type: ignore[override]
        cls,
        model: str | Path,
        *,
        media_source: MediaSource,
        revision: str | None = None,
        compute_dtype: str | None = None,
        device: str | torch.device = "cpu",
        attn_implementation: str | None = None,
        checkpoint: CheckpointSource | str | None = None,
        adapter: str | Path | None = None,
        max_pixels: int = MAX_PIXELS,
        **options: Any,
    ) -> Self:
        """Load a model with its image processor and make an extractor of it.

        Parameters
        ----------
        model, revision, compute_dtype, device, attn_implementation, checkpoint
            As for :meth:`kvformat.extract.hf.HuggingFaceExtractor.load`.
        adapter
            Refused: it may change the vision tower too.
        media_source, max_pixels, **options
            As for the class.

        Raises
        ------
        InputError
            E302 model refused, E303 cache incomplete, E304 model or image processor does not load, E308 checkpoint
            refused, E310 adapter given.
        UsageError
            E081.
        DependencyError
            E205 where Pillow is not installed.
        """
        if adapter is not None:
            raise make_error(
                "E310",
                "adapters are not fitted to models that take images here: merge it into its base model with peft "
                "(merge_and_unload), and save that",
                path=adapter,
            )
        where = check_device(device)
        commit = commit_of(model, revision)
        images = ImageProcessor.load(model, revision=commit or revision)
        whole, restored = load_vision_model(
            model,
            revision=commit or revision,
            compute_dtype=compute_dtype,
            attn_implementation=attn_implementation,
            checkpoint=checkpoint,
            layers=options.get("layers"),
        )
        extractor = cls(
            whole,
            images=images,
            media_source=media_source,
            max_pixels=max_pixels,
            provenance=_provenance(whole, model, where, commit) | restored,
            **{"layers": None, "dtype": None, "text": None, "context": "derive"} | options,
        )
        extractor._move(where)
        return extractor

    @classmethod
    def of(  # type: ignore[override]
        cls,
        model: PreTrainedModel,
        *,
        images: ImageProcessor,
        media_source: MediaSource,
        max_pixels: int = MAX_PIXELS,
        **options: Any,
    ) -> Self:
        """Make an extractor of a model that is loaded already; the model is used where it is and never changed.

        Raises
        ------
        InputError, UsageError
            As :meth:`load`.
        """
        device = next(model.parameters()).device
        return cls(
            model,
            images=images,
            media_source=media_source,
            max_pixels=max_pixels,
            provenance=_provenance(model, getattr(model.config, "_name_or_path", ""), device, None),
            **{"layers": None, "dtype": None, "text": None, "context": "derive"} | options,
        )

    def extract(self, documents: Sequence[Document]) -> Sequence[Extracted]:
        """Components of each document, in order.

        Parameters
        ----------
        documents
            One or more, all with the same number of tokens, causal, with or without images.

        Returns
        -------
        Sequence[Extracted]
            Tensors ``[layers, tokens, heads, head_dim]`` of the storage dtype on the model's device.

        Raises
        ------
        InputError
            E110 for a document this model does not take, E301 too long, E303 where a layer gave other shapes, E309 for
            an image that is not the one of the document.
        UsageError
            E081 for documents of different lengths.
        """
        self._check(documents)
        found: dict[int, Extracted] = {}
        together = [number for number, document in enumerate(documents) if not document.media]
        if together:
            extracted = super().extract([documents[number] for number in together])
            found.update(zip(together, extracted, strict=True))
        for number, document in enumerate(documents):
            if document.media:
                (found[number],) = super().extract([document])
        return [found[number] for number in range(len(documents))]

    def values_digest(self) -> str:
        """As for :class:`~kvformat.extract.hf.HuggingFaceExtractor`, over the vision tower too."""
        visual = self._whole.visual
        determining = {
            "configuration": visual.config.to_json_string(use_diff=False),
            "decoder": super().values_digest(),
            "image_processor": self._images.digest.hex(),
            "state": state_digest(visual.state_dict(keep_vars=True)),
        }
        return hashlib.sha256(canonical.encode(determining)).hexdigest()

    def _check(self, documents: Sequence[Document]) -> int:
        num_tokens = super()._check([replace(document, media=(), position_ids=None) for document in documents])
        for document in documents:
            spans = [(entry.first, entry.count) for entry in document.media]
            if spans and (
                any(entry.scheme != "pixels" for entry in document.media)
                or spans != list(media_spans(document.token_ids, self._image_id))
            ):
                raise make_error(
                    "E110", "media must be images by their pixels, each the span of one run of image tokens"
                )
        return num_tokens

    def _inputs(self, documents: Sequence[Document], device: torch.device) -> dict[str, Any]:
        media = [entry for document in documents for entry in document.media]
        if not media and all(d.position_ids is None or len(d.position_ids) == 1 for d in documents):
            return super()._inputs(documents, device)
        ids = torch.from_numpy(np.stack([d.token_ids for d in documents])).to(device=device, dtype=torch.int64)
        inputs: dict[str, Any] = {"position_ids": _positions(documents).to(device)}
        if not media:
            return inputs | {"input_ids": ids}
        return inputs | self._embedded(ids, [self._patches(entry) for entry in media])

    def _embedded(self, ids: torch.Tensor, patches: Sequence[Patches]) -> dict[str, Any]:
        """The decoder's input with images in place, and what the tower adds behind its first layers.

        As the forward of the whole model does it, which would also work out positions and keep them.
        """
        features = self._whole.get_image_features(
            torch.cat([one.values for one in patches]).to(ids.device),
            torch.tensor([one.grid for one in patches], device=ids.device),
            return_dict=True,
        )
        embedded = self._whole.get_input_embeddings()(ids)
        seen = torch.cat(features.pooler_output).to(embedded.device, embedded.dtype)
        inside = ids == self._image_id
        return {
            "inputs_embeds": embedded.masked_scatter(inside[..., None].expand_as(embedded), seen),
            "visual_pos_masks": inside,
            "deepstack_visual_embeds": [torch.cat(feature) for feature in features.deepstack_features],
        }

    def _patches(self, entry: Media) -> Patches:
        """Patches of the image of a media entry; E309 where it is not there, or another one."""
        source = self._media_source(entry.digest)
        if source is None:
            raise make_error(
                "E309",
                f"nothing says where the image {entry.digest.hex()[:16]} is: plan the documents again, from the "
                "messages that name their images",
            )
        try:
            image = load_image(source, max_pixels=self._max_pixels)
            if media_digest(pixels_digest(image), self._images.digest) != entry.digest:
                raise make_error(
                    "E309",
                    "not the image that was planned, or planned for other settings of the image processor: restore "
                    "the image, or plan again",
                    path=source,
                )
            found = self._images.patches(to_rgb(image))
        except KVFormatError as error:
            if error.code != "E309" or error.path is not None:
                raise
            raise make_error("E309", error.message, path=source) from error
        if self._images.num_tokens(found.grid) != entry.count:
            raise make_error(
                "E309",
                f"an image of {self._images.num_tokens(found.grid)} tokens, the document has {entry.count} for it",
                path=source,
            )
        return found

    def _with_tower(self, context: Context) -> Context:
        """The context, with the vision tower in its weights."""
        visual = self._whole.visual
        dtype = compute_dtype_of(self._decoder)
        check_tower(visual.config, visual)
        odd = {str(tensor.dtype) for tensor in visual.parameters()} - {str(torch_dtype(dtype))}
        if odd:
            raise make_error(
                "E302",
                f"the vision tower computes in {', '.join(sorted(odd))}, the decoder in {dtype}: load both in one",
            )
        tower = weights_file(tower_tensors(reachable_state(visual), last=self._last), compute_dtype=dtype)
        lines = [*_lines(self._files["weights"]), *_lines(tower)]
        lines.sort(key=lambda line: str(line["name"]).encode())
        self._files["weights"] = canonical.encode({"tensors": lines})
        assert context.model is not None, "only a known context has weights"
        return replace(context, model=replace(context.model, weights=weights_digest(self._files["weights"])))

    def _move(self, device: torch.device) -> None:
        super()._move(device)
        self._whole.visual.requires_grad_(requires_grad=False)
        self._whole.visual.to(device)


def _positions(documents: Sequence[Document]) -> torch.Tensor:
    """Rows of time, height and width, int64 ``[3, documents, tokens]``."""
    rows = [
        np.arange(document.num_tokens)[None] if document.position_ids is None else document.position_ids
        for document in documents
    ]
    shape = (3, documents[0].num_tokens)
    return torch.from_numpy(np.stack([np.broadcast_to(row, shape) for row in rows], axis=1).astype(np.int64))


def _lines(file: bytes) -> Sequence[Mapping[str, Any]]:
    decoded: Any = canonical.decode(file)
    tensors: Sequence[Mapping[str, Any]] = decoded["tensors"]
    return tensors


def _whole(model: Any) -> Any:
    """The base model, with tower and decoder."""
    whole = model.base_model
    if not takes_images(whole.config):
        raise make_error("E302", f"models of type {whole.config.model_type!r} take no images that are known here")
    return whole


def _provenance(model: Any, name: str | Path, device: torch.device, commit: str | None) -> dict[str, str]:
    from importlib.metadata import version

    whole = _whole(model)
    attention = getattr(whole.visual.config, "_attn_implementation", None)
    return provenance_of(whole.get_decoder(), name, device, commit=commit) | {
        "pillow": version("pillow"),
        "vision_attn_implementation": str(attention or "eager"),
    }
