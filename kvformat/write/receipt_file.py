"""A receipt as a file of its own: with what it belongs to, and a digest over both, as nothing else vouches for it."""

from __future__ import annotations

import hashlib

import msgspec
from msgspec import Struct

from kvformat.errors import make_error
from kvformat.write.staging import Receipt

__all__ = ["decode_receipt", "encode_receipt"]


class _Sealed(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    plan: str
    receipt: Receipt
    sha256: str


_DECODER = msgspec.json.Decoder(_Sealed)


def encode_receipt(receipt: Receipt, *, key: str) -> bytes:
    """The file of a receipt.

    Parameters
    ----------
    key
        Of the plan or run it belongs to.
    """
    digest = hashlib.sha256(key.encode() + b"\0" + receipt.encode()).hexdigest()
    return msgspec.json.encode(_Sealed(plan=key, receipt=receipt, sha256=digest))


def decode_receipt(data: bytes, *, key: str, ordinal: int, path: object) -> Receipt:
    """The receipt of a shard.

    Raises
    ------
    DamageError
        E116 where it is not as it was written, or belongs to something else.
    """
    try:
        sealed = _DECODER.decode(data)
    except msgspec.DecodeError as error:
        message = f"a damaged receipt ({error}): run `kvformat clean` and start again"
        raise make_error("E116", message, path=path) from None
    receipt = sealed.receipt
    holds = receipt.records or (receipt.skipped and receipt == Receipt.without_records(ordinal, receipt.skipped))
    if sealed.plan != key or receipt.ordinal != ordinal or not holds:
        raise make_error("E116", "not the receipt of this shard: run `kvformat clean` and start again", path=path)
    if encode_receipt(receipt, key=key) != data:
        raise make_error("E116", "a damaged receipt: run `kvformat clean` and start again", path=path)
    return receipt
