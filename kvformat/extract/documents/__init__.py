"""Documents for extraction: enumerated in a fixed order, tokenised once, kept in a *documents file* (``*.kvdocs``).

Sources are JSON Lines, Parquet, data sets that Hugging Face ``datasets`` saved on disk, and Python functions. All of
them go through one validation. Importing this loads none of the libraries that some of them need.
"""

from __future__ import annotations

from kvformat.extract.documents.captions import Captioned, Choice, Null, caption_documents, caption_name
from kvformat.extract.documents.collect import Enumerated, TooLong, write_documents
from kvformat.extract.documents.file import Documents, open_documents
from kvformat.extract.documents.opening import DocumentsSource
from kvformat.extract.documents.writer import DocumentsWriter

__all__ = [
    "Captioned",
    "Choice",
    "Documents",
    "DocumentsSource",
    "DocumentsWriter",
    "Enumerated",
    "Null",
    "TooLong",
    "caption_documents",
    "caption_name",
    "open_documents",
    "write_documents",
]
