"""An extractor that quantises: what it passes on, what it stores, what it refuses; and what is read back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import kvformat
from kvformat.errors import InputError, KVFormatError, UsageError
from kvformat.extract import HuggingFaceExtractor
from kvformat.extract.bounds import read_bounds
from kvformat.extract.quant_math import error_bound, quantise
from kvformat.extract.quantise import QuantisingExtractor
from kvformat.extract.schemes import SCHEMES
from kvformat.extract.tag import Identified, staging_tag
from kvformat.interfaces import Extracted
from kvformat.loader import gather
from kvformat.loader.layouts import HF, Packed, Padded
from kvformat.read.dataset import Dataset
from kvformat.spec.context import Context, Text, differences
from kvformat.spec.digests import schema_digest
from kvformat.spec.document import Document
from kvformat.spec.schema import Schema
from tests.models import tiny_model

LAYERS, HEADS, WIDTH = 3, 2, 8
IDS = [[5, 3, 250, 7, 7, 1], [9], [17, 4, 2, 200]]


class Normal:
    """K and V drawn by the token ids of a document."""

    context = Context.unknown()
    text = Text(truncate=9)
    provenance: dict[str, str] = {"device": "none"}  # noqa: RUF012 -- read only
    files: dict[str, bytes] = {"notes": b"{}"}  # noqa: RUF012 -- read only
    max_tokens = 64

    def __init__(self, dtype: str = "BF16") -> None:
        self.schema = Schema.uniform(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=WIDTH, dtype=dtype)
        self.dtype = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[dtype]

    def tensors(self, ids: Sequence[int]) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(sum(ids))
        shape = (LAYERS, len(ids), HEADS, WIDTH)
        return {name: torch.randn(shape, generator=generator).mul(4).to(self.dtype) for name in ("k", "v")}

    def extract(self, documents: Sequence[Document]) -> list[Extracted]:
        return [Extracted(self.tensors(document.token_ids.tolist()), {}) for document in documents]


class Digested(Normal):
    def values_digest(self) -> str:
        return "5" * 64


class Changed(Normal):
    """Whose tensors are changed on the way."""

    def __init__(self, change: Any) -> None:
        super().__init__("F32")
        self.change = change

    def tensors(self, ids: Sequence[int]) -> dict[str, torch.Tensor]:
        found = super().tensors(ids)
        self.change(found, list(ids))
        return found


def write(path: Path, extractor: Any, ids: Sequence[Sequence[int]] = IDS, *, levels: Sequence[int] = (4,)) -> Dataset:
    with kvformat.create(
        path,
        schema=extractor.schema,
        context=extractor.context,
        text=extractor.text,
        provenance=extractor.provenance,
        files=extractor.files,
    ) as writer:
        for number, given in enumerate(ids):
            document = Document.of(given)
            (found,) = extractor.extract([document])
            writer.add(f"doc-{number}", found.components, document=document, extras=found.extras)
    for level in levels:
        report = kvformat.verify(path, level=level)
        assert (report.findings, report.warnings) == ((), ())
    return kvformat.open(path)


def close(found: torch.Tensor, wanted: torch.Tensor, scale: torch.Tensor, dtype: str) -> bool:
    return bool(((found.double() - wanted.double()).abs() <= error_bound(wanted, scale, dtype)).all())


# --------------------------------------------------------------------------------------------------- what it passes on


@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_everything_else_is_the_inner_extractors(scheme):
    inner = Normal()
    extractor = QuantisingExtractor(inner, scheme=scheme)
    assert (extractor.context, extractor.text, extractor.max_tokens) == (inner.context, inner.text, inner.max_tokens)
    assert extractor.provenance is inner.provenance
    assert set(extractor.files) == {"notes", "bounds"}
    assert extractor.files["notes"] == b"{}"


def test_extras_and_components_of_other_roles_are_passed_on():
    extra, other = torch.ones(3), torch.ones(1, 3)

    class More(Normal):
        def extract(self, documents: Sequence[Document]) -> list[Extracted]:
            return [Extracted({**found.components, "h": other}, {"x": extra}) for found in super().extract(documents)]

    (found,) = QuantisingExtractor(More()).extract([Document.of([1, 2, 3])])
    assert found.extras["x"] is extra
    assert found.components["h"] is other


def test_a_values_digest_is_there_where_the_inner_one_is():
    without, having = QuantisingExtractor(Normal()), QuantisingExtractor(Digested())
    assert not isinstance(without, Identified)
    assert isinstance(having, Identified)
    assert having.values_digest() == "5" * 64
    assert staging_tag(without, "t") == "t"
    assert staging_tag(having, "t") == staging_tag(Digested(), "t") != "t"


def test_schemes_share_a_context_and_have_schemas_of_their_own(tmp_path):
    """The context says what was computed, the schema how it is stored; fingerprints cover both."""
    inner = HuggingFaceExtractor.of(tiny_model("llama", dtype=torch.bfloat16))
    extractors = [inner, *(QuantisingExtractor(inner, scheme=scheme) for scheme in SCHEMES)]
    datasets = [write(tmp_path / str(number), extractor) for number, extractor in enumerate(extractors)]
    for dataset in datasets[1:]:
        assert differences(dataset.context, datasets[0].context) == []
        dataset.require(datasets[0].context)
        assert dataset.manifest.file("weights") == datasets[0].manifest.file("weights")
    assert len({schema_digest(dataset.schema) for dataset in datasets}) == len(datasets)
    assert len({dataset[0].fingerprint for dataset in datasets}) == len(datasets)
    assert len({dataset[0].document for dataset in datasets}) == 1


@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_the_bounds_are_recorded(scheme, tmp_path):
    dataset = write(tmp_path / "ds", QuantisingExtractor(HuggingFaceExtractor.of(tiny_model("llama")), scheme=scheme))
    found = read_bounds(dataset)
    assert found.quantisation == {"k": scheme, "v": scheme}
    assert found.recorded == {"k", "v"}
    lost = SCHEMES[scheme].relative_rms
    assert all(lost < bound < lost + 0.001 for bound in found.relative_rms.values())  # computed in float32
    again = QuantisingExtractor(HuggingFaceExtractor.of(tiny_model("llama")), scheme=scheme, relative_rms=0.25)
    assert again.files["bounds"] != dataset.manifest.file("bounds")
    assert all(0.25 < bound < 0.251 for bound in read_bounds(write(tmp_path / "2", again)).relative_rms.values())


# --------------------------------------------------------------------------------------------------------- round trip


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_a_round_trip(scheme, dtype, tmp_path):
    inner = Normal(dtype)
    extractor = QuantisingExtractor(inner, scheme=scheme)
    dataset = write(tmp_path / "ds", extractor, levels=(1, 2, 3, 4))
    stored = SCHEMES[scheme].dtype
    for number, ids in enumerate(IDS):
        record, wanted = dataset[f"doc-{number}"], inner.tensors(ids)
        assert set(record.placement.tensors) >= {"k", "v", "k_scale", "v_scale"}
        for name, role in (("k", "key"), ("v", "value")):
            scale = record.component(f"{name}_scale")
            found = record.dequantised(name)
            assert torch.equal(found, record.component(name).float() * scale)
            assert close(found, wanted[name], scale, stored)
            assert torch.equal(record.dequantised(name, dtype=dtype), found.to(inner.dtype))
            for layer in range(LAYERS):
                assert torch.equal(record.dequantised_slab(role, layer=layer), found[layer])


@pytest.mark.parametrize("scheme", list(SCHEMES))
@pytest.mark.parametrize(("name", "layers"), [("llama", [0, 2]), ("deepseek", None), ("deepseek", [1])])
def test_models_and_slices_of_them(name, layers, scheme, tmp_path):
    """Latent attention included, where one component serves as both."""
    inner = HuggingFaceExtractor.of(tiny_model(name, dtype=torch.bfloat16), layers=layers)
    dataset = write(tmp_path / "ds", QuantisingExtractor(inner, scheme=scheme))
    for number, ids in enumerate(IDS):
        (wanted,) = inner.extract([Document.of(ids)])
        for component in inner.schema.components:
            record = dataset[number]
            found, scale = record.dequantised(component.name), record.component(f"{component.name}_scale")
            assert close(found, wanted.components[component.name], scale, SCHEMES[scheme].dtype)
            for row, layer in enumerate(component.layers):
                assert torch.equal(record.dequantised_slab(component.role, layer=layer), found[row])


def test_several_documents_of_a_call_are_each_as_alone():
    given = [Document.of(ids) for ids in ([1, 2, 3], [4, 5, 6], [1, 3, 2])]
    extractor = QuantisingExtractor(Normal())
    for document, found in zip(given, extractor.extract(given), strict=True):
        (alone,) = extractor.extract([document])
        for name, tensor in alone.components.items():
            assert torch.equal(tensor, found.components[name])


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("scheme", list(SCHEMES))
@pytest.mark.parametrize("layout", [Packed, Padded, HF])
def test_batches_as_floats(layout, scheme, dtype, tmp_path):
    dataset = write(tmp_path / "ds", QuantisingExtractor(Normal(), scheme=scheme))
    order = [2, 0, 1]
    for _ in range(2):  # verified, and once more when it is
        batch = gather(dataset, records=order, layout=layout(dtype=dtype))
        assert list(batch.components) == ["k", "v"]
        for name in ("k", "v"):
            records = [dataset[number].dequantised(name, dtype=dtype) for number in order]
            if layout is Packed:
                assert torch.equal(batch[name], torch.cat(records, 1))
                continue
            for number, wanted in enumerate(records):
                found = batch[name][:, number]
                if layout is HF:
                    assert torch.equal(found[:, :, -wanted.shape[1] :], wanted.transpose(1, 2))
                    assert not found[:, :, : -wanted.shape[1]].any()
                else:
                    assert torch.equal(found[:, : wanted.shape[1]], wanted)
                    assert not found[:, wanted.shape[1] :].any()


def test_batches_as_they_are_stored(tmp_path):
    dataset = write(tmp_path / "ds", QuantisingExtractor(Normal()))
    batch = gather(dataset, records=[0, 2], layout="packed")
    assert list(batch.components) == ["k", "v", "k_scale", "v_scale"]
    assert batch["k_scale"].shape == (LAYERS, 2, 1, HEADS, WIDTH)
    assert batch["v_scale"].shape == (LAYERS, 10, HEADS, 1)
    again = batch["k"][:, 6:].float() * batch["k_scale"][:, 1]
    assert torch.equal(again, dataset[2].dequantised("k"))


# ----------------------------------------------------------------------------------------------------- what it refuses


@pytest.mark.parametrize("scheme", list(SCHEMES))
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("component", ["k", "v"])
def test_what_is_not_finite_is_refused(component, bad, scheme):
    """Nothing would show it in integers, nor behind the largest magnitude."""

    def change(found: dict[str, torch.Tensor], ids: list[int]) -> None:
        if ids == [4, 5, 6]:
            found[component][1, 2, 0, 3] = bad

    given = [Document.of(ids) for ids in ([1, 2, 3], [4, 5, 6], [7, 8, 9])]
    with pytest.raises(InputError, match=f"'{component}' holds NaN or infinity") as caught:
        QuantisingExtractor(Changed(change), scheme=scheme).extract(given)
    assert (caught.value.code, caught.value.layer) == ("E104", 1)
    assert caught.value.record == given[1].digest.hex()
    with pytest.raises(InputError, match=f"'{component}' holds NaN or infinity") as caught:
        QuantisingExtractor(Changed(change), scheme=scheme).extract(given[1:2])
    assert (caught.value.code, caught.value.layer, caught.value.record) == (
        "E104",
        1,
        None,
    )  # the caller knows its name


def spiked(found: dict[str, torch.Tensor], ids: list[int]) -> None:
    if len(ids) > 3:
        found["k"][2, 0] *= 100


def test_what_would_lose_more_than_the_bound_is_refused(tmp_path):
    """One token of large keys leaves the others few steps of their channels."""
    given = [Document.of([1, 2, 3]), Document.of([1, 2, 3, 4] * 500)]
    extractor = QuantisingExtractor(Changed(spiked), relative_rms=0.02)
    extractor.extract(given[:1])
    with pytest.raises(InputError, match=r"'k' stored by int8 would be off by 0\.0") as caught:
        extractor.extract(given[1:])
    assert (caught.value.code, caught.value.layer) == ("E313", 2)
    QuantisingExtractor(Changed(spiked), relative_rms=0.2).extract(given[1:])
    QuantisingExtractor(Changed(spiked), scheme="fp8").extract(given[1:])


def test_the_layer_named_is_the_models(tmp_path):
    class Sliced(Changed):
        def __init__(self) -> None:
            super().__init__(lambda found, _: found["v"][2].fill_(math.nan))
            components = tuple(replace(c, layers=(4, 9, 11)) for c in self.schema.components)
            self.schema = replace(self.schema, components=components)

    with pytest.raises(InputError, match="NaN") as caught:
        QuantisingExtractor(Sliced()).extract([Document.of([1])])
    assert caught.value.layer == 11


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("E102", lambda found, _: found.update(k=found["k"].half())),
        ("E101", lambda found, _: found.update(k=found["k"][0])),
        ("E101", lambda found, _: found.update(v=found["v"][:2])),
        ("E101", lambda found, _: found.update(v=found["v"][:, :0])),
        ("E101", lambda found, _: found.update(v=found["v"][:, :1])),
        ("E103", lambda found, _: found.pop("v")),
    ],
)
def test_an_inner_extractor_that_breaks_its_word(code, change, tmp_path):
    """Refused here, or by the writer, which knows the name."""
    with pytest.raises(InputError) as caught:
        write(tmp_path / "ds", QuantisingExtractor(Changed(change)))
    assert caught.value.code == code


@pytest.mark.parametrize(
    "given", [{"scheme": "int3"}, {"relative_rms": -0.1}, {"relative_rms": math.nan}, {"relative_rms": 2.0}]
)
def test_refused_when_it_is_made(given):
    with pytest.raises(UsageError) as caught:
        QuantisingExtractor(Normal(), **given)
    assert caught.value.code == "E081"


def test_what_is_quantised_is_not_quantised_again():
    with pytest.raises(KVFormatError, match="'k' is I8 already") as caught:
        QuantisingExtractor(QuantisingExtractor(Normal()), scheme="fp8")
    assert caught.value.code == "E081"


# ------------------------------------------------------------------------------------------------------- a real model


@pytest.mark.slow
def test_a_real_model_loses_little(smollm2: Path, tmp_path: Path):
    """What ``spec/design/015-quantised-storage.md`` states, on one paragraph."""
    from transformers import AutoTokenizer

    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(smollm2)(text)["input_ids"][:192]
    inner = HuggingFaceExtractor.load(smollm2)
    (wanted,) = inner.extract([Document.of(ids)])
    lost = {}
    for scheme in ("int8", "fp8"):
        dataset = write(tmp_path / scheme, QuantisingExtractor(inner, scheme=scheme), [ids])
        for name, values in wanted.components.items():
            error = (dataset[0].dequantised(name).double() - values.double()).flatten(1)
            lost[scheme, name] = error.square().mean(1).sqrt() / values.double().flatten(1).square().mean(1).sqrt()
    assert all((lost["int8", name] < 0.02).all() for name in ("k", "v"))
    assert all((lost["int8", name] < lost["fp8", name] / 2).all() for name in ("k", "v"))
    made = quantise(wanted.components["k"], shared=(1,), dtype="I8")
    torch.testing.assert_close(made.relative_rms, lost["int8", "k"], rtol=1e-4, atol=0)
