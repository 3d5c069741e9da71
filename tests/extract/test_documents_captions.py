from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvformat.errors import InputError, UsageError
from kvformat.extract import Tokeniser
from kvformat.extract.documents import Captioned, Choice, Null, caption_documents, caption_name, write_documents
from tests.models import tiny_tokenizer

NULL = Null(token_ids=[256])


def listed(*samples: Captioned, **more: Any) -> list[tuple[str, Any]]:
    return [tuple(one.values()) for one in caption_documents(samples, **more)]


def test_every_caption_that_may_be_drawn_with_every_suffix() -> None:
    clip = Captioned(
        id="clip",
        captions=[Choice("short", 0.2), Choice("never", 0), Choice("long", 3)],
        suffixes=[Choice(" 24 FPS", 1), Choice(" 5 s", 0.0), Choice("", 0.1)],
    )
    assert listed(clip, Captioned("other", [Choice("x")])) == [
        ("clip/0/0", "short 24 FPS"),
        ("clip/0/2", "short"),
        ("clip/2/0", "long 24 FPS"),
        ("clip/2/2", "long"),
        ("other/0", "x"),
    ]


def test_the_null_document_comes_once_and_first() -> None:
    samples = [Captioned(id=name, captions=[Choice(name)], suffixes=[Choice("!")]) for name in "ab"]
    assert listed(*samples, dropout=0.1, null=NULL) == [("null", [256]), ("a/0/0", "a!"), ("b/0/0", "b!")]
    assert listed(*samples, dropout=0.1, null=Null("empty", text=""))[0] == ("empty", "")
    assert listed(*samples, dropout=0, null=NULL) == listed(*samples)
    assert listed(*samples, dropout=1, null=NULL) == [("null", [256])]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dropout": 0.1}, r'dropout is 0.1, and there is no null document; give it as Null\(text=""\) where'),
        ({"dropout": 0.1, "null": Null()}, "exactly one of text and token_ids"),
        ({"dropout": 0.1, "null": Null(text="", token_ids=[1])}, "exactly one of text and token_ids"),
        ({"dropout": 0.1, "null": Null(token_ids=[])}, r"no tokens; give it as .*, or by its ids, as Null\(token_ids"),
        ({"dropout": -0.1}, "a probability"),
        ({"dropout": 1.1, "null": NULL}, "a probability"),
        ({"dropout": float("nan"), "null": NULL}, "a probability"),
    ],
)
def test_dropout_without_a_null_document_is_refused_at_once(options: Any, match: str) -> None:
    def samples() -> Any:
        raise AssertionError("looked at")
        yield

    with pytest.raises(UsageError, match=match) as refused:
        caption_documents(samples(), **options)
    assert refused.value.code == "E081"


@pytest.mark.parametrize(
    ("sample", "match"),
    [
        (Captioned("clip", []), "none of its captions has a weight above zero; leave the sample out"),
        (Captioned("clip", [Choice("x", 0)]), "none of its captions"),
        (Captioned("clip", [Choice("x")], [Choice("y", 0)]), "none of its suffixes"),
        (Captioned("clip", [Choice("x"), Choice("y", -1)]), r"captions\[1\]: a weight is finite and not negative"),
        (Captioned("clip", [Choice("x", float("inf"))]), r"captions\[0\]: a weight"),
        (Captioned("clip", [Choice("x")], [Choice("y", float("nan"))]), r"suffixes\[0\]: a weight"),
    ],
)
def test_a_sample_of_which_nothing_can_be_drawn_is_named(sample: Captioned, match: str) -> None:
    with pytest.raises(InputError, match=match) as refused:
        listed(sample)
    assert (refused.value.code, refused.value.record) == ("E300", "clip")


def test_a_caption_may_become_messages() -> None:
    def as_messages(text: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}]}

    found = listed(Captioned("a", [Choice("x")]), dropout=0.5, null=Null(text=""), member=as_messages)
    assert found == [
        ("null", [{"role": "user", "content": ""}]),
        ("a/0", [{"role": "user", "content": "x"}]),
    ]


def test_from_a_function_to_a_documents_file() -> None:
    def documents() -> Any:
        samples = (Captioned(f"{n}", [Choice("same"), Choice(f"own {n}")]) for n in range(3))
        return caption_documents(samples, dropout=0.1, null=Null(text=""))

    found = write_documents(documents, None, Tokeniser(tiny_tokenizer()))
    assert found.first_name(0) == "null"
    assert found.document(0).token_ids.tolist() == [256]
    assert (len(found), found.num_names) == (5, 7)
    assert found.name_document.tolist() == [0, 1, 2, 1, 3, 1, 4]


def test_a_null_document_without_tokens_is_refused_with_the_remedy() -> None:
    def documents() -> Any:
        return caption_documents([Captioned("a", [Choice("x")])], dropout=0.1, null=Null(text=""))

    with pytest.raises(InputError, match="give an empty caption a token of its own") as refused:
        write_documents(documents, None, Tokeniser(tiny_tokenizer(bos=False)))
    assert (refused.value.code, refused.value.record) == ("E300", "null")


def test_what_goes_wrong_in_a_function_is_told_with_its_place() -> None:
    def documents() -> Any:
        return caption_documents([Captioned("a", [Choice("x")]), Captioned("b", [])])

    with pytest.raises(InputError, match=r"^\[E300\] item 1: none of its captions") as refused:
        write_documents(documents, None, Tokeniser(tiny_tokenizer()))
    assert (refused.value.record, refused.value.path.endswith("documents")) == ("b", True)


choices = st.lists(st.tuples(st.text(max_size=3), st.floats(0, 5)), max_size=4)


@given(captions=choices, suffixes=choices, dropout=st.floats(0, 1), seed=st.integers(0, 2**32))
def test_every_draw_is_a_document(captions: Any, suffixes: Any, dropout: float, seed: int) -> None:
    """Against an independent sampler: whatever it draws has a name, and the text it stands for."""
    sample = Captioned("s", [Choice(*one) for one in captions], [Choice(*one) for one in suffixes])
    weights = [weight for _, weight in captions], [weight for _, weight in suffixes]
    if dropout < 1 and not (sum(weights[0]) > 0 and (not suffixes or sum(weights[1]) > 0)):
        with pytest.raises(InputError):
            listed(sample, dropout=dropout, null=NULL)
        return
    found = dict(listed(sample, dropout=dropout, null=NULL))
    generator = random.Random(seed)
    for _ in range(20):
        if generator.random() < dropout:
            assert "null" in found
            continue
        (caption,) = generator.choices(range(len(captions)), weights[0])
        suffix = generator.choices(range(len(suffixes)), weights[1])[0] if suffixes else None
        expected = captions[caption][0] + (suffixes[suffix][0] if suffix is not None else "")
        assert found[caption_name("s", caption, suffix)] == expected
    drawn = [int(np.count_nonzero(weight)) for weight in weights]
    assert len(found) == (dropout > 0) + (drawn[0] * (drawn[1] if suffixes else 1) if dropout < 1 else 0)
