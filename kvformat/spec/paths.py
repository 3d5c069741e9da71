"""Where the files of a dataset stand, relative to its directory (SPEC.md, section 4)."""

from __future__ import annotations

__all__ = ["ROOT", "STAGING", "covered_path", "manifest_path", "part_path", "shard_path"]

ROOT = "kvformat.json"
STAGING = ".staging"


def manifest_path(sha256: str) -> str:
    """Path of the manifest with a digest."""
    return f"manifest/{sha256}.json"


def part_path(sha256: str) -> str:
    """Path of the index part with a digest."""
    return f"index/{sha256}.safetensors"


def covered_path(sha256: str) -> str:
    """Path of the covered file with a digest."""
    return f"files/{sha256}"


def shard_path(ordinal: int, sha256: bytes) -> str:
    """Path of a shard."""
    return f"shards/{ordinal // 1000:05d}/{ordinal:08d}-{sha256[:8].hex()}.safetensors"
