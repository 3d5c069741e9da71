"""The mutation registry: named edits of valid datasets, each of which introduces one defect with one code.

Everything that follows from an edit is sealed again, so that no other check fires.
"""

from __future__ import annotations

from kvformat.testing.mutations import covered, files, index, members, schema, shards, text
from kvformat.testing.mutations.edits import Mutation

__all__ = ["MUTATIONS", "Mutation"]

MUTATIONS: tuple[Mutation, ...] = tuple(
    sorted(
        (m for module in (files, text, members, schema, covered, index, shards) for m in module.MUTATIONS),
        key=lambda mutation: mutation.code,
    )
)
"""All mutations."""
