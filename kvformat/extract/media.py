"""Images of documents: from where they lie to the pixels that identify them, and that a model is given.

An image is decoded to its first frame, turned upright as its EXIF orientation says, and brought to one of a few forms
in which equal pixels have equal bytes: a palette or one bit a pixel is an encoding, the colours it stands for are the
pixels. Colour profiles are not applied. The same form is identified and given to the model, so that nothing which
reaches the model can differ behind one digest.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import struct
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from msgspec.structs import replace

from kvformat.errors import KVFormatError, make_error
from kvformat.spec.document import MEDIA_ENTRY_NBYTES
from kvformat.spec.schema import Axis, Extra, Schema
from kvformat.storage.location import resolve
from kvformat.storage.remote import Remote

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "MAX_PIXELS",
    "load_image",
    "media_digest",
    "pixels_digest",
    "resolve_source",
    "to_rgb",
    "upright",
    "with_media",
]

MAX_PIXELS = 1 << 26
"""Most pixels of an image: 8192 x 8192. What claims more is refused before it is decoded."""
_MAX_NBYTES = 1 << 29
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Formats that are nothing but pixels: decoding them starts no other program."""
_SAMPLES = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4, "I;16": 2}  # bytes a pixel, by mode
_SIZE = struct.Struct("<QQ")


def resolve_source(reference: str, *, base: Path) -> str:
    """Absolute path or URL of an image; a relative path is one from the directory ``base``.

    Raises
    ------
    InputError
        E309 for what is no location.
    """
    try:
        return str(resolve(reference if "://" in reference else base / reference))
    except (KVFormatError, ValueError) as error:
        reason = error.message if isinstance(error, KVFormatError) else str(error)
        raise make_error("E309", f"no location of an image: {reason}", path=reference) from error


def load_image(source: str, *, max_pixels: int = MAX_PIXELS) -> Image:
    """Read and decode an image.

    Parameters
    ----------
    source
        Absolute path, or URL of anything fsspec has a file system for.
    max_pixels
        A larger image is refused before it is decoded.

    Returns
    -------
    PIL.Image.Image
        As :func:`upright` gives it.

    Raises
    ------
    InputError
        E309, with the source as its path: missing, unreadable, too large, or no image of a known format.
    DependencyError
        E205 where Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise make_error("E205", "images need Pillow: pip install 'kvformat[hf]'") from error
    data = _read(source)
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as opened:
            width, height = opened.size
            if width * height > max_pixels:
                raise make_error(
                    "E309",
                    f"{width} x {height} pixels, at most {max_pixels:,} are decoded: scale the image down",
                    path=source,
                )
            return upright(opened)
    except KVFormatError as error:
        raise make_error("E309", error.message, path=source) from None
    except Exception as error:  # Pillow raises whatever the odd bytes led to, its warning of large images included
        raise make_error(
            "E309",
            f"no image that decodes ({type(error).__name__}: {error}); readable are {', '.join(_FORMATS)}",
            path=source,
        ) from error


def upright(image: Image) -> Image:
    """The pixels of an image as they are seen: orientation applied, palette and single bits resolved.

    Returns
    -------
    PIL.Image.Image
        Mode ``L``, ``LA``, ``RGB``, ``RGBA`` (whatever else has transparency), ``CMYK`` or ``I;16``. Doing this twice
        changes nothing.

    Raises
    ------
    InputError
        E309 for any other mode: floating point, 32 bits, Lab and the like.
    """
    from PIL import ImageOps

    found = ImageOps.exif_transpose(image)
    if found.mode in ("1", "L", "P", "PA", "RGB") and found.has_transparency_data:
        found = found.convert("RGBA")
    elif found.mode == "P":
        found = found.convert("RGB")
    elif found.mode == "1":
        found = found.convert("L")
    if found.mode not in _SAMPLES:
        raise make_error("E309", f"an image of mode {found.mode!r}: save it as RGB with 8 bits a sample")
    return found


def pixels_digest(image: Image) -> bytes:
    """SHA-256 over an image: its mode, its size and its pixels.

    Over ``kvf1/image`` and a zero byte, the length of the mode's name (u8), the name, width and height (u64 each,
    little-endian), and the samples row by row, those of a pixel together. No two images have equal bytes.

    Raises
    ------
    InputError
        E309 as :func:`upright`, which is applied first.
    """
    found = upright(image)
    samples = found.tobytes()
    width, height = found.size
    if len(samples) != width * height * _SAMPLES[found.mode]:
        message = f"{len(samples)} bytes for {width} x {height} pixels of mode {found.mode}: save it as PNG in RGB"
        raise make_error("E309", message)
    hasher = hashlib.sha256(b"kvf1/image\0")
    hasher.update(bytes([len(found.mode)]) + found.mode.encode() + _SIZE.pack(width, height))
    hasher.update(samples)
    return hasher.digest()


def media_digest(pixels: bytes, processing: bytes) -> bytes:
    """Digest of a document's media entry: an image, and how its pixels become what the model is given.

    Parameters
    ----------
    pixels
        :func:`pixels_digest` of the image.
    processing
        SHA-256 of the settings of the image processor, the covered file ``image_processor``.
    """
    return hashlib.sha256(b"kvf1/pixels\0" + processing + pixels).digest()


def to_rgb(image: Image) -> Image:
    """What the image processor is given: mode ``RGB``; transparency laid over white.

    Parameters
    ----------
    image
        As :func:`upright` gives it.

    Raises
    ------
    InputError
        E309 for 16 bits a sample. The usual conversion makes white of all values from 255 up.
    """
    from PIL import Image

    if image.mode == "I;16":
        raise make_error("E309", "16 bits a sample, of which models take 8: scale the values and save them as 8 bits")
    if image.mode in ("LA", "RGBA"):
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return image.convert("RGB")


def with_media(schema: Schema) -> Schema:
    """A schema whose records also keep what documents with images are made of: three rows of positions, and media."""
    positions = Extra(
        name="position_ids", axes=(Axis(name="rows", size=3), Axis(name="tokens", size="tokens")), dtype="I32"
    )
    media = Extra(
        name="media", axes=(Axis(name="media", size="media"), Axis(name="bytes", size=MEDIA_ENTRY_NBYTES)), dtype="U8"
    )
    return replace(schema, dims=(*schema.dims, "media"), extras=(*schema.extras, positions, media))


def _read(source: str) -> bytes:
    try:
        found = resolve(source)
        return _read_file(found) if isinstance(found, Path) else _read_url(found)
    except KVFormatError as error:
        raise make_error("E309", f"the image cannot be read: {error.message}", path=source) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise make_error(
            "E309", f"the image cannot be read: {reason}; restore it, or leave the document out", path=source
        ) from error


def _read_file(path: Path) -> bytes:
    # Without waiting for the other end, where it is a pipe.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise make_error("E309", "not a regular file")
        if status.st_size > _MAX_NBYTES:
            raise make_error("E309", f"{status.st_size:,} bytes, at most {_MAX_NBYTES:,} are read")
        return file.read()


def _read_url(url: str) -> bytes:
    base, mark, query = url.partition("?")
    parent, _, name = base.rpartition("/")
    if base.startswith(("http://", "https://")):
        name = unquote(name)  # a name is quoted again when it is asked for
    remote = Remote(parent + mark + query)
    try:
        return remote.read(name, max_nbytes=_MAX_NBYTES)
    finally:
        remote.close()
