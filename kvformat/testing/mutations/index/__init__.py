"""Mutations of index parts and of what the tables say (E050 to E059)."""

from __future__ import annotations

from kvformat.testing.mutations.index import lookups, names, parts, shards

__all__ = ["MUTATIONS"]

MUTATIONS = (*parts.MUTATIONS, *shards.MUTATIONS, *names.MUTATIONS, *lookups.MUTATIONS)
