"""Every test vector, read by the package and by the reference reader."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import kvformat
from kvformat.codes import CODES
from kvformat.errors import KVFormatError
from kvformat.tensors import torch_dtype
from tests.spec.reference import SPEC, described, refusal
from tests.testing.touch import touch_all

VECTORS = SPEC / "vectors" / "v1"
READABLE = sorted([*VECTORS.glob("valid/*"), *VECTORS.glob("warn/*")])
INVALID = sorted(VECTORS.glob("invalid/*"))
NAMED = pytest.mark.parametrize("case", READABLE, ids=lambda case: case.name)


def expected(case: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((case / "expected.json").read_text(encoding="ascii"))
    return found


def opened(case: Path, **options: Any) -> kvformat.Dataset:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"\[W003\]")
        return kvformat.open(case / "dataset", **options)


def read_by_package(dataset: kvformat.Dataset) -> dict[str, Any]:
    """What the package finds, in the form of ``expected.json`` without warnings."""
    records = []
    dtypes = {t.name: t.dtype for t in (*dataset.schema.components, *dataset.schema.extras)}
    for record in dataset:
        tensors = {}
        for name, dtype in dtypes.items():
            component = any(c.name == name for c in dataset.schema.components)
            tensor = record.component(name) if component else record.extra(name)
            assert tensor.dtype == torch_dtype(dtype)
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            tensors[name] = {
                "dtype": dtype,
                "shape": list(tensor.shape),
                "sha256": hashlib.sha256(data).hexdigest(),
            }
        records.append(
            {"names": record.names, "document": record.document.hex(), "dims": record.dims, "tensors": tensors}
        )
    return {"id": dataset.id, "records": records}


@NAMED
@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("verify", ["first", "always", "off"])
def test_the_package_reads_a_valid_vector_to_equal_bytes(case: Path, io: str, verify: str) -> None:
    wanted = expected(case)
    wanted.pop("warnings", None)
    dataset = opened(case, io=io, verify=verify, expected_id=wanted["id"])
    assert read_by_package(dataset) == wanted
    assert touch_all(dataset) == 0


@NAMED
def test_verification_finds_nothing_in_a_valid_vector_but_its_warnings(case: Path) -> None:
    report = kvformat.verify(case / "dataset")
    assert report.ok
    assert report.findings == ()
    assert sorted({finding.code for finding in report.warnings}) == expected(case).get("warnings", [])
    assert (report.id, report.records) == (expected(case)["id"], len(expected(case)["records"]))


@NAMED
def test_the_reference_reader_reads_a_valid_vector_to_equal_bytes(case: Path) -> None:
    assert described(case / "dataset") == expected(case)


@pytest.mark.parametrize("case", INVALID, ids=lambda case: case.name)
def test_an_invalid_vector_is_refused_with_its_code(case: Path) -> None:
    wanted = expected(case)
    assert case.name.startswith(f"{wanted['code']}-")
    assert set(wanted) <= {"code", "detected", "expected_id"}
    assert wanted["detected"] in CODES[wanted["code"]].detected.split(", ")
    pinned = wanted.get("expected_id")
    report = kvformat.verify(case / "dataset", expected_id=pinned)
    assert not report.ok
    assert {finding.code for finding in report.findings} == {wanted["code"]}
    assert refusal(case / "dataset", pinned) == wanted["code"]
    stage, code = "verify", wanted["code"]
    try:
        dataset = opened(case, expected_id=pinned)
        stage = "touch"
        touch_all(dataset)
        stage = "verify"
    except KVFormatError as error:
        stage, code = ("open" if stage == "verify" else stage), error.code
    assert (stage, code) == (wanted["detected"], wanted["code"])


def test_every_reader_code_and_every_warning_has_a_vector() -> None:
    by_class = {
        "reader": {case.name[:4] for case in INVALID},
        "warning": {case.name[:4] for case in VECTORS.glob("warn/*")},
    }
    for kind, found in by_class.items():
        # What a loader, a cache or a writer warns of is its own work, and no dataset shows it.
        others = {"load", "write", "extract"}
        expected = {code for code, row in CODES.items() if row.kind == kind and row.detected not in others}
        assert found == expected - {"W005"}


def test_the_vectors_are_those_the_generator_makes(tmp_path: Path) -> None:
    """In another process with another hash seed; ``make vectors`` does the same."""
    environment = os.environ | {"PYTHONHASHSEED": "12345", "PYTHONPATH": str(SPEC.parent)}
    command = [sys.executable, str(SPEC / "make_vectors.py"), str(tmp_path / "v1")]
    subprocess.run(command, check=True, env=environment, timeout=120)
    assert snapshot(tmp_path / "v1") == snapshot(VECTORS)


def test_the_vectors_are_small() -> None:
    sizes = [path.lstat().st_size for path in VECTORS.rglob("*") if path.is_file()]
    assert max(sizes) < 256 << 10
    assert sum(sizes) < 6 << 20


def snapshot(root: Path) -> dict[str, str]:
    """By path, a link's target or a file's digest. Git keeps no empty folders, so there must be none."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_symlink():
            found[name] = f"link to {path.readlink()}"
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            assert any(path.iterdir()), f"{name} is empty"
    return found


def test_the_reference_reader_is_independent() -> None:
    """No import of kvformat, nor of what could read the format for it."""
    tree = ast.parse((SPEC / "reference_reader.py").read_text(encoding="utf-8"))
    imported = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert {name.partition(".")[0] for name in imported} - set(sys.stdlib_module_names) == {"numpy", "xxhash"}
