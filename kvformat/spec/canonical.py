"""Canonical JSON: one byte string for each value (SPEC.md, "Canonical JSON")."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from kvformat.errors import KVFormatError, make_error
from kvformat.spec import limits

__all__ = ["convert", "decode", "decode_real", "encode", "encode_real", "flatten", "is_real", "loose", "plain"]

T = TypeVar("T")
JSON = Any  # a decoded JSON value: never crosses a module border without being converted to a typed struct
# Possessive, and with an end that may be missing: a string without one is passed over once, not from each quote in it.
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_NOT_BRACKET = bytes(set(range(256)) - set(b"[]{}"))


class _DuplicateError(Exception):
    pass


def encode(value: object) -> bytes:
    """Encode a value (plain objects or msgspec structs) canonically.

    Raises
    ------
    FormatError
        E015 for a value outside the subset, E010 for deeper nesting than allowed.
    """
    _check_types(value, 0)
    built = plain(value)
    _check_subset(built, 0)
    text = json.dumps(built, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise make_error("E015", "a string holds a surrogate") from None


def plain(value: object) -> JSON:
    """Plain objects of a struct or a sequence of structs."""
    return msgspec.to_builtins(value)


def loose(data: bytes, *, path: str | None = None) -> dict[str, JSON]:
    """Decode any JSON object, as a newer version may write it.

    Raises
    ------
    FormatError
        E010 nested too deep, E011 not a JSON object in UTF-8.
    """
    _check_depth(data, path)
    try:
        value = json.loads(data.decode("utf-8"), parse_int=_integer, parse_constant=_not_json)
    except (ValueError, RecursionError) as error:
        raise make_error("E011", f"not well-formed JSON: {error}; restore the file", path=path) from None
    if not isinstance(value, dict):
        raise make_error("E011", f"expected a JSON object, found {type(value).__name__}", path=path)
    return value


def decode(data: bytes, *, path: str | None = None) -> dict[str, JSON]:
    """Decode a canonical JSON object and prove that it is canonical.

    Raises
    ------
    FormatError
        E010, E011, E014 (duplicate member) or E015 (not canonical).
    """
    loose(data, path=path)
    try:
        value: dict[str, JSON] = json.loads(data.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_int=_integer)
    except _DuplicateError as error:
        raise make_error("E014", f"member {error.args[0]!r} stands twice", path=path) from None
    try:
        again = encode(value)
    except (KVFormatError, ValueError) as error:
        raise make_error("E015", f"a value outside the canonical subset: {error}", path=path) from None
    if again != data:
        raise make_error("E015", f"not canonical: {_first_difference(data, again)}; restore the file", path=path)
    return value


def convert(value: JSON, kind: type[T], *, path: str | None = None) -> T:
    """Turn a decoded value into a typed struct.

    Raises
    ------
    FormatError
        E016 unknown member, E017 missing member, E018 wrong type, form or range; the message ends with the place.
    """
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        # msgspec stops at the first fault it meets; by precedence, unknown and missing members anywhere come first.
        found = min(_member_faults(value, msgspec.inspect.type_info(kind), "$"), default=("E018", str(error)))
        raise make_error(*found, path=path) from None


def encode_real(value: float) -> str:
    """Encode a finite real as the 16 hex digits of its big-endian binary64; E081 for NaN, Inf and -0."""
    number = float(value)
    digits = struct.pack(">d", number).hex()
    if not is_real(digits):
        raise make_error("E081", f"{value!r} has no encoding as a real: NaN, infinities and -0 are refused")
    return digits


def decode_real(digits: str) -> float:
    """Decode 16 hex digits."""
    number: float = struct.unpack(">d", bytes.fromhex(digits))[0]
    return number


def is_real(digits: str) -> bool:
    """Whether 16 hex digits encode a finite real other than -0."""
    number = decode_real(digits)
    return math.isfinite(number) and not (number == 0 and digits[0] == "8")


def flatten(value: JSON, prefix: str = "") -> Iterator[tuple[str, JSON]]:
    """Leaves of a decoded value as (dotted path, value)."""
    if isinstance(value, dict):
        for key in sorted(value):
            yield from flatten(value[key], f"{prefix}.{key}" if prefix else key)
    elif isinstance(value, list | tuple) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from flatten(item, f"{prefix}[{index}]")
    else:
        yield prefix, value


def _member_faults(value: JSON, kind: msgspec.inspect.Type, where: str) -> Iterator[tuple[str, str]]:
    """Objects with unknown (E016) or missing (E017) members, as far as the value has the form of the type."""
    if isinstance(kind, msgspec.inspect.UnionType):
        kind = next((one for one in kind.types if isinstance(one, msgspec.inspect.StructType)), kind)
    if isinstance(kind, msgspec.inspect.StructType) and isinstance(value, dict):
        fields = {field.encode_name: field for field in kind.fields}
        for name in sorted(value.keys() - fields.keys()):
            yield "E016", f"Object contains unknown field `{name}` - at `{where}`"
        for name, field in fields.items():
            if name in value:
                yield from _member_faults(value[name], field.type, f"{where}.{name}")
            elif field.required:
                yield "E017", f"Object missing required field `{name}` - at `{where}`"
    elif isinstance(kind, msgspec.inspect.VarTupleType) and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _member_faults(item, kind.item_type, f"{where}[{index}]")


def _integer(literal: str) -> int:
    """Python refuses to convert thousands of digits; whatever is so long is out of range."""
    return int(literal) if len(literal) <= 20 else limits.MAX_INTEGER + 1


def _not_json(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _no_duplicates(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    found: dict[str, JSON] = {}
    for key, value in pairs:
        if key in found:
            raise _DuplicateError(key)
        found[key] = value
    return found


def _check_depth(data: bytes, path: str | None) -> None:
    depth = deepest = 0
    for bracket in _STRING.sub(b"", data).translate(None, _NOT_BRACKET):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
        if deepest > limits.MAX_JSON_DEPTH:
            raise make_error("E010", f"nested deeper than {limits.MAX_JSON_DEPTH}", path=path)


def _check_types(value: object, depth: int) -> None:
    """Refuse what :func:`plain` would turn into something else, such as bytes and sets, and too deep nesting."""
    if value is None or type(value) in (str, bool, int, float):
        return
    if isinstance(value, msgspec.Struct):
        items = [getattr(value, field) for field in value.__struct_fields__]
    elif isinstance(value, dict):
        items = [*value, *value.values()]
    elif isinstance(value, list | tuple):
        items = list(value)
    else:
        raise make_error("E015", f"{type(value).__name__} has no canonical encoding")
    if depth >= limits.MAX_JSON_DEPTH:
        raise make_error("E010", f"nested deeper than {limits.MAX_JSON_DEPTH}")
    for item in items:
        _check_types(item, depth + 1)


def _check_subset(value: JSON, depth: int) -> None:
    if isinstance(value, bool):
        return
    if isinstance(value, int):
        if not 0 <= value <= limits.MAX_INTEGER:
            raise make_error("E015", f"integer {value} is not in 0..2^53-1")
    elif isinstance(value, str):
        return
    elif isinstance(value, dict):
        if depth >= limits.MAX_JSON_DEPTH:
            raise make_error("E010", f"nested deeper than {limits.MAX_JSON_DEPTH}")
        for key, item in value.items():
            if not isinstance(key, str) or not key.isascii():
                raise make_error("E015", f"member name {key!r} is not ASCII")
            _check_subset(item, depth + 1)
    elif isinstance(value, list | tuple):
        if depth >= limits.MAX_JSON_DEPTH:
            raise make_error("E010", f"nested deeper than {limits.MAX_JSON_DEPTH}")
        for item in value:
            _check_subset(item, depth + 1)
    else:
        raise make_error("E015", f"{type(value).__name__} has no canonical encoding")


def _first_difference(data: bytes, again: bytes) -> str:
    at = next((i for i, (a, b) in enumerate(zip(data, again, strict=False)) if a != b), min(len(data), len(again)))
    return f"byte {at} is {data[at : at + 12]!r}, the canonical encoding has {again[at : at + 12]!r}"
