from __future__ import annotations

from typing import Any

import pytest

from kvformat.extract.rules import other_rules
from kvformat.spec.context import Canary, Text

SHA, OTHER = "ab" * 32, "cd" * 32


@pytest.mark.parametrize(
    ("here", "wanted", "said"),
    [
        ({}, {}, None),
        ({"tokenizer": SHA}, {"tokenizer": SHA}, None),
        ({"tokenizer": SHA}, {"tokenizer": OTHER}, "tokenizer: abababababababab... here, cdcdcdcdcdcdcdcd... wanted"),
        ({"tokenizer": SHA}, {}, "tokenizer: abababababababab... here, absent wanted"),
        ({"truncate": 8}, {"truncate": 9}, "truncate: 8 here, 9 wanted"),
        (
            {"special_tokens": True},
            {"special_tokens": False, "chat_template": SHA},
            "chat_template: absent here, abababababababab... wanted, special_tokens: True here, False wanted",
        ),
        ({"canary": Canary(text="x", token_ids=(777, 2))}, {}, "canary: only here"),
        ({}, {"canary": Canary(text="x", token_ids=(777, 2))}, "canary: absent here"),
        (
            {"canary": Canary(text="x", token_ids=(777, 2))},
            {"canary": Canary(text="x", token_ids=(778, 2))},
            "canary: other ids",
        ),
    ],
)
def test_members_that_differ_are_named_with_both_values(here: Any, wanted: Any, said: str | None) -> None:
    assert other_rules(Text(**here), Text(**wanted)) == said
