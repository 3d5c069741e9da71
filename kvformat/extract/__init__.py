"""Extraction: documents in, K and V of a model out. Importing this loads neither torch nor transformers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvformat.errors import make_error
from kvformat.extract.job import Phase, Progress, extract_plan, run
from kvformat.extract.plan import Plan, make_plan
from kvformat.extract.prepare import estimate
from kvformat.extract.size import Estimate
from kvformat.extract.tokenise import Tokeniser

if TYPE_CHECKING:
    from kvformat.extract.hf import HuggingFaceExtractor

__all__ = [
    "Estimate",
    "HuggingFaceExtractor",
    "Phase",
    "Plan",
    "Progress",
    "Tokeniser",
    "estimate",
    "extract_plan",
    "make_plan",
    "run",
]


def __getattr__(name: str) -> Any:
    if name != "HuggingFaceExtractor":
        raise AttributeError(f"module 'kvformat.extract' has no attribute {name!r}")
    try:
        value = import_module("kvformat.extract.hf").HuggingFaceExtractor
    except ModuleNotFoundError as error:
        raise make_error("E205", f"extraction needs {error.name}: pip install 'kvformat[hf]'") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
