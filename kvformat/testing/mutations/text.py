"""Mutations of canonical JSON as text, and of the version (E010 to E015)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from kvformat.testing.dataset_files import DatasetFiles, dump
from kvformat.testing.mutations.edits import Edit, Mutation, manifest, put, root, text

__all__ = ["MUTATIONS"]

Change = Callable[[bytes], bytes]


def _swap(old: bytes, new: bytes) -> Change:
    def apply(data: bytes) -> bytes:
        if old not in data:
            raise ValueError(f"{old!r} does not stand in the text")
        return data.replace(old, new, 1)

    return apply


def _extensions(value: bytes) -> Change:
    """Give the manifest ``extensions`` with a member ``x`` of this text."""
    return _swap(b'"files":', b'"extensions":{"x":' + value + b'},"files":')


def _both(version: str, *, requires: list[str] | None = None, **others: Any) -> Edit:
    """State version and features in root and manifest; other members in the root alone."""

    def apply(files: DatasetFiles) -> None:
        for decoded in (files.root, files.manifest):
            decoded["version"] = version
            if requires is not None:
                decoded["requires"] = requires
        files.root.update(others)
        files.reseal("manifest")

    return apply


def _nested(levels: int) -> Any:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


def _version_first(data: bytes) -> bytes:
    return b'{"version":"1.0",' + data[1:].replace(b',"version":"1.0"', b"")


def _anywhere() -> Iterator[Mutation]:
    """What is wrong with a text wherever it stands: in the root, and in the manifest."""
    changes: list[tuple[str, str, Change]] = [
        ("E011", "empty", lambda _: b""),
        ("E011", "cut", lambda data: data[:-1]),
        ("E011", "two-objects", lambda data: data + b"{}"),
        ("E011", "an-array", lambda data: b"[" + data + b"]"),
        ("E011", "a-string", lambda _: b'"kvformat"'),
        ("E011", "byte-order-mark", lambda data: b"\xef\xbb\xbf" + data),
        ("E011", "utf-16", lambda data: data.decode().encode("utf-16-le")),
        ("E011", "not-utf-8", _swap(b'"kvformat"', b'"kvformat\xff"')),
        ("E011", "overlong-utf-8", _swap(b'"kvformat"', b'"kvf\xc0\xafrmat"')),
        ("E011", "surrogate-in-utf-8", _swap(b'"kvformat"', b'"kvf\xed\xa0\x80rmat"')),
        ("E011", "single-quotes", lambda data: data.replace(b'"', b"'")),
        ("E011", "bare-name", _swap(b'"format"', b"format")),
        ("E011", "comma-at-end", lambda data: data[:-1] + b",}"),
        ("E011", "raw-control", _swap(b'"kvformat"', b'"kvf\nrmat"')),
        ("E011", "nan", _swap(b'"kvformat"', b"NaN")),
        ("E011", "infinity", _swap(b'"kvformat"', b"-Infinity")),
        ("E011", "leading-zero", _swap(b'"size":', b'"size":0')),
        ("E011", "unknown-escape", _swap(b'"kvformat"', b'"kv\\xf"')),
        ("E014", "member-twice", lambda data: data[:-1] + b',"version":"1.0"}'),
        ("E014", "member-twice-by-escape", lambda data: data[:-1] + b',"v\\u0065rsion":"1.0"}'),
        ("E015", "final-newline", lambda data: data + b"\n"),
        ("E015", "leading-space", lambda data: b" " + data),
        ("E015", "space-after-colon", _swap(b'"format":', b'"format": ')),
        ("E015", "members-out-of-order", _version_first),
        ("E015", "needless-escape", _swap(b'"kvformat"', b'"kv\\u0066ormat"')),
        ("E015", "number-with-fraction", _swap(b',"version"', b',"u":1.0,"version"')),
        ("E015", "number-with-exponent", _swap(b',"version"', b',"u":1e3,"version"')),
        ("E015", "number-negative", _swap(b',"version"', b',"u":-1,"version"')),
        ("E015", "minus-zero", _swap(b',"version"', b',"u":-0,"version"')),
        ("E015", "number-too-large", _swap(b',"version"', b',"u":9007199254740992,"version"')),
        ("E015", "number-of-5000-digits", _swap(b',"version"', b',"u":' + b"9" * 5000 + b',"version"')),
        ("E015", "number-overflows", _swap(b',"version"', b',"u":1e400,"version"')),
        ("E015", "null", _swap(b',"version"', b',"u":null,"version"')),
        ("E015", "name-not-ascii", _swap(b',"version"', ',"\u00fc":1,"version"'.encode())),
        ("E015", "surrogate", _swap(b',"version"', b',"u":"\\ud800","version"')),
    ]
    chosen = {"cut", "not-utf-8", "an-array", "nan", "member-twice", "final-newline", "members-out-of-order", "null"}
    chosen_in_root = {"number-with-fraction", "number-too-large", "surrogate", "member-twice-by-escape"}
    files: tuple[Literal["root", "manifest"], ...] = ("root", "manifest")
    for code, name, change in changes:
        for which in files:
            vector = name in chosen or (which == "root" and name in chosen_in_root)
            yield Mutation(code=code, name=f"{which}-{name}", apply=text(which, change), vector=vector)


def _strings() -> Iterator[Mutation]:
    """Strings that are not written as they must be; ``extensions`` may hold any."""
    for name, value in (
        ("escaped-solidus", rb'"\/"'),
        ("upper-case-escape", rb'"\u001F"'),
        ("long-escape-of-newline", rb'"\u000a"'),
        ("escaped-delete", rb'"\u007f"'),
        ("escaped-letter", rb'"\u00e9"'),
        ("escaped-pair", rb'"\ud83d\ude00"'),
        ("pair-reversed", rb'"\ude00\ud83d"'),
        ("space-in-array", b"[1, 2]"),
        ("newline-in-object", b'{"a":1,\n"b":2}'),
        ("order-by-length", b'{"b":1,"aa":2}'),
        ("order-ignoring-case", b'{"a":1,"B":2}'),
        ("plus-sign-exponent", b"1E+2"),
    ):
        yield Mutation(
            code="E015",
            name=f"extensions-{name}",
            apply=text("manifest", _extensions(value)),
            vector=name in {"escaped-solidus", "upper-case-escape", "escaped-pair"},
        )
    yield Mutation(code="E014", name="extensions-member-twice", apply=text("manifest", _extensions(b'{"a":1,"a":1}')))
    yield Mutation(code="E011", name="extensions-plus-sign", apply=text("manifest", _extensions(b"+1")), vector=False)


MUTATIONS = (
    Mutation(code="E010", name="root-too-deep", apply=root(put(_nested(32), "x"))),
    Mutation(code="E010", name="manifest-too-deep", apply=manifest(put({"x": _nested(31)}, "extensions"))),
    Mutation(
        code="E010",
        name="root-very-deep",
        apply=text("root", lambda data: b'{"x":' + b"[" * 30_000 + b"]" * 30_000 + b"," + data[1:]),
        vector=False,
    ),
    Mutation(
        code="E010",
        name="manifest-very-deep",
        apply=text("manifest", _extensions(b"[" * 200_000 + b"]" * 200_000)),
        vector=False,
    ),
    Mutation(
        code="E010",
        name="manifest-deep-objects",
        apply=text("manifest", _extensions(b'{"a":' * 40 + b"1" + b"}" * 40)),
        vector=False,
    ),
    *_anywhere(),
    *_strings(),
    Mutation(code="E012", name="newer-major", apply=_both("2.0")),
    Mutation(code="E012", name="much-newer-major", apply=_both("10.3"), vector=False),
    Mutation(code="E012", name="newer-with-zeros", apply=_both("0000000002.00"), vector=False),
    Mutation(code="E012", name="newer-with-huge-number", apply=_both("9" * 5000 + ".0"), vector=False),
    Mutation(
        code="E012",
        name="newer-with-new-members",
        apply=_both("2.0", new={"a": -1.5}, requires=["codec.byteplane-zstd"]),
    ),
    Mutation(
        code="E012",
        name="newer-and-not-canonical",
        apply=text("root", lambda _: dump({"format": "kvformat", "version": "3.0"}).replace(b":", b" : ") + b"\n"),
    ),
    Mutation(code="E013", name="reserved-feature", apply=_both("1.0", requires=["codec.byteplane-zstd"])),
    Mutation(code="E013", name="unknown-feature-newer-minor", apply=_both("1.9", requires=["later"])),
    Mutation(code="E013", name="features-out-of-order", apply=_both("1.0", requires=["b", "a", "a"]), vector=False),
    Mutation(
        code="E013",
        name="feature-among-odd-members",
        apply=_both("1.0", requires=["later", 7], unknown=[None]),  # type: ignore[list-item]
        vector=False,
    ),
)
