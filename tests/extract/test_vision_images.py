"""The image processor: every setting that decides patches is identified, and others are refused."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch

from kvformat.errors import InputError
from kvformat.extract.hf.images import ImageProcessor
from kvformat.spec import canonical
from tests.vision import image_processor, picture, vision_config

OTHER_SETTINGS = {
    "do_normalize": {"do_normalize": False},
    "do_rescale": {"do_rescale": False},
    "do_resize": {"do_resize": False},
    "image_mean": {"image_mean": [0.5, 0.4, 0.31]},
    "image_std": {"image_std": [0.5, 0.6, 0.71]},
    "max_pixels": {"size": {"shortest_edge": 128, "longest_edge": 1025}},
    "merge_size": {"merge_size": 1},
    "min_pixels": {"size": {"shortest_edge": 129, "longest_edge": 1024}},
    "patch_size": {"patch_size": 8},
    "resample": {"resample": 2},
    "rescale_factor": {"rescale_factor": 1 / 256},
    "temporal_patch_size": {"temporal_patch_size": 1},
}


@pytest.mark.parametrize("name", list(OTHER_SETTINGS))
def test_every_setting_enters_the_digest(name):
    plain, other = ImageProcessor(image_processor()), ImageProcessor(image_processor(**OTHER_SETTINGS[name]))
    assert plain.digest != other.digest
    first, second = canonical.decode(plain.file), canonical.decode(other.file)
    assert [member for member in first if first[member] != second[member]] == [name]


def test_the_digest_is_that_of_the_covered_file():
    made = ImageProcessor(image_processor())
    assert made.digest == hashlib.sha256(made.file).digest()
    assert made.digest == ImageProcessor(image_processor(do_pad=False, crop_size=None)).digest


def test_it_is_the_same_after_saving_and_loading(tmp_path):
    image_processor().save_pretrained(tmp_path)
    assert ImageProcessor.load(tmp_path).file == ImageProcessor(image_processor()).file


def test_patches_are_those_of_the_processor():
    image = picture(37, 23)
    found = ImageProcessor(image_processor()).patches(image)
    expected = image_processor()(images=[image], return_tensors="pt")
    assert torch.equal(found.values, expected["pixel_values"])
    assert [list(found.grid)] == expected["image_grid_thw"].tolist()
    assert found.values.shape == (found.grid[1] * found.grid[2], 3 * 2 * 4 * 4)
    assert ImageProcessor(image_processor()).num_tokens(found.grid) == len(found.values) // 4


@pytest.mark.parametrize("settings", [{"do_pad": True}, {"do_center_crop": True}, {"odd_thing": 3}])
def test_settings_nobody_knows_are_refused(settings):
    with pytest.raises(InputError, match=next(iter(settings))) as caught:
        ImageProcessor(image_processor(**settings))
    assert caught.value.code == "E302"


def test_an_unknown_resampling_is_refused():
    with pytest.raises(InputError, match="resamples"):
        ImageProcessor(image_processor(resample=9))


def test_another_processor_is_refused():
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    with pytest.raises(InputError, match="CLIPImageProcessorPil") as caught:
        ImageProcessor(CLIPImageProcessorPil())
    assert caught.value.code == "E302"


def test_a_directory_without_one(tmp_path):
    with pytest.raises(InputError) as caught:
        ImageProcessor.load(tmp_path)
    assert (caught.value.code, caught.value.path) == ("E304", str(tmp_path))


def test_an_image_it_cannot_take():
    with pytest.raises(InputError, match="aspect ratio") as caught:
        ImageProcessor(image_processor()).patches(picture(1000, 2))
    assert caught.value.code == "E309"


@pytest.mark.parametrize("vision", [{"patch_size": 8}, {"temporal_patch_size": 1}, {"spatial_merge_size": 1}])
def test_a_tower_for_other_patches_is_refused(vision):
    processor = ImageProcessor(image_processor())
    processor.require(vision_config().vision_config)
    with pytest.raises(InputError, match=next(iter(vision))) as caught:
        processor.require(vision_config(vision=vision).vision_config)
    assert caught.value.code == "E302"


@pytest.mark.parametrize(
    "written",
    [
        {"processor_class": "Qwen3VLProcessor"},
        {
            "crop_size": None,
            "data_format": "channels_first",
            "default_to_square": True,
            "device": None,
            "disable_grouping": None,
            "do_center_crop": None,
            "do_pad": None,
            "input_data_format": None,
            "max_pixels": None,
            "min_pixels": None,
            "pad_size": None,
            "processor_class": "Qwen3VLProcessor",
            "return_tensors": None,
        },
    ],
    ids=["published", "saved"],
)
def test_the_forms_in_which_it_is_found(tmp_path, written):
    """As the published models have it, and as releases of transformers save it."""
    settings = image_processor().to_dict() | {"image_processor_type": "Qwen2VLImageProcessorFast", "resample": 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings | written))
    assert ImageProcessor.load(tmp_path).file == ImageProcessor(image_processor()).file
