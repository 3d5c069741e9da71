"""Documents a Python function yields."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from kvformat.errors import KVFormatError, make_error

__all__ = ["FunctionItems", "is_function", "load_function"]

_NAMED = re.compile(r"(?P<where>.+):(?P<name>[^\W\d]\w*)")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


class FunctionItems:
    """A :class:`~kvformat.extract.documents.reading.Reader` of what a function without arguments yields.

    Each call of the function has to yield the same objects in the same order: dicts with ``id`` and one of ``text``,
    ``messages``, ``token_ids``, as in a line of JSON.
    """

    noun = "item"

    def __init__(self, function: Callable[[], Iterable[Any]], location: str | None = None) -> None:
        module = getattr(function, "__module__", "")
        self.location = location or f"{module}:{getattr(function, '__qualname__', function)}"
        self._function = function
        self._count = 0

    def __iter__(self) -> Iterator[object]:
        """What it yields; E300 where it raises, with what it raised as the cause."""
        self._count = 0
        try:
            for value in self._function():
                yield value
                self._count += 1
        except Exception as error:  # whatever a function of a user raises
            place = self.place(self._count)
            if isinstance(error, KVFormatError):  # refused by what it calls: told with the place
                code, message, record = error.code, f"{place}: {error.message}", error.record
            else:
                code, message, record = "E300", f"{place}: the function raised {type(error).__name__}: {error}", None
            raise make_error(code, message, path=self.location, record=record) from error

    def place(self, ordinal: int) -> str:
        """Number of the item, from 0."""
        return f"item {ordinal}"

    def done(self) -> None:
        """Nobody knows."""
        return


def is_function(text: str) -> bool:
    """Whether a text has the form ``module:function`` or ``file.py:function``."""
    found = _NAMED.fullmatch(text)
    return found is not None and (found["where"].endswith(".py") or _MODULE.fullmatch(found["where"]) is not None)


def load_function(text: str) -> FunctionItems:
    """The function a text of that form names.

    Raises
    ------
    InputError
        E300 where the module does not load, or has no such function.
    """
    found = _NAMED.fullmatch(text)
    if found is None:
        raise make_error("E081", f"expected module:function or file.py:function, found {text!r:.200}")
    where, name = found["where"], found["name"]
    try:
        module = _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except Exception as error:  # a module raises what it likes
        raise make_error(
            "E300",
            f"{where} does not load: {type(error).__name__}: {error}; a module must be importable, a file is named as "
            "path/to/file.py:function",
            path=text,
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise make_error("E300", f"{where} has no function {name!r}; it takes no argument and yields dicts", path=text)
    return FunctionItems(function, text)


def _load_file(path: Path) -> Any:
    name = f"kvformat_documents_{hashlib.sha256(str(path.resolve()).encode('utf-8', 'surrogateescape')).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
