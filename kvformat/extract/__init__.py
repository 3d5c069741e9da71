"""Extraction: documents in, K and V of a model out. Importing this loads neither torch nor transformers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvformat.extract.again import extractor_for
from kvformat.extract.audit import audit
from kvformat.extract.audit_report import AuditReport
from kvformat.extract.checkpoint import CheckpointSource
from kvformat.extract.documents import (
    Captioned,
    Choice,
    Documents,
    Null,
    caption_documents,
    open_documents,
    write_documents,
)
from kvformat.extract.extras import needing
from kvformat.extract.job import run
from kvformat.extract.join import check_documents
from kvformat.extract.join_report import JoinReport
from kvformat.extract.meter import PipelineTimes
from kvformat.extract.plan import Plan, make_plan, open_plan
from kvformat.extract.plan_job import extract_plan
from kvformat.extract.prepare import estimate
from kvformat.extract.progress import Phase, Progress
from kvformat.extract.size import Estimate
from kvformat.extract.tokenise import Tokeniser

if TYPE_CHECKING:
    from kvformat.extract.hf import HuggingFaceExtractor
    from kvformat.extract.hf.vision import VisionExtractor
    from kvformat.extract.quantise import QuantisingExtractor

__all__ = [
    "AuditReport",
    "Captioned",
    "CheckpointSource",
    "Choice",
    "Documents",
    "Estimate",
    "HuggingFaceExtractor",
    "JoinReport",
    "Null",
    "Phase",
    "PipelineTimes",
    "Plan",
    "Progress",
    "QuantisingExtractor",
    "Tokeniser",
    "VisionExtractor",
    "audit",
    "caption_documents",
    "check_documents",
    "estimate",
    "extract_plan",
    "extractor_for",
    "make_plan",
    "open_documents",
    "open_plan",
    "run",
    "write_documents",
]

_HEAVY = {
    "HuggingFaceExtractor": "kvformat.extract.hf",
    "QuantisingExtractor": "kvformat.extract.quantise",
    "VisionExtractor": "kvformat.extract.hf.vision",
}


def __getattr__(name: str) -> Any:
    if name not in _HEAVY:
        raise AttributeError(f"module 'kvformat.extract' has no attribute {name!r}")
    with needing("extraction needs"):
        value = getattr(import_module(_HEAVY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
