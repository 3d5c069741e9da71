"""The plan of an extraction: which documents, in which order, known before any model is loaded."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvformat.errors import InputError
from kvformat.extract.sources import BadLines, Kind, read_documents, refuse
from kvformat.extract.tokenise import Tokeniser
from kvformat.spec.context import Text
from kvformat.spec.document import Document

__all__ = ["Plan", "PlannedDocument", "make_plan"]

_DIGEST = 32


class PlannedDocument(NamedTuple):
    """One document of the plan. ``repeated``: an earlier one has the same digest."""

    name: str
    document: Document
    digest: bytes
    repeated: bool


class Plan:
    """Documents of a file under fixed rules. Holds 37 bytes a document; iterating reads the file again.

    Attributes
    ----------
    path
        The documents file.
    num_tokens
        Tokens of each document.
    text
        How text becomes ids.
    """

    def __init__(
        self,
        path: Path,
        tokeniser: Tokeniser,
        *,
        digests: bytes,
        num_tokens: array[int],
        repeated: bytes,
        text: Text,
        name_nbytes: int,
    ) -> None:
        self.path = path
        self.num_tokens = num_tokens
        self.text = text
        self.name_nbytes = name_nbytes
        self._tokeniser = tokeniser
        self._digests = digests
        self._repeated = repeated

    def __len__(self) -> int:
        return len(self.num_tokens)

    def __iter__(self) -> Iterator[PlannedDocument]:
        """Read and tokenise again; E300 where a document is no longer the planned one."""
        number = -1
        for number, source in enumerate(read_documents(self.path)):
            document = self._tokeniser.document(source, path=self.path)
            digest = document.digest
            if number >= len(self) or digest != self._digests[number * _DIGEST : (number + 1) * _DIGEST]:
                refuse(self.path, source.line, "the file changed while it was being read; start again")
            yield PlannedDocument(source.id, document, digest, bool(self._repeated[number]))
        if number + 1 != len(self):
            refuse(self.path, number + 2, "the file became shorter while it was being read; start again")

    def records(self) -> Iterator[int]:
        """Tokens of each record: of each document that is no repetition, in order."""
        return (tokens for tokens, repeated in zip(self.num_tokens, self._repeated, strict=True) if not repeated)


def make_plan(path: str | Path, tokeniser: Tokeniser) -> Plan:
    """Read a documents file once, tokenise it, and refuse what cannot be extracted.

    Raises
    ------
    InputError
        E300, E301, E305, E306; one error tells of all bad lines, with the code of the first.
    """
    path = Path(path)
    digests = bytearray()
    repeated = bytearray()
    num_tokens = array("I")
    kinds: set[Kind] = set()
    seen: set[bytes] = set()
    name_nbytes = 0
    bad = BadLines(path)
    for source in read_documents(path, bad=bad):
        try:
            document = tokeniser.document(source, path=path)
        except InputError as error:
            bad.add(error)
            if not tokeniser.takes(source.kind):
                break  # every line of this kind would say the same
            continue
        digest = document.digest
        digests += digest
        repeated.append(digest in seen)
        num_tokens.append(document.num_tokens)
        kinds.add(source.kind)
        seen.add(digest)
        name_nbytes += len(source.id.encode())
    bad.check()
    return Plan(
        path,
        tokeniser,
        digests=bytes(digests),
        num_tokens=num_tokens,
        repeated=bytes(repeated),
        text=tokeniser.text(kinds),
        name_nbytes=name_nbytes,
    )
