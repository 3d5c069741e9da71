from __future__ import annotations

from pathlib import Path

import pytest

from kvformat.errors import IdentityError, UsageError
from kvformat.extract import HuggingFaceExtractor
from kvformat.extract.again import extractor_for
from kvformat.extract.audit import audit
from kvformat.extract.documents import write_documents as tokenise
from kvformat.extract.documents.source import Source
from kvformat.extract.hf.vision import VisionExtractor
from kvformat.extract.hf.vision_tokenise import VisionTokeniser
from kvformat.extract.quantise import QuantisingExtractor
from tests.extract.auditing import publish
from tests.models import save_tiny, write_documents
from tests.vision import picture, save_vision


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", "qwen3")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layers": [0, 2]},
        {"dtype": "BF16"},
        {"compute_dtype": "BF16", "dtype": "F32"},
        {"key_stage": "raw"},
        {"key_stage": "normed", "layers": [1]},
        {"context": "unknown"},
    ],
    ids=str,
)
def test_it_gives_what_the_dataset_stores(model: Path, tmp_path: Path, options: dict[str, object]) -> None:
    extractor = HuggingFaceExtractor.load(model, **options)  # type: ignore[arg-type]
    dataset = publish(tmp_path / "ds", extractor)
    again = extractor_for(dataset, model)
    assert again.schema == dataset.schema
    report = audit(dataset, again, fraction=1)
    assert report.ok
    assert report.equal == 5


def test_what_is_quantised_is_computed_without(model: Path, tmp_path: Path) -> None:
    extractor = HuggingFaceExtractor.load(model, compute_dtype="BF16")
    dataset = publish(tmp_path / "ds", QuantisingExtractor(extractor, scheme="int8"))
    again = extractor_for(dataset, model)
    assert again.schema == extractor.schema
    assert audit(dataset, again, fraction=1).ok


def test_a_dtype_of_an_unknown_context_can_be_given(model: Path, tmp_path: Path) -> None:
    extractor = HuggingFaceExtractor.load(model, compute_dtype="BF16", context="unknown")
    dataset = publish(tmp_path / "ds", extractor)
    assert audit(dataset, extractor_for(dataset, model, compute_dtype="BF16"), fraction=1).equal == 5
    assert audit(dataset, extractor_for(dataset, model), fraction=1).equal < 5  # the configuration says F32


def test_a_model_of_fewer_layers_is_another_one(model: Path, tmp_path: Path) -> None:
    dataset = publish(tmp_path / "ds", HuggingFaceExtractor.load(model))
    other = save_tiny(tmp_path / "other", "qwen3", num_hidden_layers=2)
    (other / "model.safetensors").unlink()  # it is told before weights are looked for
    with pytest.raises(IdentityError, match="it stores layer 2, and this model's last is 1, counted from 0") as caught:
        extractor_for(dataset, other)
    assert caught.value.code == "E083"


# -- images ---------------------------------------------------------------------------------------------------------


def test_images_are_found_by_the_documents_file(tmp_path: Path) -> None:
    model = save_vision(tmp_path / "vision")
    tokeniser = VisionTokeniser.load(model, base=tmp_path)
    made = {}
    for number, name in enumerate("ab"):
        picture(24, 16, seed=number).save(tmp_path / f"{name}.png")
        messages = ({"role": "user", "content": [{"type": "image", "image": f"{name}.png"}]},)
        line = {"id": name, "messages": list(messages)}
        file = tmp_path / f"{name}.kvdocs"
        tokenise(write_documents(tmp_path / f"{name}.jsonl", [line]), file, tokeniser)
        made[name] = file, tokeniser.document(Source(id=name, place=name, messages=messages))
    file, document = made["a"]
    places = {document.media[0].digest: str(tmp_path / "a.png")}
    extractor = VisionExtractor.load(model, media_source=places.get)
    dataset = publish(tmp_path / "ds", extractor, {"a": document})
    again = extractor_for(dataset, model, documents=file)
    assert again.schema == dataset.schema
    assert audit(dataset, again, fraction=1).equal == 1
    for given in (None, tmp_path / "a.jsonl"):
        with pytest.raises(UsageError, match=r"give it \(--documents FILE\.kvdocs") as caught:
            extractor_for(dataset, model, documents=given)
        assert caught.value.code == "E081"
    # Of other images: that ends it, and is no difference.
    with pytest.raises(UsageError, match="give the documents file that the dataset was made of"):
        audit(dataset, extractor_for(dataset, model, documents=made["b"][0]), fraction=1)


def test_a_dataset_that_could_store_images_and_has_none_needs_nothing(tmp_path: Path) -> None:
    model = save_vision(tmp_path / "vision")
    dataset = publish(tmp_path / "ds", VisionExtractor.load(model, media_source={}.get), {"a": [1, 2, 3]})
    assert audit(dataset, extractor_for(dataset, model), fraction=1).equal == 1
