"""The extractor of vision-language models: K and V of documents with images."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from msgspec.structs import replace

from kvformat.errors import make_error
from kvformat.extract.checkpoint.source import CheckpointSource
from kvformat.extract.hf.decoder_inputs import token_ids_of
from kvformat.extract.hf.extractor import HuggingFaceExtractor
from kvformat.extract.hf.hub import commit_of
from kvformat.extract.hf.images import ImageProcessor
from kvformat.extract.hf.images_ahead import ImagesAhead
from kvformat.extract.hf.loading import compute_dtype_of, provenance_of, refuse_adapters
from kvformat.extract.hf.options import check_device
from kvformat.extract.hf.planned_images import MediaSource, PlannedImages
from kvformat.extract.hf.vision_context import context_with_tower
from kvformat.extract.hf.vision_inputs import check_media, embedded_inputs, position_rows
from kvformat.extract.hf.vision_loading import load_vision_model
from kvformat.extract.media import MAX_PIXELS, with_media
from kvformat.extract.towers import takes_images
from kvformat.extract.weights import state_digest
from kvformat.interfaces import Extracted
from kvformat.spec import canonical

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvformat.spec.document import Document

__all__ = ["Foresight", "VisionExtractor"]

Foresight = Callable[["Document"], Iterable["Document"]]
"""From a document to those that are likely to be asked for after it, in order."""


class VisionExtractor(HuggingFaceExtractor):
    """Extracts K and V of a vision-language model; an :class:`kvformat.interfaces.Extractor`.

    A document's images are read again from where they were when it was planned, and refused where they are others;
    those of documents that are foreseen are read and decoded by helper threads, while the model runs.
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
    following
        Foresees documents: their images are loaded beside the model. Without it, the model waits for each image.
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
        following: Foresight | None = None,
        **options: Any,
    ) -> None:
        whole = _whole(model)
        images.require(whole.config.vision_config)
        refuse_adapters(whole.visual)
        super().__init__(whole.get_decoder(), **options)
        self._whole = whole
        self._images = images
        self._ahead = ImagesAhead(PlannedImages(images, media_source, max_pixels=max_pixels))
        self._following = following
        self._image_id = int(whole.config.image_token_id)
        self._schema = with_media(self._schema)
        self._files["image_processor"] = images.file
        if self._context.model is not None:
            self._context, self._files["weights"] = context_with_tower(
                self._context,
                self._files["weights"],
                whole.visual,
                last=self._last,
                compute_dtype=compute_dtype_of(self._decoder),
            )

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
        following: Foresight | None = None,
        **options: Any,
    ) -> Self:
        """Load a model with its image processor and make an extractor of it.

        Parameters
        ----------
        model, revision, compute_dtype, device, attn_implementation, checkpoint
            As for :meth:`kvformat.extract.hf.HuggingFaceExtractor.load`.
        adapter
            Refused: it may change the vision tower too.
        media_source, max_pixels, following, **options
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
            following=following,
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
        following: Foresight | None = None,
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
            following=following,
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
            if self._following is not None:
                self._expect(documents)
            extracted = super().extract([documents[number] for number in together])
            found.update(zip(together, extracted, strict=True))
        for number, document in enumerate(documents):
            if document.media:
                self._expect(documents[number:])
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
            check_media(document, image_id=self._image_id)
        return num_tokens

    def _expect(self, documents: Sequence[Document]) -> None:
        """Begin to load the images of the first of some documents, and of what follows it."""
        following = () if self._following is None else self._following(documents[-1])
        then = chain.from_iterable(document.media for document in chain(documents[1:], following))
        self._ahead.expect(documents[0].media, then)

    def _inputs(self, documents: Sequence[Document], device: torch.device) -> dict[str, Any]:
        media = [entry for document in documents for entry in document.media]
        if not media and all(d.position_ids is None or len(d.position_ids) == 1 for d in documents):
            return super()._inputs(documents, device)
        ids = token_ids_of(documents, device)
        inputs: dict[str, Any] = {"position_ids": position_rows(documents).to(device)}
        if not media:
            return inputs | {"input_ids": ids}
        patches = [self._ahead.take(entry) for entry in media]
        return inputs | embedded_inputs(self._whole, ids, patches, image_id=self._image_id)

    def _move(self, device: torch.device) -> None:
        super()._move(device)
        self._whole.visual.requires_grad_(requires_grad=False)
        self._whole.visual.to(device)


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
