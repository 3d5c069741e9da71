"""A receipt is as it was written, and of its run and shard, or it is damaged."""

from __future__ import annotations

import json

import pytest

from kvformat.errors import DamageError
from kvformat.spec import canonical
from kvformat.write.receipt_file import decode_receipt, encode_receipt
from kvformat.write.staging import Receipt, SkippedDocument, StagedRecord

KEY = "0123456789abcdef"


def receipt(**changes):
    records = tuple(StagedRecord(dims=(n + 1,), document=f"{n:064x}", record_sum=f"{n:032x}") for n in range(3))
    return Receipt(**{"ordinal": 4, "records": records, "sha256": "ab" * 32, "size": 8192, **changes})


SKIPPING = receipt(skipped=(SkippedDocument(document="cd" * 32, reason='no image: "\u00e9\n/x"'),))


@pytest.mark.parametrize("one", [receipt(), SKIPPING], ids=["whole", "skipping"])
def test_it_comes_back(one):
    data = encode_receipt(one, key=KEY)
    assert decode_receipt(data, key=KEY, ordinal=4, path="x") == one
    assert ("skipped" in json.loads(data)["receipt"]) == bool(one.skipped)
    assert canonical.encode(json.loads(data)) == data


def test_every_flipped_bit_is_found():
    data = encode_receipt(SKIPPING, key=KEY)
    for at in range(len(data)):
        for bit in (0, 5):
            odd = bytearray(data)
            odd[at] ^= 1 << bit
            with pytest.raises(DamageError) as caught:
                decode_receipt(bytes(odd), key=KEY, ordinal=4, path="x")
            assert caught.value.code == "E116"


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (encode_receipt(receipt(), key=KEY), {"ordinal": 5}),
        (encode_receipt(receipt(), key=KEY[::-1]), {}),
        (encode_receipt(receipt(records=()), key=KEY), {}),
        (encode_receipt(receipt(), key=KEY)[:-1], {}),
        (encode_receipt(receipt(), key=KEY) + b" ", {}),
        (b"", {}),
        (b"[]", {}),
        (b'{"plan":' + b"[" * 10_000, {}),
    ],
    ids=["ordinal", "key", "empty", "cut", "longer", "nothing", "array", "deep"],
)
def test_anything_else_is_damaged(data, options):
    with pytest.raises(DamageError) as caught:
        decode_receipt(data, key=KEY, **{"ordinal": 4, "path": "x", **options})
    assert (caught.value.code, caught.value.path) == ("E116", "x")
