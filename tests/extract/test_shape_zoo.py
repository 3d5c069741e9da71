"""From documents to a published dataset, for models of every shape: what is read back is what the live model has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

import kvformat
from kvformat.errors import KVFormatError
from kvformat.extract import run
from tests.models import save_tiny, tiny_model, write_documents
from tests.vision import live, ordinary_inputs, picture, save_vision, vision_model


@pytest.mark.parametrize("name", ["deepseek", "gemma3", "gpt2", "llama", "qwen3"])
def test_what_is_read_back_is_the_live_cache(name: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", name)
    lines = [{"id": f"{n}", "token_ids": [(7 * n + step) % 250 for step in range(3 + 5 * n)]} for n in range(5)]
    documents = write_documents(tmp_path / "d.jsonl", lines)
    dataset = run(model=model, documents=documents, out=tmp_path / "ds", shard_nbytes=24 << 10, order="length")
    assert kvformat.verify(tmp_path / "ds").ok
    whole = tiny_model(name)
    first, second = (component.name for component in dataset.schema.components)
    for line in lines:
        record = dataset[line["id"]]
        with torch.inference_mode():
            cache = whole(input_ids=torch.tensor([line["token_ids"]]), cache=DynamicCache(), use_cache=True).cache
        for layer, held in enumerate(cache.layers):
            for component, tensor in ((first, held.keys), (second, held.values)):
                stored = record.component(component)[layer]
                assert torch.equal(stored, tensor[0].transpose(0, 1).reshape(stored.shape))


def test_documents_with_images(tmp_path: Path) -> None:
    model = save_vision(tmp_path / "model")
    pictures = [picture(24, 16, seed=1), picture(16, 40, seed=2)]
    for number, image in enumerate(pictures):
        image.save(tmp_path / f"{number}.png")
    content = [{"type": "image", "image": f"{number}.png"} for number in range(2)]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": "what?"}]}]
    documents = tmp_path / "d.jsonl"
    lines = [{"id": "seen", "messages": messages}, {"id": "plain", "text": "only text"}]
    documents.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    dataset = run(model=model, documents=documents, out=tmp_path / "ds", images=True)
    assert kvformat.verify(tmp_path / "ds").ok
    expected = live(vision_model(), **ordinary_inputs(messages, pictures))
    record = dataset["seen"]
    for layer, (key, value) in enumerate(expected):
        assert torch.equal(record.slab("key", layer=layer), key)
        assert torch.equal(record.slab("value", layer=layer), value)
    assert record.extra("position_ids").shape == (3, record.num_tokens)
    assert record.extra("media").shape == (2, 49)
    assert {file.name for file in dataset.manifest.files} >= {"bounds", "image_processor", "inv_freq", "weights"}
    picture(24, 16, seed=3).save(tmp_path / "1.png")
    with pytest.raises(KVFormatError) as refused:
        run(model=model, documents=documents, out=tmp_path / "ds", images=True)
    assert refused.value.code == "E118"
    with pytest.raises(KVFormatError, match="images"):
        run(model=model, documents=documents, out=tmp_path / "other")


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_stored_in_eight_bits(scheme: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", "qwen3")
    documents = write_documents(tmp_path / "d.jsonl", [{"id": "a", "token_ids": list(range(40))}])
    plain = run(model=model, documents=documents, out=tmp_path / "plain")["a"]
    stored = run(model=model, documents=documents, out=tmp_path / "stored", quantise=scheme)
    assert kvformat.verify(tmp_path / "stored").ok
    record = stored["a"]
    for name in ("k", "v"):
        exact = plain.component(name).float()
        found = record.component(name).float() * record.component(f"{name}_scale")
        error = (found - exact).square().mean().sqrt() / exact.square().mean().sqrt()
        assert 0 < error < (0.02 if scheme == "int8" else 0.06)
    assert stored.context == kvformat.open(tmp_path / "plain").context
