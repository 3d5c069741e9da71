"""Whether a model is the one a dataset was extracted with, as far as both state it: weights, structure, text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from kvformat.errors import KVFormatError, make_error
from kvformat.extract.documents.source import Kind, Source
from kvformat.extract.text_encoder import Remedies
from kvformat.extract.tokenise import Tokeniser
from kvformat.read.check_covered import TensorList, read_covered
from kvformat.read.frequencies import InverseFrequencies
from kvformat.spec import canonical
from kvformat.spec.context import Canary, Text, differences
from kvformat.spec.paths import covered_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvformat.interfaces import Extractor
    from kvformat.read.dataset import Dataset

__all__ = [
    "begins_twice",
    "context_differences",
    "frequency_difference",
    "text_differences",
    "text_of",
    "tokeniser_of",
]

T = TypeVar("T")
_SHOWN = 3  # tensors named one by one
_TOLERANCE = 1e-6
_REMEDIES = Remedies(
    text="give a model that has one (--model DIR_OR_ID), or a documents file (`kvformat documents`)",
    images="give the documents file they become (`kvformat documents --images`)",
)


def context_differences(dataset: Dataset, extractor: Extractor) -> list[str]:
    """Fields of the context in which a dataset and an extractor differ, tensors of the weights by name.

    Empty where they agree, and where either context is unknown: then the values alone can tell.

    Raises
    ------
    FormatError, DamageError
        E044, E002, E005, E006 of a covered file that is read for it.
    """
    if dataset.context.model is None or extractor.context.model is None:
        return []
    found = differences(dataset.context, extractor.context)
    if any(one.startswith("weights.") for one in found):
        found = [one for one in found if not one.startswith("weights.")] + [_weights(dataset, extractor.files)]
    rotation = frequency_difference(dataset, extractor.files)
    return found if rotation is None else [*found, rotation]


def frequency_difference(dataset: Dataset, files: Mapping[str, bytes]) -> str | None:
    """How the inverse frequencies that were used differ from those a model holds; None where they agree to 1e-6."""
    ours, theirs = _content(dataset, "inv_freq", InverseFrequencies), _given(files, "inv_freq", InverseFrequencies)
    if ours is None or theirs is None:
        return None
    sides = [
        {group.layers: [canonical.decode_real(v) for v in group.values] for group in s.groups} for s in (ours, theirs)
    ]
    if {layers: len(values) for layers, values in sides[0].items()} != {k: len(v) for k, v in sides[1].items()}:
        return "inv_freq: other layers, or another number of frequencies"
    largest = max(
        (
            abs(one - other) / max(abs(one), abs(other))
            for layers, values in sides[0].items()
            for one, other in zip(values, sides[1][layers], strict=True)
            if one != other
        ),
        default=0.0,
    )
    return f"inv_freq: the rotary frequencies differ by up to {largest:.1e}" if largest > _TOLERANCE else None


def tokeniser_of(tokenizer: PreTrainedTokenizerBase | None, text: Text) -> Tokeniser:
    """A tokeniser with the rules of a text section; those of plain text as usual where it has none."""
    return Tokeniser(
        tokenizer,
        special_tokens=text.special_tokens is not False,
        add_generation_prompt=bool(text.add_generation_prompt),
        truncate=text.truncate,
        remedies=_REMEDIES,
    )


def text_of(tokenizer: PreTrainedTokenizerBase, text: Text) -> Text:
    """What would have been recorded in place of ``text`` with this tokenizer, by the same rules.

    Raises
    ------
    InputError
        E305 for a tokenizer that cannot be identified, or has no chat template where one was used.
    """
    uncut = tokeniser_of(tokenizer, replace(text, truncate=None))
    kinds: set[Kind] = {"text"} if text.chat_template is None else {"text", "messages"}
    found = replace(uncut.text(kinds), truncate=text.truncate)
    if text.canary is None:
        return replace(found, canary=None)
    ids = uncut.document(Source(id="canary", place="canary", text=text.canary.text)).token_ids.tolist()
    return replace(found, canary=Canary(text=text.canary.text, token_ids=tuple(ids)))


def text_differences(ours: Text, theirs: Text) -> list[str]:
    """Members in which two texts differ, as far as both have them; of canaries only where, never which ids.

    Empty where either side's documents came as token ids.
    """
    if ours.tokenizer is None or theirs.tokenizer is None:
        return []
    found = []
    for member in ("add_generation_prompt", "chat_template", "special_tokens", "tokenizer", "truncate"):
        one, other = getattr(ours, member), getattr(theirs, member)
        # A template and what it adds play no part on a side without messages.
        if one != other and (member == "truncate" or (one is not None and other is not None)):
            found.append(f"{member}: {_shown(one)} against {_shown(other)}")
    if ours.canary is not None and theirs.canary is not None and ours.canary.text == theirs.canary.text:
        ids, other_ids = ours.canary.token_ids, theirs.canary.token_ids
        if ids != other_ids:
            at = next((n for n, (a, b) in enumerate(zip(ids, other_ids, strict=False)) if a != b), None)
            at = min(len(ids), len(other_ids)) if at is None else at
            found.append(
                f"canary: one text gives other ids from token {at} on ({len(ids)} tokens against {len(other_ids)})"
            )
    return found


def begins_twice(tokenizer: PreTrainedTokenizerBase | None, token_ids: NDArray[np.int32]) -> bool:
    """Whether a document begins with the tokenizer's first token (BOS) twice: in the text, and added once more."""
    bos = getattr(tokenizer, "bos_token_id", None)
    return bos is not None and token_ids[:2].tolist() == [bos, bos]


def _weights(dataset: Dataset, files: Mapping[str, bytes]) -> str:
    """Which tensors of the weights differ."""
    ours, theirs = _content(dataset, "weights", TensorList), _given(files, "weights", TensorList)
    if ours is None or theirs is None:
        return "weights: other values"
    sides = [{tensor.name: tensor for tensor in side.tensors} for side in (ours, theirs)]
    names = [n for n in sorted(sides[0].keys() | sides[1].keys()) if sides[0].get(n) != sides[1].get(n)]
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    tensors = "tensor differs" if len(names) == 1 else "tensors differ"
    return f"weights: {len(names):,} {tensors} of {len(sides[0]):,}: {', '.join(names[:_SHOWN])}{more}"


def _content(dataset: Dataset, name: str, kind: type[T]) -> T | None:
    """Content of a covered file whose digest was checked; None without it."""
    file = dataset.manifest.file(name)
    if file is None:
        return None
    data = read_covered(dataset.reader, file)
    try:
        return canonical.convert(canonical.decode(data), kind)
    except KVFormatError as error:
        path = dataset.reader.path(covered_path(file.sha256))
        raise make_error("E044", f"covered file {name!r}: {error.message}", path=path) from None


def _given(files: Mapping[str, bytes], name: str, kind: type[T]) -> T | None:
    return canonical.convert(canonical.decode(files[name]), kind) if name in files else None


def _shown(value: object) -> str:
    return "absent" if value is None else f"{value:.16}..." if isinstance(value, str) else str(value)
