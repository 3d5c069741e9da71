"""Canonical JSON: one text for each value, and every other text refused."""

from __future__ import annotations

import datetime as dt
import json
import math
import re
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvformat.errors import FormatError, KVFormatError
from kvformat.spec import canonical
from kvformat.testing.strategies import canonical_objects
from tests.spec.reference import reference_reader

CODES = {"E010", "E011", "E014", "E015"}


def is_canonical(data: bytes) -> bool:
    """A strict checker of its own: a grammar of canonical tokens, and the order of names. Knows no JSON library."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    string = re.compile(r'"(?:[^"\\\x00-\x1f\ud800-\udfff]|\\["\\bfnrt]|\\u00(?:0[0-7bef]|1[0-9a-f]))*"')
    number = re.compile(r"0|[1-9][0-9]{0,15}")

    def value(at: int, depth: int) -> int:
        """Where the value that begins at ``at`` ends; -1 where none does."""
        if text.startswith(("true", "false"), at):
            return at + (4 if text[at] == "t" else 5)
        if text[at : at + 1] == '"':
            found = string.match(text, at)
            return found.end() if found else -1
        found = number.match(text, at)
        if found:
            return found.end() if int(found[0]) < 2**53 else -1
        if text[at : at + 1] not in ("{", "[") or depth == 32:
            return -1
        close = "}" if text[at] == "{" else "]"
        names: list[str] = []
        if text[at + 1 : at + 2] == close:
            return at + 2
        while True:
            at += 1
            if close == "}":
                found = string.match(text, at)
                if not found or not found[0].isascii() or text[found.end() : found.end() + 1] != ":":
                    return -1
                names.append(json.loads(found[0]))
                at = found.end() + 1
            at = value(at, depth + 1)
            if at < 0 or text[at : at + 1] not in (",", close):
                return -1
            if text[at] == close:
                ascending = all(a < b for a, b in pairwise(names))
                return at + 1 if ascending else -1

    return text[:1] == "{" and value(0, 0) == len(text)


def accepts(data: bytes) -> bool:
    code = package_code(data)
    assert code is None or code in CODES
    return code is None


def reference_code(data: bytes) -> str | None:
    reference = reference_reader()
    try:
        reference.decode(data, "")
    except reference.Refused as refused:
        code: str = refused.code
        return code
    return None


def package_code(data: bytes) -> str | None:
    try:
        canonical.decode(data)
    except FormatError as error:
        return error.code
    return None


@given(value=canonical_objects(max_leaves=40))
@settings(max_examples=400)
@example({})
@example({"a": [{}, [], "", 0, False, True, 2**53 - 1], "\x7f": '\x7f\u2028\U0001f600\x00\x1f\b\f\n\r\t"\\/'})
def test_round_trip(value: dict[str, Any]) -> None:
    data = canonical.encode(value)
    assert canonical.decode(data) == value
    assert type(canonical.decode(data)) is dict
    assert is_canonical(data)
    assert reference_reader().encode(value).encode() == data
    assert json.loads(data) == value


@given(value=canonical_objects(), data=st.data())
@settings(max_examples=600)
def test_a_changed_byte_is_refused_or_makes_another_value(value: dict[str, Any], data: st.DataObject) -> None:
    text = bytearray(canonical.encode(value))
    at = data.draw(st.integers(0, len(text) - 1))
    edit = data.draw(st.sampled_from(("replace", "insert", "delete")))
    byte = data.draw(st.integers(0, 255) | st.sampled_from(b'{}[]",:\\0159 tfnu\n'))
    if edit == "replace":
        text[at] = byte
    elif edit == "insert":
        text.insert(at, byte)
    else:
        del text[at]
    changed = bytes(text)
    assert accepts(changed) == is_canonical(changed)
    assert package_code(changed) == reference_code(changed)
    if accepts(changed) and changed != canonical.encode(value):
        other = canonical.decode(changed)
        assert json.dumps(other, sort_keys=True) != json.dumps(value, sort_keys=True)  # True is not 1 here


@given(data=st.text(st.sampled_from('{}[]",:\\0159 tfeulsnra.+-E\u00e9\n'), max_size=24).map(str.encode))
@settings(max_examples=600)
def test_any_text_is_judged_alike(data: bytes) -> None:
    data = b'{"a":' + data + b"}"
    assert accepts(data) == is_canonical(data)
    assert package_code(data) == reference_code(data)


def test_a_string_without_an_end_is_passed_over_once() -> None:
    """Each quote in it taken for another beginning would make minutes of this."""
    assert package_code(b'{"a":"' + b'\\"' * 500_000) == "E011"
    assert package_code(b'{"a":"' + b"[" * 40) == "E011"


@pytest.mark.parametrize("depth", [31, 32])
def test_depth_is_counted_outside_strings(depth: int) -> None:
    arrays = b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b',"b":"' + b"[{" * 100 + b'"}'
    assert accepts(arrays)
    deeper = arrays.replace(b"[" * (depth - 1) + b"]", b"[" * 32 + b"]" * (33 - depth) + b"]", 1)
    assert package_code(deeper) == "E010"


@pytest.mark.parametrize(
    "value",
    [
        2**53, -1, 1.0, None, math.nan, "\ud800", {1: 2}, {"\u00e9": 1}, {"\ud800": 1},
        b"x", {1, 2}, 1j, np.int64(1), np.float64(1), np.str_("x"), dt.date(2020, 1, 1), Path("x"),
    ],
    ids=repr,
)  # fmt: skip
def test_values_outside_the_subset_are_not_encoded(value: object) -> None:
    for outer in ({"x": value}, {"x": [1, {"y": (value,)}]}):
        with pytest.raises(FormatError, match="E015"):
            canonical.encode(outer)


@pytest.mark.parametrize("levels", [32, 100_000])
def test_nesting_beyond_the_limit_is_not_encoded(levels: int) -> None:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    with pytest.raises(KVFormatError, match="E010"):
        canonical.encode({"x": value})


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_reals_round_trip_by_their_bits(number: float) -> None:
    if number == 0 and math.copysign(1, number) < 0:
        with pytest.raises(KVFormatError, match="E081"):
            canonical.encode_real(number)
        return
    digits = canonical.encode_real(number)
    assert re.fullmatch("[0-9a-f]{16}", digits)
    assert digits == struct.pack(">d", number).hex()
    assert canonical.decode_real(digits) == number


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, -0.0])
def test_odd_reals_are_refused(number: float) -> None:
    with pytest.raises(KVFormatError, match="E081"):
        canonical.encode_real(number)
    assert not canonical.is_real(struct.pack(">d", number).hex())


def test_an_integer_and_the_equal_real_are_one_real() -> None:
    assert canonical.encode_real(10_000) == canonical.encode_real(10_000.0)
