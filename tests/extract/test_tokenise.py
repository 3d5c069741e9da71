from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from transformers import AutoTokenizer

from kvformat.errors import InputError, KVFormatError, UsageError
from kvformat.extract.documents.source import Source
from kvformat.extract.text_identity import CANARY, tokenizer_digest
from kvformat.extract.tokenise import Tokeniser
from tests.models import CHAT_TEMPLATE, tiny_tokenizer

BOS = 256


def text(value: str) -> Source:
    return Source(id="x", place="line 7", text=value)


def given(*ids: int) -> Source:
    return Source(id="x", place="line 7", token_ids=np.array(ids, np.int32))


def chat(*contents: str) -> Source:
    return Source(id="x", place="line 7", messages=tuple({"role": "user", "content": content} for content in contents))


def ids(tokeniser: Tokeniser, source: Source) -> list[int]:
    return tokeniser.document(source).token_ids.tolist()


def refused(tokeniser: Tokeniser, source: Source, code: str, match: str) -> None:
    with pytest.raises(InputError, match=match) as caught:
        tokeniser.document(source, path="docs.jsonl")
    error = caught.value
    assert (error.code, error.path, error.record) == (code, "docs.jsonl", "x")
    assert "line 7" in error.message


def test_special_tokens_are_added_or_not() -> None:
    tokenizer = tiny_tokenizer()
    plain = ids(Tokeniser(tokenizer, special_tokens=False), text("abc"))
    assert len(plain) == 3
    assert ids(Tokeniser(tokenizer), text("abc")) == [BOS, *plain]


def test_a_chat_template_never_doubles_bos() -> None:
    tokenizer = tiny_tokenizer()
    for special_tokens in (True, False):
        found = ids(Tokeniser(tokenizer, special_tokens=special_tokens), chat("hi"))
        assert found.count(BOS) == 1
        assert found[0] == BOS
        assert tokenizer.decode(found) == "<s>[user]hi"


def test_generation_prompt() -> None:
    tokenizer = tiny_tokenizer()
    opened = ids(Tokeniser(tokenizer, add_generation_prompt=True), chat("hi"))
    assert tokenizer.decode(opened) == "<s>[user]hi[assistant]"


def test_text_that_brings_its_own_bos_is_refused_rather_than_doubled() -> None:
    tokenizer = tiny_tokenizer()
    refused(Tokeniser(tokenizer), text("<s>abc"), "E305", "--no-special-tokens")
    assert ids(Tokeniser(tokenizer, special_tokens=False), text("<s>abc"))[0] == BOS


def test_token_ids_are_taken_as_they_are() -> None:
    assert ids(Tokeniser(None), given(5, 5, 9)) == [5, 5, 9]


def test_truncation_keeps_the_head() -> None:
    tokenizer = tiny_tokenizer()
    whole = ids(Tokeniser(tokenizer), text("abcdefgh"))
    assert ids(Tokeniser(tokenizer, truncate=4), text("abcdefgh")) == whole[:4]
    assert ids(Tokeniser(tokenizer, truncate=40), text("abcdefgh")) == whole
    assert ids(Tokeniser(None, truncate=2), given(7, 8, 9)) == [7, 8]


def test_too_long_is_refused_unless_truncated() -> None:
    tokenizer = tiny_tokenizer()
    limited = Tokeniser(tokenizer, max_tokens=5)
    assert len(ids(limited, text("abcd"))) == 5
    refused(limited, text("abcde"), "E301", "6 tokens, but the model has 5 positions")
    assert len(ids(Tokeniser(tokenizer, max_tokens=5, truncate=5), text("abcde"))) == 5


def test_nothing_is_refused_with_a_remedy() -> None:
    refused(Tokeniser(tiny_tokenizer(bos=False)), text(""), "E300", "empty caption a token of its own")
    assert ids(Tokeniser(tiny_tokenizer()), text("")) == [BOS]


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    refused(
        Tokeniser(None, vocab_size=9),
        given(1, 9),
        "E300",
        "vocabulary of 9",
    )


def test_without_tokenizer_or_template() -> None:
    refused(Tokeniser(None), text("abc"), "E305", "give documents as `token_ids`")
    refused(Tokeniser(None), chat("abc"), "E305", "needs a tokenizer")
    refused(Tokeniser(tiny_tokenizer(chat_template=None)), chat("abc"), "E305", "chat template")


def test_a_template_that_refuses_is_named() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    refused(Tokeniser(tiny_tokenizer(chat_template=template)), chat("abc"), "E305", "roles must alternate")


def test_a_template_that_reads_the_clock_is_refused() -> None:
    template = "{{ strftime_now('%d %b %Y') }}"
    refused(Tokeniser(tiny_tokenizer(chat_template=template)), chat("abc"), "E305", "clock")


@pytest.mark.parametrize(
    ("options", "match"), [({"truncate": 0}, "at least 1"), ({"truncate": 9, "max_tokens": 8}, "8 positions")]
)
def test_bad_truncation(options: dict[str, int], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        Tokeniser(None, **options)


# ------------------------------------------------------------------------------------------------------- the record


def test_the_record_holds_what_played_a_part() -> None:
    tokenizer = tiny_tokenizer()
    tokeniser = Tokeniser(tokenizer, truncate=12, add_generation_prompt=True)
    nothing = tokeniser.text({"token_ids"})
    assert (nothing.tokenizer, nothing.canary, nothing.special_tokens, nothing.truncate) == (None, None, None, 12)
    plain = tokeniser.text({"text", "token_ids"})
    assert plain.tokenizer == tokenizer_digest(tokenizer)
    assert (plain.special_tokens, plain.chat_template, plain.add_generation_prompt) == (True, None, None)
    assert plain.canary.text == CANARY
    assert list(plain.canary.token_ids) == tokenizer(CANARY)["input_ids"]
    rendered = tokeniser.text({"messages"})
    assert rendered.chat_template == hashlib.sha256(CHAT_TEMPLATE.encode()).hexdigest()
    assert rendered.add_generation_prompt is True


def test_the_canary_tells_special_tokens() -> None:
    with_bos = Tokeniser(tiny_tokenizer()).text({"text"})
    without = Tokeniser(tiny_tokenizer(), special_tokens=False).text({"text"})
    assert with_bos.tokenizer == without.tokenizer
    assert with_bos.canary.token_ids == (BOS, *without.canary.token_ids)


def test_the_digest_survives_saving(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_digest(AutoTokenizer.from_pretrained(tmp_path)) == tokenizer_digest(tokenizer)


def test_use_does_not_change_the_digest() -> None:
    tokenizer = tiny_tokenizer()
    before = tokenizer_digest(tokenizer)
    tokenizer.pad_token = "</s>"
    tokenizer(["abc", "a"], padding=True, truncation=True, max_length=2)
    assert tokenizer_digest(tokenizer) == before


def swapped(tokenizer: Any) -> Any:
    tokenizer.backend_tokenizer.add_tokens(["abc"])
    return tokenizer


@pytest.mark.parametrize(
    "other", [lambda: tiny_tokenizer(bos=False), lambda: swapped(tiny_tokenizer())], ids=["no BOS", "token"]
)
def test_another_tokenizer_has_another_digest(other: Any) -> None:
    assert tokenizer_digest(other()) != tokenizer_digest(tiny_tokenizer())


def test_a_tokenizer_without_serialisation_is_refused() -> None:
    with pytest.raises(KVFormatError, match="no serialisation") as refused_:
        tokenizer_digest(object())
    assert refused_.value.code == "E305"


def test_loading(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    assert ids(Tokeniser.load(tmp_path), text("a"))[0] == BOS
    refused(Tokeniser.load(tmp_path / "absent"), text("a"), "E305", "needs a tokenizer")


# ------------------------------------------------------------------------------------------------------ many at once


def test_many_at_once_are_the_same_as_one_by_one() -> None:
    tokeniser = Tokeniser(tiny_tokenizer(), vocab_size=300, max_tokens=12)
    sources = [
        text("abc"),
        given(5, 1),
        chat("hi"),
        text("<s>doubled"),
        text(""),
        text("x" * 40),
        given(300),
        text("abc and"),
    ]
    together = tokeniser.documents(sources, path="docs.jsonl")
    assert len(together) == len(sources)
    for source, found in zip(sources, together, strict=True):
        try:
            alone = tokeniser.document(source, path="docs.jsonl")
        except KVFormatError as error:
            assert str(found) == str(error)  # noqa: PT017 - refusing is one of the two outcomes compared
        else:
            assert found.digest == alone.digest
    assert [getattr(found, "code", "") for found in together] == ["", "", "", "E305", "", "E301", "E300", ""]


def test_one_text_without_tokens_among_others_is_refused_alone() -> None:
    first, second, third = Tokeniser(tiny_tokenizer(bos=False)).documents([text("a"), text(""), text("b")])
    assert (first.num_tokens, second.code, third.num_tokens) == (1, "E300", 1)


@pytest.mark.parametrize(
    ("made", "asked", "match"),
    [
        (tiny_tokenizer(), tiny_tokenizer(bos=False), "another tokenizer"),
        (tiny_tokenizer(), tiny_tokenizer(chat_template="{{ messages }}"), "another chat template"),
        (tiny_tokenizer(), tiny_tokenizer(chat_template=None), "another chat template"),
    ],
    ids=["tokenizer", "template", "no template"],
)
def test_documents_of_another_tokenizer_are_told(made: Any, asked: Any, match: str) -> None:
    section = Tokeniser(made).text({"text", "messages"})
    assert match in Tokeniser(asked).difference(section)
    assert Tokeniser(made).difference(section) is None
    assert Tokeniser(asked).difference(Tokeniser(made).text({"token_ids"})) is None


def test_a_canary_with_other_ids_is_told() -> None:
    section = Tokeniser(tiny_tokenizer()).text({"text"})
    changed = msgspec.structs.replace(section, special_tokens=False)
    assert "canary" in Tokeniser(tiny_tokenizer()).difference(changed)
