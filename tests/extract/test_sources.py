from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvformat.errors import InputError, KVFormatError, StorageError
from kvformat.extract.documents.json_lines import JsonLines
from kvformat.extract.documents.reading import BadEntries, read_sources
from kvformat.extract.documents.source import Source
from tests.models import write_documents


def entries(path: Path) -> list[Source | KVFormatError]:
    return list(read_sources(JsonLines(path)))


def read(path: Path) -> list[Source]:
    """The sources of a file; all that is wrong with it is raised, as an enumeration does."""
    bad = BadEntries(path, "line")
    found = []
    for entry in read_sources(JsonLines(path)):
        if isinstance(entry, Source):
            found.append(entry)
        else:
            bad.add(entry)
    bad.check()
    return found


def test_the_three_kinds(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "user", "content": [{"type": "text", "text": "there"}]}]
    path = write_documents(
        tmp_path / "d.jsonl",
        [{"id": "a", "text": "héllo"}, {"id": "b", "messages": messages}, {"id": "c", "token_ids": [0, 2**31 - 1]}],
    )
    first, second, third = read(path)
    assert (first.id, first.place, first.kind, first.text) == ("a", "line 1", "text", "héllo")
    assert (second.place, second.kind, list(second.messages)) == ("line 2", "messages", messages)
    assert (third.place, third.kind, third.token_ids.tolist()) == ("line 3", "token_ids", [0, 2**31 - 1])


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b""])
def test_line_endings(ending: bytes, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"id":"a","text":"x"}\r\n{"id":"b","text":"y"}' + ending)
    assert [source.id for source in read(path)] == ["a", "b"]


BAD: list[tuple[str | bytes, str]] = [
    ("", "blank"),
    ("   ", "blank"),
    ("not json", "not JSON"),
    ('{"id": "x", "text": "y"', "not JSON"),
    ('{"id": "x", "text": "y"} {}', "not JSON"),
    ('{"id": "x", "text": NaN}', "NaN"),
    (b'{"id": "x", "text": "\xff"}', "not UTF-8 at byte"),
    (b'\xef\xbb\xbf{"id": "x", "text": "y"}', "not JSON at column 1"),
    ('{"id": "x" "text": "y"}', r"^\[E300\] line 2: not JSON at column 12: Expecting ',' delimiter \("),
    ("[1]", "expected an object, found array"),
    ("null", "found null"),
    ("[" * 100_000, "nested too deeply"),
    ('{"text": "y"}', "`id` is missing"),
    ('{"id": 7, "text": "y"}', "`id` must be a string"),
    ('{"id": "", "text": "y"}', "1 to 512 bytes"),
    ('{"id": "%s", "text": "y"}' % ("é" * 257), "found 514"),
    ('{"id": "x"}', "exactly one of text, messages, token_ids, found none"),
    ('{"id": "x", "text": "y", "token_ids": [1]}', "found text, token_ids"),
    ('{"id": "x", "text": "y", "label": 1}', "unknown member 'label'"),
    ('{"id": "x", "text": "y", "text": "z"}', "'text' stands twice"),
    ('{"id": "x", "text": null}', "`text` must be a string, found null"),
    ('{"id": "x", "text": "\\ud800"}', "surrogate"),
    ('{"id": "\\udfff", "text": "y"}', "surrogate"),
    ('{"id": "x", "messages": []}', "non-empty"),
    ('{"id": "x", "messages": {"role": "user"}}', "non-empty array"),
    ('{"id": "x", "messages": ["hi"]}', r"messages\[0\] must be an object"),
    ('{"id": "x", "messages": [{"content": "hi"}]}', "`role` must be a string"),
    ('{"id": "x", "messages": [{"role": "user"}]}', "`content` must be"),
    ('{"id": "x", "messages": [{"role": "user", "content": 3}]}', "`content` must be"),
    ('{"id": "x", "messages": [{"role": "user", "content": "", "image": ""}]}', "unknown member 'image'"),
    ('{"id": "x", "messages": [{"role": "user", "content": [{"type": "image"}]}]}', "a part of `content` must be"),
    ('{"id": "x", "messages": [{"role": "user", "content": "\\udc00"}]}', "surrogate"),
    ('{"id": "x", "token_ids": []}', "empty"),
    ('{"id": "x", "token_ids": "1"}', "array of integers"),
    ('{"id": "x", "token_ids": [1, -1]}', r"token_ids\[1\] must be an integer"),
    ('{"id": "x", "token_ids": [2147483648]}', "2147483648"),
    ('{"id": "x", "token_ids": [1.0]}', "1.0"),
    ('{"id": "x", "token_ids": [true]}', "True"),
]


@pytest.mark.parametrize(("line", "text"), BAD, ids=range(len(BAD)))
def test_a_bad_line_is_refused_with_file_number_and_reason(line: str | bytes, text: str, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    raw = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(b'{"id": "good", "text": "y"}\n' + raw + b"\n" + b'{"id": "after", "text": "y"}\n')
    before, bad, after = entries(path)
    assert (before.id, after.id) == ("good", "after")
    with pytest.raises(InputError, match=text) as refused:
        raise bad
    assert (refused.value.code, refused.value.path) == ("E300", str(path))
    assert "line 2" in refused.value.message


def test_a_file_is_read_as_a_stream(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "d.jsonl", [{"id": f"{i}", "text": "x" * 1000} for i in range(100)])
    reader = JsonLines(path)
    following = read_sources(reader)
    assert next(following).id == "0"
    done, total = reader.done()
    assert 1000 < done < 2000
    assert total == path.stat().st_size
    assert len(list(following)) == 99
    assert reader.done() == (total, total)


def test_a_byte_order_mark_before_everything_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"id": "x", "text": "y"}\n{"id": "z", "text": "y"}\n')
    assert [source.id for source in read(path)] == ["x", "z"]


def test_all_bad_lines_are_told_at_once(tmp_path: Path) -> None:
    path = write_documents(
        tmp_path / "d.jsonl",
        [
            {"id": "a", "text": "x"},
            "not json",
            {"id": "b", "text": "x"},
            "",
            {"id": "a", "text": "y"},
            {"id": "c", "token_ids": []},
        ],
    )
    with pytest.raises(InputError) as refused:
        read(path)
    assert (refused.value.code, refused.value.path) == ("E300", str(path))
    first, *others = refused.value.message.split("; line ")
    assert first.startswith("4 bad lines: line 2: not JSON")
    assert [other.partition(":")[0] for other in others] == ["4", "5", "6"]
    assert "blank" in others[0]
    assert "stands in line 1" in others[1]
    assert "`token_ids` is empty" in others[2]


@pytest.mark.parametrize("count", [20, 21, 1020])
def test_what_is_told_of_bad_lines_is_bounded(count: int, tmp_path: Path) -> None:
    path = write_documents(tmp_path / "d.jsonl", ["[]"] * count)
    with pytest.raises(InputError) as refused:
        read(path)
    message = refused.value.message
    assert message.startswith(f"{count:,} bad lines: line 1: ")
    assert message.count("; line ") == 19
    assert ("line 20:" in message, "line 21:" in message) == (True, False)
    assert message.endswith("; and 1,000 more" if count > 1000 else "; and 1 more" if count == 21 else "array")


def test_good_lines_among_bad_ones_are_given_in_their_order(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "d.jsonl", ["[]", {"id": "a", "text": "x"}, "[]", {"id": "b", "text": "x"}])
    assert [getattr(entry, "id", None) for entry in entries(path)] == [None, "a", None, "b"]
    assert not BadEntries(path, "line")
    BadEntries(path, "line").check()


def test_a_repeated_id_names_both_lines(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "d.jsonl", [{"id": n, "text": "x"} for n in ("a", "b", "a")])
    with pytest.raises(InputError, match=r"line 3: id 'a' stands in line 1 already") as refused:
        read(path)
    assert refused.value.code == "E300"


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").touch()
    with pytest.raises(InputError) as refused:
        read(tmp_path / "d.jsonl")
    assert refused.value.code == "E306"


@pytest.mark.parametrize("name", ["absent.jsonl", "."])
def test_a_file_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError) as refused:
        read(tmp_path / name)
    assert refused.value.code == "E203"


JSON_VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(value=st.dictionaries(st.sampled_from(["id", "text", "messages", "token_ids", "more"]), JSON_VALUES))
def test_any_object_is_read_or_refused_with_a_code(value: dict[str, Any], tmp_path_factory: Any) -> None:
    path = write_documents(tmp_path_factory.mktemp("any") / "d.jsonl", [value])
    try:
        (source,) = read(path)
    except InputError as error:
        assert error.code == "E300"  # noqa: PT017 - accepting is the other legal outcome
    else:
        assert {"id", source.kind} == set(value)


@given(raw=st.binary(max_size=60))
def test_any_bytes_are_read_or_refused_with_a_code(raw: bytes, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("any") / "d.jsonl"
    path.write_bytes(raw)
    with pytest.raises(InputError) as refused:
        read(path)
    assert refused.value.code in ("E300", "E306")
