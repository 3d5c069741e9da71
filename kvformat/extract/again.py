"""An extractor that gives just what a dataset stores, to compute it again with."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from kvformat.errors import make_error
from kvformat.extract.documents.opening import is_documents_file
from kvformat.extract.extras import needing
from kvformat.extract.inputs import require_media_sources
from kvformat.read.error_bounds import compared
from kvformat.spec.schema import UNIFORM_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvformat.interfaces import Extractor
    from kvformat.read.dataset import Dataset

__all__ = ["extractor_for"]


def extractor_for(
    dataset: Dataset,
    model: str | Path,
    *,
    revision: str | None = None,
    compute_dtype: str | None = None,
    device: str = "cpu",
    attn_implementation: str | None = None,
    adapter: str | Path | None = None,
    checkpoint: Any = None,
    documents: str | os.PathLike[str] | None = None,
) -> Extractor:
    """Load a model and make an extractor with the layers, the stage of keys and the dtypes of a dataset.

    What is stored in 8 bits is computed without quantisation.

    Parameters
    ----------
    model, revision, device, attn_implementation, adapter, checkpoint
        As for :meth:`kvformat.extract.HuggingFaceExtractor.load`. An adapter is applied where the dataset's context
        names one, and merged elsewhere.
    compute_dtype
        That of the dataset's context when absent; of an unknown one, that of the model's configuration.
    documents
        Documents file (``*.kvdocs``) that says where images are, for a dataset with images.

    Raises
    ------
    UsageError
        E081 for a dataset with images without its documents file.
    IdentityError
        E083 where the model has fewer layers than the dataset's.
    KVFormatError
        As for :meth:`kvformat.extract.HuggingFaceExtractor.load`.
    DependencyError
        E205 where transformers is missing.
    """
    require_media_sources(dataset, documents)
    components = compared(dataset.schema)
    dtypes = {component.dtype for component in components} & set(UNIFORM_DTYPES)
    stages = {component.stage for component in components if component.role in {"key", "rope_key"}}
    context = dataset.context.model
    options: dict[str, Any] = {
        "revision": revision,
        "dtype": next(iter(dtypes)) if len(dtypes) == 1 and all(one.quant is None for one in components) else None,
        "compute_dtype": compute_dtype or (None if context is None else context.compute_dtype),
        "device": device,
        "attn_implementation": attn_implementation,
        "layers": sorted({layer for component in components for layer in component.layers}),
        "key_stage": next(iter(stages)) if len(stages) == 1 else "attention",
        "context": "unknown" if context is None else "derive",
    }
    if checkpoint is not None:
        options["checkpoint"] = checkpoint
    if adapter is not None:
        options |= {
            "adapter": adapter,
            "adapter_mode": "apply" if context is not None and context.adapters else "merge",
        }
    with needing("computing again needs"):
        _require_layers(dataset, options["layers"], model, revision)
        return _load(dataset, model, documents, options)


def _load(
    dataset: Dataset, model: str | Path, documents: str | os.PathLike[str] | None, options: dict[str, Any]
) -> Extractor:
    if not any(extra.name == "media" for extra in dataset.schema.extras):
        from kvformat.extract.hf import HuggingFaceExtractor

        return HuggingFaceExtractor.load(model, **options)
    from kvformat.extract.hf.vision import VisionExtractor

    return VisionExtractor.load(model, media_source=_media_source(documents), **options)


def _media_source(documents: str | os.PathLike[str] | None) -> Callable[[bytes], str]:
    """Where images are. One that nobody told of ends the audit: it says nothing of the stored values."""
    from kvformat.extract.documents.file import open_documents

    opened = open_documents(documents) if is_documents_file(documents) else None

    def source(digest: bytes) -> str:
        found = None if opened is None else opened.media_source(digest)
        if found is None:
            raise make_error(
                "E081",
                f"nothing says where the image {digest.hex()[:16]} is: give the documents file that the dataset was "
                "made of (--documents FILE.kvdocs)",
                path=documents,
            )
        return found

    return source


def _require_layers(dataset: Dataset, layers: list[int], model: str | Path, revision: str | None) -> None:
    """Refuse a model without the dataset's layers, before its weights are loaded."""
    from kvformat.extract.hf.hub import commit_of
    from kvformat.extract.hf.loading import load_config

    config = load_config(model, revision=commit_of(model, revision) or revision).get_text_config(decoder=True)
    count = int(config.num_hidden_layers)
    if layers and layers[-1] >= count:
        raise make_error(
            "E083",
            f"the dataset was made with another model: it stores layer {layers[-1]}, and this model's last is "
            f"{count - 1}, counted from 0; give the model that made it",
            path=dataset.location,
        )
