from __future__ import annotations

from pathlib import Path

import pytest

from kvformat.extract import HuggingFaceExtractor
from kvformat.extract.again import extractor_for
from kvformat.extract.audit import audit
from kvformat.extract.quantise import QuantisingExtractor
from tests.extract.auditing import publish
from tests.models import save_tiny


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
