"""K and V of documents with images."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import DynamicCache

import kvformat
from kvformat.errors import InputError, UsageError
from kvformat.extract.documents.source import Source
from kvformat.extract.hf import HuggingFaceExtractor, describe
from kvformat.extract.hf.images import ImageProcessor
from kvformat.extract.hf.vision import VisionExtractor
from kvformat.extract.hf.vision_tokenise import VisionTokeniser
from kvformat.extract.media import load_image, with_media
from kvformat.extract.towers import check_tower, tower_tensors
from kvformat.loader import Packed, gather
from kvformat.spec import canonical
from kvformat.spec.document import Document, Media
from tests.vision import (
    IMAGE_ID,
    image_processor,
    live,
    ordinary_inputs,
    picture,
    save_vision,
    vision_config,
    vision_model,
    vision_tokenizer,
)

SIZES = {"a": (24, 16), "b": (16, 40), "c": (16, 24), "d": (32, 24)}


class Images:
    """Images in a directory, documents about them, and where their media entries lead."""

    def __init__(self, directory):
        self.directory = directory
        self.sources = {}
        self.pictures = {}
        for number, (name, size) in enumerate(SIZES.items()):
            self.pictures[name] = picture(*size, seed=number)
            self.pictures[name].save(directory / f"{name}.png")

    def messages(self, names, words="what is it?"):
        content = [{"type": "image", "image": f"{name}.png"} for name in names]
        return ({"role": "user", "content": [*content, {"type": "text", "text": words}]},)

    def document(self, names, words="what is it?", **processing):
        made = VisionTokeniser(
            vision_tokenizer(),
            images=ImageProcessor(image_processor(**processing)),
            config=vision_config(),
            base=self.directory,
        )
        source = Source(id="x", place="line 1", messages=self.messages(names, words))
        document = made.document(source)
        self.sources.update(zip((entry.digest for entry in document.media), made.media_sources(source), strict=True))
        return document

    def inputs(self, names, words="what is it?"):
        return ordinary_inputs(self.messages(names, words), [self.pictures[name] for name in names])


@pytest.fixture
def images(tmp_path):
    (tmp_path / "images").mkdir()
    return Images(tmp_path / "images")


def extractor_of(model, images, **options):
    return VisionExtractor.of(
        model, images=ImageProcessor(image_processor()), media_source=images.sources.get, **options
    )


def same(first, second):
    return all(torch.equal(first.components[name], second.components[name]) for name in ("k", "v"))


def after(documents):
    digests = [document.digest for document in documents]
    return lambda document: documents[digests.index(document.digest) + 1 :]


class TestAhead:
    """Images of the documents that follow are loaded while the model runs."""

    @pytest.fixture
    def loaded(self, monkeypatch):
        """By file name, the event that its image was loaded, and in which threads images were."""
        threads = set()
        events = {f"{name}.png": threading.Event() for name in SIZES}

        def load(source, **options):
            try:
                return load_image(source, **options)
            finally:
                threads.add(threading.current_thread())
                events[Path(source).name].set()

        monkeypatch.setattr("kvformat.extract.hf.planned_images.load_image", load)
        return SimpleNamespace(threads=threads, events=events)

    def test_the_next_image_is_there_before_it_is_asked_for_and_values_are_the_same(self, images, loaded):
        model = vision_model()
        documents = [images.document(names) for names in ("a", "bc", "d", "ab")]
        expected = [extractor_of(model, images).extract([document])[0] for document in documents]
        for event in loaded.events.values():
            event.clear()
        loaded.threads.clear()
        extractor = extractor_of(model, images, following=after(documents))
        (first,) = extractor.extract(documents[:1])
        assert all(event.wait(60) for event in loaded.events.values())
        assert threading.current_thread() not in loaded.threads
        found = [first, *(extractor.extract([document])[0] for document in documents[1:])]
        assert all(same(one, other) for one, other in zip(found, expected, strict=True))

    def test_documents_without_images_prepare_those_that_have_some(self, images, loaded):
        pictured = images.document("d")
        extractor = extractor_of(vision_model(), images, following=lambda _: [pictured])
        extractor.extract([Document.of([1, 2, 3])])
        assert loaded.events["d.png"].wait(60)

    def test_an_image_that_is_missing_is_an_error_of_its_own_document(self, images, loaded):
        documents = [images.document(names) for names in "abc"]
        (images.directory / "b.png").unlink()
        extractor = extractor_of(vision_model(), images, following=after(documents))
        extractor.extract(documents[:1])
        assert loaded.events["b.png"].wait(60)
        with pytest.raises(InputError) as caught:
            extractor.extract(documents[1:2])
        assert (caught.value.code, caught.value.path) == ("E309", str(images.directory / "b.png"))
        assert caught.value.record is None  # for the pipeline to say
        extractor.extract(documents[2:])


class TestValues:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["F32", "BF16"])
    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    @pytest.mark.parametrize("names", ["a", "bad"])
    def test_they_are_what_attention_and_cache_of_the_whole_model_get(self, images, dtype, attention, names):
        model = vision_model(dtype=dtype, attention=attention)
        document, inputs = images.document(names), images.inputs(names)
        (found,) = extractor_of(model, images).extract([document])
        cache = DynamicCache()
        attended = live(model, **inputs, cache=cache)
        assert len(cache.layers) == len(found.components["k"]) == len(attended) == 4
        for layer, (key, value) in enumerate(attended):
            assert torch.equal(found.components["k"][layer], key)
            assert torch.equal(found.components["v"][layer], value)
            assert torch.equal(found.components["k"][layer], cache.layers[layer].keys[0].transpose(0, 1))
            assert torch.equal(found.components["v"][layer], cache.layers[layer].values[0].transpose(0, 1))
        assert found.components["k"].dtype == dtype

    def test_a_tower_of_no_known_kind_is_run_all_the_same(self, images):
        model = vision_model(vision_config(depth=2, vision={"num_heads": 8}))
        with pytest.raises(InputError, match="num_heads"):
            extractor_of(model, images)
        (found,) = extractor_of(model, images, context="unknown").extract([images.document("a")])
        for layer, (key, value) in enumerate(live(model, **images.inputs("a"))):
            assert torch.equal(found.components["k"][layer], key)
            assert torch.equal(found.components["v"][layer], value)

    def test_pixels_reach_k_and_v_from_the_first_layer_on(self, images):
        model = vision_model()
        document = images.document("a")
        extractor = extractor_of(model, images)
        (before,) = extractor.extract([document])
        images.pictures["a"] = picture(*SIZES["a"], seed=99)
        images.pictures["a"].save(images.directory / "a.png")
        (after,) = extractor.extract([images.document("a")])
        for layer in range(4):
            assert not torch.equal(before.components["k"][layer], after.components["k"][layer])

    def test_deepstack_features_reach_the_layers_above(self, images):
        model = vision_model()
        document = images.document("a")
        (before,) = extractor_of(model, images).extract([document])
        with torch.no_grad():
            model.model.visual.deepstack_merger_list[1].linear_fc2.bias.add_(1.0)
        (after,) = extractor_of(model, images).extract([document])
        changed = [not torch.equal(before.components["v"][n], after.components["v"][n]) for n in range(4)]
        assert changed == [False, False, True, True]

    def test_positions_of_the_document_are_what_rotates(self, images):
        document = images.document("a")
        extractor = extractor_of(vision_model(), images)
        (grid,) = extractor.extract([document])
        (flat,) = extractor.extract([replace(document, position_ids=None)])
        assert not torch.equal(grid.components["k"][0], flat.components["k"][0])
        assert torch.equal(grid.components["v"][0], flat.components["v"][0])

    def test_keys_before_their_rotation(self, images):
        """Positions are no part of them."""
        document = images.document("a")
        extractor = extractor_of(vision_model(), images, key_stage="normed")
        (grid,) = extractor.extract([document])
        (flat,) = extractor.extract([replace(document, position_ids=None)])
        assert torch.equal(grid.components["k"][0], flat.components["k"][0])
        assert extractor.schema.components[0].stage == "normed"

    def test_the_model_is_left_as_it_was(self, images):
        model = vision_model()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        extractor_of(model, images).extract([images.document("a")])
        assert model.model.rope_deltas is None
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class TestTogether:
    def test_another_grid_in_the_same_call_changes_no_bit(self, images):
        extractor = extractor_of(vision_model(dtype=torch.bfloat16), images)
        documents = [images.document("a"), images.document("c"), images.document("a", "what is it!")]
        assert {document.num_tokens for document in documents} == {documents[0].num_tokens}
        assert documents[0].position_ids.tolist() != documents[1].position_ids.tolist()
        together = extractor.extract(documents)
        for document, found in zip(documents, together, strict=True):
            (alone,) = extractor.extract([document])
            assert same(found, alone)

    def test_with_and_without_images(self, images):
        model = vision_model()
        extractor = extractor_of(model, images)
        pictured = images.document("a")
        plain = [Document.of(np.arange(pictured.num_tokens) % 250 + shift) for shift in (0, 3)]
        found = extractor.extract([plain[0], pictured, plain[1]])
        (alone,) = extractor.extract([pictured])
        assert same(found[1], alone)
        expected = HuggingFaceExtractor.of(model).extract(plain)
        assert same(found[0], expected[0])
        assert same(found[2], expected[1])

    def test_text_alone_gives_what_the_text_extractor_gives(self, images):
        model = vision_model()
        documents = [
            Document.of(range(20)),
            Document.of([*range(5), IMAGE_ID, *range(14)]),
            Document.of(range(20), position_ids=range(3, 23)),
        ]
        for document in documents:
            (found,) = extractor_of(model, images).extract([document])
            (expected,) = HuggingFaceExtractor.of(model).extract([document])
            assert same(found, expected)

    def test_three_rows_without_an_image(self, images):
        """Positions are the document's, whatever they are."""
        extractor = extractor_of(vision_model(), images)
        rows = np.stack([np.arange(12)] * 3)
        (plain,) = extractor.extract([Document.of(range(12))])
        assert same(extractor.extract([Document.of(range(12), position_ids=rows)])[0], plain)
        rows[1, 4] += 1
        (moved,) = extractor.extract([Document.of(range(12), position_ids=rows)])
        assert not same(moved, plain)

    def test_other_lengths_are_refused(self, images):
        with pytest.raises(UsageError):
            extractor_of(vision_model(), images).extract([images.document("a"), Document.of([1])])


class TestImagesAtExtraction:
    def refused(self, extractor, document, words):
        with pytest.raises(InputError, match=words) as caught:
            extractor.extract([document])
        assert caught.value.code == "E309"
        return caught.value

    def test_another_image_in_its_place(self, images):
        document = images.document("a")
        picture(*SIZES["a"], seed=50).save(images.directory / "a.png")
        error = self.refused(extractor_of(vision_model(), images), document, "not the image that was planned")
        assert error.path == str(images.directory / "a.png")

    def test_the_same_pixels_in_another_file(self, images):
        document = images.document("a")
        extractor = extractor_of(vision_model(), images)
        (before,) = extractor.extract([document])
        images.pictures["a"].save(images.directory / "moved.bmp")
        images.sources[document.media[0].digest] = str(images.directory / "moved.bmp")
        assert same(extractor.extract([document])[0], before)

    def test_one_that_is_gone_or_broken(self, images):
        document = images.document("a")
        extractor = extractor_of(vision_model(), images)
        (images.directory / "a.png").write_bytes(b"\x89PNG\r\n\x1a\nno more")
        self.refused(extractor, document, "no image that decodes")
        (images.directory / "a.png").unlink()
        error = self.refused(extractor, document, "cannot be read")
        assert error.path == str(images.directory / "a.png")

    def test_other_settings_than_planned(self, images):
        document = images.document("a", image_mean=[0.5, 0.4, 0.31])
        self.refused(extractor_of(vision_model(), images), document, "other settings")

    def test_nobody_knows_where_it_is(self, images):
        document = images.document("a")
        images.sources.clear()
        self.refused(extractor_of(vision_model(), images), document, "nothing says where")

    def test_a_lower_bound_of_pixels(self, images):
        document = images.document("a")
        self.refused(extractor_of(vision_model(), images, max_pixels=100), document, "at most 100")

    @pytest.mark.parametrize("change", ["scheme", "span", "missing", "extra"])
    def test_media_that_are_no_images_of_the_document(self, images, change):
        document = images.document("ab")
        first, second = document.media
        media = {
            "scheme": (replace(first, scheme="opaque"), second),
            "span": (replace(first, first=first.first + 1), second),
            "missing": (first,),
            "extra": (Media(scheme="pixels", first=0, count=0, digest=bytes(32)), first, second),
        }[change]
        with pytest.raises(InputError, match="media") as caught:
            extractor_of(vision_model(), images).extract([replace(document, media=media)])
        assert caught.value.code == "E110"


class TestIdentity:
    def names(self, extractor):
        return [line["name"] for line in canonical.decode(extractor.files["weights"])["tensors"]]

    def test_the_weights_list_the_tower(self, images):
        model = vision_model()
        plain, vision = HuggingFaceExtractor.of(model), extractor_of(model, images)
        tower = [name for name in self.names(vision) if name.startswith("visual.")]
        assert sorted({*self.names(plain), *tower}, key=str.encode) == self.names(vision)
        assert tower == sorted(f"visual.{name}" for name in model.model.visual.state_dict())
        assert plain.context.model.weights != vision.context.model.weights
        assert replace(vision.context.model, weights=plain.context.model.weights) == plain.context.model

    def test_a_weight_of_the_tower_counts_for_documents_with_images_only(self, images):
        before, after = vision_model(), vision_model()
        with torch.no_grad():
            after.model.visual.blocks[3].attn.proj.bias[0] += 1
        assert extractor_of(before, images).context != extractor_of(after, images).context
        assert HuggingFaceExtractor.of(before).context == HuggingFaceExtractor.of(after).context

    @pytest.mark.parametrize("last", range(4))
    def test_the_listed_tensors_are_those_that_reach_k_and_v(self, images, last):
        model = vision_model()
        extractor = extractor_of(model, images, layers=[last])
        model.requires_grad_(requires_grad=True)
        taken = {}
        cache = DynamicCache()
        with torch.enable_grad():
            model(**images.inputs("a"), cache=cache)
            total = cache.layers[last].keys.sum() + cache.layers[last].values.sum()
            named = dict(model.model.visual.named_parameters())
            gradients = torch.autograd.grad(total, list(named.values()), allow_unused=True)
        taken = {f"visual.{name}" for name, one in zip(named, gradients, strict=True) if one is not None}
        assert {name for name in self.names(extractor) if name.startswith("visual.")} == taken

    def test_settings_of_the_processor_are_a_covered_file(self, images):
        extractor = extractor_of(vision_model(), images)
        assert extractor.files["image_processor"] == ImageProcessor(image_processor()).file

    def test_an_unknown_context_tells_towers_apart_too(self, images):
        first, second = vision_model(), vision_model()
        with torch.no_grad():
            second.model.visual.pos_embed.weight[0] += 1
        digests = {extractor_of(model, images, context="unknown").values_digest() for model in (first, first, second)}
        assert len(digests) == 2
        assert extractor_of(first, images, context="unknown").context == kvformat.Context.unknown()

    def test_a_tower_in_another_dtype_is_refused(self, images):
        model = vision_model(dtype=torch.bfloat16)
        model.model.visual.merger.float()
        with pytest.raises(InputError, match="float32") as caught:
            extractor_of(model, images)
        assert caught.value.code == "E302"

    def test_what_was_run_is_told(self, images):
        provenance = extractor_of(vision_model(), images).provenance
        assert provenance["pillow"]
        assert provenance["vision_attn_implementation"] == "sdpa"


class TestTowers:
    def test_the_known_one_passes(self):
        model = vision_model()
        check_tower(model.config.vision_config, model.model.visual)

    @pytest.mark.parametrize(
        ("vision", "words"),
        [
            ({"hidden_act": "silu"}, "hidden_act"),
            ({"num_heads": 8}, "num_heads"),
            ({"deepstack_visual_indexes": (5, 11, 16)}, "deepstack_visual_indexes"),
            ({"depth": 18, "deepstack_visual_indexes": (5, 11, 17)}, "deepstack_visual_indexes"),
            ({"rope_parameters": {"rope_type": "axial", "rope_theta": 5000.0}}, "rope_parameters"),
        ],
    )
    def test_what_no_tensor_tells_is_demanded(self, vision, words):
        model = vision_model(vision_config(vision=vision))
        with pytest.raises(InputError, match=words) as caught:
            check_tower(model.config.vision_config, model.model.visual)
        assert caught.value.code == "E302"
        assert "unknown context" in caught.value.message

    def test_modules_that_differ_from_their_configuration(self):
        def rotate(visual):
            visual.rotary_pos_emb.inv_freq.mul_(1.001)

        def attend(visual):
            visual.blocks[3].attn.scaling *= 2

        def act(visual):
            visual.blocks[3].mlp.act_fn = torch.nn.ReLU()

        def merge(visual):
            visual.merger.act_fn = torch.nn.GELU(approximate="tanh")

        def norm(visual):
            visual.deepstack_merger_list[1].norm.eps = 1e-5

        def stack(visual):
            visual.deepstack_visual_indexes = (5, 11, 16)

        def interpolate(visual):
            visual.interpolation_align_corners = False

        for change in (rotate, attend, act, merge, norm, stack, interpolate):
            model = vision_model()
            change(model.model.visual)
            with pytest.raises(InputError, match="vision tower") as caught:
                check_tower(model.config.vision_config, model.model.visual)
            assert caught.value.code == "E302", change.__name__

    def test_a_tensor_nobody_knows_is_refused(self):
        with pytest.raises(InputError, match="adapter_gate"):
            tower_tensors({"blocks.0.adapter": torch.zeros(1), "adapter_gate.weight": torch.zeros(1)}, last=1)


class TestDatasets:
    def write(self, out, extractor, documents):
        with kvformat.create(
            out,
            schema=extractor.schema,
            context=extractor.context,
            files=extractor.files,
            provenance=extractor.provenance,
        ) as writer:
            for name, document in documents.items():
                (found,) = extractor.extract([document])
                writer.add(name, found.components, document=document)
        return kvformat.open(out)

    def test_everything_a_document_is_made_of_is_stored_and_verified(self, images, tmp_path):
        extractor = extractor_of(vision_model(), images)
        documents = {"two": images.document("ab"), "one": images.document("a"), "none": Document.of(range(9))}
        dataset = self.write(tmp_path / "ds", extractor, documents)
        assert kvformat.verify(tmp_path / "ds").ok
        for name, document in documents.items():
            record = dataset[name]
            rows = np.arange(9)[None] if document.position_ids is None else document.position_ids
            assert record.extra("position_ids").tolist() == np.broadcast_to(rows, (3, document.num_tokens)).tolist()
            packed = b"".join(entry.pack() for entry in document.media)
            assert record.extra("media").numpy().tobytes() == packed
            assert dataset.find(document=document.digest).index == record.index
            (found,) = extractor.extract([document])
            assert torch.equal(record.component("k"), found.components["k"])

    def test_a_consumer_of_one_row_is_refused(self, images, tmp_path):
        document = images.document("a")
        dataset = self.write(tmp_path / "ds", extractor_of(vision_model(), images), {"x": document})
        with pytest.raises(kvformat.KVFormatError) as caught:
            gather(dataset, ["x"], layout="packed")
        assert caught.value.code == "E089"
        batch = gather(dataset, ["x"], layout=Packed(position_rows=3))
        assert batch.position_ids.tolist() == document.position_ids.tolist()

    def test_from_a_model_directory(self, images, tmp_path):
        model = vision_model(dtype=torch.bfloat16)
        directory = save_vision(tmp_path / "model", model)
        described = describe(directory, layers=[0, 2])
        assert described.takes_images
        document = images.document("a")
        extractor = VisionExtractor.load(directory, media_source=images.sources.get, layers=[0, 2])
        assert extractor.schema == with_media(described.schema)
        (found,) = extractor.extract([document])
        attended = live(model, **images.inputs("a"))
        for row, layer in enumerate((0, 2)):
            assert torch.equal(found.components["k"][row], attended[layer][0])
            assert torch.equal(found.components["v"][row], attended[layer][1])

    def test_a_checkpoint_without_all_of_its_tower(self, images, tmp_path):
        from safetensors.torch import load_file, save_file

        directory = save_vision(tmp_path / "model")
        state = load_file(directory / "model.safetensors")
        name = next(name for name in state if name.endswith("visual.merger.norm.weight"))
        save_file({other: tensor for other, tensor in state.items() if other != name}, directory / "model.safetensors")
        with pytest.raises(InputError, match=r"lacks 1 tensors.*merger") as caught:
            VisionExtractor.load(directory, media_source=images.sources.get)
        assert caught.value.code == "E304"
        odd = state | {name.replace("norm.weight", "gate.weight"): torch.zeros(1)}
        save_file(odd, directory / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(InputError, match=r"holds 1 tensors.*gate") as caught:
            VisionExtractor.load(directory, media_source=images.sources.get)
        assert caught.value.code == "E304"

    def test_weights_from_a_checkpoint(self, images, tmp_path):
        import torch.distributed.checkpoint as dcp

        model = vision_model(dtype=torch.bfloat16)
        directory = save_vision(tmp_path / "model", vision_model(seed=5, dtype=torch.bfloat16))
        with warnings.catch_warnings(action="ignore"):  # that it is one process which saves
            dcp.save(model.state_dict(), checkpoint_id=tmp_path / "checkpoint", no_dist=True)
        document = images.document("a")
        extractor = VisionExtractor.load(
            directory, checkpoint=f"dcp:{tmp_path / 'checkpoint'}", media_source=images.sources.get
        )
        expected = extractor_of(model, images)
        assert extractor.context == expected.context
        assert same(extractor.extract([document])[0], expected.extract([document])[0])

    def test_an_adapter_is_refused(self, images, tmp_path):
        with pytest.raises(InputError, match="merge") as caught:
            VisionExtractor.load(tmp_path, media_source=images.sources.get, adapter=tmp_path)
        assert caught.value.code == "E310"

    def test_a_model_without_images_is_refused(self, images, tmp_path):
        from tests.models import save_tiny, tiny_model

        with pytest.raises(InputError, match="llama") as caught:
            extractor_of(tiny_model("llama"), images)
        assert caught.value.code == "E302"
        save_tiny(tmp_path / "llama")
        assert not describe(tmp_path / "llama").takes_images
