from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from kvformat.errors import InputError, KVFormatError, StorageError, UsageError
from kvformat.extract import Tokeniser
from kvformat.extract.documents import DocumentsSource, Enumerated, open_documents, write_documents
from kvformat.extract.documents.opening import open_source
from kvformat.extract.documents.reading import read_sources
from kvformat.extract.documents.source import Source
from tests.models import tiny_tokenizer
from tests.models import write_documents as write_lines

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
OBJECTS: list[dict[str, Any]] = [
    {"id": "a", "text": "one"},
    {"id": "b", "token_ids": [7, 8, 9]},
    {"id": "c", "messages": CHAT},
    {"id": "d", "text": "two"},
    {"id": "e", "token_ids": [7, 8, 9]},
]


def objects() -> list[dict[str, Any]]:
    return OBJECTS


def arrow(given: list[dict[str, Any]]) -> Any:
    """A table has every column in every row; what a row lacks is null there."""
    schema = pa.schema(
        [
            ("id", pa.string()),
            ("text", pa.string()),
            ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
            ("token_ids", pa.list_(pa.int64())),
        ]
    )
    return pa.Table.from_pylist(given, schema=schema)


def as_lines(folder: Path) -> DocumentsSource:
    return write_lines(folder / "d.jsonl", OBJECTS)


def as_parquet(folder: Path) -> DocumentsSource:
    parquet.write_table(arrow(OBJECTS), folder / "d.parquet", row_group_size=2)
    return folder / "d.parquet"


def as_parts(folder: Path) -> DocumentsSource:
    for number, first in enumerate(range(0, 5, 2)):
        table = arrow(OBJECTS[first : first + 2])
        parquet.write_table(table, folder / f"part-{number}.parquet")
    return folder


def as_saved(folder: Path) -> DocumentsSource:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset(arrow(OBJECTS)).save_to_disk(folder / "saved")
    return folder / "saved"


def as_function(folder: Path) -> DocumentsSource:
    return objects


def as_file(folder: Path) -> DocumentsSource:
    (folder / "mine.py").write_text(f"def documents():\n    yield from {OBJECTS!r}\n")
    return f"{folder}/mine.py:documents"


SOURCES = [as_lines, as_parquet, as_parts, as_saved, as_function, as_file]


def sources(source: DocumentsSource, **more: Any) -> list[Source | KVFormatError]:
    return list(read_sources(open_source(source, **more)))


def write(source: DocumentsSource, path: Path | None = None, **more: Any) -> Any:
    tokeniser = more.pop("tokeniser", None) or Tokeniser(tiny_tokenizer(), vocab_size=320)
    return write_documents(source, path, tokeniser, **more)


def as_json(found: Source) -> dict[str, Any]:
    ids = None if found.token_ids is None else found.token_ids.tolist()
    members = {"id": found.id, "text": found.text, "messages": list(found.messages or ()), "token_ids": ids}
    return {name: value for name, value in members.items() if value}


@pytest.mark.parametrize("made", SOURCES)
def test_every_source_gives_the_same_documents(made: Any, tmp_path: Path) -> None:
    assert [as_json(found) for found in sources(made(tmp_path))] == OBJECTS


@pytest.mark.parametrize("made", SOURCES)
def test_every_source_gives_the_same_file(made: Any, tmp_path: Path) -> None:
    expected = write(as_lines(tmp_path), tmp_path / "expected.kvdocs")
    (tmp_path / "other").mkdir()
    found = write(made(tmp_path / "other"), tmp_path / "found.kvdocs")
    assert (tmp_path / "found.kvdocs").read_bytes() == (tmp_path / "expected.kvdocs").read_bytes()
    assert (len(found), found.num_names) == (4, 5)
    assert found.text == expected.text == Tokeniser(tiny_tokenizer()).text({"text", "messages"})


@pytest.mark.parametrize("made", SOURCES)
def test_a_bad_entry_is_told_by_place(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = [*OBJECTS[:3], {"id": "", "text": "two"}, {"id": "a", "token_ids": [7, 8, 9]}]
    monkeypatch.setattr(sys.modules[__name__], "OBJECTS", bad)
    source = made(tmp_path)
    with pytest.raises(InputError) as refused:
        write(source)
    found = refused.value
    assert found.code == "E300"
    places = {
        "as_lines": ("line 4", "line 5", "line 1"),
        "as_parts": ("part-1.parquet row 1", "part-2.parquet row 0", "part-0.parquet row 0"),
        "as_function": ("item 3", "item 4", "item 0"),
        "as_file": ("item 3", "item 4", "item 0"),
    }.get(made.__name__, ("row 3", "row 4", "row 0"))
    noun = "line" if made is as_lines else "item" if made in (as_function, as_file) else "row"
    assert found.message == (
        f"2 bad {noun}s: {places[0]}: `id` must have 1 to 512 bytes of UTF-8, found 0; "
        f"{places[1]}: id 'a' stands in {places[2]} already; ids are unique"
    )
    named = f"{__name__}:objects" if made is as_function else str(source)
    assert found.path == named


# --------------------------------------------------------------------------------------------------------- in columns


def table(path: Path, **columns: Any) -> Path:
    parquet.write_table(pa.table(columns), path, row_group_size=2)
    return path


def test_columns_are_chosen(tmp_path: Path) -> None:
    path = table(
        tmp_path / "d.parquet",
        clip=["a", "b"],
        short=["x", "y"],
        text=["long x", "long y"],
        frames=[[1.0], [2.0]],
    )
    (first, second) = sources(path, columns={"id": "clip", "text": "short"})
    assert [as_json(first), as_json(second)] == [{"id": "a", "text": "x"}, {"id": "b", "text": "y"}]
    (first, _) = sources(path, columns={"id": "clip"})
    assert as_json(first) == {"id": "a", "text": "long x"}


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        (None, "no column id; there are clip, text"),
        ({"id": "other"}, "no column other; there are clip, text"),
        ({"id": "clip", "token_ids": "ids"}, "no column ids"),
        ({"id": "text"}, None),
    ],
)
def test_a_missing_column_is_told_with_those_there_are(columns: Any, match: str | None, tmp_path: Path) -> None:
    path = table(tmp_path / "d.parquet", clip=["a"], text=["x"])
    if match is None:
        assert as_json(sources(path, columns=columns)[0]) == {"id": "x", "text": "x"}
        return
    with pytest.raises(InputError, match=match) as refused:
        sources(path, columns=columns)
    assert (refused.value.code, refused.value.path) == ("E300", str(path))


def test_no_content_column(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no column text or messages or token_ids"):
        sources(table(tmp_path / "d.parquet", id=["a"], caption=["x"]))


@pytest.mark.parametrize("columns", [{"label": "x"}, {"id": "a", "caption": "b"}])
def test_columns_of_no_member(columns: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="columns name id, text, messages, token_ids"):
        sources(table(tmp_path / "d.parquet", id=["a"], text=["x"]), columns=columns)


def test_columns_of_a_source_that_has_none(tmp_path: Path) -> None:
    for made in (as_lines, as_function):
        with pytest.raises(UsageError, match="columns are named of Parquet"):
            open_source(made(tmp_path), columns={"id": "a"})


@pytest.mark.parametrize(
    ("ids", "kind", "expected"),
    [
        ([[1, 2], [3]], pa.list_(pa.int64()), [[1, 2], [3]]),
        ([[1, 2], [3]], pa.list_(pa.uint16()), [[1, 2], [3]]),
        ([[1, 2], [3]], pa.large_list(pa.int32()), [[1, 2], [3]]),
        ([[1, 2], [3, 4]], pa.list_(pa.int32(), 2), [[1, 2], [3, 4]]),
        ([[1, None], [3]], pa.list_(pa.int64()), ["found None", [3]]),
        ([[1.5], [3.0]], pa.list_(pa.float32()), ["found 1.5", "found 3.0"]),
        ([[-1], [2**31]], pa.list_(pa.int64()), ["found -1", "found 2147483648"]),
        ([[2**63], [1]], pa.list_(pa.uint64()), ["found 9223372036854775808", [1]]),
        ([[], [1]], pa.list_(pa.int64()), ["`token_ids` is empty", [1]]),
        ([None, [1]], pa.list_(pa.int64()), ["found none", [1]]),
        (["12", "3"], pa.string(), ["must be an array of integers, found string"] * 2),
    ],
)
def test_token_ids_in_columns(ids: Any, kind: Any, expected: list[Any], tmp_path: Path) -> None:
    path = table(tmp_path / "d.parquet", id=["a", "b"], token_ids=pa.array(ids, type=kind))
    for found, wanted in zip(sources(path), expected, strict=True):
        if isinstance(wanted, str):
            assert wanted in found.message
        else:
            assert (found.token_ids.tolist(), found.token_ids.dtype) == (wanted, np.int32)


def test_a_list_column_with_nulls_in_a_slice(tmp_path: Path) -> None:
    ids = [[n, n + 1] if n % 3 else None for n in range(3000)]
    given = [{"id": f"{n}", **({"text": "x"} if one is None else {"token_ids": one})} for n, one in enumerate(ids)]
    parquet.write_table(arrow(given), tmp_path / "d.parquet")  # several batches of one row group
    found = sources(tmp_path / "d.parquet")
    assert [one.token_ids.tolist() if one.token_ids is not None else None for one in found] == ids


def test_members_a_message_lacks_are_not_there(tmp_path: Path) -> None:
    messages = [[{"role": "user", "content": "a", "name": None}], [{"role": "user", "content": "b", "name": "n"}]]
    path = table(tmp_path / "d.parquet", id=["a", "b"], messages=messages)
    first, second = sources(path)
    assert list(first.messages) == [{"role": "user", "content": "a"}]
    assert list(second.messages) == [{"role": "user", "content": "b", "name": "n"}]


def test_a_file_that_is_no_parquet(tmp_path: Path) -> None:
    (tmp_path / "d.parquet").write_bytes(b"PAR1 and nothing more")
    with pytest.raises(StorageError, match="cannot be read") as refused:
        sources(tmp_path / "d.parquet")
    assert (refused.value.code, refused.value.path) == ("E203", str(tmp_path / "d.parquet"))
    with pytest.raises(StorageError) as refused:
        sources(tmp_path / "absent.parquet")
    assert refused.value.code == "E203"


def test_a_damaged_page_is_told(tmp_path: Path) -> None:
    path = table(tmp_path / "d.parquet", id=[f"{n}" for n in range(100)], text=[f"text {n}" for n in range(100)])
    data = bytearray(path.read_bytes())
    data[4:40] = bytes(36)
    path.write_bytes(data)
    with pytest.raises(StorageError) as refused:
        sources(path)
    assert (refused.value.code, refused.value.path) == ("E203", str(path))


def test_several_splits_are_told_by_name(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    split = datasets.Dataset(arrow(OBJECTS))
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(tmp_path / "saved")
    with pytest.raises(InputError, match="name the directory of one of them: test, train") as refused:
        open_source(tmp_path / "saved")
    assert refused.value.code == "E300"
    assert len(sources(tmp_path / "saved" / "train")) == 5


def test_a_selection_keeps_its_order(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset(arrow(OBJECTS)).select([3, 0]).save_to_disk(tmp_path / "saved")
    assert [found.id for found in sources(tmp_path / "saved")] == ["d", "a"]


def test_a_damaged_saved_data_set(tmp_path: Path) -> None:
    source = as_saved(tmp_path)
    next(source.glob("*.arrow")).write_bytes(b"nothing")
    with pytest.raises(StorageError) as refused:
        sources(source)
    assert (refused.value.code, refused.value.path) == ("E203", str(source))


@pytest.mark.parametrize("library", ["pyarrow", "datasets"])
def test_a_missing_library_is_told_with_its_remedy(library: str, tmp_path: Path) -> None:
    source = as_parquet(tmp_path) if library == "pyarrow" else as_saved(tmp_path)
    code = (
        f"import sys; sys.modules[{library!r}] = None; sys.modules['pyarrow.parquet'] = None\n"
        "import kvformat\nfrom kvformat.extract.documents.opening import open_source\n"
        "try:\n    open_source(sys.argv[1])\nexcept kvformat.DependencyError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(source)], capture_output=True, text=True, check=True)
    assert "[E205]" in done.stdout
    assert library in done.stdout
    assert "pip install 'kvformat[data]'" in done.stdout


# -------------------------------------------------------------------------------------------------------- by functions


def test_what_a_function_raises_is_told_with_the_item() -> None:
    def documents() -> Any:
        yield {"id": "a", "text": "x"}
        yield {"id": "b", "text": "x"}
        raise OSError("gone")

    with pytest.raises(InputError, match="item 2: the function raised OSError: gone") as refused:
        write(documents)
    assert refused.value.code == "E300"
    assert isinstance(refused.value.__cause__, OSError)
    assert refused.value.path.endswith("documents")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("no.such.module:f", "no.such.module does not load: ModuleNotFoundError"),
        ("json:nothing", "json has no function 'nothing'"),
        ("json:__name__", "json has no function '__name__'"),
        ("{folder}/absent.py:f", "absent.py does not load: FileNotFoundError"),
        ("{folder}/broken.py:f", "broken.py does not load: SyntaxError"),
    ],
)
def test_a_function_that_is_not_there(text: str, match: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def f(:\n")
    with pytest.raises(InputError, match=match) as refused:
        open_source(text.format(folder=tmp_path))
    assert refused.value.code == "E300"


def test_numpy_values_of_a_function_are_taken() -> None:
    found = sources(
        lambda: [
            {"id": "a", "token_ids": np.array([1, 2], np.int64)},
            {"id": "b", "token_ids": (np.int32(1), 2)},
            {"id": "c", "token_ids": np.array([[1]])},
            {"id": "d", "token_ids": np.array([True])},
            "text",
            None,
            {"id": 5, "text": "x"},
            {1: 2},
        ]
    )
    assert [one.token_ids.tolist() for one in found[:2]] == [[1, 2]] * 2
    assert [one.message.partition(": ")[2] for one in found[2:]] == [
        "`token_ids` must be integers in one dimension, found int64 of shape (1, 1)",
        "`token_ids` must be integers in one dimension, found bool of shape (1,)",
        "expected an object, found string",
        "expected an object, found null",
        "`id` must be a string, found number",
        "unknown member '1'; expected `id` and one of text, messages, token_ids",
    ]


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(value=ANY | st.dictionaries(st.sampled_from(["id", "text", "messages", "token_ids"]), ANY))
@settings(max_examples=200)
def test_any_object_of_a_function_is_read_or_refused(value: Any) -> None:
    (found,) = sources(lambda: [value])
    assert isinstance(found, Source) or (found.code == "E300" and found.message.startswith("item 0: "))


# --------------------------------------------------------------------------------------------------------- enumerating


def test_the_kind_of_a_source_is_told_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be read") as refused:
        sources(tmp_path / "absent.jsonl")
    assert refused.value.code == "E203"
    odd = write_lines(tmp_path / "odd:name", OBJECTS)  # a file, whatever it is called
    assert len(sources(odd)) == 5
    for source in ([{"id": "a", "text": "x"}], 5, b"path"):
        with pytest.raises(UsageError, match="documents must be a path, module:function or a function"):
            open_source(source)  # type: ignore[arg-type]


@pytest.mark.parametrize("made", [as_lines, as_parquet, as_function])
def test_a_source_of_nothing(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "OBJECTS", [])
    source = made(tmp_path)
    with pytest.raises(InputError) as refused:
        write(source)
    assert refused.value.code == "E306"


def test_what_is_wrong_is_told_in_the_order_of_the_source_over_many_batches(tmp_path: Path) -> None:
    lines: list[Any] = [{"id": f"{n}", "token_ids": [n % 300]} for n in range(2000)]
    lines[5]["token_ids"] = [400]
    lines[700] = "[]"
    lines[701]["text"] = "both"
    lines[1500]["token_ids"] = [1] * 9
    with pytest.raises(InputError) as refused:
        write(
            write_lines(tmp_path / "d.jsonl", lines),
            tokeniser=Tokeniser(None, vocab_size=320, max_tokens=8),
        )
    assert refused.value.message.startswith("4 bad lines: line 6: token id 400 ")
    places = [part.partition(":")[0] for part in refused.value.message.split("; line ")]
    assert places[1:] == ["701", "702", "1501"]


def test_what_is_too_long_is_skipped_on_request(tmp_path: Path) -> None:
    lines = [{"id": f"{n}", "token_ids": [1] * n} for n in range(7, 11)]
    source = write_lines(tmp_path / "d.jsonl", lines)
    tokeniser = Tokeniser(None, max_tokens=8)
    with pytest.raises(InputError, match="2 bad lines: line 3: 9 tokens, but the model has 8 positions"):
        write(source, tokeniser=tokeniser)
    found = write(source, tokeniser=tokeniser, too_long="skip")
    assert [(one.input, one.name) for one in found.skipped] == [(2, "9"), (3, "10")]
    assert "9 tokens, but the model has 8 positions" in found.skipped[0].reason
    assert found.name_input.tolist() == [0, 1]
    with pytest.raises(UsageError, match="too_long must be 'refuse' or 'skip'"):
        write(source, tokeniser=tokeniser, too_long="drop")
    with pytest.raises(InputError) as refused:
        write(source, tokeniser=Tokeniser(None, max_tokens=6), too_long="skip")
    assert refused.value.code == "E306"


def test_nothing_stays_of_what_is_refused(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "d.jsonl", [{"id": "a", "token_ids": [1]}, "nothing"])
    with pytest.raises(InputError):
        write(source, tmp_path / "out" / "d.kvdocs")
    assert list((tmp_path / "out").iterdir()) == []


def test_progress_is_told(tmp_path: Path) -> None:
    lines = [{"id": f"{n}", "token_ids": [n % 300, 1]} for n in range(600)]
    source = write_lines(tmp_path / "d.jsonl", lines)
    seen: list[Enumerated] = []
    write(source, progress=seen.append)
    assert [one.names for one in seen] == [256, 512, 600]
    assert seen[-1] == Enumerated(names=600, tokens=600, done=source.stat().st_size, total=source.stat().st_size)
    seen.clear()
    write(lambda: lines[:3], progress=seen.append)
    assert seen == [Enumerated(names=3, tokens=6, done=None, total=None)]
    seen.clear()
    write(table(tmp_path / "d.parquet", id=["a", "b"], text=["x", "y"]), progress=seen.append)
    size = (tmp_path / "d.parquet").stat().st_size
    assert [(one.done, one.total) for one in seen] == [(size, size)]


def test_a_failing_consumer_ends_the_threads(tmp_path: Path) -> None:
    def stop(_: Enumerated) -> None:
        raise KeyboardInterrupt

    lines = [{"id": f"{n}", "text": "x"} for n in range(3000)]
    with pytest.raises(KeyboardInterrupt):
        write(write_lines(tmp_path / "d.jsonl", lines), tmp_path / "d.kvdocs", progress=stop)
    assert not (tmp_path / "d.kvdocs").exists()


def test_a_real_tokenizer_gives_the_ids_it_gives_alone(smollm2: Path, tmp_path: Path) -> None:
    tokeniser = Tokeniser.load(smollm2)
    texts = ["", "a", " naïve 北京 🙂", "x" * 3000, "<|im_start|>user", "line\n\n\nline"]
    source = write_lines(tmp_path / "d.jsonl", [{"id": f"{n}", "text": text or "-"} for n, text in enumerate(texts)])
    write_documents(source, tmp_path / "d.kvdocs", tokeniser)
    found = open_documents(tmp_path / "d.kvdocs")
    for number, text in enumerate(texts):
        alone = tokeniser._encoder.tokenizer(text or "-")["input_ids"]
        assert found.document(number).token_ids.tolist() == alone
    assert json.loads(source.read_text().splitlines()[2])["text"] == texts[2]
