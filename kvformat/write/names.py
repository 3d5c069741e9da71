"""The names a writer was given: one each for a record, a further one, or a document that was skipped."""

from __future__ import annotations

from kvformat.errors import make_error
from kvformat.spec import limits
from kvformat.spec.manifest import Skipped

__all__ = ["Names"]

_SKIPPED = -1


class Names:
    """Names in the order they were given; every one counts as one input."""

    def __init__(self) -> None:
        self._records: dict[str, int] = {}
        self._skipped: list[Skipped] = []

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Documents that were skipped, in input order."""
        return tuple(self._skipped)

    def check(self, name: str) -> bytes:
        """UTF-8 of a name that may be given.

        Raises
        ------
        InputError
            E106 for something that is no name, E107 for one that was given before.
        """
        try:
            encoded = name.encode()
        except (AttributeError, UnicodeEncodeError):
            encoded = b""
        if not 1 <= len(encoded) <= limits.MAX_NAME_NBYTES:
            raise make_error(
                "E106", f"a name is a string of 1 to {limits.MAX_NAME_NBYTES} bytes of UTF-8, found {name!r:.80}"
            )
        if name in self._records:
            raise make_error("E107", "the name was given before", record=name)
        return encoded

    def record(self, target: str, *, alias: str) -> int:
        """The record a name belongs to; E109 where nothing was added under it. ``alias`` is for the message."""
        record = self._records.get(target, _SKIPPED)
        if record == _SKIPPED:
            raise make_error("E109", f"no record was added as {target!r}", record=alias)
        return record

    @property
    def num_inputs(self) -> int:
        """Names so far; also the position of the next one."""
        return len(self._records)

    def add(self, name: str, record: int) -> None:
        """Note a checked name of a record."""
        self._records[name] = record

    def skipped_as(self, name: bytes, reason: object) -> Skipped:
        """What is noted of a document that is not stored, under a name as :meth:`check` gave it.

        Strings of a subclass, such as NumPy's, become plain ones: no manifest could be made of them.

        Raises
        ------
        UsageError
            E081 where the reason is no Unicode text.
        """
        text = name.decode()
        try:
            words = reason.encode() if isinstance(reason, str) else b""
        except UnicodeEncodeError:
            words = b""
        if not words:
            raise make_error("E081", f"a skipped document needs a reason in Unicode, found {reason!r}", record=text)
        return Skipped(input=self.num_inputs, name=text, reason=words.decode())

    def skip(self, skipped: Skipped) -> None:
        """Note a document that is not stored."""
        self._skipped.append(skipped)
        self._records[skipped.name] = _SKIPPED
