from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvformat
from kvformat.errors import FormatError, UsageError
from kvformat.extract.audit import audit
from kvformat.extract.bounds import Quantisation, bounds_file, read_bounds
from kvformat.extract.quantise import QuantisingExtractor
from kvformat.extract.schemes import SCHEMES
from kvformat.spec import canonical
from kvformat.spec.context import Context
from tests.extract.auditing import Altered, extractor_of, publish


def entry(name: str, value: float, **more: str) -> dict[str, str]:
    return {"name": name, "relative_rms": canonical.encode_real(value), **more}


def with_bounds(path: Path, *entries: dict[str, str], name: str = "llama") -> kvformat.Dataset:
    return publish(path, extractor_of(name), files={"bounds": canonical.encode({"components": list(entries)})})


def test_the_file_is_canonical_and_read_back(tmp_path: Path) -> None:
    extractor = extractor_of(dtype=torch.bfloat16)
    data = bounds_file(extractor.schema, "BF16")
    assert canonical.decode(data) == {"components": [entry("k", 0.1), entry("v", 0.1)]}
    dataset = publish(tmp_path / "ds", extractor, files={"bounds": data})
    assert kvformat.verify(tmp_path / "ds").ok
    found = read_bounds(dataset)
    assert found.relative_rms == {"k": 0.1, "v": 0.1}
    assert found.recorded == {"k", "v"}
    report = audit(dataset, extractor)
    assert [(component.bound, component.bound_recorded) for component in report.components] == [(0.1, True)] * 2


def test_names_are_sorted(tmp_path: Path) -> None:
    schema = extractor_of("deepseek").schema
    assert [one["name"] for one in canonical.decode(bounds_file(schema, "F32"))["components"]] == [
        "latent",
        "rope_key",
    ]
    gemma = kvformat.Schema.uniform(num_layers=1, num_kv_heads=1, head_dim=4)
    reverse = kvformat.Schema(dims=gemma.dims, components=gemma.components[::-1], extras=(), shared=())
    assert [one["name"] for one in canonical.decode(bounds_file(reverse, "F32"))["components"]] == ["k", "v"]


@pytest.mark.parametrize(
    ("compute", "stored", "bound"),
    [("F32", "F32", 1e-4), ("BF16", "BF16", 0.1), ("BF16", "F32", 0.1), ("F32", "BF16", 2**-7),
     ("F32", "F16", 2**-10), ("F16", "BF16", 0.0125)],
)  # fmt: skip
def test_what_is_rounded_twice_may_land_on_neighbours(compute: str, stored: str, bound: float) -> None:
    schema = kvformat.Schema.uniform(num_layers=1, num_kv_heads=1, head_dim=4, dtype=stored)
    listed = canonical.decode(bounds_file(schema, compute))["components"]  # type: ignore[arg-type]
    assert canonical.decode_real(listed[0]["relative_rms"]) == bound


def test_the_default_is_that_of_the_compute_dtype(tmp_path: Path) -> None:
    dataset = publish(tmp_path / "known", extractor_of(dtype=torch.bfloat16))
    assert read_bounds(dataset) == ({"k": 0.1, "v": 0.1}, {}, frozenset())
    unknown = publish(tmp_path / "unknown", extractor_of(), context=Context.unknown())
    assert read_bounds(unknown).relative_rms["k"] == 1e-4  # as it is stored
    assert read_bounds(unknown, compute_dtype="BF16").relative_rms["k"] == 0.1


def test_a_recorded_bound_counts(tmp_path: Path) -> None:
    dataset = with_bounds(tmp_path / "ds", entry("k", 1e-9))
    assert read_bounds(dataset).relative_rms == {"k": 1e-9, "v": 1e-4}
    assert read_bounds(dataset).recorded == {"k"}
    off = Altered(extractor_of(), lambda _, tensors: {name: value * (1 + 1e-6) for name, value in tensors.items()})
    report = audit(dataset, off, fraction=1)
    assert [finding.code for finding in report.findings] == ["E311"] * 5
    assert "'k' differs" in report.findings[0].message
    assert "'v' agrees" in report.findings[0].message


def test_what_quantisation_loses_is_added(tmp_path: Path) -> None:
    quantised = QuantisingExtractor(extractor_of(dtype=torch.bfloat16), scheme="int8", relative_rms=0.03)
    found = read_bounds(publish(tmp_path / "ds", quantised))
    assert found == ({"k": 0.1 + 0.03, "v": 0.1 + 0.03}, {"k": "int8", "v": "int8"}, frozenset({"k", "v"}))
    schema = quantised.schema
    data = bounds_file(schema, "F32", quantised={"v": Quantisation("mine", 0.2)})
    listed = {one["name"]: one for one in canonical.decode(data)["components"]}
    assert listed["v"] == entry("v", 1e-4 + 0.2, quantisation="mine")
    assert listed["k"] == entry("k", 1e-4 + SCHEMES["int8"].relative_rms)
    for wrong in (
        {"v": Quantisation("mine", 1.0)},
        {"v": Quantisation("mine", float("nan"))},
        {"v_scale": Quantisation("", 0)},
    ):
        with pytest.raises(UsageError):
            bounds_file(schema, "F32", quantised=wrong)
    with pytest.raises(UsageError):
        bounds_file(extractor_of().schema, "F32", quantised={"k": Quantisation("mine", 0.1)})


def test_quantised_values_without_recorded_bounds(tmp_path: Path) -> None:
    quantised = QuantisingExtractor(extractor_of(dtype=torch.bfloat16), scheme="fp8")
    quantised.files.pop("bounds")  # type: ignore[attr-defined]
    dataset = publish(tmp_path / "ds", quantised)
    assert read_bounds(dataset) == ({"k": 0.1 + 2**-4, "v": 0.1 + 2**-4}, {}, frozenset())
    report = audit(dataset, extractor_of(dtype=torch.bfloat16), fraction=1)
    assert report.ok
    assert [component.quantisation for component in report.components] == ["unknown", "unknown"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"components":[{"name":"k"}]}',
        b'{"components":[{"name":"k","relative_rms":"7ff0000000000000"}]}',
        b'{"components":[{"name":"k","relative_rms":"bf50624dd2f1a9fc"}]}',
        b'{"components":[{"name":"q","relative_rms":"3f50624dd2f1a9fc"}]}',
        b'{"components":[{"name":"v","relative_rms":"3f50624dd2f1a9fc"},{"name":"k","relative_rms":"3f50624dd2f1a9fc"}]}',
        b'{"components":[{"name":"k","relative_rms":"3f50624dd2f1a9fc"},{"name":"k","relative_rms":"3f50624dd2f1a9fc"}]}',
        b'{"components": []}',
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, data: bytes) -> None:
    dataset = publish(tmp_path / "ds", extractor_of(), files={"bounds": data})
    with pytest.raises(FormatError) as caught:
        read_bounds(dataset)
    assert caught.value.code == "E044"
    assert "bounds" in caught.value.message
    assert kvformat.verify(tmp_path / "ds", level=1).ok
    (finding,) = kvformat.verify(tmp_path / "ds", level=2).findings
    assert (finding.code, finding.message, finding.path) == ("E044", caught.value.message, caught.value.path)


@pytest.mark.parametrize("scheme", [*SCHEMES])
def test_what_an_extraction_records_obeys_the_specification(tmp_path: Path, scheme: str) -> None:
    quantised = QuantisingExtractor(extractor_of(dtype=torch.bfloat16), scheme=scheme)
    publish(tmp_path / "ds", quantised)
    assert kvformat.verify(tmp_path / "ds", level=2).ok
