"""The image processor of a model: from RGB pixels to patches, and the record of every setting that decides them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch

from kvformat.errors import make_error
from kvformat.extract.hf.library import first_line
from kvformat.spec import canonical
from kvformat.spec.context import real

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["ImageProcessor", "Patches"]

_CHANNELS = 3
_KIND = "Qwen2VLImageProcessorPil"
_FLAGS = ("do_normalize", "do_rescale", "do_resize")
_INTEGERS = ("merge_size", "patch_size", "temporal_patch_size")
_RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
_KNOWN = frozenset({*_FLAGS, *_INTEGERS, "image_mean", "image_std", "resample", "rescale_factor", "size"})
# Written by one release or another; this processor reads none of them, or they change nothing for an RGB image.
_IDLE: Mapping[str, tuple[object, ...]] = {
    "data_format": ("channels_first",),
    "default_to_square": (True, False),
    "disable_grouping": (True, False),
    "do_center_crop": (False,),
    "do_convert_rgb": (True, False),
    "do_pad": (False,),
    "image_processor_type": ("Qwen2VLImageProcessor",),
}


class Patches(NamedTuple):
    """What the vision tower is given for one image.

    Attributes
    ----------
    values
        float32 ``[patches, channels * temporal_patch_size * patch_size ** 2]``, on the CPU.
    grid
        Patches in time, height and width.
    """

    values: torch.Tensor
    grid: tuple[int, int, int]


class ImageProcessor:
    """An image processor of transformers whose settings are known.

    The one that computes with Pillow is used wherever a model is extracted: that of torchvision resizes to other
    values.

    Attributes
    ----------
    file
        The covered file ``image_processor``: canonical JSON of all settings that decide patches.
    digest
        SHA-256 of ``file``, 32 bytes. It enters the digest of every image of a document.

    Parameters
    ----------
    processor
        ``Qwen2VLImageProcessorPil``.

    Raises
    ------
    InputError
        E302 for another processor, and for settings unknown here.
    """

    def __init__(self, processor: Any) -> None:
        if type(processor).__name__ != _KIND:
            raise make_error(
                "E302", f"an image processor of type {type(processor).__name__} is unknown here, only {_KIND}"
            )
        self._processor = processor
        settings = _settings(processor.to_dict())
        self._sizes = {name: int(settings[name]) for name in _INTEGERS}
        self.file = canonical.encode(settings)
        self.digest = hashlib.sha256(self.file).digest()

    @classmethod
    def load(cls, model: str | Path, *, revision: str | None = None) -> Self:
        """Load the image processor of a model directory or hub id.

        Raises
        ------
        InputError
            E302; E304 where none loads.
        DependencyError
            E205 where Pillow is not installed.
        """
        try:
            import PIL  # noqa: F401 - transformers takes its absence for an unknown processor
            from transformers import AutoImageProcessor
        except ImportError as error:
            raise make_error("E205", f"images need {error.name}: pip install 'kvformat[hf]'") from error
        try:
            processor = AutoImageProcessor.from_pretrained(
                str(model), revision=revision or "main", backend="pil", trust_remote_code=False
            )
        except Exception as error:  # transformers raises whatever the missing or odd file led to
            raise make_error(
                "E304", f"the model's image processor does not load: {first_line(error)}", path=model
            ) from error
        return cls(processor)

    def require(self, vision: Any) -> None:
        """Refuse a processor that cuts other patches than a tower of this configuration takes; E302."""
        for name, own in (
            ("patch_size", "patch_size"),
            ("temporal_patch_size", "temporal_patch_size"),
            ("merge_size", "spatial_merge_size"),
        ):
            if self._sizes[name] != getattr(vision, own):
                raise make_error(
                    "E302",
                    f"the image processor has {name} = {self._sizes[name]}, the vision tower {own} = "
                    f"{getattr(vision, own)}: take both from one model",
                )

    def patches(self, image: Image) -> Patches:
        """Patches of an image of mode ``RGB``.

        Raises
        ------
        InputError
            E309 for an image the processor does not take, such as one 200 times as wide as it is high.
        """
        try:
            found = self._processor(images=[image], return_tensors="pt")
        except Exception as error:  # whatever a size it cannot take led to
            raise make_error("E309", f"the image processor refuses {image.width} x {image.height}: {error}") from error
        (grid,) = found["image_grid_thw"].tolist()
        return Patches(values=found["pixel_values"], grid=(grid[0], grid[1], grid[2]))

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """Tokens that stand for an image of this grid."""
        return grid[0] * grid[1] * grid[2] // self._sizes["merge_size"] ** 2

    def patches_nbytes(self, num_tokens: int) -> int:
        """Bytes of the patches of an image of so many tokens."""
        sizes = self._sizes
        samples = _CHANNELS * sizes["temporal_patch_size"] * sizes["patch_size"] ** 2
        return num_tokens * sizes["merge_size"] ** 2 * samples * torch.float32.itemsize


def _settings(given: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in given.items():
        if name in _KNOWN or value is None or value in _IDLE.get(name, ()):
            continue
        raise make_error("E302", f"the image processor has {name} = {value!r}, of which it is unknown what it does")
    missing = sorted(name for name in _KNOWN if given.get(name) is None)
    if missing:
        raise make_error("E302", f"the image processor does not say its {', '.join(missing)}")
    size = dict(given["size"])
    if size.keys() != {"longest_edge", "shortest_edge"}:
        raise make_error(
            "E302", f"the image processor has a size of {sorted(size)}, expected the least and most pixels"
        )
    resample = _RESAMPLING.get(int(given["resample"]))
    if resample is None:
        raise make_error("E302", f"the image processor resamples by {given['resample']!r}, unknown here")
    return {
        **{name: bool(given[name]) for name in _FLAGS},
        **{name: int(given[name]) for name in _INTEGERS},
        "backend": "pil",
        "image_mean": [real(float(value)) for value in given["image_mean"]],
        "image_std": [real(float(value)) for value in given["image_std"]],
        "max_pixels": int(size["longest_edge"]),
        "min_pixels": int(size["shortest_edge"]),
        "resample": resample,
        "rescale_factor": real(float(given["rescale_factor"])),
        "type": "qwen2_vl",
    }
