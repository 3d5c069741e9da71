"""Real extractions killed at any moment: no dataset or a whole one, and the same call completes it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvformat
from tests.models import save_tiny, write_documents

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = 24
KILLS = 50


class Server:
    """See :mod:`tests.reliability.extracting`."""

    def __init__(self, directory, model, lines, shard_nbytes):
        self._directory = directory
        documents = write_documents(directory / "documents.jsonl", lines)
        self.undisturbed = directory / "undisturbed"
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.reliability.extracting",
                model,
                documents,
                str(shard_nbytes),
                self.undisturbed,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )
        self.id = self._process.stdout.readline().strip()
        assert len(self.id) == 64

    def close(self):
        self._process.stdin.close()
        assert self._process.wait() == 0
        self._process.stdout.close()

    def extract(self, out, *, kill_after=None):
        """Extract, or kill the extraction after so many signs of progress: exit status and how many there were."""
        pipe = self._directory / "pipe"
        os.mkfifo(pipe)
        self._process.stdin.write(json.dumps({"out": str(out), "pipe": str(pipe)}) + "\n")
        self._process.stdin.flush()
        # It waits for the pipe to be opened: until then the number can be no other process's.
        process = os.pidfd_open(int(self._process.stdout.readline()))
        fd = os.open(pipe, os.O_RDONLY)
        pipe.unlink()
        seen = 0
        while data := os.read(fd, 1 << 16 if kill_after is None else kill_after - seen):
            seen += len(data)
            if seen == kill_after:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                break
        status = int(self._process.stdout.readline())
        os.close(process)
        os.close(fd)
        return status, seen


def check_whole(location, server):
    report = kvformat.verify(location)
    assert report.findings == ()
    assert (report.ok, report.id, report.records) == (True, server.id, DOCUMENTS)
    assert {warning.code for warning in report.warnings} <= {"W002"}


def kind_of(name):
    """What a staged file is."""
    return "receipt" if re.fullmatch(r"[0-9]{8}\.json", name) else Path(name).suffix


class State(NamedTuple):
    """What lies at a location: files by the folder they are in, without what is random about their names."""

    published: bool
    staged: tuple[tuple[str, int], ...]
    sealed: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, out):
        files = [path.relative_to(out) for path in out.rglob("*") if path.is_file()]
        staged = Counter(kind_of(path.name) for path in files if path.parts[0] == ".staging")
        sealed = Counter(path.parts[0] for path in files if path.parts[0] != ".staging")
        return cls((out / "kvformat.json").exists(), tuple(sorted(staged.items())), tuple(sorted(sealed.items())))

    @property
    def kind(self):
        receipts = dict(self.staged).get("receipt", 0)
        return "published" if self.published else "some shards" if receipts > 0 else "no shard"


def kill_and_resume(server, tmp_path, kills):
    """Kill one extraction at each of so many points and let the same call complete it; states it was found in."""
    status, total = server.extract(tmp_path / "all")
    assert status == 0
    assert total > 5 * DOCUMENTS, "operations on the disk are told too"
    check_whole(tmp_path / "all", server)
    chance = random.Random(0)
    seen = Counter()
    for number in range(kills):
        point = chance.randrange(number * total // kills, (number + 1) * total // kills) + 1
        out = tmp_path / f"{number}"
        status, _ = server.extract(out, kill_after=point)
        assert status in (-signal.SIGKILL, 0)
        state = State.of(out)
        seen[state] += 1
        if state.published:
            check_whole(out, server)
        else:
            with pytest.raises(kvformat.DatasetNotFoundError):
                kvformat.open(out)
        status, steps = server.extract(out)
        assert status == 0
        assert steps <= total
        check_whole(out, server)
    assert sum(seen.values()) == kills
    assert {state.kind for state in seen} == {"no shard", "some shards", "published"}, seen
    assert len(seen) > kills // 3, seen  # the points are spread, and no two thirds of them fall together


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kill_an_extraction_at_fifty_points(tmp_path):
    model = save_tiny(tmp_path / "model", "gemma3", tokenizer=False)
    lines = [
        {"id": f"doc-{number}", "token_ids": [(7 * number + step) % 250 for step in range(3 + number)]}
        for number in range(DOCUMENTS)
    ]
    server = Server(tmp_path, model, lines, 24 << 10)
    try:
        kill_and_resume(server, tmp_path, KILLS)
    finally:
        server.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kill_an_extraction_of_a_real_model_at_fifty_points(tmp_path, smollm2):
    """The lower layers of real weights, and texts that are tokens already: what is killed each time starts quickly."""
    whole = AutoModelForCausalLM.from_pretrained(smollm2, num_hidden_layers=4, dtype=torch.bfloat16)
    whole.save_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    texts = [f"{number} bottles of beer on the wall, " * (1 + number % 3) for number in range(DOCUMENTS)]
    lines = [{"id": f"doc-{number}", "token_ids": tokenizer(text)["input_ids"]} for number, text in enumerate(texts)]
    server = Server(tmp_path, tmp_path / "model", lines, 256 << 10)
    try:
        kill_and_resume(server, tmp_path, KILLS)
    finally:
        server.close()
