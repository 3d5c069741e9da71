from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvformat
from kvformat.errors import DamageError, IdentityError, InputError, KVFormatError
from kvformat.extract import HuggingFaceExtractor
from kvformat.extract.audit import audit
from kvformat.extract.quantise import QuantisingExtractor
from kvformat.spec.context import Text
from kvformat.spec.document import Document
from kvformat.spec.schema import Schema
from tests.extract.auditing import (
    DOCUMENTS,
    Altered,
    exchanged,
    extractor_of,
    left_padded,
    publish,
    with_inputs,
)
from tests.models import CHAT_TEMPLATE, tiny_model, tiny_tokenizer, write_documents


def codes(report: Any) -> list[str]:
    return [finding.code for finding in report.findings]


def deviation(report: Any, name: str) -> Any:
    return next(component for component in report.components if component.name == name)


def worst(report: Any, name: str) -> float:
    return max(layer.worst_rms for layer in deviation(report, name).layers)


def test_a_sound_dataset_is_equal_bit_by_bit(tmp_path: Path) -> None:
    extractor = extractor_of()
    dataset = publish(tmp_path / "ds", extractor)
    seen: list[tuple[int, int]] = []
    report = audit(dataset, extractor, fraction=1, progress=lambda *done: seen.append(done))
    assert report.ok
    assert (report.id, report.records, report.sampled, report.computed, report.equal, report.beyond) == (
        dataset.id, 5, 5, 5, 5, 0,
    )  # fmt: skip
    assert report.tokens == dataset.num_tokens
    assert report.context_known
    assert report.notes == ("the documents came as token ids: there is no tokenizer to compare",)
    assert [component.name for component in report.components] == ["k", "v"]
    assert [layer.layer for layer in deviation(report, "k").layers] == [0, 1, 2]
    assert all(layer.equal_records == 5 and layer.max_abs == 0 for layer in deviation(report, "v").layers)
    total = sum(record.nbytes for record in dataset)
    assert seen[-1] == (total, total)
    assert len(seen) == 5
    report.raise_for_findings()


def test_the_sample_is_of_the_size_asked_for(tmp_path: Path) -> None:
    extractor = extractor_of()
    dataset = publish(tmp_path / "ds", extractor)
    assert audit(dataset, extractor).sampled == 1  # of 1 %, at least one
    assert audit(dataset, extractor, count=3).computed == 3
    seen = {audit(dataset, extractor, count=1, seed=seed).tokens for seed in range(20)}
    assert seen == {len(ids) for ids in DOCUMENTS.values()}


def test_records_whose_tensors_were_exchanged(tmp_path: Path) -> None:
    extractor = extractor_of()
    dataset = publish(tmp_path / "ds", extractor, change=exchanged("a", "b", extractor))
    assert kvformat.verify(tmp_path / "ds").ok
    report = audit(dataset, extractor, fraction=1)
    assert not report.ok
    assert codes(report) == ["E311", "E311"]
    assert {finding.record for finding in report.findings} == {"a", "b"}
    assert (report.computed, report.equal, report.beyond) == (5, 3, 2)
    assert "'k' differs in 3 of 3 layers" in report.findings[0].message
    assert "'v' differs in 3 of 3 layers" in report.findings[0].message
    assert worst(report, "k") > 0.5
    with pytest.raises(IdentityError, match="and 1 more finding") as caught:
        report.raise_for_findings()
    assert (caught.value.code, caught.value.record) == ("E311", report.findings[0].record)
    assert pickle.loads(pickle.dumps(report)) == report


@pytest.mark.parametrize("known", [True, False])
def test_other_weights(tmp_path: Path, known: bool) -> None:
    context = "derive" if known else "unknown"
    dataset = publish(tmp_path / "ds", extractor_of(context=context))
    other = tiny_model("llama")
    with torch.no_grad():
        other.model.layers[1].self_attn.v_proj.weight[0] += 0.5
    report = audit(dataset, HuggingFaceExtractor.of(other, context=context), fraction=1)
    assert not report.ok
    assert report.context_known is known
    if known:
        assert report.findings[0].code == "E083"
        assert "weights: 1 tensor differs of " in report.findings[0].message
        assert "layers.1.self_attn.v_proj.weight" in report.findings[0].message
    else:
        assert "only the values tell" in report.notes[0]
    assert codes(report)[known:] == ["E311"] * 5
    # What lies below the changed tensor agrees bit by bit, so that the layer names itself.
    keys, values = (deviation(report, name).layers for name in "kv")
    assert [layer.equal_records for layer in keys] == [5, 5, 0]
    assert [layer.equal_records for layer in values] == [5, 0, 0]
    assert {finding.layer for finding in report.findings[known:]} <= {1, 2}


def test_another_rotary_embedding(tmp_path: Path) -> None:
    scaled = extractor_of("llama-linear")
    dataset = publish(tmp_path / "ds", scaled)
    report = audit(dataset, extractor_of("llama"), fraction=1)
    stated = [finding.message for finding in report.findings if finding.code == "E083"]
    assert any("rope[0].kind: linear against default" in message for message in stated)
    assert any("rope[0].factor" in message for message in stated)
    assert any("inv_freq: the rotary frequencies differ by up to 7.5e-01" in message for message in stated)
    assert not any("weights" in message for message in stated)
    assert "E311" in codes(report)
    assert worst(report, "k") > 0.1
    assert deviation(report, "v").layers[0].equal_records == 5


def test_a_field_of_the_rotary_embedding_that_a_library_no_longer_reads(tmp_path: Path) -> None:
    """The default base, used silently: the same configuration, another model."""
    dataset = publish(tmp_path / "ds", extractor_of("llama3-rope"))
    renamed = tiny_model("llama3-rope")
    with torch.no_grad():
        plain = tiny_model("llama").model.rotary_emb
        renamed.model.rotary_emb.inv_freq.copy_(plain.inv_freq)
    with pytest.raises(InputError) as caught:
        HuggingFaceExtractor.of(renamed)
    assert caught.value.code == "E302"
    unchecked = HuggingFaceExtractor.of(renamed, context="unknown")
    assert "E311" in codes(audit(dataset, unchecked, fraction=1))
    assert worst(audit(dataset, unchecked, fraction=1), "k") > 0.01


def test_left_padding_without_positions_makes_wrong_keys_and_right_values(tmp_path: Path) -> None:
    model = tiny_model("llama")
    extractor = HuggingFaceExtractor.of(model)
    dataset = publish(
        tmp_path / "ds", extractor, change=lambda name, _: left_padded(model, DOCUMENTS[name], padding=9)
    )
    report = audit(dataset, extractor, fraction=1)
    assert codes(report) == ["E311"] * 5
    assert worst(report, "k") > 0.2
    assert worst(report, "v") < 1e-5
    for finding in report.findings:
        assert "'v' agrees" in finding.message
        assert "keys alone differ: they were made with other positions" in finding.message


def test_neighbouring_layers_exchanged(tmp_path: Path) -> None:
    extractor = extractor_of()
    dataset = publish(
        tmp_path / "ds", extractor, change=lambda _, tensors: {"k": tensors["k"][[1, 0, 2]], "v": tensors["v"]}
    )
    report = audit(dataset, extractor, fraction=1)
    assert codes(report) == ["E311"] * 5
    assert "'k' differs in 2 of 3 layers" in report.findings[0].message
    assert "layer 0 of 'k' is what the model gives for layer 1" in report.findings[0].message
    assert deviation(report, "k").layers[2].equal_records == 5


def test_heads_and_tokens_exchanged_where_their_numbers_are_equal(tmp_path: Path) -> None:
    """Two heads, two tokens: every shape fits."""
    extractor = extractor_of()

    def change(name: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if name != "d":
            return tensors
        return {key: value.transpose(1, 2) for key, value in tensors.items()}

    dataset = publish(tmp_path / "ds", extractor, change=change)
    report = audit(dataset, extractor, fraction=1)
    assert [(finding.code, finding.record) for finding in report.findings] == [("E311", "d")]


def test_axes_in_another_order_are_not_compared(tmp_path: Path) -> None:
    extractor = extractor_of()
    tokens, heads, width = extractor.schema.components[0].axes
    components = tuple(
        kvformat.Component(**{**{f: getattr(c, f) for f in c.__struct_fields__}, "axes": (heads, tokens, width)})
        for c in extractor.schema.components
    )
    schema = Schema(dims=("tokens",), components=components, extras=extractor.schema.extras, shared=())
    dataset = publish(
        tmp_path / "ds",
        extractor,
        schema=schema,
        change=lambda _, tensors: {name: value.transpose(1, 2) for name, value in tensors.items()},
    )
    report = audit(dataset, extractor, fraction=1)
    assert codes(report) == ["E311", "E311"]
    assert "its axes are [heads 2, tokens tokens, head_dim 16]" in report.findings[0].message
    assert report.components == ()


def test_layers_the_model_does_not_give(tmp_path: Path) -> None:
    dataset = publish(tmp_path / "ds", extractor_of(context="unknown"))
    report = audit(dataset, extractor_of(layers=[0, 1], context="unknown"), fraction=1)
    assert codes(report) == ["E311", "E311"]
    assert report.findings[0].layer == 2
    assert "the model gives no key of this layer" in report.findings[0].message


def test_rows_sliced_at_wrong_offsets(tmp_path: Path) -> None:
    extractor = extractor_of()
    dataset = publish(
        tmp_path / "ds", extractor, change=lambda _, tensors: {key: value.roll(1, 1) for key, value in tensors.items()}
    )
    assert codes(audit(dataset, extractor, fraction=1)) == ["E311"] * 5


def test_a_single_row_of_another_token(tmp_path: Path) -> None:
    """Too little for the RMS of a layer, in a long document of a model that computes in BF16."""
    extractor = extractor_of(dtype=torch.bfloat16, max_position_embeddings=1024)
    generator = np.random.default_rng(0)
    documents = {"long": generator.integers(0, 256, 800)}

    def change(_name: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors = {key: value.clone() for key, value in tensors.items()}
        tensors["v"][1, 70] = tensors["v"][1, 71]
        return tensors

    dataset = publish(tmp_path / "ds", extractor, documents, change=change)
    report = audit(dataset, extractor, fraction=1)
    assert codes(report) == ["E311"]
    assert "'v' differs in 1 of 3 layers, in layer 1 at token 70 alone, by " in report.findings[0].message
    assert worst(report, "v") < 0.1


def test_computed_in_another_batch_is_within_the_bounds(tmp_path: Path) -> None:
    extractor = extractor_of(dtype=torch.bfloat16)
    others = [Document.of([5] * 40), Document.of(range(40))]

    def batched(document: Document, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        together = [document, *(Document.of(other.token_ids[: document.num_tokens]) for other in others)]
        return dict(extractor.extract(together)[0].components)

    dataset = publish(tmp_path / "ds", Altered(extractor, batched))
    report = audit(dataset, extractor, fraction=1)
    assert report.ok
    assert all(component.bound == 0.1 and not component.bound_recorded for component in report.components)


@pytest.mark.parametrize("scheme", ["int8", "fp8", "fp8-e5m2"])
def test_quantised_values_are_compared_after_dequantisation(tmp_path: Path, scheme: str) -> None:
    extractor = extractor_of(dtype=torch.bfloat16)
    quantised = QuantisingExtractor(extractor, scheme=scheme)
    dataset = publish(tmp_path / "sound", quantised)
    report = audit(dataset, extractor, fraction=1)
    assert report.ok, report.findings
    assert [component.name for component in report.components] == ["k", "v"]
    assert [component.quantisation for component in report.components] == [scheme, scheme]
    assert 0.001 < worst(report, "k") < 0.15
    assert audit(dataset, quantised, fraction=1).equal == 5
    swapped = publish(
        tmp_path / "swapped",
        QuantisingExtractor(Altered(extractor, lambda _, t: {"k": t["k"][[1, 0, 2]], "v": t["v"]}), scheme=scheme),
    )
    assert codes(audit(swapped, extractor, fraction=1)) == ["E311"] * 5


def test_positions_and_masks_are_taken_as_stored(tmp_path: Path) -> None:
    extractor = extractor_of()
    documents = {"shifted": Document.of([4, 5, 6], position_ids=[7, 8, 11]), "plain": Document.of([4, 5, 6])}
    dataset = publish(tmp_path / "ds", extractor, documents, schema=with_inputs(extractor.schema, rows=1))
    report = audit(dataset, extractor, fraction=1)
    assert report.ok
    assert report.equal == 2


def test_documents_the_model_does_not_take(tmp_path: Path) -> None:
    extractor = extractor_of(context="unknown")
    dataset = publish(tmp_path / "ds", extractor, {"a": [1, 2, 3], "b": [300, 301]})
    smaller = extractor_of(vocab_size=280, context="unknown")
    report = audit(dataset, smaller, fraction=1)
    found = {finding.record: finding.code for finding in report.findings}
    assert found["b"] == "E110"
    assert report.computed == 1
    assert "does not take the stored document" in next(f.message for f in report.findings if f.record == "b")


def test_damage_is_a_finding_and_the_rest_is_looked_at(tmp_path: Path) -> None:
    extractor = extractor_of()
    dataset = publish(tmp_path / "ds", extractor)
    path = tmp_path / "ds" / dataset.index.shard(0).path
    data = bytearray(path.read_bytes())
    data[dataset.manifest.header_size + 700] ^= 1
    path.write_bytes(data)
    report = audit(kvformat.open(tmp_path / "ds"), extractor, fraction=1)
    assert codes(report) in (["E072"], ["E070"], ["E073"])
    assert report.computed == 4
    with pytest.raises(DamageError):
        report.raise_for_findings()


def test_stored_ids_that_are_not_those_of_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extractor = extractor_of()
    dataset = publish(tmp_path / "ds", extractor)
    monkeypatch.setattr(type(dataset.index), "document", lambda *_: bytes(32))
    report = audit(dataset, extractor, fraction=1)
    assert codes(report) == ["E075"] * 5
    assert report.computed == 0


def test_of_many_findings_the_first_are_told(tmp_path: Path) -> None:
    extractor = extractor_of()
    documents = {f"doc-{number}": [number, 3, 5] for number in range(25)}
    dataset = publish(
        tmp_path / "ds", extractor, documents, change=lambda _, tensors: {"k": tensors["k"], "v": -tensors["v"]}
    )
    report = audit(dataset, extractor, fraction=1)
    assert codes(report) == ["E311"] * 20
    assert (report.num_findings, report.beyond, report.ok) == (25, 25, False)
    with pytest.raises(IdentityError, match="and 24 more findings"):
        report.raise_for_findings()


def test_keys_of_a_compressed_cache(tmp_path: Path) -> None:
    extractor = extractor_of("deepseek")
    dataset = publish(
        tmp_path / "ds", extractor, change=lambda _, tensors: {**tensors, "rope_key": tensors["rope_key"].roll(1, -1)}
    )
    assert audit(publish(tmp_path / "sound", extractor), extractor, fraction=1).equal == 5
    report = audit(dataset, extractor, fraction=1)
    assert codes(report) == ["E311"] * 5
    assert report.findings[0].message.startswith("'latent' agrees; 'rope_key' differs in 3 of 3 layers")
    assert "keys alone differ" in report.findings[0].message


def test_without_token_ids_it_is_refused(tmp_path: Path) -> None:
    extractor = extractor_of()
    schema = Schema(dims=("tokens",), components=extractor.schema.components, extras=(), shared=())
    dataset = publish(tmp_path / "ds", extractor, schema=schema)
    with pytest.raises(KVFormatError, match="stores no token_ids") as caught:
        audit(dataset, extractor)
    assert caught.value.code == "E082"


def test_an_interrupt_ends_it(tmp_path: Path) -> None:
    extractor = extractor_of()
    dataset = publish(tmp_path / "ds", extractor)

    def stop(done: int, total: int) -> None:
        if done < total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit(dataset, extractor, fraction=1, progress=stop)


def test_an_extractor_that_gives_other_shapes_than_it_says(tmp_path: Path) -> None:
    extractor = extractor_of()
    dataset = publish(tmp_path / "ds", extractor)
    cut = Altered(extractor, lambda _, tensors: {name: value[:, :-1] for name, value in tensors.items()})
    with pytest.raises(InputError, match="computed is ") as caught:
        audit(dataset, cut)
    assert (caught.value.code, caught.value.layer) == ("E101", 0)


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    extractor = extractor_of()
    broken = Altered(extractor, lambda _, tensors: {**tensors, "k": tensors["k"] * float("nan")})
    report = audit(publish(tmp_path / "ds", extractor), broken, fraction=1)
    assert codes(report) == ["E311"] * 5
    assert worst(report, "k") == float("inf")
    assert worst(report, "v") == 0


# -- text -----------------------------------------------------------------------------------------------------------


def text_of(tokenizer: Any, **rules: Any) -> Text:
    from kvformat.extract import Tokeniser

    return Tokeniser(tokenizer, **rules).text({"text", "messages"} if tokenizer.chat_template else {"text"})


def test_the_tokenizer_is_compared(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    extractor = extractor_of()
    dataset = publish(tmp_path / "ds", extractor, text=text_of(tokenizer))
    assert audit(dataset, extractor, tokenizer=tokenizer).ok
    assert "that of the dataset is not compared" in audit(dataset, extractor).notes[0]
    other_template = tiny_tokenizer(chat_template=CHAT_TEMPLATE.replace("[", "<"))
    (finding,) = audit(dataset, extractor, tokenizer=other_template).findings
    assert finding.code == "E312"
    assert "chat_template: " in finding.message
    without_bos = audit(dataset, extractor, tokenizer=tiny_tokenizer(bos=False))
    assert codes(without_bos) == ["E312", "E312"]
    assert "tokenizer: " in without_bos.findings[0].message
    assert "canary: one text gives other ids from token 0 on" in without_bos.findings[1].message


def test_a_start_that_was_added_twice(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    extractor = extractor_of()
    dataset = publish(tmp_path / "ds", extractor, {"twice": [256, 256, 40, 41], "once": [256, 40, 41]})
    report = audit(dataset, extractor, fraction=1, tokenizer=tokenizer)
    assert [(finding.code, finding.record) for finding in report.findings] == [("E305", "twice")]
    assert report.equal == 2  # values of stored ids are right whatever the ids are


def test_documents_are_tokenised_again_by_the_rules_of_the_dataset(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    text = text_of(tokenizer, add_generation_prompt=True, truncate=30)
    lines: list[dict[str, Any]] = [
        {"id": "chat", "messages": [{"role": "user", "content": "hi"}]},
        {"id": "text", "text": "some words, and more of them than fit"},
        {"id": "ids", "token_ids": list(range(50))},
    ]
    documents = write_documents(tmp_path / "docs.jsonl", lines)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    made = {
        "chat": tokenizer(rendered, add_special_tokens=False)["input_ids"],
        "text": tokenizer(lines[1]["text"])["input_ids"][:30],
        "ids": list(range(30)),
    }
    extractor = extractor_of()
    dataset = publish(tmp_path / "ds", extractor, made, text=text)
    report = audit(dataset, extractor, fraction=1, tokenizer=tokenizer, documents=documents)
    assert report.ok, report.findings
    wrong = publish(tmp_path / "wrong", extractor, made | {"chat": made["chat"][1:]}, text=text)
    (finding,) = audit(wrong, extractor, fraction=1, tokenizer=tokenizer, documents=documents).findings
    assert (finding.code, finding.record) == ("E312", "chat")
    assert "BOS doubled?" in finding.message or "one token more at the start" in finding.message
    absent = write_documents(tmp_path / "fewer.jsonl", lines[:2])
    (finding,) = audit(dataset, extractor, fraction=1, tokenizer=tokenizer, documents=absent).findings
    assert (finding.code, finding.record) == ("E312", "ids")


def test_only_sampled_documents_are_tokenised(tmp_path: Path) -> None:
    extractor = extractor_of()
    dataset = publish(tmp_path / "ds", extractor)
    # All others would be refused: text without a tokenizer.
    for seed in range(10):
        chosen = next(
            name for name in DOCUMENTS if audit(dataset, extractor, count=1, seed=seed).tokens == len(DOCUMENTS[name])
        )
        if sum(len(ids) == len(DOCUMENTS[chosen]) for ids in DOCUMENTS.values()) == 1:
            break
    lines = [{"id": n, "token_ids": ids} if n == chosen else {"id": n, "text": "?"} for n, ids in DOCUMENTS.items()]
    documents = write_documents(tmp_path / "docs.jsonl", lines)
    assert audit(dataset, extractor, count=1, seed=seed, documents=documents).ok
    with pytest.raises(InputError, match="text needs a tokenizer, give a model that has one") as caught:
        audit(dataset, extractor, fraction=1, documents=documents)
    assert caught.value.code == "E305"


# -- a real model ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_real_model_with_other_settings_and_with_faults(smollm2: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    texts = ["The keys and values of a frozen transformer are computed once.", "def area(r): return 3.14 * r**2", "é"]
    documents = {f"text-{n}": tokenizer(text)["input_ids"] for n, text in enumerate(texts)}
    live = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16).eval()
    extractor = HuggingFaceExtractor.of(live)
    dataset = publish(tmp_path / "sound", extractor, documents)
    assert audit(dataset, extractor, fraction=1).equal == 3
    eager = HuggingFaceExtractor.load(smollm2, attn_implementation="eager")
    report = audit(dataset, eager, fraction=1, tokenizer=tokenizer)
    assert report.ok
    assert report.equal < 3
    assert 0 < worst(report, "k") < 0.1
    padded = publish(
        tmp_path / "padded",
        extractor,
        documents,
        change=lambda name, _: left_padded(live, documents[name], padding=11),
    )
    report = audit(padded, extractor, fraction=1)
    assert codes(report) == ["E311"] * 3
    assert worst(report, "k") > 0.3
    assert all("'v' agrees" in finding.message for finding in report.findings)
