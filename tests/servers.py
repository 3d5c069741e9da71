"""The S3 servers tests use, one of each kind for a worker, started when the first test asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvformat.testing import servers


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """A real S3 server."""
    with servers.seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """A second opinion, for small objects."""
    with servers.moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture
def s3(seaweed: servers.Server) -> tuple[str, dict[str, object]]:
    """A URL in a bucket of its own, and the options to use it."""
    return f"{seaweed.bucket()}/some/prefix", dict(seaweed.storage_options)


__all__ = ["moto", "s3", "seaweed"]
