"""Messages with images to documents: token ids, three rows of positions, and the identity of every image."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModel, ProcessorMixin

from kvformat.errors import KVFormatError, make_error
from kvformat.extract.documents.source import Source
from kvformat.extract.hf.images import ImageProcessor
from kvformat.extract.hf.loading import load_config
from kvformat.extract.hf.tokenizer import load_tokenizer
from kvformat.extract.media import MAX_PIXELS, load_image, media_digest, pixels_digest, resolve_source, to_rgb
from kvformat.extract.tokenise import Tokeniser
from kvformat.extract.towers import takes_images
from kvformat.spec.document import Document, Media

__all__ = ["VisionTokeniser", "media_spans"]

_MOST_THREADS = 16


class _Seen(NamedTuple):
    """What is known of one image of a document."""

    digest: bytes
    grid: tuple[int, int, int]
    num_tokens: int


class VisionTokeniser(Tokeniser):
    """A :class:`~kvformat.extract.tokenise.Tokeniser` that takes images in messages.

    A part ``{"type": "image", "image": PATH_OR_URL}`` of a message's content stands for an image; a relative path is
    one from the directory ``base``. Messages are rendered by the model's chat template, each placeholder becomes as
    many image tokens as the image has, and positions are those the model computes for them. Every other source is
    tokenised as ever.

    Parameters
    ----------
    images
        The image processor.
    config
        Configuration of the whole model.
    base
        Directory that relative paths begin at; the working directory when absent.
    max_pixels
        A larger image is refused before it is decoded.
    threads
        How many images are decoded at a time; as many as there are cores when absent, and at most 16.
    **options
        As for :class:`~kvformat.extract.tokenise.Tokeniser`.

    Raises
    ------
    InputError
        E302 for a model that takes no images, or none that are known here.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        images: ImageProcessor,
        config: Any,
        base: Path | None = None,
        max_pixels: int = MAX_PIXELS,
        threads: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(tokenizer, **options)
        if not takes_images(config):
            raise make_error("E302", f"models of type {config.model_type!r} take no images that are known here")
        images.require(config.vision_config)
        with torch.device("meta"):
            self._model = AutoModel.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
        self._images = images
        self._base = base or Path()
        self._max_pixels = max_pixels
        self._threads = threads or min(len(os.sched_getaffinity(0)), _MOST_THREADS)
        self._image_id = int(config.image_token_id)
        self._video_id = int(config.video_token_id)

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        revision: str | None = None,
        base: Path | None = None,
        max_pixels: int = MAX_PIXELS,
        threads: int | None = None,
        **options: Any,
    ) -> Self:
        """Load tokenizer, chat template and image processor of a model directory or hub id.

        Raises
        ------
        InputError
            E302, E304, E305.
        DependencyError
            E205 where Pillow is not installed.
        """
        config = load_config(model, revision=revision)
        tokenizer = load_tokenizer(model, revision=revision)
        template = _processor_template(model, revision)
        if template is not None:
            tokenizer.chat_template = template
        images = ImageProcessor.load(model, revision=revision)
        return cls(
            tokenizer, images=images, config=config, base=base, max_pixels=max_pixels, threads=threads, **options
        )

    @property
    def images(self) -> ImageProcessor:
        """The image processor; its ``file`` belongs to the dataset."""
        return self._images

    def documents(self, sources: Sequence[Source], *, path: object = None) -> list[Document | KVFormatError]:
        """As for :class:`~kvformat.extract.tokenise.Tokeniser`; images are decoded in several threads.

        Errors besides: E300 where the rendered text has another number of placeholders than the messages have images,
        E301 where truncation would cut through an image, E309 for an image that does not load.
        """
        pictured = [source for source in sources if source.images]
        if not pictured:
            return super().documents(sources, path=path)
        plain = iter(super().documents([s for s in sources if not s.images], path=path))
        found: list[Document | KVFormatError] = []
        with ThreadPoolExecutor(self._threads, thread_name_prefix="kvformat-images") as threads:
            looks = iter([threads.submit(self._look, source) for source in pictured])
            for source in sources:
                if not source.images:
                    found.append(next(plain))
                    continue
                seen = next(looks)
                try:
                    found.append(self._with_images(source, seen.result(), path))
                except KVFormatError as error:
                    found.append(error)
        return found

    def media_sources(self, source: Source) -> tuple[str, ...]:
        """Absolute paths or URLs of a source's images, in order; the document may have dropped the last ones.

        Raises
        ------
        InputError
            E309 for what is no location.
        """
        return tuple(resolve_source(reference, base=self._base) for reference in source.images)

    def _with_images(self, source: Source, seen: Sequence[_Seen], path: object) -> Document:
        rendered = self._encoder.render(source, path)
        (ids,) = self._encoder.encode([self._expanded(source, rendered, seen, path)], special_tokens=False)
        spans = list(media_spans(np.asarray(ids), self._image_id))
        if [count for _, count in spans] != [one.num_tokens for one in seen]:
            raise make_error(
                "E305",
                f"{source.place}: the tokenizer makes runs of {[count for _, count in spans]} image tokens, expected "
                f"{[one.num_tokens for one in seen]}: its image token is no special one, or images stand side by side",
                path=path,
                record=source.id,
            )
        whole = self._checked(source, ids, path)
        kept = whole.num_tokens
        if any(first < kept < first + count for first, count in spans):
            raise make_error(
                "E301",
                f"{source.place}: truncating to {kept} tokens would cut through an image; use smaller images, less "
                "text before them, or a higher limit",
                path=path,
                record=source.id,
            )
        return Document.of(
            whole.token_ids,
            position_ids=self._positions(ids, [one.grid for one in seen])[:, :kept],
            media=[
                Media(scheme="pixels", first=first, count=count, digest=one.digest)
                for (first, count), one in zip(spans, seen, strict=True)
                if first < kept
            ],
        )

    def _look(self, source: Source) -> list[_Seen]:
        """Identity and size of each image of a source."""
        found = []
        for number, location in enumerate(self.media_sources(source)):
            try:
                image = load_image(location, max_pixels=self._max_pixels)
                grid = self._images.patches(to_rgb(image)).grid
                digest = media_digest(pixels_digest(image), self._images.digest)
            except KVFormatError as error:
                if error.code != "E309":
                    raise
                raise make_error(
                    "E309", f"{source.place}: image {number}: {error.message}", path=location, record=source.id
                ) from error
            found.append(_Seen(digest=digest, grid=grid, num_tokens=self._images.num_tokens(grid)))
        return found

    def _expanded(self, source: Source, rendered: str, seen: Sequence[_Seen], path: object) -> str:
        """The rendered messages with as many image tokens for each image as it has."""
        image, video = self._token(self._image_id), self._token(self._video_id)
        pieces = rendered.split(image)
        if len(pieces) - 1 != len(seen) or video in rendered:
            raise make_error(
                "E300",
                f"{source.place}: the rendered messages have {len(pieces) - 1} placeholders {image!r} for {len(seen)} "
                f"images, and {rendered.count(video)} for videos: text must not hold these tokens, and the template "
                "must place each image",
                path=path,
                record=source.id,
            )
        return pieces[0] + "".join(image * one.num_tokens + piece for one, piece in zip(seen, pieces[1:], strict=True))

    def _token(self, number: int) -> str:
        return str(self._encoder.required().convert_ids_to_tokens(number))

    def _positions(self, ids: Sequence[int], grids: Sequence[tuple[int, int, int]]) -> NDArray[np.int64]:
        """Rows of time, height and width, ``[3, tokens]``, by the model's own rule."""
        tokens = torch.tensor([list(ids)])
        positions, _ = self._model.get_rope_index(
            input_ids=tokens,
            mm_token_type_ids=(tokens == self._image_id).int(),
            image_grid_thw=torch.tensor(grids),
        )
        found: NDArray[np.int64] = positions[:, 0].numpy()
        return found


def media_spans(ids: NDArray[Any], image_id: int) -> Iterator[tuple[int, int]]:
    """First token and number of tokens of each run of image tokens."""
    inside = np.concatenate(([False], ids == image_id, [False]))
    edges = np.flatnonzero(inside[1:] != inside[:-1]).tolist()
    for number, (first, end) in enumerate(pairwise(edges)):
        if number % 2 == 0:
            yield first, end - first


def _processor_template(model: str | Path, revision: str | None) -> str | None:
    """The chat template of a model's processor, where it has one beside the tokenizer's."""
    try:
        settings, _ = ProcessorMixin.get_processor_dict(str(model), revision=revision or "main")
    except Exception:  # noqa: BLE001 - a directory without one: the tokenizer's holds
        return None
    template = settings.get("chat_template")
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None
