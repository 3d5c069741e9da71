"""Images of planned documents: read again from where they were, and refused where they are others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvformat.errors import KVFormatError, make_error
from kvformat.extract.hf.images import ImageProcessor, Patches
from kvformat.extract.media import load_image, media_digest, pixels_digest, to_rgb

if TYPE_CHECKING:
    from kvformat.spec.document import Media

__all__ = ["MediaSource", "PlannedImages"]

MediaSource = Callable[[bytes], str | None]
"""From the digest of a media entry to the path or URL of its image. Threads may call it at the same time."""


class PlannedImages:
    """Loads the images of media entries. Threads may use it at the same time.

    Parameters
    ----------
    processor
        The image processor.
    source
        Says where images are.
    max_pixels
        A larger image is refused before it is decoded.
    """

    def __init__(self, processor: ImageProcessor, source: MediaSource, *, max_pixels: int) -> None:
        self._processor = processor
        self._source = source
        self._max_pixels = max_pixels

    def nbytes(self, entry: Media) -> int:
        """Bytes of the patches of an entry's image, as far as it is the planned one."""
        return self._processor.patches_nbytes(entry.count)

    def load(self, entry: Media) -> Patches:
        """Patches of the image of a media entry.

        Raises
        ------
        InputError
            E309 where it is not there, or another one.
        """
        source = self._source(entry.digest)
        if source is None:
            raise make_error(
                "E309",
                f"nothing says where the image {entry.digest.hex()[:16]} is: plan the documents again, from the "
                "messages that name their images",
            )
        try:
            image = load_image(source, max_pixels=self._max_pixels)
            if media_digest(pixels_digest(image), self._processor.digest) != entry.digest:
                raise make_error(
                    "E309",
                    "not the image that was planned, or planned for other settings of the image processor: restore "
                    "the image, or plan again",
                    path=source,
                )
            found = self._processor.patches(to_rgb(image))
        except KVFormatError as error:
            if error.code != "E309" or error.path is not None:
                raise
            raise make_error("E309", error.message, path=source) from error
        num_tokens = self._processor.num_tokens(found.grid)
        if num_tokens != entry.count:
            raise make_error(
                "E309", f"an image of {num_tokens} tokens, the document has {entry.count} for it", path=source
            )
        return found
