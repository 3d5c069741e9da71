"""What a process holds open of a cache for a later use, and can let go of where room is needed now."""

from __future__ import annotations

import weakref
from typing import Protocol

__all__ = ["Holder", "let_go", "register"]


class Holder(Protocol):
    """Whatever holds entries of a cache that nobody uses at the moment."""

    def let_go(self) -> None:
        """Hold none of them any more; they can be opened again. Called from any thread."""


_HOLDERS: dict[int, tuple[str, weakref.ref[Holder]]] = {}


def register(directory: str, holder: Holder) -> None:
    """Have a holder asked, for as long as it lives, where the cache in a directory is full."""
    number = id(holder)
    _HOLDERS[number] = directory, weakref.ref(holder, lambda _: _HOLDERS.pop(number, None))


def let_go(directory: str) -> None:
    """Ask all holders of a cache in this process: an entry that is held cannot make room for another one."""
    for held_in, reference in list(_HOLDERS.values()):
        holder = reference() if held_in == directory else None
        if holder is not None:
            holder.let_go()
