"""Extraction from Hugging Face models. Importing this loads torch and transformers."""

from __future__ import annotations

from kvformat.extract.hf.describe import Description, describe
from kvformat.extract.hf.extractor import HuggingFaceExtractor
from kvformat.extract.hf.options import check_device

__all__ = ["Description", "HuggingFaceExtractor", "check_device", "describe"]
