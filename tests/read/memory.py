"""A dataset in anonymous memory, behind the interface of a reader: thousands of damaged copies need no disk."""

from __future__ import annotations

import mmap

from kvformat.errors import make_error
from kvformat.read.verify import Report, _Verification
from kvformat.storage.local_read import FileIdentity, LocalReader, OpenFile


class MemoryReader(LocalReader):
    """Files by path, in writable anonymous mappings; a flipped bit is seen by whatever reads next."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__("/dataset", use_mmap=True)
        self.sizes = {name: len(data) for name, data in files.items()}
        self.files = {}
        for name, data in files.items():
            self.files[name] = mmap.mmap(-1, max(len(data), 1))
            self.files[name][: len(data)] = data

    def open(
        self,
        name: str,
        *,
        nbytes: int | None = None,
        sha256: str | None = None,
        use_mmap: bool | None = None,
        ranged: bool = False,
    ) -> OpenFile:
        path = self.path(name)
        if name not in self.files:
            raise make_error("E002", "the file is missing", path=path)
        if nbytes is not None and nbytes != self.sizes[name]:
            raise make_error("E005", f"{self.sizes[name]} bytes, expected {nbytes}", path=path)
        return OpenFile(-1, path, FileIdentity(0, 0, self.sizes[name], 0, 0), self.files[name])

    def walk(self) -> list[str]:
        return sorted(self.files)

    def flip(self, name: str, bit: int) -> None:
        """Flip a bit; once more puts it back."""
        self.files[name][bit // 8] ^= 1 << (bit % 8)

    def verify(self) -> Report:
        """What ``kvformat.verify`` finds here at level 4."""
        return _Verification(self, 4, 1, None).run(None)
