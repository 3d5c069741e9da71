"""What all workers of a run have in common: all of the manifest that is known before any value is. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from kvformat.errors import KVFormatError, make_error
from kvformat.spec import canonical, limits
from kvformat.spec.context import Context, Text
from kvformat.spec.digests import context_digest, schema_digest
from kvformat.spec.layout import Layout
from kvformat.spec.manifest import CoveredFile
from kvformat.spec.schema import Schema
from kvformat.write.draft import Draft
from kvformat.write.planned import Planned

__all__ = ["RunIdentity", "SameFile", "differences", "run_differs"]

SameFile = Callable[[str, bytes, bytes], bool]
"""Whether two contents of the covered file with a label mean the same: what was first staged, and one's own."""

_MOST_SHOWN = 80


class RunIdentity(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """``run.json``. The first worker writes it down; every other one must agree.

    Attributes
    ----------
    files
        Covered files, by label.
    nbytes
        Of all shards together, headers included, where nothing is skipped.
    num_records, num_shards, num_tokens
        Planned.
    plan
        Digest of the plan.
    tag
        What else the values depend on. Work of other tags is never continued.
    """

    context: Context
    files: tuple[CoveredFile, ...]
    header_size: int
    nbytes: int
    num_records: int
    num_shards: int
    num_tokens: int
    plan: str
    provenance: dict[str, str]
    schema: Schema
    shard_nbytes: int
    shard_slots: int
    tag: str
    text: Text
    version: str
    extensions: dict[str, Any] | None = None

    @classmethod
    def of(
        cls,
        planned: Planned,
        *,
        schema: Schema,
        context: Context,
        text: Text,
        provenance: Mapping[str, str],
        covered: Mapping[str, bytes],
        shard_nbytes: int,
        shard_slots: int,
        num_tokens: int,
        nbytes: int,
        tag: str = "",
        extensions: Mapping[str, Any] | None = None,
    ) -> RunIdentity:
        """The run of a plan.

        Parameters
        ----------
        covered
            Covered files by label.
        num_tokens, nbytes
            Tokens, and bytes of payload, of all planned records together.
        """
        header_size = Layout(schema).header_size(limits.VERSION, shard_slots)
        num_shards = planned.num_shards
        return cls(
            context=context,
            files=tuple(
                CoveredFile(name=name, sha256=hashlib.sha256(data).hexdigest(), size=len(data))
                for name, data in sorted(covered.items())
            ),
            header_size=header_size,
            nbytes=nbytes + num_shards * header_size,
            num_records=planned.shard(num_shards - 1).stop if num_shards else 0,
            num_shards=num_shards,
            num_tokens=num_tokens,
            plan=planned.digest,
            provenance=dict(sorted(provenance.items())),
            schema=schema,
            shard_nbytes=shard_nbytes,
            shard_slots=shard_slots,
            tag=tag,
            text=text,
            version=limits.VERSION,
            extensions=dict(extensions) if extensions else None,
        )

    @classmethod
    def decode(cls, data: bytes, *, path: Path | str) -> RunIdentity:
        """What :meth:`encode` gave.

        Raises
        ------
        DamageError
            E116.
        """
        try:
            return canonical.convert(canonical.decode(data), cls)
        except KVFormatError as error:
            message = f"not readable ({error.message}): run `kvformat clean` and start again"
            raise make_error("E116", message, path=path) from None

    def encode(self) -> bytes:
        """Canonical JSON."""
        return canonical.encode(self)

    @property
    def key(self) -> str:
        """16 digits that name its staging: runs of one key share their work, where they agree in all else too."""
        named = {
            "context": context_digest(self.context).hex(),
            "plan": self.plan,
            "schema": schema_digest(self.schema).hex(),
            "tag": self.tag,
            "version": self.version,
        }
        return hashlib.sha256(canonical.encode(named)).hexdigest()[:16]

    def draft(self, place: Path | str, covered: Mapping[str, bytes]) -> Draft:
        """The manifest, as far as it is known; errors as for :class:`~kvformat.write.draft.Draft`."""
        return Draft(
            place,
            schema=self.schema,
            context=self.context,
            text=self.text,
            provenance=self.provenance,
            covered=dict(sorted(covered.items())),
            extensions=self.extensions,
            version=self.version,
            header_size=self.header_size,
            shard_slots=self.shard_slots,
        )


def differences(ours: RunIdentity, theirs: RunIdentity) -> list[str]:
    """Fields in which two runs differ, as dotted paths with both values; empty where they are equal."""
    left, right = _fields(ours), _fields(theirs)
    if left == right and ours.tag != theirs.tag:  # unfolded they are alike
        left["tag"], right["tag"] = ours.tag, theirs.tag
    found = [name for name in sorted(left.keys() | right.keys()) if left.get(name) != right.get(name)]
    # What a tag is made of is mostly recorded as provenance too, and need not be told twice.
    told = {f"tag.{name.removeprefix('provenance.')}" for name in found if name.startswith("provenance.")}
    return [
        f"{name} ({_shown(left.get(name))} here, {_shown(right.get(name))} there)"
        for name in found
        if name not in told
    ]


def listed(found: Sequence[str], *, most: int = 10) -> str:
    """Differences for a message: the first ones, and how many more there are."""
    more = f"; and {len(found) - most} more" if len(found) > most else ""
    return "; ".join(found[:most]) + more


def run_differs(found: list[str], place: Path | str) -> KVFormatError:
    """The E120 of a worker that is not of the run whose work is staged."""
    return make_error(
        "E120",
        f"other work of this plan is staged, and this run differs from it in {listed(found)}: "
        "give all workers the same model, settings and libraries, or drop that work with `kvformat clean`",
        path=place,
    )


def _fields(run: RunIdentity) -> dict[str, object]:
    plain = canonical.plain(run)
    plain["files"] = {file.name: file.sha256 for file in run.files}
    plain["tag"] = _unfolded(run.tag)
    return dict(canonical.flatten(plain))


def _unfolded(tag: str) -> object:
    """The object a tag is mostly the canonical JSON of, a tag within it taken into it; else the tag."""
    try:
        members = canonical.decode(tag.encode())
    except (KVFormatError, UnicodeEncodeError):
        return tag
    inner = members.pop("tag", None)
    within = _unfolded(inner) if isinstance(inner, str) else inner
    if isinstance(within, dict) and not within.keys() & members.keys():
        return {**within, **members} or tag
    return {**members, "tag": within} if inner is not None else members or tag


def _shown(value: object) -> str:
    if value is None:
        return "absent"
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."
