"""The model of an extraction: described before it is loaded, its tokenizer, and the extractor it becomes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from kvformat.errors import UsageError, make_error
from kvformat.extract.documents.opening import DocumentsSource
from kvformat.extract.extras import needing
from kvformat.extract.following import Following
from kvformat.extract.media import with_media
from kvformat.extract.options import ModelOptions, SourceOptions
from kvformat.extract.plan import Plan
from kvformat.extract.schemes import SCHEMES, quantised_schema, scheme_named
from kvformat.extract.tokenise import Tokeniser
from kvformat.interfaces import Extractor
from kvformat.spec.schema import UNIFORM_DTYPES, Schema

if TYPE_CHECKING:
    from kvformat.extract.hf import Description

__all__ = [
    "describe_reasoner",
    "load_extractor",
    "load_tokeniser",
    "options_of_plan",
    "stored_schema",
    "threads_used",
    "use_threads",
]


def describe_reasoner(options: ModelOptions) -> Description:
    """What is known of the model before its weights are loaded; errors as for :func:`kvformat.extract.hf.describe`.

    Raises
    ------
    DependencyError
        E205 where transformers is missing.
    InputError
        E302 where images are wanted of a model that takes none.
    """
    with needing("extraction needs"):
        from kvformat.extract.hf import check_device, describe
    check_device(options.device)
    described = describe(
        options.model,
        revision=options.revision,
        layers=options.layers,
        dtype=options.dtype,
        compute_dtype=options.compute_dtype,
        key_stage=options.key_stage,
    )
    if options.images and not described.takes_images:
        raise make_error("E302", "the model takes no images that are known here: leave images out", path=options.model)
    return described._replace(schema=stored_schema(described.schema, options))


def stored_schema(schema: Schema, options: ModelOptions) -> Schema:
    """The schema of what is stored of what a model computes."""
    found = with_media(schema) if options.images else schema
    return found if options.quantise is None else quantised_schema(found, scheme_named(options.quantise))


def options_of_plan(options: ModelOptions, plan: Plan) -> ModelOptions:
    """The model's options, with those a plan has settled: which layers, in which dtype and stage, quantised or not.

    Raises
    ------
    UsageError
        E081 where one of them was given, and is another.
    """
    components = plan.schema.components
    dtypes = {component.dtype for component in components}
    scheme = next((scheme.name for scheme in SCHEMES.values() if scheme.dtype in dtypes), None)
    plain = sorted(dtypes & set(UNIFORM_DTYPES)) if scheme is None else []
    stages = {component.stage for component in components if component.role in ("key", "rope_key")}
    settled: dict[str, Any] = {
        "layers": tuple(sorted({layer for component in components for layer in component.layers})),
        "dtype": plain[0] if len(plain) == 1 else options.dtype,
        "key_stage": next(iter(stages)) if len(stages) == 1 else options.key_stage,
        "quantise": scheme,
        "images": any(extra.name == "media" for extra in plan.schema.extras),
    }
    usual = ModelOptions(model=options.model)
    for name, value in settled.items():
        given = getattr(options, name)
        if given not in (getattr(usual, name), value):
            made = "without it" if value in (None, False) else f"with {_written(value)}"
            raise make_error("E081", f"{name} is {_written(given)}, but the plan was made {made}: leave it out")
    return replace(options, **settled)


def _written(value: object) -> str:
    """The value of an option as it is typed."""
    if isinstance(value, tuple):
        return ",".join(_runs(value)) or "none"
    if isinstance(value, bool):
        return "given" if value else "not given"
    return str(value)


def _runs(layers: tuple[int, ...]) -> Iterator[str]:
    for _, run in groupby(enumerate(sorted(layers)), lambda numbered: numbered[1] - numbered[0]):
        found = [layer for _, layer in run]
        yield f"{found[0]}-{found[-1]}" if len(found) > 1 else f"{found[0]}"


def load_tokeniser(described: Description, model: ModelOptions, source: SourceOptions) -> Tokeniser:
    """What turns sources into documents that the model takes.

    Raises
    ------
    DependencyError
        E205 where a library is missing.
    InputError
        E304 where there is no image processor that loads.
    """
    options: dict[str, Any] = {
        "revision": described.revision,
        "special_tokens": source.special_tokens,
        "add_generation_prompt": source.add_generation_prompt,
        "truncate": source.truncate,
        "max_tokens": described.max_tokens,
        "vocab_size": described.vocab_size,
    }
    if model.images:
        from kvformat.extract.hf.vision_tokenise import VisionTokeniser

        return VisionTokeniser.load(model.model, base=_folder(source.documents), **options)
    return Tokeniser.load(model.model, **options)


def load_extractor(options: ModelOptions, plan: Plan, *, revision: str | None) -> Extractor:
    """Load the model and make an extractor of it, which gives just the records that are planned.

    Parameters
    ----------
    revision
        Commit of a hub id, where it is known, otherwise as in the options.

    Raises
    ------
    KVFormatError
        As for :meth:`kvformat.extract.HuggingFaceExtractor.load`; E205 where transformers is missing, E302 where the
        records would be others.
    """
    try:
        found = _loaded(options, plan, revision)
    except UsageError as error:
        if "layers" not in error.message:
            raise
        message = f"the plan was made for another model ({error.message}): give that model, or plan again"
        raise make_error("E302", message, path=options.model) from error
    if options.quantise is not None:
        from kvformat.extract.quantise import QuantisingExtractor

        found = QuantisingExtractor(found, scheme=options.quantise)
    if found.schema != plan.schema:
        raise make_error(
            "E302",
            "the loaded model caches other shapes than were planned: plan with this model's configuration",
            path=options.model,
        )
    return found


def _folder(documents: DocumentsSource) -> Path | None:
    """What relative paths of images start from: the directory of a documents file; None for a function."""
    return Path(documents).parent if isinstance(documents, str | os.PathLike) else None


def _loaded(options: ModelOptions, plan: Plan, revision: str | None) -> Extractor:
    common: dict[str, Any] = {
        "revision": revision,
        # What is quantised is taken as it was computed.
        "dtype": options.dtype if options.quantise is None else None,
        "compute_dtype": options.compute_dtype,
        "device": options.device,
        "attn_implementation": options.attn_implementation,
        "layers": options.layers,
        "key_stage": options.key_stage,
        "text": plan.text,
        "context": options.context,
    }
    if options.images:
        with needing("extraction needs"):
            from kvformat.extract.hf.vision import VisionExtractor

        return VisionExtractor.load(
            options.model,
            media_source=plan.media_source,
            following=Following(plan),
            checkpoint=options.checkpoint,
            adapter=options.adapter,
            **common,
        )
    with needing("extraction needs"):
        from kvformat.extract.hf import HuggingFaceExtractor

    return HuggingFaceExtractor.load(
        options.model,
        checkpoint=options.checkpoint,
        adapter=options.adapter,
        adapter_mode=options.adapter_mode,
        **common,
    )


def use_threads(threads: int | None) -> None:
    """Have torch compute with so many threads; None leaves it at what it is."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def threads_used() -> int:
    """Threads torch computes with."""
    import torch

    return torch.get_num_threads()
