"""What every test runs under: no network, few threads, repeatable examples."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.servers import moto, s3, seaweed

__all__ = ["moto", "repository", "s3", "seaweed", "smollm2"]

REPOSITORY = Path(__file__).resolve().parent.parent

# Read when the libraries are imported, and inherited by the processes tests start.
os.environ.update(
    {
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",  # tokenizers warns about forks otherwise, and warnings are errors
    }
)
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers fill the cores already

# Timing is no property: no deadline. Equal commits try equal examples; `thorough` searches for new ones.
settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("thorough", deadline=None, max_examples=2_000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No garbage collection: in callbacks of one, such as those of hypothesis, an interrupt is lost."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the working tree."""
    return REPOSITORY


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Directory of the small real model; ``make test`` names it, and then it must be there."""
    named = os.environ.get("KVFORMAT_TEST_MODEL")
    directory = Path(named) if named else REPOSITORY / ".models" / "smollm2"
    if not (directory / "config.json").is_file():
        refuse = pytest.fail if named else pytest.skip
        refuse(f"no model in {directory}: python tools/prepare_smollm2.py {directory}")
    return directory
