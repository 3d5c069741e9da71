"""Messages with images to documents."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvformat.errors import InputError, KVFormatError
from kvformat.extract.documents.source import Source
from kvformat.extract.hf.images import ImageProcessor
from kvformat.extract.hf.vision_tokenise import VisionTokeniser, media_spans
from kvformat.extract.media import media_digest, pixels_digest
from kvformat.extract.tokenise import Tokeniser
from tests.models import tiny_config
from tests.vision import (
    IMAGE_ID,
    image_processor,
    ordinary_inputs,
    picture,
    save_vision,
    vision_config,
    vision_model,
    vision_tokenizer,
)


def part(image):
    return {"type": "image", "image": str(image)}


def text(words):
    return {"type": "text", "text": words}


def source(*content, role="user", name="a"):
    return Source(id=name, place="line 7", messages=({"role": role, "content": list(content)},))


def tokeniser(base=None, *, processing=None, **options):
    images = ImageProcessor(image_processor(**(processing or {})))
    return VisionTokeniser(vision_tokenizer(), images=images, config=vision_config(), base=base, **options)


@pytest.fixture
def images(tmp_path):
    """Three images of other sizes in a directory."""
    for number, (width, height) in enumerate([(24, 16), (16, 40), (8, 8)]):
        picture(width, height, seed=number).save(tmp_path / f"{number}.png")
    return tmp_path


def refused(made, given, code, words):
    with pytest.raises(KVFormatError, match=words) as caught:
        made.document(given, path="docs.jsonl")
    assert caught.value.code == code
    assert caught.value.record == "a"
    assert caught.value.message.startswith("line 7: ")
    return caught.value


class TestDocuments:
    def test_ids_and_positions_are_those_of_the_processor_and_the_model(self, images):
        given = source(text("left "), part("0.png"), text(" right "), part("1.png"), text(" so?"))
        document = tokeniser(images).document(given)
        inputs = ordinary_inputs(given.messages, [picture(24, 16), picture(16, 40, seed=1)])
        assert document.token_ids.tolist() == inputs["input_ids"][0].tolist()
        positions, _ = vision_model().model.get_rope_index(
            inputs["input_ids"], inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"]
        )
        assert document.position_ids.tolist() == positions[:, 0].tolist()
        assert document.position_ids.shape == (3, document.num_tokens)

    def test_media_are_spans_with_the_identity_of_the_image(self, images):
        given = source(part("0.png"), text("and"), part("1.png"))
        made = tokeniser(images)
        document = made.document(given)
        digest = media_digest(pixels_digest(picture(24, 16)), made.images.digest)
        assert [(entry.scheme, entry.count) for entry in document.media] == [("pixels", 6), ("pixels", 10)]
        assert document.media[0].digest == digest
        for entry in document.media:
            inside = document.token_ids[entry.first : entry.first + entry.count]
            assert (inside == IMAGE_ID).all()
        assert (document.token_ids == IMAGE_ID).sum() == 16
        assert made.media_sources(given) == (str(images / "0.png"), str(images / "1.png"))

    def test_one_token_an_image_needs_no_rows(self, tmp_path):
        """An image of one patch group has the position a word would have: the rows are equal, and collapse."""
        picture(8, 8).save(tmp_path / "one.png")
        made = tokeniser(tmp_path, processing={"size": {"shortest_edge": 16, "longest_edge": 64}})
        document = made.document(source(part("one.png"), text("x")))
        assert [entry.count for entry in document.media] == [1]
        assert document.position_ids is None

    def test_the_encoding_of_a_file_is_no_part_of_a_document(self, images):
        picture(24, 16).save(images / "same.bmp")
        picture(24, 16, seed=9).save(images / "other.png")
        documents = [tokeniser(images).document(source(part(name))) for name in ("0.png", "same.bmp", "other.png")]
        assert documents[0].digest == documents[1].digest != documents[2].digest

    def test_settings_of_the_processor_are_part_of_a_document(self, images):
        given = source(part("0.png"), text("?"))
        plain = tokeniser(images).document(given)
        other = tokeniser(images, processing={"image_mean": [0.5, 0.4, 0.31]}).document(given)
        assert plain.token_ids.tolist() == other.token_ids.tolist()
        assert plain.digest != other.digest

    def test_a_list_of_sources_keeps_its_order(self, images):
        plain = Source(id="b", place="line 8", text="plain")
        bad = source(part("missing.png"), name="c")
        chat = Source(id="d", place="line 9", messages=({"role": "user", "content": "words"},))
        found = tokeniser(images).documents([plain, source(part("0.png")), bad, chat])
        alone = Tokeniser(vision_tokenizer())
        assert found[0].digest == alone.document(plain).digest
        assert len(found[1].media) == 1
        assert isinstance(found[2], InputError)
        assert found[3].digest == alone.document(chat).digest

    def test_how_text_became_ids_is_recorded_as_ever(self, images):
        made = tokeniser(images, add_generation_prompt=True)
        plain = Tokeniser(vision_tokenizer(), add_generation_prompt=True)
        assert made.text({"messages"}) == plain.text({"messages"})

    def test_from_a_model_directory(self, images, tmp_path):
        directory = save_vision(tmp_path / "model")
        made = VisionTokeniser.load(directory, base=images, max_tokens=256)
        given = source(part("0.png"), text("?"))
        assert made.document(given).digest == tokeniser(images).document(given).digest

    def test_the_template_of_the_processor_comes_first(self, tmp_path):
        directory = save_vision(tmp_path / "model")
        given = Source(id="a", place="line 1", messages=({"role": "user", "content": "x"},))
        assert VisionTokeniser.load(directory).document(given).num_tokens == len("[user]x")
        template = {"chat_template": "other {{ messages[0]['content'] }}"}
        (directory / "chat_template.json").write_text(json.dumps(template))
        assert VisionTokeniser.load(directory).document(given).num_tokens == len("other x")


class TestTruncation:
    def test_behind_the_images(self, images):
        given = source(part("0.png"), text("0123456789"))
        whole, cut = tokeniser(images).document(given), tokeniser(images, truncate=18).document(given)
        assert cut.token_ids.tolist() == whole.token_ids.tolist()[:18]
        assert cut.position_ids.tolist() == whole.position_ids[:, :18].tolist()
        assert cut.media == whole.media

    def test_an_image_behind_the_cut_is_dropped(self, images):
        given = source(part("0.png"), text("0123456789"), part("1.png"))
        whole, cut = tokeniser(images).document(given), tokeniser(images, truncate=20).document(given)
        assert len(whole.media) == 2
        assert cut.media == whole.media[:1]

    def test_through_an_image_is_refused(self, images):
        made = tokeniser(images, truncate=10)
        assert "cut through" in refused(made, source(part("0.png"), text("x")), "E301", "image").message

    def test_too_long_for_the_model(self, images):
        refused(tokeniser(images, max_tokens=8), source(part("0.png")), "E301", "8 positions")


class TestRefusals:
    def test_an_image_that_is_not_there(self, images):
        error = refused(tokeniser(images), source(part("0.png"), part("missing.png")), "E309", "image 1: ")
        assert error.path == str(images / "missing.png")

    def test_an_image_of_another_kind(self, images):
        (images / "note.png").write_text("no image")
        refused(tokeniser(images), source(part("note.png")), "E309", "no image that decodes")

    def test_an_image_that_is_too_large(self, images):
        refused(tokeniser(images, max_pixels=100), source(part("0.png")), "E309", "at most 100")

    def test_an_image_the_processor_does_not_take(self, images):
        picture(1000, 2).save(images / "wide.png")
        refused(tokeniser(images), source(part("wide.png")), "E309", "aspect ratio")

    @pytest.mark.parametrize("token", ["<|image_pad|>", "<|video_pad|>"])
    def test_placeholders_in_text(self, images, token):
        refused(tokeniser(images), source(part("0.png"), text(token)), "E300", "placeholders")

    def test_an_image_the_template_leaves_out(self, images):
        refused(tokeniser(images), source(part("0.png"), role="system"), "E300", "0 placeholders")

    def test_a_model_without_images(self):
        with pytest.raises(InputError, match="llama") as caught:
            VisionTokeniser(vision_tokenizer(), images=ImageProcessor(image_processor()), config=tiny_config("llama"))
        assert caught.value.code == "E302"

    def test_a_processor_of_another_model(self):
        images = ImageProcessor(image_processor(patch_size=8))
        with pytest.raises(InputError, match="patch_size"):
            VisionTokeniser(vision_tokenizer(), images=images, config=vision_config())


def test_references_stand_in_the_order_of_the_messages():
    given = Source(
        id="a",
        place="line 1",
        messages=(
            {"role": "user", "content": [part("x.png"), text("and"), part("y.png")]},
            {"role": "assistant", "content": "plain"},
            {"role": "user", "content": [part("z.png")]},
        ),
    )
    assert given.images == ("x.png", "y.png", "z.png")
    assert Source(id="a", place="line 1", text="x").images == ()


def test_spans_of_image_tokens():
    ids = np.array([9, 9, 1, 9, 2, 9, 9, 9])
    assert list(media_spans(ids, 9)) == [(0, 2), (3, 1), (5, 3)]
    assert list(media_spans(ids, 7)) == []


def test_another_image_under_the_same_name_makes_another_document(images):
    made, given = tokeniser(images), source(part("0.png"))
    before = made.document(given).digest
    picture(24, 16, seed=5).save(images / "0.png")
    assert made.document(given).digest != before
