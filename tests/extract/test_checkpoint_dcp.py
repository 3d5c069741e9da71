"""DCP directories: what is read of them, over how many files, and what damage is found."""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, Metadata

from kvformat.errors import KVFormatError
from kvformat.extract.checkpoint import CheckpointSource
from kvformat.extract.checkpoint.dcp import DcpCheckpoint, _overlap
from kvformat.extract.checkpoint.metadata import read_metadata
from kvformat.extract.checkpoint.reading import CountedFiles
from kvformat.extract.hf.loading import load_decoder, load_from_checkpoint
from kvformat.extract.weights import state_digest
from tests.extract.checkpoints import cpu_ranks, save_dcp, training_state
from tests.models import save_tiny, tiny_config, tiny_model

MOT = "mot"


def read(path: Path, *names: str) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint, in their own dtype."""
    with CountedFiles() as files:
        checkpoint = DcpCheckpoint(path, files)
        entries = checkpoint._metadata.state_dict_metadata
        wanted = names or [name for name, form in checkpoint.forms.items() if form.dtype is not None]
        targets = {name: torch.full(entries[name].size, 7, dtype=entries[name].properties.dtype) for name in wanted}
        checkpoint.read(targets)
    return targets


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(40, 30, generator=generator),
        "b": torch.randn(5, 3, 7, generator=generator).bfloat16(),
        "c": torch.randn(33, generator=generator).t(),
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 4),
        "numbers": torch.arange(6, dtype=torch.int64),
        "strided": torch.randn(8, 6, generator=generator).t(),
        "step": 3,
    }


def assert_read(path: Path) -> None:
    expected = {name: value for name, value in state().items() if isinstance(value, torch.Tensor)}
    found = read(path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("options", [{}, {"single_file_per_rank": False}, {"thread_count": 3}])
def test_tensors_come_out_as_they_went_in_whatever_files_they_lie_in(tmp_path: Path, options: dict[str, Any]) -> None:
    path = save_dcp(state(), tmp_path / "dcp", **options)
    assert_read(path)
    assert len(list(path.glob("*.distcp"))) >= (1 if not options else 3)
    assert not dist.is_initialized()


def test_nested_states_have_dotted_names(tmp_path: Path) -> None:
    path = save_dcp({"model": {"x": {"y": torch.arange(3.0)}}, "list": [torch.ones(2)]}, tmp_path / "dcp")
    assert read(path, "model.x.y")["model.x.y"].tolist() == [0.0, 1.0, 2.0]
    assert read(path, "list.0")["list.0"].tolist() == [1.0, 1.0]


def test_checksums_that_were_not_saved_are_not_asked_for(tmp_path: Path) -> None:
    asked = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        path = save_dcp(state(), tmp_path / "dcp")
    finally:
        torch.serialization.set_crc32_options(asked)
    assert_read(path)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory, repository) -> tuple[Path, Path, str]:
    """A model, a checkpoint that two ranks saved of it in halves, and the digest rank 0 found in it meanwhile."""
    directory = tmp_path_factory.mktemp("sharded")
    # Odd numbers of rows: the halves differ.
    model = save_tiny(directory / "model", "qwen3", tokenizer=False, intermediate_size=45, vocab_size=321)
    printed = cpu_ranks(repository, model, directory / "dcp", directory / "store")
    return model, directory / "dcp", printed[0]


@pytest.mark.slow
def test_shards_of_two_ranks_make_up_each_tensor(sharded: tuple[Path, Path, str]) -> None:
    model, path, printed = sharded
    assert len(list(path.glob("*.distcp"))) == 2
    metadata, _ = read_metadata(path)
    entry = metadata.state_dict_metadata["net.language_model.model.layers.0.mlp.up_proj.weight"]
    assert sorted(chunk.sizes[0] for chunk in entry.chunks) == [22, 23]
    source = CheckpointSource(kind="dcp", path=path, preset=MOT)
    found = state_digest(load_decoder(model, checkpoint=source).state_dict())
    assert found == state_digest(load_decoder(model).state_dict()) == printed


@pytest.mark.slow
def test_a_missing_shard_is_named(sharded: tuple[Path, Path, str], tmp_path: Path) -> None:
    model, path, _ = sharded
    copy = shutil.copytree(path, tmp_path / "dcp")
    (copy / "__1_0.distcp").unlink()
    with pytest.raises(KVFormatError, match=r"E308.*1 of 2 files are missing, the first '__1_0\.distcp'"):
        load_decoder(model, checkpoint=CheckpointSource(kind="dcp", path=copy, preset=MOT))


def test_half_a_checkpoint_is_read_for_half_a_model(tmp_path: Path) -> None:
    reasoner = tiny_model("qwen3", hidden_size=256, intermediate_size=384, num_hidden_layers=4, vocab_size=128)
    tiny_config("qwen3", hidden_size=256, intermediate_size=384, num_hidden_layers=4, vocab_size=128).save_pretrained(
        tmp_path / "config"
    )
    whole = {
        name: tensor for name, tensor in training_state(reasoner, reasoner).items() if name.startswith("net.language_")
    }
    path = save_dcp(whole, tmp_path / "dcp")
    size = sum(file.stat().st_size for file in path.iterdir())
    source = CheckpointSource(kind="dcp", path=path, preset=MOT)
    load_from_checkpoint(tmp_path / "config", source)  # what is imported on the way is read before
    before = _system_read()
    loaded = load_from_checkpoint(tmp_path / "config", source)
    by_system = _system_read() - before
    needed = sum(tensor.nbytes for tensor in loaded.module.state_dict().values())
    assert needed < loaded.nbytes <= 0.55 * size
    assert loaded.nbytes <= by_system <= 1.02 * loaded.nbytes + (1 << 16)  # besides: the configuration


def _system_read() -> int:
    """Bytes this process has read so far, as the system counts them."""
    return int(Path("/proc/self/io").read_text(encoding="ascii").split()[1])


def test_a_named_class_is_refused_and_nothing_it_says_is_run(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "harm"),)

    path = save_dcp(state(), tmp_path / "dcp")
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.planner_data = {"a": Harmful()}
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(KVFormatError, match=r"E308.*it names posix\.mkdir, which is none of DCP's records"):
        read(path)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    ("target", "arguments"),
    [(getattr, (torch, "hub")), (getattr, (Metadata, "__init__")), (eval, ("1",)), (torch.load, ("x",))],
)
def test_what_is_pickled_by_name_is_not_a_way_around(tmp_path: Path, target: Any, arguments: Any) -> None:
    class Around:
        def __reduce__(self) -> Any:
            return target, arguments

    if arguments[0] is torch:
        arguments = (dict, "hub")  # a module cannot be pickled; any class will do
    path = tmp_path / "dcp"
    path.mkdir()
    (path / ".metadata").write_bytes(pickle.dumps(Metadata({}, Around(), {})))
    with pytest.raises(KVFormatError, match="E308"):
        read(path)


def test_a_path_among_the_metadata_is_no_reason_to_refuse(tmp_path: Path) -> None:
    path = save_dcp(state(), tmp_path / "dcp")
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.storage_meta.checkpoint_id = tmp_path
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_read(path)


def edited(change: Callable[[Metadata], None]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        metadata = pickle.loads((path / ".metadata").read_bytes())
        change(metadata)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))

    return apply


def in_file(change: Callable[[bytearray], Any]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        (file,) = path.glob("*.distcp")
        raw = bytearray(file.read_bytes())
        file.write_bytes(change(raw) or raw)

    return apply


def infos(metadata: Metadata, name: str) -> list[Any]:
    return [info for index, info in metadata.storage_data.items() if index.fqn == name]


def flip_in_values(raw: bytearray) -> None:
    at = raw.find(state()["a"].numpy().tobytes())
    assert at > 0
    raw[at + 1000] ^= 16


def fifo(name: str) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        (target,) = path.glob(name)
        target.unlink()
        os.mkfifo(target)

    return apply


def other_save(path: Path) -> None:
    other = save_dcp(state() | {"a": torch.zeros(30, 40)}, path.parent / "other")
    shutil.copy(other / "__0_0.distcp", path / "__0_0.distcp")


def set_(target: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(target, name, value)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no directory": (shutil.rmtree, "no such directory; give the directory that"),
    "a file": (lambda p: (shutil.rmtree(p), p.write_text("x")), "a file stands there, not a directory"),
    "empty": (lambda p: [f.unlink() for f in p.iterdir()], "this is no directory that torch.distributed.checkpoint s"),
    "below": (lambda p: shutil.copytree(p, p / "model") and (p / ".metadata").unlink(), "but in 'model' below"),
    "no metadata": (lambda p: (p / ".metadata").unlink(), "which DCP writes last: its save did not finish"),
    "saved alone": (
        lambda p: (p / ".metadata").rename(p / "__0.metadata"),
        r"each rank saved alone \(no_dist=True\)",
    ),
    "metadata empty": (lambda p: (p / ".metadata").write_bytes(b""), "or it is damaged"),
    "metadata text": (lambda p: (p / ".metadata").write_text("hello"), "no metadata of a DCP checkpoint"),
    "metadata foreign": (
        lambda p: (p / ".metadata").write_bytes(pickle.dumps({"a": 1})),
        "it holds no DCP metadata",
    ),
    "metadata fifo": (fifo(".metadata"), "E308"),
    "metadata directory": (lambda p: ((p / ".metadata").unlink(), (p / ".metadata").mkdir()), "E308"),
    "no storage": (edited(lambda m: set_(m, storage_data=None)), "does not say where the tensors lie"),
    "odd entry": (edited(lambda m: m.state_dict_metadata.update(x=3)), "neither a tensor nor an object"),
    "odd size": (
        edited(lambda m: set_(m.state_dict_metadata["a"], size=(40, 30))),
        "'a' has sizes that are none",
    ),
    "negative size": (
        edited(lambda m: set_(m.state_dict_metadata["a"].chunks[0], sizes=torch.Size([-40, -30]))),
        "'a' has sizes that are none",
    ),
    "rank": (edited(lambda m: set_(m.state_dict_metadata["a"], size=torch.Size([40, 30, 1]))), "sizes that are none"),
    "odd dtype": (edited(lambda m: set_(m.state_dict_metadata["a"].properties, dtype="x")), "'a' has no dtype"),
    "odd offset": (edited(lambda m: set_(infos(m, "a")[0], offset=-1)), "'a' lies at"),
    "odd path": (edited(lambda m: set_(infos(m, "a")[0], relative_path=b"x")), "'a' lies at"),
    "outside": (edited(lambda m: set_(infos(m, "a")[0], relative_path="../x")), "outside the directory"),
    "absolute": (edited(lambda m: set_(infos(m, "a")[0], relative_path="/etc/passwd")), "outside the directory"),
    "unplaced": (
        edited(lambda m: [m.storage_data.pop(i) for i in list(m.storage_data) if i.fqn == "a"]),
        "does not say where 'a' lies",
    ),
    "chunk missing": (
        edited(lambda m: m.state_dict_metadata["a"].chunks.clear()),
        r"'a' has 1,200 values, and its 0 chunks do not make them up \(0 values\)",
    ),
    "chunk twice": (
        edited(lambda m: m.state_dict_metadata["a"].chunks.append(m.state_dict_metadata["a"].chunks[0])),
        r"its 2 chunks do not make them up",
    ),
    "chunk outside": (
        edited(lambda m: set_(m.state_dict_metadata["a"].chunks[0], offsets=torch.Size([1, 0]))),
        "its 1 chunks do not make them up",
    ),
    "transformed": (
        edited(lambda m: set_(infos(m, "a")[0], transform_descriptors=["stream.zstd"])),
        r"was saved through \['stream\.zstd'\]",
    ),
    "file missing": (lambda p: (p / "__0_0.distcp").unlink(), "1 of 1 files are missing, the first '__0_0.distcp'"),
    "file fifo": (fifo("*.distcp"), "this is no regular file"),
    "file empty": (in_file(bytearray.clear), "is cut short: the file has 0 bytes"),
    "file cut": (in_file(lambda raw: raw[: len(raw) // 2]), "is cut short: the file has"),
    "file foreign": (in_file(lambda raw: bytearray(len(raw))), "is no tensor that loads"),
    "values": (in_file(flip_in_values), "'a' .*is damaged: archive/data/0 has another checksum than was saved"),
    "other save": (other_save, r"'a' .* holds torch\.float32 \[30, 40\], expected torch\.float32 \[40, 30\]"),
}


@pytest.mark.parametrize("kind", list(DAMAGE))
@pytest.mark.timeout(60)
def test_damage_is_told_from_anything_else(tmp_path: Path, kind: str) -> None:
    path = save_dcp(state(), tmp_path / "dcp")
    damage, message = DAMAGE[kind]
    damage(path)
    with pytest.raises(KVFormatError, match=message) as caught:
        read(path)
    assert caught.value.code == "E308"
    assert str(path) in str(caught.value.path)


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_dcp(state(), tmp_path / "dcp")
    plain = os.open

    def refused(file: Any, *args: Any, **kwargs: Any) -> int:
        if str(file).endswith(".distcp"):
            raise PermissionError(13, "Permission denied")
        return plain(file, *args, **kwargs)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(KVFormatError, match="Permission denied") as caught:
        read(path)
    assert caught.value.code == "E207"


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "harm"),)

    path = save_dcp(state() | {"object": Harmful()}, tmp_path / "dcp")
    metadata, _ = read_metadata(path)
    assert isinstance(metadata.state_dict_metadata["object"], BytesStorageMetadata)
    assert_read(path)
    assert not (tmp_path / "harm").exists()


@pytest.mark.timeout(120)
def test_truncated_anywhere_it_is_refused(tmp_path: Path) -> None:
    path = save_dcp(state(), tmp_path / "dcp")
    for name in (".metadata", "__0_0.distcp"):
        raw = (path / name).read_bytes()
        for length in range(0, len(raw), max(1, len(raw) // 60)):
            (path / name).write_bytes(raw[:length])
            with pytest.raises(KVFormatError) as caught:
                read(path)
            assert caught.value.code == "E308"
        (path / name).write_bytes(raw)
    assert_read(path)


@pytest.mark.timeout(120)
def test_flipped_anywhere_nothing_foreign_is_raised_and_no_value_changes(tmp_path: Path) -> None:
    path = save_dcp(state(), tmp_path / "dcp")
    expected = read(path)
    chance = random.Random(0)
    for name, count in ((".metadata", 150), ("__0_0.distcp", 150)):
        raw = (path / name).read_bytes()
        for _ in range(count):
            damaged = bytearray(raw)
            damaged[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
            (path / name).write_bytes(damaged)
            try:
                found = read(path)
            except KVFormatError as error:
                assert error.code == "E308"  # noqa: PT017 -- most flips raise, those in padding do not
            else:
                if name != ".metadata":  # a flip there may rename a tensor
                    assert all(torch.equal(found[one], tensor) for one, tensor in expected.items())
        (path / name).write_bytes(raw)


def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def test_chunks_that_share_values() -> None:
    quarters = [chunk((r, c), (2, 3)) for r in (0, 2) for c in (0, 3)]
    pinwheel = [chunk((0, 0), (1, 2)), chunk((0, 2), (2, 1)), chunk((2, 1), (1, 2)), chunk((1, 0), (2, 1))]
    assert not _overlap([chunk((0,), (4,))])
    assert not _overlap([chunk((4,), (4,)), chunk((0,), (4,))])
    assert not _overlap(quarters)
    assert not _overlap([*pinwheel, chunk((1, 1), (1, 1))])
    assert _overlap([chunk((0,), (4,)), chunk((3,), (4,))])
    assert _overlap([*quarters, chunk((1, 1), (1, 1))])
    assert _overlap([chunk((), ()), chunk((), ())])
