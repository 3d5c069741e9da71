"""Plain states in safetensors files: which files belong together, and what damage is found."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvformat.errors import KVFormatError
from kvformat.extract.checkpoint import CheckpointSource
from kvformat.extract.checkpoint.reading import CountedFiles
from kvformat.extract.checkpoint.safetensors_files import SafetensorsCheckpoint
from kvformat.extract.hf.loading import load_decoder
from tests.models import save_tiny, tiny_config, tiny_model


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(40, 30, generator=generator),
        "b": torch.randn(5, 3, 7, generator=generator).bfloat16(),
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 4),
        "numbers": torch.arange(6, dtype=torch.int64),
    }


def read(path: Path, *, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    with CountedFiles() as files:
        checkpoint = SafetensorsCheckpoint(path, files)
        expected = state()
        targets = {
            name: torch.full(form.shape, 7, dtype=dtype or expected[name].dtype)
            for name, form in checkpoint.forms.items()
        }
        checkpoint.read(targets)
        assert files.nbytes <= sum(file.stat().st_size for file in path.parent.rglob("*.safetensors"))
    return targets


def split(directory: Path, *, index: bool = True) -> Path:
    directory.mkdir()
    tensors = state()
    files = {"x-00001.safetensors": ["a", "none"], "x-00002.safetensors": ["b", "scalar", "numbers"]}
    for name, members in files.items():
        save_file({member: tensors[member] for member in members}, directory / name)
    if index:
        weight_map = {member: name for name, members in files.items() for member in members}
        (directory / "x.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    return directory


def assert_read(path: Path) -> None:
    found, expected = read(path), state()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_one_file_and_many_with_and_without_an_index(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    save_file(state(), tmp_path / "one" / "any.safetensors", metadata={"format": "pt"})
    assert_read(tmp_path / "one" / "any.safetensors")
    assert_read(tmp_path / "one")
    assert_read(split(tmp_path / "many"))
    assert_read(split(tmp_path / "bare", index=False))


def test_a_file_the_index_does_not_name_is_left(tmp_path: Path) -> None:
    directory = split(tmp_path / "many")
    save_file(state(), directory / "consolidated.safetensors")
    assert_read(directory)


def test_values_are_cast_to_their_target(tmp_path: Path) -> None:
    save_file(state(), tmp_path / "x.safetensors")
    found = read(tmp_path / "x.safetensors", dtype=torch.float16)
    assert all(torch.equal(found[name], tensor.half()) for name, tensor in state().items())


def in_header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])

    return apply


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (lambda p: p.unlink(), "no such file or directory"),
    "empty": (lambda p: p.write_bytes(b""), "it has 0 bytes"),
    "text": (lambda p: p.write_text("hello world, this is no such file"), "its header would have"),
    "long header": (lambda p: p.write_bytes(struct.pack("<Q", 1 << 60) + b"{}"), "its header would have"),
    "no JSON": (lambda p: p.write_bytes(struct.pack("<Q", 2) + b"{x"), "its header cannot be read"),
    "deep JSON": (
        lambda p: p.write_bytes(struct.pack("<Q", 90_000) + b'{"a":' + b"[" * 89_995),
        "its header cannot be read",
    ),
    "list": (lambda p: p.write_bytes(struct.pack("<Q", 2) + b"[]"), "its header cannot be read"),
    "cut": (lambda p: p.write_bytes(p.read_bytes()[:-1]), "its tensors would end at byte"),
    "longer": (lambda p: p.write_bytes(p.read_bytes() + b"x"), "its tensors would end at byte"),
    "no shape": (in_header(lambda h: h["a"].pop("shape")), "KeyError: 'shape'"),
    "shape": (in_header(lambda h: h["a"].update(shape=[40, 31])), r"4800 bytes for F32 \[40, 31\]"),
    "real shape": (in_header(lambda h: h["a"].update(shape=[40, 30.0])), "sizes and offsets must be integers"),
    "offsets": (in_header(lambda h: h["a"].update(data_offsets=[0])), "its header cannot be read"),
    "backwards": (in_header(lambda h: h["a"].update(data_offsets=[9, 3])), "sizes and offsets must be integers"),
    "hole": (in_header(lambda h: h.pop("a")), "its tensors would end at byte"),
    "fifo": (fifo, "no regular file"),
}


@pytest.mark.parametrize("kind", list(DAMAGE))
@pytest.mark.timeout(60)
def test_damage_is_told_from_anything_else(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.safetensors"
    save_file(state(), path)
    damage, message = DAMAGE[kind]
    damage(path)
    with pytest.raises(KVFormatError, match=message) as caught:
        read(path)
    assert caught.value.code == "E308"
    assert caught.value.path == str(path)


@pytest.mark.timeout(60)
def test_truncated_anywhere_it_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(state(), path)
    raw = path.read_bytes()
    for length in range(0, len(raw), 37):
        path.write_bytes(raw[:length])
        with pytest.raises(KVFormatError, match="E308"):
            read(path)


def test_directories_that_are_not_plain(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(KVFormatError, match=r"E308.*no \*\.safetensors in this directory"):
        read(tmp_path / "empty")
    twice = split(tmp_path / "twice", index=False)
    save_file({"a": torch.ones(1)}, twice / "y.safetensors")
    with pytest.raises(KVFormatError, match=r"E308.*'a' is in 'x-00001\.safetensors' too"):
        read(twice)
    missing = split(tmp_path / "missing")
    (missing / "x-00002.safetensors").unlink()
    with pytest.raises(KVFormatError, match=r"E308.*1 of 2 files are missing, the first 'x-00002\.safetensors'"):
        read(missing)
    indexes = split(tmp_path / "indexes")
    (indexes / "y.safetensors.index.json").write_text("{}", encoding="utf-8")
    with pytest.raises(KVFormatError, match=r"E308.*2 indexes"):
        read(indexes)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"weight_map": []}', '{"weight_map": {"a": "../x.safetensors"}}'])
def test_an_index_that_is_none(tmp_path: Path, text: str) -> None:
    directory = split(tmp_path / "many")
    (directory / "x.safetensors.index.json").write_text(text, encoding="utf-8")
    with pytest.raises(KVFormatError, match=r"E308.*index"):
        read(directory)


def test_a_state_with_foreign_names_is_selected_and_renamed(tmp_path: Path) -> None:
    model = tiny_model("gpt2")
    save_file(
        {f"lm.{name.replace('.attn.', '.attention.')}": t for name, t in model.transformer.state_dict().items()}
        | {"head.weight": torch.ones(3)},
        tmp_path / "state.safetensors",
    )
    tiny_config("gpt2").save_pretrained(tmp_path / "config")
    source = CheckpointSource(
        kind="safetensors",
        path=tmp_path / "state.safetensors",
        select=r"^lm\.",
        rename=((r"^lm\.", ""), (r"\.attention\.", ".attn.")),
    )
    found = load_decoder(tmp_path / "config", checkpoint=source).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.transformer.state_dict().items())


def test_a_directory_that_save_pretrained_wrote_is_a_checkpoint_too(tmp_path: Path) -> None:
    saved = save_tiny(tmp_path / "model", "gemma3", tokenizer=False)
    expected = load_decoder(saved).state_dict()
    found = load_decoder(saved, checkpoint=f"safetensors:{saved}").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
