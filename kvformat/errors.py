"""The error tree.

::

    KVFormatError
    +-- DatasetNotFoundError (FileNotFoundError)  nothing is published there: check the location
    +-- DatasetExistsError (FileExistsError)      a dataset is there already: choose another location
    +-- UnsupportedError                          written by a newer version: upgrade kvformat
    +-- FormatError (ValueError)                  bytes no conforming writer makes: restore or extract again
    |   +-- DamageError                           a digest, checksum or size does not match: restore the file
    +-- IdentityError                             sound, but not what was asked for: compare, then decide
    +-- LookupFailedError (KeyError)              no such record, component or layer: see what the dataset holds
    +-- UsageError (ValueError)                   an argument makes no sense: change the call
    +-- InputError (ValueError)                   data given to a writer are refused: mend the data
    +-- ConflictError                             another writer is, or was, here: wait, resume or clean
    +-- StorageError (OSError)                    the storage refused: free space, mend permissions, retry
    +-- DependencyError (ImportError)             an optional package is missing: install it

    KVFormatWarning (UserWarning)                 readable, but worth a look

Every error carries a stable ``code`` (see ``spec/codes.md``) and, where they are known, the ``path``, the ``record``
and the ``layer`` it is about; a warning carries ``code`` and ``path``. All of them pickle.
"""

from __future__ import annotations

from typing import Any

from kvformat.codes import CODES

__all__ = [
    "ConflictError",
    "DamageError",
    "DatasetExistsError",
    "DatasetNotFoundError",
    "DependencyError",
    "FormatError",
    "IdentityError",
    "InputError",
    "KVFormatError",
    "KVFormatWarning",
    "LookupFailedError",
    "StorageError",
    "UnsupportedError",
    "UsageError",
    "make_error",
]


class KVFormatError(Exception):
    """Base of every error kvformat raises on purpose.

    Parameters
    ----------
    message
        What is wrong, with expected and actual values, and what to do next.
    code
        Stable code, for example ``"E072"``; listed in ``spec/codes.md``.
    path
        File or location the error is about.
    record
        Name or index of the record.
    layer
        Model layer index.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str,
        path: str | None = None,
        record: str | int | None = None,
        layer: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.path = path
        self.record = record
        self.layer = layer

    def __str__(self) -> str:
        return _text(self.code, self.message, path=self.path, record=self.record, layer=self.layer)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.code, self.path, self.record, self.layer)


class DatasetNotFoundError(KVFormatError, FileNotFoundError):
    """Nothing is published at the location."""


class DatasetExistsError(KVFormatError, FileExistsError):
    """A dataset is published at the location already."""


class UnsupportedError(KVFormatError):
    """The dataset needs a newer version of kvformat."""


class FormatError(KVFormatError, ValueError):
    """The bytes are not what a conforming writer makes."""


class DamageError(FormatError):
    """A size, digest or checksum does not match what its parent states."""


class IdentityError(KVFormatError):
    """A sound dataset, but not the one that was asked for."""


class LookupFailedError(KVFormatError, KeyError, IndexError):
    """No such record, name, document, component or layer."""


class UsageError(KVFormatError, ValueError):
    """A call makes no sense."""


class InputError(KVFormatError, ValueError):
    """Data given to a writer or an extractor are refused."""


class ConflictError(KVFormatError):
    """Another writer is active here, or left something that does not agree."""


class StorageError(KVFormatError, OSError):
    """The storage refused an operation."""


class DependencyError(KVFormatError, ImportError):
    """An optional package is missing."""


class KVFormatWarning(UserWarning):
    """A dataset is readable, but worth a look.

    Parameters
    ----------
    message
        What is unusual.
    code
        Stable code, for example ``"W003"``; listed in ``spec/codes.md``. The text begins with it in brackets, so that
        a filter may name it.
    path
        File or location the warning is about.
    """

    def __init__(self, message: str, *, code: str, path: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.path = path

    def __str__(self) -> str:
        return _text(self.code, self.message, path=self.path)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_warning, (type(self), self.message, self.code, self.path)


_CLASSES: dict[str, type[KVFormatError]] = {
    cls.__name__: cls
    for cls in (
        DatasetNotFoundError,
        DatasetExistsError,
        UnsupportedError,
        FormatError,
        DamageError,
        IdentityError,
        LookupFailedError,
        UsageError,
        InputError,
        ConflictError,
        StorageError,
        DependencyError,
    )
}


def make_error(
    code: str,
    message: str,
    *,
    path: object = None,
    record: str | int | None = None,
    layer: int | None = None,
) -> KVFormatError:
    """Build the error whose class belongs to ``code``."""
    cls = _CLASSES[CODES[code].error]
    return cls(message, code=code, path=None if path is None else str(path), record=record, layer=layer)


def _rebuild(
    cls: type[KVFormatError],
    message: str,
    code: str,
    path: str | None,
    record: str | int | None,
    layer: int | None,
) -> KVFormatError:
    return cls(message, code=code, path=path, record=record, layer=layer)


def _rebuild_warning(cls: type[KVFormatWarning], message: str, code: str, path: str | None) -> KVFormatWarning:
    return cls(message, code=code, path=path)


def _text(code: str, message: str, **where: str | int | None) -> str:
    """Code and message, and in brackets what is known of the place."""
    known = [
        f"{label} {value!r}" if isinstance(value, str) else f"{label} {value}"
        for label, value in where.items()
        if value is not None
    ]
    return f"[{code}] {message}" + (f" ({', '.join(known)})" if known else "")
