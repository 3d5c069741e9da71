"""An extractor that gives just what a dataset stores, to compute it again with."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from kvformat.errors import make_error
from kvformat.extract.bounds import compared
from kvformat.spec.schema import UNIFORM_DTYPES

if TYPE_CHECKING:
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
    KVFormatError
        As for :meth:`kvformat.extract.HuggingFaceExtractor.load`.
    DependencyError
        E205 where transformers is missing.
    """
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
    try:
        return _load(dataset, model, documents, options)
    except ModuleNotFoundError as error:
        raise make_error("E205", f"computing again needs {error.name}: pip install 'kvformat[hf]'") from error


def _load(
    dataset: Dataset, model: str | Path, documents: str | os.PathLike[str] | None, options: dict[str, Any]
) -> Extractor:
    if not any(extra.name == "media" for extra in dataset.schema.extras):
        from kvformat.extract.hf import HuggingFaceExtractor

        return HuggingFaceExtractor.load(model, **options)
    from kvformat.extract.documents.file import open_documents
    from kvformat.extract.documents.opening import is_documents_file
    from kvformat.extract.hf.vision import VisionExtractor

    source = open_documents(documents).media_source if documents and is_documents_file(documents) else _nowhere
    return VisionExtractor.load(model, media_source=source, **options)


def _nowhere(_digest: bytes) -> None:
    return None
