"""From the names of a checkpoint to those of the model: select, then rename."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from kvformat.errors import make_error
from kvformat.extract.checkpoint.presets import PRESETS, Preset
from kvformat.extract.checkpoint.source import CheckpointSource

__all__ = ["beginnings", "first_of", "select_names"]

_SHOWN = 3


def select_names(names: Iterable[str], source: CheckpointSource) -> dict[str, str]:
    """Selected names of a checkpoint by what they are renamed to.

    Raises
    ------
    InputError
        E308 where nothing is selected, where two names become one, and where a preset finds live and EMA weights and
        was not told which.
    """
    held = sorted(names)
    if source.preset is None:
        chosen = [name for name in held if source.select is None or re.search(source.select, name)]
        rests = {name: name for name in chosen}
        rename: Sequence[tuple[str, str]] = source.rename
    else:
        preset = PRESETS[source.preset]
        rests = _preset_names(held, preset, source)
        rename = preset.rename
    if not rests:
        raise make_error("E308", f"{_nothing(source)}; its names begin with {beginnings(held)}", path=source.path)
    renamed: dict[str, str] = {}
    twice: dict[str, tuple[str, str]] = {}
    for name, rest in rests.items():
        found = rest
        for pattern, replacement in rename:
            found = re.sub(pattern, replacement, found)
        if found in renamed:
            twice.setdefault(found, (renamed[found], name))
        renamed[found] = name
    if twice:
        found, (one, other) = next(iter(twice.items()))
        more = f" ({len(twice)} names are met twice)" if len(twice) > 1 else ""
        raise make_error(
            "E308", f"{one!r} and {other!r} both become {found!r}{more}; select only one of them", path=source.path
        )
    return renamed


def beginnings(names: Collection[str]) -> str:
    """What names begin with, the most frequent first: ``net.language_model (310), optim.state (620)``."""
    if not names:
        return "nothing: it is empty"
    counts = Counter(".".join(name.split(".")[:2]) for name in names)
    shown = [f"{head} ({count:,})" for head, count in counts.most_common(2 * _SHOWN)]
    return ", ".join(shown) + (", ..." if len(counts) > len(shown) else "")


def first_of(names: Iterable[str]) -> str:
    """The first few names, in quotes, and how many there are."""
    ordered = sorted(names)
    shown = ", ".join(map(repr, ordered[:_SHOWN]))
    return shown if len(ordered) <= _SHOWN else f"{shown} and {len(ordered) - _SHOWN:,} more"


def _preset_names(held: Sequence[str], preset: Preset, source: CheckpointSource) -> dict[str, str]:
    """Names that a preset selects, and what is left of each behind ``live`` or ``ema``."""
    found: dict[str, dict[str, str]] = {"live": {}, "ema": {}}
    for name in held:
        for weights, head in (("live", preset.live), ("ema", preset.ema)):
            start = re.match(head, name)
            if start and re.match(preset.select, name[start.end() :]):
                found[weights][name] = name[start.end() :]
    if source.weights is not None:
        return found[source.weights]
    if found["live"] and found["ema"]:
        raise make_error(
            "E308",
            f"the checkpoint holds live weights ({len(found['live']):,} tensors of the model) and their moving "
            f"average ({len(found['ema']):,}); choose with weights=live or weights=ema",
            path=source.path,
        )
    return found["live"] or found["ema"]


def _nothing(source: CheckpointSource) -> str:
    if source.preset is not None:
        which = f"{source.weights} weights of the model" if source.weights else "tensors of the model"
        return f"the checkpoint holds no {which} by the names of preset {source.preset!r}"
    if source.select is not None:
        return f"no name of the checkpoint matches {source.select!r}"
    return "the checkpoint holds no tensors"
