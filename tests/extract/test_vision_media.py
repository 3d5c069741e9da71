"""Identity of images, and what is refused before it reaches a model."""

from __future__ import annotations

import hashlib
import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from kvformat.errors import InputError
from kvformat.extract.media import (
    load_image,
    media_digest,
    pixels_digest,
    resolve_source,
    to_rgb,
    upright,
    with_media,
)
from kvformat.spec.layout import Layout
from kvformat.spec.rules import check_schema
from kvformat.spec.schema import Schema
from tests.vision import picture

ORIENTATION = 0x0112


def saved(image: Image.Image, path: Path, **options) -> str:
    image.save(path, **options)
    return str(path)


def through(image: Image.Image, kind: str, **options) -> Image.Image:
    """The image after it was encoded and decoded again."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return Image.open(io.BytesIO(buffer.getvalue()))


def grey16(values: list[list[int]]) -> Image.Image:
    return Image.fromarray(np.array(values, dtype=np.uint16))


def palette(colours: list[int], **options) -> Image.Image:
    image = Image.frombytes("P", (2, 2), bytes([0, 1, 1, 0]))
    image.putpalette(colours)
    return through(image, "PNG", **options)


class TestIdentity:
    def test_the_framing_is_the_documented_one(self):
        image = picture(3, 2)
        framed = b"kvf1/image\0" + b"\x03RGB" + struct.pack("<QQ", 3, 2) + image.tobytes()
        assert pixels_digest(image) == hashlib.sha256(framed).digest()

    def test_a_media_entry_names_pixels_and_processing(self):
        expected = hashlib.sha256(b"kvf1/pixels\0" + b"s" * 32 + b"p" * 32).digest()
        assert media_digest(b"p" * 32, b"s" * 32) == expected

    @pytest.mark.parametrize("mode", ["L", "RGB"])
    def test_equal_pixels_of_several_formats_are_one_image(self, tmp_path, mode):
        image = picture(5, 7, mode=mode)
        for kind in ("png", "bmp", "tiff", "ppm"):
            assert pixels_digest(load_image(saved(image, tmp_path / f"image.{kind}"))) == pixels_digest(image)

    def test_equal_bytes_of_another_size_are_another_image(self):
        samples = bytes(range(36))
        sizes = [(2, 6), (6, 2), (3, 4), (4, 3), (12, 1), (1, 12)]
        assert len({pixels_digest(Image.frombytes("RGB", size, samples)) for size in sizes}) == len(sizes)

    def test_equal_bytes_of_another_mode_are_another_image(self):
        samples = bytes(range(48))
        widths = {"L": 12, "LA": 6, "RGB": 4, "RGBA": 3, "CMYK": 3}
        images = [Image.frombytes(mode, (width, 4), samples) for mode, width in widths.items()]
        images.append(Image.frombytes("I;16", (6, 4), samples))
        assert len({pixels_digest(image) for image in images}) == len(images)

    def test_sixteen_bits_count_whole(self):
        assert pixels_digest(grey16([[256]])) != pixels_digest(grey16([[257]]))
        assert pixels_digest(through(grey16([[1, 65535]]), "PNG")) == pixels_digest(grey16([[1, 65535]]))

    def test_a_palette_stands_for_its_colours(self):
        first, second = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7]
        assert pixels_digest(palette(first)) != pixels_digest(palette(second))
        colours = bytes([1, 2, 3, 4, 5, 6, 4, 5, 6, 1, 2, 3])
        assert pixels_digest(palette(first)) == pixels_digest(Image.frombytes("RGB", (2, 2), colours))
        swapped = Image.frombytes("P", (2, 2), bytes([1, 0, 0, 1]))
        swapped.putpalette([4, 5, 6, 1, 2, 3])
        assert pixels_digest(swapped) == pixels_digest(palette(first))

    def test_transparency_of_a_palette_or_a_colour_counts(self):
        colours = [1, 2, 3, 4, 5, 6]
        assert pixels_digest(palette(colours)) != pixels_digest(palette(colours, transparency=0))
        assert pixels_digest(palette(colours, transparency=0)) != pixels_digest(palette(colours, transparency=1))
        plain = picture(2, 2)
        keyed = through(plain, "PNG", transparency=plain.getpixel((0, 0)))
        assert pixels_digest(keyed) != pixels_digest(plain)
        assert upright(keyed).mode == "RGBA"

    def test_one_bit_is_black_and_white(self):
        image = Image.frombytes("L", (2, 1), b"\x00\xff")
        assert pixels_digest(image.convert("1")) == pixels_digest(image)

    def test_alpha_counts_even_where_all_is_opaque(self):
        image = picture(2, 2)
        assert pixels_digest(image) != pixels_digest(image.convert("RGBA"))

    @pytest.mark.parametrize(
        ("orientation", "turn"),
        [
            (1, None),
            (2, Image.Transpose.FLIP_LEFT_RIGHT),
            (3, Image.Transpose.ROTATE_180),
            (4, Image.Transpose.FLIP_TOP_BOTTOM),
            (5, Image.Transpose.TRANSPOSE),
            (6, Image.Transpose.ROTATE_270),
            (7, Image.Transpose.TRANSVERSE),
            (8, Image.Transpose.ROTATE_90),
        ],
    )
    def test_orientation_is_applied_first(self, tmp_path, orientation, turn):
        image = picture(4, 6)
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        loaded = load_image(saved(image, tmp_path / "turned.png", exif=exif))
        seen = image if turn is None else image.transpose(turn)
        assert loaded.size == seen.size
        assert pixels_digest(loaded) == pixels_digest(seen)
        assert to_rgb(loaded).tobytes() == seen.tobytes()

    def test_doing_it_twice_changes_nothing(self):
        for image in (palette([1, 2, 3, 4, 5, 6], transparency=0), picture(3, 3, mode="LA"), grey16([[7]])):
            once = upright(image)
            assert (once.mode, once.tobytes()) == (upright(once).mode, upright(once).tobytes())

    @pytest.mark.parametrize("mode", ["F", "I", "HSV", "LAB", "YCbCr"])
    def test_other_modes_are_refused(self, mode):
        with pytest.raises(InputError, match="mode") as caught:
            pixels_digest(Image.new(mode, (2, 2)))
        assert caught.value.code == "E309"

    @given(
        st.lists(
            st.tuples(
                st.sampled_from(["L", "LA", "RGB", "RGBA"]),
                st.integers(1, 4),
                st.integers(1, 4),
                st.binary(max_size=64),
            ),
            min_size=2,
            max_size=2,
        )
    )
    def test_digests_are_equal_where_images_are(self, given_images):
        images = []
        for mode, width, height, content in given_images:
            nbytes = width * height * len(mode)
            images.append((mode, (width, height), content[:nbytes].ljust(nbytes, b"\0")))
        first, second = (pixels_digest(Image.frombytes(*image)) for image in images)
        assert (first == second) == (images[0] == images[1])


class TestLoading:
    def refused(self, source: object, words: str, **options) -> None:
        with pytest.raises(InputError, match=words) as caught:
            load_image(str(source), **options)
        assert (caught.value.code, caught.value.path) == ("E309", str(source))

    def test_what_is_missing_or_no_file(self, tmp_path):
        self.refused(tmp_path / "missing.png", "cannot be read: No such file")
        self.refused(tmp_path, "cannot be read")
        os.mkfifo(tmp_path / "pipe.png")
        self.refused(tmp_path / "pipe.png", "not a regular file")

    def test_a_link_is_followed(self, tmp_path):
        saved(picture(3, 3), tmp_path / "image.png")
        (tmp_path / "link.png").symlink_to(tmp_path / "image.png")
        assert load_image(str(tmp_path / "link.png")).size == (3, 3)

    def test_what_does_not_decode(self, tmp_path):
        (tmp_path / "text.png").write_text("no image")
        self.refused(tmp_path / "text.png", "no image that decodes")
        whole = Path(saved(picture(64, 64), tmp_path / "whole.png")).read_bytes()
        (tmp_path / "half.png").write_bytes(whole[: len(whole) // 2])
        self.refused(tmp_path / "half.png", "no image that decodes")
        damaged = bytearray(whole)
        damaged[len(whole) // 2] ^= 255
        (tmp_path / "damaged.png").write_bytes(damaged)
        self.refused(tmp_path / "damaged.png", "no image that decodes")

    def test_other_formats_are_left_alone(self, tmp_path):
        """Pillow reads some of them by starting another program."""
        self.refused(saved(picture(4, 4), tmp_path / "image.pcx"), "readable are")
        self.refused(saved(picture(4, 4), tmp_path / "page.eps"), "readable are")

    @pytest.mark.parametrize("side", [9000, 200_000])
    def test_a_decompression_bomb(self, tmp_path, side):
        """A header that claims more pixels than are decoded, above and below the bounds of Pillow itself."""

        def chunk(kind: bytes, content: bytes) -> bytes:
            return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

        header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
        (tmp_path / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b""))
        self.refused(tmp_path / "bomb.png", "pixels")

    def test_a_lower_bound(self, tmp_path):
        source = saved(picture(4, 5), tmp_path / "image.png")
        assert load_image(source, max_pixels=20).size == (4, 5)
        self.refused(source, "at most 19", max_pixels=19)

    def test_a_file_that_is_too_long(self, tmp_path):
        with (tmp_path / "long.bmp").open("wb") as file:
            file.truncate(1 << 30)
        self.refused(tmp_path / "long.bmp", "bytes, at most")

    def test_the_first_frame_stands_for_an_animation(self, tmp_path):
        first, second = picture(4, 4, seed=1).quantize(8), picture(4, 4, seed=2).quantize(8)
        source = saved(first, tmp_path / "moving.gif", save_all=True, append_images=[second])
        assert pixels_digest(load_image(source)) == pixels_digest(first)

    def test_urls(self, tmp_path):
        import fsspec

        buffer = io.BytesIO()
        picture(3, 4).save(buffer, "PNG")
        memory = fsspec.filesystem("memory")
        memory.pipe("/kvformat-images/a b.png", buffer.getvalue())
        try:
            url = resolve_source("memory://kvformat-images/a b.png", base=tmp_path)
            assert pixels_digest(load_image(url)) == pixels_digest(picture(3, 4))
            self.refused("memory://kvformat-images/missing.png", "cannot be read")
        finally:
            memory.rm("/kvformat-images", recursive=True)
        (tmp_path / "file.png").write_bytes(buffer.getvalue())
        url = resolve_source((tmp_path / "file.png").as_uri(), base=Path("/nowhere"))
        assert load_image(url).size == (3, 4)

    def test_where_a_reference_leads(self, tmp_path):
        assert resolve_source("images/a.png", base=tmp_path) == str(tmp_path / "images" / "a.png")
        assert resolve_source("/somewhere/a.png", base=tmp_path) == "/somewhere/a.png"
        assert resolve_source("s3://bucket/a.png", base=tmp_path) == "s3://bucket/a.png"
        with pytest.raises(InputError) as caught:
            resolve_source("nonsense://bucket/a.png", base=tmp_path)
        assert (caught.value.code, caught.value.path) == ("E309", "nonsense://bucket/a.png")


class TestForTheModel:
    def test_transparency_is_laid_over_white(self):
        samples = bytes([10, 20, 30, 255, 10, 20, 30, 0, 10, 20, 30, 128])
        given_image = Image.frombytes("RGBA", (3, 1), samples)
        assert to_rgb(given_image).tobytes() == bytes([10, 20, 30, 255, 255, 255, 132, 137, 142])
        assert to_rgb(Image.frombytes("LA", (2, 1), b"\x07\xff\x07\x00")).tobytes() == bytes([7] * 3 + [255] * 3)

    def test_it_is_what_the_processor_would_do_itself(self):
        from transformers.image_transforms import convert_to_rgb

        for mode in ("L", "LA", "RGB", "RGBA", "CMYK"):
            image = picture(5, 4, mode=mode)
            np.testing.assert_array_equal(np.array(to_rgb(image)), convert_to_rgb(image, return_numpy=True))

    def test_sixteen_bits_are_refused(self):
        with pytest.raises(InputError, match="16 bits") as caught:
            to_rgb(grey16([[256]]))
        assert caught.value.code == "E309"


def test_the_schema_keeps_what_a_document_is_made_of():
    plain = Schema.uniform(num_layers=2, num_kv_heads=1, head_dim=4, dtype="F32", key_stage="attention")
    schema = with_media(plain)
    check_schema(schema)
    assert schema.dims == ("tokens", "media")
    assert [extra.name for extra in schema.extras] == ["token_ids", "position_ids", "media"]
    placed = Layout(schema).place((5, 2)).tensors
    assert placed["position_ids"].shape == (3, 5)
    assert placed["media"].shape == (2, 49)
