"""Which tensor of a checkpoint goes to which of the model, and what does not fit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from kvformat.errors import KVFormatError, make_error
from kvformat.extract.checkpoint.experts import Piece, pieces_of
from kvformat.extract.checkpoint.names import beginnings, first_of

__all__ = ["FLOATS", "Match", "ModelNames", "TensorForm", "match_tensors"]

FLOATS = frozenset({"BF16", "F16", "F32", "F64"})
_SHOWN = 3
_FREQUENCIES = ".rotary_emb.inv_freq"  # saved with old models; the model's class computes them


class TensorForm(NamedTuple):
    """Dtype (safetensors name; None for what is no tensor) and shape."""

    dtype: str | None
    shape: tuple[int, ...]


class ModelNames(NamedTuple):
    """The tensors of a model.

    Attributes
    ----------
    forms
        All of them, by the names they have in the module.
    needed
        Those to be read.
    prefixes
        What may stand before each name: that of the whole model where the module is a part of it.
    stack
        Name of the list of decoder layers.
    """

    forms: Mapping[str, TensorForm]
    needed: Collection[str]
    prefixes: Sequence[str]
    stack: str


class Match(NamedTuple):
    """A tensor of the checkpoint and the one of the model it goes to, or the piece of it."""

    stored: str
    name: str
    piece: Piece | None


def match_tensors(
    selected: Mapping[str, str],
    held: Mapping[str, TensorForm],
    model: ModelNames,
    *,
    strict: bool,
    dtype: str | None,
    path: str | Path,
) -> list[Match]:
    """Find the tensors a model needs.

    Parameters
    ----------
    selected
        Names of the checkpoint, by what they are renamed to.
    held
        Everything in the checkpoint, by its own names.
    strict
        Whether every selected tensor must be one of the model's. Otherwise only tensors of its layers must be.
    dtype
        What is stored must have this dtype; None for any floating one.

    Raises
    ------
    InputError
        E308 naming the tensors: missing, not the model's, no tensors, of another shape or dtype.
    """
    objects = {name: stored for name, stored in selected.items() if held[stored].dtype is None}
    if objects and strict:
        raise make_error(
            "E308",
            f"{len(objects):,} of the selected entries are no tensors, and pickled objects are never loaded: "
            f"{first_of(objects.values())}; leave them out of select",
            path=path,
        )
    tensors = {name: stored for name, stored in selected.items() if name not in objects}
    prefix = _prefix(tensors, model, path)
    below = {name[len(prefix) :]: stored for name, stored in tensors.items() if name.startswith(prefix)}
    parts = {
        piece.name: piece
        for name, form in model.forms.items()
        if name not in below
        for piece in pieces_of(name, form.shape)
    }
    whole = {parts[name].whole for name in below.keys() & parts.keys()}
    parts = {name: piece for name, piece in parts.items() if piece.whole in whole}
    forms = {name: form for name, form in model.forms.items() if name not in whole}
    forms |= {name: _form(piece, model.forms[piece.whole]) for name, piece in parts.items()}
    needed = {name for name in forms if (parts[name].whole if name in parts else name) in model.needed}

    outside = [stored for name, stored in tensors.items() if not name.startswith(prefix)] if strict else []
    surplus = [stored for name, stored in below.items() if name not in forms]
    if not strict:
        own = f"{prefix}{model.stack}."
        surplus = [stored for name, stored in tensors.items() if _is_odd(name, own, prefix, forms)]
    _refuse_names(needed - below.keys(), outside + surplus, len(needed), prefix=prefix, path=path)
    _refuse_forms({name: (below[name], held[below[name]], forms[name]) for name in needed}, dtype=dtype, path=path)
    return [Match(stored=below[name], name=name, piece=parts.get(name)) for name in sorted(needed)]


def _prefix(tensors: Mapping[str, str], model: ModelNames, path: str | Path) -> str:
    """What stands before the model's names; E308 where nothing has them, or where two sets of tensors do."""
    own = set(model.forms)
    own.update(piece.name for name, form in model.forms.items() for piece in pieces_of(name, form.shape))
    hits = {
        prefix: sum(name.startswith(prefix) and name[len(prefix) :] in own for name in tensors)
        for prefix in dict.fromkeys(model.prefixes)
    }
    found = [prefix for prefix, count in hits.items() if count]
    if len(found) == 1:
        return found[0]
    if found:
        places = " and ".join(f"{f'below {prefix!r}' if prefix else 'bare'} ({hits[prefix]:,})" for prefix in found)
        raise make_error("E308", f"the checkpoint holds the model's names twice, {places}; select one", path=path)
    example = min(model.forms)
    ends = sorted({name.removesuffix(example) for name in tensors if name.endswith(f".{example}")})
    if ends:
        where = ", ".join(map(repr, islice(ends, _SHOWN)))
        pattern = "^" + ends[0].replace(".", r"\.")
        step = f"{example!r} stands below {where}; rename, such as {pattern + '='!r}"
    else:
        step = f"what was selected begins with {beginnings(tensors)}; expected such as {first_of(model.forms)}"
    raise make_error("E308", f"no selected tensor has a name of the model: {step}", path=path)


def _form(piece: Piece, whole: TensorForm) -> TensorForm:
    return TensorForm(whole.dtype, (piece.last - piece.first, *whole.shape[2:]))


def _is_odd(name: str, own: str, prefix: str, forms: Mapping[str, TensorForm]) -> bool:
    """Whether a tensor claims to be of the model's layers, which do not have it."""
    return name.startswith(own) and name[len(prefix) :] not in forms and not name.endswith(_FREQUENCIES)


def _refuse_names(
    missing: Collection[str], surplus: Collection[str], num_needed: int, *, prefix: str, path: str | Path
) -> None:
    if not missing and not surplus:
        return
    parts = []
    if missing:
        below = f" (below {prefix!r})" if prefix else ""
        parts.append(
            f"{len(missing):,} of {num_needed:,} tensors of the model are missing{below}: {first_of(missing)}"
        )
    if surplus:
        parts.append(f"{len(surplus):,} tensors are none of the model's: {first_of(surplus)}")
    step = "mend select and rename, or give the configuration that this checkpoint was trained with"
    raise make_error("E308", f"{'; '.join(parts)}; {step}", path=path)


def _refuse_forms(
    pairs: Mapping[str, tuple[str, TensorForm, TensorForm]], *, dtype: str | None, path: str | Path
) -> None:
    shapes = [
        f"{stored!r} is {list(found.shape)}, the model has {list(form.shape)}"
        for stored, found, form in (pairs[name] for name in sorted(pairs))
        if found.shape != form.shape
    ]
    if shapes:
        raise _several("shape", shapes, "give the configuration that this checkpoint was trained with", path)
    dtypes, steps = [], set()
    for stored, found, form in (pairs[name] for name in sorted(pairs)):
        if form.dtype not in FLOATS:
            expected, step = str(form.dtype), "save them in the dtype of the model"
            fits = found.dtype == form.dtype
        elif found.dtype not in FLOATS:
            expected, step = ", ".join(sorted(FLOATS)), "save them dequantised: without their scales they mean nothing"
            fits = False
        else:
            expected, step = str(dtype), "declare another dtype of the checkpoint, or none"
            fits = dtype in {None, found.dtype}
        if not fits:
            dtypes.append(f"{stored!r} is {found.dtype}, expected {expected}")
            steps.add(step)
    if dtypes:
        raise _several("dtype", dtypes, "; ".join(sorted(steps)), path)


def _several(what: str, found: Sequence[str], step: str, path: str | Path) -> KVFormatError:
    more = f" and {len(found) - _SHOWN:,} more" if len(found) > _SHOWN else ""
    listed = "; ".join(found[:_SHOWN]) + more
    return make_error("E308", f"{len(found):,} tensors have another {what}: {listed}; {step}", path=path)
