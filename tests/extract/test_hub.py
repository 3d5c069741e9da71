"""Hub ids: which revision is loaded and which commit is recorded, from a real cache and without a network."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kvformat
from tests.models import live_attention, save_tiny, tiny_model, write_documents

COMMITS = {"main": "1" * 40, "v2": "20" * 20}
SEEDS = {"main": 0, "v2": 5}
SCRIPT = """
import json, sys
import kvformat
from kvformat.extract import estimate, run
for options in json.loads(sys.argv[1]):
    try:
        estimate(**options)
        print(run(**options).id)
    except kvformat.KVFormatError as error:
        print(error.code)
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache as huggingface_hub lays it out, with two revisions of ``org/name`` whose weights differ."""
    home = tmp_path_factory.mktemp("hub")
    repository = home / "hub" / "models--org--name"
    for revision, commit in COMMITS.items():
        saved = save_tiny(home / revision, seed=SEEDS[revision])
        snapshot = repository / "snapshots" / commit
        for folder in (snapshot, repository / "blobs", repository / "refs"):
            folder.mkdir(parents=True, exist_ok=True)
        for file in saved.iterdir():
            blob = hashlib.sha256(file.read_bytes()).hexdigest()
            shutil.copy(file, repository / "blobs" / blob)
            (snapshot / file.name).symlink_to(f"../../blobs/{blob}")
        (repository / "refs" / revision).write_text(commit)
    return home


@pytest.fixture
def extract(cache: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Run extractions one after the other in a process that has this cache: ids, or codes of errors."""
    documents = write_documents(tmp_path / "d.jsonl", [{"id": "a", "text": "some text"}])

    def call(*given: dict[str, Any]) -> list[str]:
        common = {"model": "org/name", "documents": str(documents)}
        environment = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_CACHE", "HF_HOME")}
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", SCRIPT, json.dumps([common | options for options in given])],
            capture_output=True,
            text=True,
            check=True,
            env=environment | {"HF_HOME": str(cache), "HF_HUB_OFFLINE": "1"},
        )
        return done.stdout.split()

    return call


def test_each_revision_is_extracted_and_its_commit_recorded(extract: Callable[..., list[str]], tmp_path: Path) -> None:
    asked: dict[str, str | None] = {"default": None, "main": "main", "v2": "v2", "commit": COMMITS["v2"]}
    ids = extract(*({"revision": revision, "out": str(tmp_path / name)} for name, revision in asked.items()))
    found = {name: kvformat.open(tmp_path / name) for name in asked}
    assert ids == [dataset.id for dataset in found.values()]
    assert ids[0] == ids[1] != ids[2] == ids[3]
    for name, revision in (("default", "main"), ("main", "main"), ("v2", "v2"), ("commit", "v2")):
        dataset = found[name]
        assert dataset.provenance["revision"] == COMMITS[revision]
        assert dataset.provenance["model"] == "org/name"
        live = live_attention(tiny_model("llama", seed=SEEDS[revision]), dataset["a"].extra("token_ids").tolist())
        for layer, (key, value) in enumerate(live):
            assert torch.equal(dataset["a"].slab("key", layer=layer), key)
            assert torch.equal(dataset["a"].slab("value", layer=layer), value)


def test_another_revision_is_no_finished_run_and_an_absent_one_is_named(
    extract: Callable[..., list[str]], tmp_path: Path
) -> None:
    out = str(tmp_path / "ds")
    first, again, other, absent = extract(
        {"out": out}, {"out": out}, {"out": out, "revision": "v2"}, {"out": out, "revision": "v3"}
    )
    assert (first, other, absent) == (again, "E118", "E304")
