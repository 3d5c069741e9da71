"""The reference reader as a module, and what it found in the form of ``expected.json``."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

SPEC = Path(__file__).resolve().parents[2] / "spec"


@cache
def reference_reader() -> ModuleType:
    """``spec/reference_reader.py``."""
    return script("reference_reader")


@cache
def script(name: str) -> ModuleType:
    """A script of ``spec/`` as a module."""
    found = importlib.util.spec_from_file_location(f"kvformat_{name}", SPEC / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # dataclasses look their module up
    found.loader.exec_module(module)
    return module


def refusal(path: Path, expected_id: str | None = None) -> str | None:
    """Code with which the reference reader refuses a dataset, or None."""
    faults = reference_reader().check(path, expected_id)
    return faults[0][0] if faults else None


def described(path: Path) -> dict[str, Any]:
    """What the reference reader finds in a valid dataset."""
    dataset = reference_reader().read(path)
    records = [
        {
            "names": record.names,
            "document": record.document,
            "dims": record.dims,
            "tensors": {
                name: {"dtype": dtype, "shape": list(shape), "sha256": hashlib.sha256(data).hexdigest()}
                for name, (dtype, shape, data) in record.tensors.items()
            },
        }
        for record in dataset.records
    ]
    found = {"id": dataset.id, "records": records}
    return {**found, "warnings": dataset.warnings} if dataset.warnings else found
