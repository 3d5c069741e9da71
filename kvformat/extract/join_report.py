"""What the join check found: where a trainer's documents are not those of a dataset."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from kvformat.errors import make_error

__all__ = ["JoinFinding", "JoinKind", "JoinReport"]

JoinKind = Literal["text", "missing", "tokens", "inputs", "unusable", "extra"]


class JoinFinding(Struct, frozen=True, kw_only=True):
    """One difference.

    Attributes
    ----------
    kind
        ``text``: a tokenizer, template or rule is another one. ``missing``: the dataset has no record of this name.
        ``tokens``: other token ids. ``inputs``: the same ids, with other positions, another mask or other media.
        ``unusable``: no document can be made of it. ``extra``: a name of the dataset that was not given.
    message
        Holds no token ids and no text, unless values were asked for.
    name, record
        Name of the document, and the record it has in the dataset.
    position
        Of the first token that differs; the length of the shorter document where one is the beginning of the other.
    expected, found
        Token ids there: the dataset's, and the trainer's. None without one, and unless values were asked for.
    expected_text, found_text
        What the tokenizer makes of them, where there is one.
    """

    kind: JoinKind
    message: str
    name: str | None = None
    record: int | None = None
    position: int | None = None
    expected: int | None = None
    found: int | None = None
    expected_text: str | None = None
    found_text: str | None = None


class JoinReport(Struct, frozen=True, kw_only=True):
    """How a trainer's documents compare with those of a dataset.

    Attributes
    ----------
    ok
        Whether there is no finding.
    id
        Dataset id, 64 hexadecimal digits.
    location
        Directory or URL of the dataset.
    looked_at
        Documents that were given, one for each name.
    matched
        How many of those are the dataset's.
    text, missing, tokens, inputs, unusable, extra
        How many findings of each kind there are; see :class:`JoinFinding`.
    findings
        The first of each kind, at most ``limit``, kind by kind.
    notes
        What could not be compared, and why.
    """

    ok: bool
    id: str
    location: str
    looked_at: int
    matched: int
    text: int
    missing: int
    tokens: int
    inputs: int
    unusable: int
    extra: int
    findings: tuple[JoinFinding, ...]
    notes: tuple[str, ...]

    @property
    def total(self) -> int:
        """Findings of all kinds."""
        return self.text + self.missing + self.tokens + self.inputs + self.unusable + self.extra

    def raise_for_findings(self) -> None:
        """Raise the first finding, with the number of the others.

        Raises
        ------
        IdentityError
            E312.
        """
        if self.ok:
            return
        more = f"; and {self.total - 1:,} more findings" if self.total > 1 else ""
        first = self.findings[0]
        record = first.name if first.name is not None else first.record
        raise make_error("E312", f"{first.message}{more}", path=self.location, record=record)
