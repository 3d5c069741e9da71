"""What ``kvformat.loader`` gives out, and what it does not load."""

from __future__ import annotations

import inspect
import pydoc
import subprocess
import sys

import pytest

import kvformat.loader
from tests.loader.made import make_dataset


def run(program: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_public_name():
    names = kvformat.loader.__all__
    assert names == sorted(set(names), key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    assert set(names) == set(kvformat.loader._LAZY)
    assert set(names) <= set(dir(kvformat.loader))
    for name in names:
        found = getattr(kvformat.loader, name)
        assert found.__module__ == f"kvformat.loader.{kvformat.loader._LAZY[name]}"
        assert len(found.__doc__) > 20
        assert getattr(kvformat.loader, name) is found
    with pytest.raises(AttributeError, match="no attribute 'KVLoaders'"):
        kvformat.loader.KVLoaders  # noqa: B018 -- asked for what it raises


@pytest.mark.parametrize("name", kvformat.loader.__all__)
def test_its_public_members_are_documented(name):
    found = getattr(kvformat.loader, name)
    if not isinstance(found, type):
        return
    members = [member for member in vars(found) if not member.startswith("_")]
    struct = set(getattr(found, "__struct_fields__", ())) | set(getattr(found, "__slots__", ()))
    for member in members:
        if member not in struct:
            assert getattr(found, member).__doc__, member


def test_the_package_loads_no_torch():
    program = """
import sys
import kvformat.loader
from kvformat.loader import BatchSampler, Collection, Cursor, Draw, LoaderStats, concat, mix
dir(kvformat.loader)
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "transformers", "torchdata", "fsspec"}))
"""
    assert run(program) == "[]"


def test_a_sampler_needs_no_torch(tmp_path):
    make_dataset(tmp_path / "data", 9)
    program = """
import sys
import kvformat
from kvformat.loader import BatchSampler, concat
dataset = kvformat.open(sys.argv[1])
sampler = BatchSampler(concat([dataset]), max_tokens=6, seed=1)
first = next(iter(sampler))
state = sampler.state_dict(after=first)
resumed = BatchSampler(sys.argv[1], max_tokens=6, seed=1)
resumed.load_state_dict(state)
print(len(first) + sum(map(len, resumed)), len(dataset), "torch" in sys.modules)
"""
    assert run(program, tmp_path / "data") == "9 9 False"


def test_a_loader_needs_no_transformers(tmp_path):
    make_dataset(tmp_path / "data", 3)
    program = """
import sys
sys.modules["transformers"] = sys.modules["torchdata"] = None
import kvformat
from kvformat.loader import BatchSampler, KVLoader, gather
dataset = kvformat.open(sys.argv[1])
loader = KVLoader(dataset, BatchSampler(dataset, batch_size=2))
print([len(batch) for batch in loader], gather(dataset, ["data-1"])["k"].shape)
"""
    assert run(program, tmp_path / "data") == "[2, 1] torch.Size([1, 2, 1, 2])"


def test_a_process_ends_while_batches_are_packed_ahead(tmp_path):
    """An iteration nobody finished keeps no process from ending."""
    make_dataset(tmp_path / "data", 20)
    program = """
import sys
import kvformat
from kvformat.loader import KVLoader
dataset = kvformat.open(sys.argv[1])
batches = iter(KVLoader(dataset, [[n % 20] for n in range(10_000)]))
print(next(batches).records)
"""
    assert run(program, tmp_path / "data") == "[0]"


@pytest.mark.parametrize("name", kvformat.loader.__all__)
def test_help_of_every_name(name: str) -> None:
    """What `help` does first: the signature, with its annotations."""
    found = getattr(kvformat.loader, name)
    assert inspect.signature(found) is not None
    assert pydoc.render_doc(found)
