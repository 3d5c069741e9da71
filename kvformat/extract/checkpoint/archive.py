"""The archive that ``torch.save`` makes of one tensor, in memory."""

from __future__ import annotations

import io
import zipfile
from typing import IO, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["damaged_member", "saved_value"]

_CRC_NBYTES = 1 << 20


def damaged_member(raw: NDArray[np.uint8]) -> str | None:
    """The first member of a saved tensor's archive that has another CRC-32 than its directory says, or None.

    torch can be told to save without; then every CRC-32 is zero.
    """
    with zipfile.ZipFile(_Memory(raw)) as archive:
        for member in archive.infolist():
            if not member.CRC:
                continue
            try:
                with archive.open(member) as stream:
                    while stream.read(_CRC_NBYTES):
                        pass
            except zipfile.BadZipFile:
                return member.filename
    return None


def saved_value(raw: NDArray[np.uint8]) -> Any:
    """What was saved: a tensor, or one of the few plain types that ``weights_only=True`` lets through."""
    return torch.load(cast("IO[bytes]", _Memory(raw)), map_location="cpu", weights_only=True)


class _Memory(io.RawIOBase):
    """Bytes as a file, without a copy of them."""

    def __init__(self, raw: NDArray[np.uint8]) -> None:
        self._view = raw.data
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._view.nbytes}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer).cast("B")
        part = self._view[self._at : self._at + target.nbytes]
        target[: part.nbytes] = part
        self._at += part.nbytes
        return part.nbytes
