"""The same on a real model: SmolLM2-135M."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvformat
from kvformat.extract import HuggingFaceExtractor, estimate, run
from kvformat.spec.context import differences, to_float
from tests.models import live_attention, write_documents

TEXTS = [
    "The keys and values of a frozen transformer are computed once.",
    "Sie werden gespeichert, geprüft und wieder gelesen.",
    "def area(r):\n    return 3.14159 * r**2\n",
    "A record holds one document; a document is a sequence of tokens, and no token is padding. " * 4,
]


def test_a_published_dataset_holds_what_the_live_model_attends_to(smollm2: Path, tmp_path: Path) -> None:
    lines: list[dict[str, object]] = [{"id": f"text-{i}", "text": text} for i, text in enumerate(TEXTS)]
    lines.append({"id": "chat", "messages": [{"role": "user", "content": "What is a key?"}]})
    documents = write_documents(tmp_path / "docs.jsonl", lines)
    expected = estimate(model=smollm2, documents=documents, out=tmp_path / "ds")
    dataset = run(model=smollm2, documents=documents, out=tmp_path / "ds")
    assert (dataset.nbytes, dataset.num_tokens) == (expected.nbytes, expected.tokens)
    assert kvformat.verify(tmp_path / "ds").ok
    live = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    for record in dataset:
        ids = record.extra("token_ids").tolist()
        key, value = record.component("k"), record.component("v")
        assert key.shape == (30, len(ids), 3, 64)
        assert key.dtype == torch.bfloat16
        for layer, (live_key, live_value) in enumerate(live_attention(live, ids)):
            assert torch.equal(key[layer], live_key)
            assert torch.equal(value[layer], live_value)
    for number, text in enumerate(TEXTS):
        assert tokenizer.decode(dataset[f"text-{number}"].extra("token_ids").tolist()) == text
    model = dataset.context.model
    assert model is not None
    assert (model.family, model.compute_dtype, to_float(model.rope[0].theta)) == ("llama", "BF16", 100000.0)


def test_the_context_is_the_live_models(smollm2: Path) -> None:
    loaded = HuggingFaceExtractor.load(smollm2)
    live = HuggingFaceExtractor.of(AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16).eval())
    assert differences(loaded.context, live.context) == []
    assert loaded.files == live.files


@pytest.mark.slow
def test_a_prompt_alone_and_as_a_prefix_agree_up_to_rounding_only(smollm2: Path) -> None:
    """Why stored bytes are hashed and never recomputed: a longer input changes the last bits of the same rows."""
    from kvformat.spec.document import Document

    extractor = HuggingFaceExtractor.load(smollm2, compute_dtype="F32")
    ids = AutoTokenizer.from_pretrained(smollm2)(TEXTS[3])["input_ids"]
    (short,) = extractor.extract([Document.of(ids[:20])])
    (long,) = extractor.extract([Document.of(ids)])
    torch.testing.assert_close(long.components["k"][:, :20], short.components["k"], rtol=1e-3, atol=1e-3)
