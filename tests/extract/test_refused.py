from __future__ import annotations

import pytest

from kvformat.codes import CODES
from kvformat.errors import make_error
from kvformat.extract.refused import DOCUMENT_CODES, is_of_document, skip_reason, with_records


def test_codes_of_documents_are_errors_of_input() -> None:
    assert {CODES[code].error for code in DOCUMENT_CODES} == {"InputError"}


def test_what_is_about_a_document() -> None:
    assert is_of_document(make_error("E104", "NaN"))
    assert not is_of_document(make_error("E302", "the model is refused"))
    assert not is_of_document(ValueError("E104"))


def test_the_reason_says_code_message_and_layer_and_leaves_the_name_to_the_list() -> None:
    assert skip_reason(make_error("E301", "too long", record="a")) == "E301: too long"
    assert skip_reason(make_error("E104", "'k' holds NaN", record="a", layer=3)) == "E104: 'k' holds NaN (layer 3)"


def test_an_error_is_given_its_record_once() -> None:
    error = make_error("E200", "no space")
    with_records(error, ["a"])
    with_records(error, ["b"])
    assert error.record == "a"
    assert "'a'" in str(error)


@pytest.mark.parametrize(
    ("names", "note"),
    [
        (["a"], "in extraction of 'a'"),
        (["a", "b", "c"], "in extraction of 'a', 'b', 'c'"),
        (list("abcdef"), "in extraction of 'a', 'b', 'c' and 3 more"),
    ],
)
def test_a_foreign_error_is_given_a_note(names: list[str], note: str) -> None:
    error = RuntimeError("CUDA out of memory")
    with_records(error, names)
    assert error.__notes__ == [note]


def test_an_error_of_several_records_names_them_in_a_note() -> None:
    error = make_error("E303", "the cache is incomplete")
    with_records(error, ["a", "b"])
    assert error.record is None
    assert error.__notes__ == ["in extraction of 'a', 'b'"]
