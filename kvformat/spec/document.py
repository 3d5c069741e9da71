"""Documents: one input sequence of the Reasoner, its bytes and its digest (SPEC.md, "Document bytes")."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Literal, SupportsIndex

import numpy as np
from msgspec import Struct
from numpy.typing import ArrayLike, NDArray

from kvformat.errors import make_error
from kvformat.spec import limits

__all__ = ["MASKS", "MEDIA_ENTRY_NBYTES", "MEDIA_SCHEMES", "Document", "Mask", "Media", "document_digest"]

Mask = Literal["causal", "prefix", "bidirectional"]
MediaScheme = Literal["source", "pixels", "opaque"]
MASKS: tuple[Mask, ...] = ("causal", "prefix", "bidirectional")
MEDIA_SCHEMES: tuple[MediaScheme, ...] = ("source", "pixels", "opaque")
MEDIA_ENTRY_NBYTES = 49
_MAGIC = b"kvf1/document\0"
_MEDIA = struct.Struct("<BQQ32s")


class Media(Struct, frozen=True, kw_only=True):
    """One image, clip or sound a document refers to.

    Parameters
    ----------
    scheme
        What ``digest`` is over: the ``source`` file's bytes, decoded ``pixels`` (with mode and size), or an ``opaque``
        id of 32 bytes the caller chose.
    first, count
        The span of tokens it stands for; ``count`` may be 0.
    digest
        32 bytes.
    """

    scheme: MediaScheme
    first: int
    count: int
    digest: bytes

    def pack(self) -> bytes:
        """The 49 bytes of this entry."""
        return _MEDIA.pack(MEDIA_SCHEMES.index(self.scheme), self.first, self.count, self.digest)


class Document(Struct, frozen=True, kw_only=True):
    """One input sequence of the Reasoner, checked and in normal form. Make one with :meth:`of`.

    Attributes
    ----------
    token_ids
        int32 ``[tokens]``.
    position_ids
        None for positions ``0..tokens-1``, else int32 ``[1, tokens]`` or ``[3, tokens]``.
    mask, prefix_length
        Kind of attention mask; ``prefix_length`` is 0 unless the kind is ``prefix``.
    media
        In ascending order of ``first``.
    """

    token_ids: NDArray[np.int32]
    position_ids: NDArray[np.int32] | None
    mask: Mask
    prefix_length: int
    media: tuple[Media, ...]

    @classmethod
    def of(
        cls,
        token_ids: ArrayLike,
        *,
        position_ids: ArrayLike | None = None,
        mask: Mask = "causal",
        prefix_length: int = 0,
        media: Iterable[Media] = (),
    ) -> Document:
        """Check and normalise a document.

        Parameters
        ----------
        token_ids
            Integers ``[tokens]``: a sequence, numpy array or CPU tensor.
        position_ids
            Integers ``[tokens]``, ``[1, tokens]`` or ``[3, tokens]``. Rows equal to ``0..tokens-1`` become None, three
            equal rows become one.
        mask, prefix_length
            ``prefix`` makes the first ``prefix_length`` tokens see each other; ``0 < prefix_length < tokens``.
        media
            Entries in ascending order of ``first``.

        Raises
        ------
        InputError
            E110, saying what is wrong.
        """
        ids = _integers(token_ids, "token_ids")
        if ids.ndim != 1 or not 1 <= ids.size <= limits.MAX_TOKENS:
            raise make_error(
                "E110",
                f"token_ids must be 1 to {limits.MAX_TOKENS} ids in one dimension, found shape {ids.shape}; "
                "give an empty caption a token of its own, such as BOS",
            )
        if ids.min() < 0 or ids.max() > limits.MAX_TOKEN_ID:
            raise make_error("E110", f"token ids must be 0 to 2^31-1, found {ids.min()} to {ids.max()}")
        num_tokens = int(ids.size)
        if mask not in MASKS:
            raise make_error("E110", f"mask must be one of {', '.join(MASKS)}, found {mask!r}")
        if not isinstance(prefix_length, SupportsIndex):
            raise make_error("E110", f"prefix_length must be an integer, found {prefix_length!r:.80}")
        if (mask == "prefix") != (prefix_length != 0) or not 0 <= prefix_length < num_tokens:
            raise make_error(
                "E110",
                f"prefix_length must be 1 to {num_tokens - 1} with mask 'prefix', else 0; found {prefix_length}",
            )
        return cls(
            token_ids=np.ascontiguousarray(ids, dtype="<i4"),
            position_ids=_normal_positions(position_ids, num_tokens),
            mask=mask,
            prefix_length=prefix_length,
            media=_checked_media(tuple(media), num_tokens),
        )

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return int(self.token_ids.size)

    def to_bytes(self) -> bytes:
        """The document bytes, whose SHA-256 is the digest."""
        rows = b"" if self.position_ids is None else np.asarray(self.position_ids, dtype="<i4").tobytes()
        kind = 0 if self.position_ids is None else len(self.position_ids)
        mask = bytes([MASKS.index(self.mask)]) + (
            struct.pack("<Q", self.prefix_length) if self.mask == "prefix" else b""
        )
        return b"".join(
            (
                _MAGIC,
                struct.pack("<Q", self.num_tokens),
                np.asarray(self.token_ids, dtype="<i4").tobytes(),
                mask,
                bytes([kind]),
                rows,
                struct.pack("<I", len(self.media)),
                *(entry.pack() for entry in self.media),
            )
        )

    @property
    def digest(self) -> bytes:
        """SHA-256 of the document bytes: the key of a record."""
        return hashlib.sha256(self.to_bytes()).digest()


def document_digest(
    *,
    token_ids: ArrayLike,
    position_ids: ArrayLike | None = None,
    mask: Mask = "causal",
    prefix_length: int = 0,
    media: Iterable[Media] = (),
) -> bytes:
    """Digest (32 bytes) of the document these inputs make; parameters as in :meth:`Document.of`."""
    return Document.of(
        token_ids, position_ids=position_ids, mask=mask, prefix_length=prefix_length, media=media
    ).digest


def unpack_media(entries: NDArray[np.uint8]) -> tuple[Media, ...]:
    """Media from the ``media`` extra, uint8 ``[media, 49]``."""
    found = []
    for entry in entries:
        scheme, first, count, digest = _MEDIA.unpack(entry.tobytes())
        if scheme >= len(MEDIA_SCHEMES):
            raise make_error("E110", f"media scheme {scheme} is none of 0..{len(MEDIA_SCHEMES) - 1}")
        found.append(Media(scheme=MEDIA_SCHEMES[scheme], first=first, count=count, digest=digest))
    return tuple(found)


def _integers(values: Any, what: str) -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:  # rows of several lengths, or a tensor of a device
        raise make_error("E110", f"{what} must be integers that NumPy can take: {error}") from error
    if array.size == 0 and not isinstance(values, np.ndarray):
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise make_error("E110", f"{what} must be integers, found {array.dtype}")
    return array


def _normal_positions(positions: ArrayLike | None, num_tokens: int) -> NDArray[np.int32] | None:
    if positions is None:
        return None
    rows = np.atleast_2d(_integers(positions, "position_ids"))
    if rows.ndim != 2 or rows.shape[0] not in (1, 3) or rows.shape[1] != num_tokens:
        raise make_error("E110", f"position_ids must be [{num_tokens}], [1, {num_tokens}] or [3, {num_tokens}]")
    if rows.min() < -(2**31) or rows.max() >= 2**31:
        raise make_error("E110", "position_ids must fit 32 bits")
    if len(rows) == 3 and (rows[0] == rows[1]).all() and (rows[0] == rows[2]).all():
        rows = rows[:1]
    if len(rows) == 1 and (rows[0] == np.arange(num_tokens)).all():
        return None
    return np.ascontiguousarray(rows, dtype="<i4")


def _is_media(entry: object) -> bool:
    """Whether the struct has values of the types it declares, which it does not check when it is made."""
    if not isinstance(entry, Media):
        return False
    values: tuple[tuple[object, type], ...] = (
        (entry.first, SupportsIndex),
        (entry.count, SupportsIndex),
        (entry.digest, bytes),
    )
    return all(isinstance(value, kind) for value, kind in values)


def _checked_media(media: Sequence[Media], num_tokens: int) -> tuple[Media, ...]:
    if len(media) > 2**32 - 1:
        raise make_error("E110", "too many media")
    previous = 0
    for entry in media:
        if not _is_media(entry):
            raise make_error("E110", f"media must be Media of integers and a digest in bytes, found {entry!r:.200}")
        if entry.scheme not in MEDIA_SCHEMES or len(entry.digest) != 32:
            raise make_error("E110", f"media need a scheme of {', '.join(MEDIA_SCHEMES)} and a digest of 32 bytes")
        if entry.first < previous or entry.count < 0 or entry.first + entry.count > num_tokens:
            raise make_error(
                "E110",
                f"media spans must lie inside the {num_tokens} tokens in ascending order of `first`, found "
                f"first={entry.first} count={entry.count}",
            )
        previous = entry.first
    return tuple(media)
