"""A small Ray cluster on this machine; its workers do what the functions here say."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from kvformat.errors import ConflictError, DependencyError, InputError, UsageError, make_error
from kvformat.extract.ray_engine import run_with_ray

MIB = 1 << 20


@pytest.fixture(scope="module")
def cluster():
    """Two CPUs, no dashboard, nothing reported; Ray's own warnings are its own affair."""
    with (
        warnings.catch_warnings(),
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="kvr-", ignore_cleanup_errors=True) as folder,  # sockets want short paths
    ):
        warnings.simplefilter("ignore")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray = pytest.importorskip("ray")
        ray.init(
            address="local",
            num_cpus=2,
            num_gpus=0,
            object_store_memory=80 * MIB,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
        )
        try:
            yield ray
        finally:
            ray.shutdown()


# ------------------------------------------------------------------------------------------------- what the workers do


def note(folder: Path, text: str, line: str) -> None:
    with (folder / text).open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")


def lines(folder: Path, text: str) -> list[str]:
    path = folder / text
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def prepare(folder: Path):
    note(folder, "prepared", str(os.getpid()))
    return partial(extract, folder)


def extract(folder: Path, ordinals) -> str:
    for ordinal in ordinals:
        note(folder, "extracted", f"{ordinal} {os.getpid()}")
        if ordinal == 3:
            raise make_error("E104", "'k' holds NaN", record="doc-7", layer=2)
        if ordinal == 5:
            raise LookupError("no such thing")
        if ordinal == 7:
            os._exit(9)
    return f"did {ordinals}"


def prepare_in_vain(folder: Path):
    raise make_error("E304", "the model does not load", path=folder)


def done(folder: Path) -> list[int]:
    return sorted(int(line.split()[0]) for line in lines(folder, "extracted"))


# --------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.usefixtures("cluster")
class TestOnACluster:
    def test_all_shards_are_extracted_and_a_worker_prepares_once(self, tmp_path: Path) -> None:
        told: dict[int, str] = {}
        run_with_ray([0, 1, 2, 4, 6, 8, 9], partial(prepare, tmp_path), on_done=told.__setitem__)
        assert done(tmp_path) == sorted(told) == [0, 1, 2, 4, 6, 8, 9]
        assert told == {ordinal: f"did [{ordinal}]" for ordinal in told}
        prepared = lines(tmp_path, "prepared")
        assert len(prepared) == len(set(prepared)) <= 2
        assert {line.split()[1] for line in lines(tmp_path, "extracted")} == set(prepared)
        assert str(os.getpid()) not in prepared

    def test_no_more_workers_than_asked_for(self, tmp_path: Path) -> None:
        run_with_ray([0, 1, 2, 4], partial(prepare, tmp_path), num_workers=1, num_cpus=0.5)
        assert len(lines(tmp_path, "prepared")) == 1
        assert [line.split()[0] for line in lines(tmp_path, "extracted")] == ["0", "1", "2", "4"]

    def test_a_failure_is_that_of_its_shard_and_the_others_are_extracted(self, tmp_path: Path) -> None:
        with pytest.raises(InputError) as caught:
            run_with_ray([3, 5, 0, 1, 2, 4], partial(prepare, tmp_path))
        error = caught.value
        assert (error.code, error.record, error.layer) == ("E104", "doc-7", 2)
        assert error.message == "shard 3: 'k' holds NaN; failed too: 5"
        assert done(tmp_path) == [0, 1, 2, 3, 4, 5]

    def test_a_foreign_failure_is_raised_as_it_is(self, tmp_path: Path) -> None:
        with pytest.raises(LookupError, match="no such thing") as caught:
            run_with_ray([0, 5, 1], partial(prepare, tmp_path))
        assert caught.value.__notes__ == ["shard 5 on a Ray cluster"]
        assert done(tmp_path) == [0, 1, 5]

    def test_a_worker_that_dies_fails_its_shard_alone(self, tmp_path: Path) -> None:
        with pytest.raises(ConflictError, match="shard 7: the Ray worker died") as caught:
            run_with_ray([7, 0, 1, 2], partial(prepare, tmp_path), num_workers=1)
        assert caught.value.code == "E119"
        assert done(tmp_path) == [0, 1, 2, 7]
        assert len(lines(tmp_path, "prepared")) == 2

    def test_too_many_failures_begin_nothing_more(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"shard 3: .+; not begun: 2 shards"):
            run_with_ray([3, 0, 1], partial(prepare, tmp_path), num_workers=1, most_failures=1)
        assert done(tmp_path) == [3]

    def test_a_model_that_does_not_load_is_what_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="the model does not load") as caught:
            run_with_ray(range(100), partial(prepare_in_vain, tmp_path))
        assert caught.value.code == "E304"

    def test_an_interrupt_ends_the_workers(self, tmp_path: Path, cluster) -> None:
        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run_with_ray([0, 1, 2, 4], partial(prepare, tmp_path), on_done=interrupt)
        # Their resources are free again: others can start.
        run_with_ray([8, 9], partial(prepare, tmp_path))
        assert {8, 9} <= set(done(tmp_path))

    def test_a_worker_that_fits_nowhere_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="it has 2 CPU, 0 GPU"):
            run_with_ray([0], partial(prepare, tmp_path), num_gpus=1)

    def test_no_shards_are_no_work(self, tmp_path: Path) -> None:
        run_with_ray([], partial(prepare, tmp_path))
        assert lines(tmp_path, "prepared") == []


def test_ray_is_loaded_only_when_it_is_used() -> None:
    code = "import sys, kvformat.extract.ray_engine; print({'ray', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout == "set()\n"


def test_without_ray_the_command_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(DependencyError, match=r"pip install 'kvformat\[ray\]'") as caught:
        run_with_ray([0], lambda: print)
    assert caught.value.code == "E205"


@pytest.mark.parametrize("needs", [{"num_cpus": 0}, {"num_cpus": -1}])
def test_a_worker_needs_something(needs: dict[str, float]) -> None:
    pytest.importorskip("ray")
    with pytest.raises(UsageError, match="some of num_cpus and num_gpus"):
        run_with_ray([0], lambda: print, **needs)


# ----------------------------------------------------------------------------------------------------------- addresses


class Unreached(ModuleType):
    """A Ray that says how it was called, and finds no cluster."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.called: list[str | None] = []

    def is_initialized(self) -> bool:
        return False

    def init(self, *, address: str | None, include_dashboard: bool, log_to_driver: bool) -> None:
        assert not include_dashboard
        assert not log_to_driver
        self.called.append(address)
        raise ConnectionError("could not find any running Ray instance")


@pytest.fixture
def unreached(monkeypatch: pytest.MonkeyPatch) -> Unreached:
    ray = Unreached()
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    return ray


def answering(answer: bytes) -> str:
    """Address of a server that says this to the first one who connects, having been spoken to."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with server, server.accept()[0] as connection, contextlib.suppress(ConnectionError):
            connection.recv(1)
            connection.sendall(answer)
            while connection.recv(1 << 10):
                pass

    threading.Thread(target=serve, daemon=True).start()
    return f"127.0.0.1:{server.getsockname()[1]}"


def refused(address: str | None) -> str:
    with pytest.raises(UsageError) as caught:
        run_with_ray([0], lambda: print, address=address)
    assert caught.value.code == "E081"
    return caught.value.message


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nothing_listens_is_refused_before_ray_tries(unreached: Unreached, scheme: str) -> None:
    with socket.socket() as bound:  # and never listening: nobody can be given this port meanwhile
        bound.bind(("127.0.0.1", 0))
        address = f"{scheme}127.0.0.1:{bound.getsockname()[1]}"
        message = refused(address)
    assert message.startswith(f"no Ray cluster answers at {address!r}")
    assert "check --ray-address" in message
    assert unreached.called == []


def test_the_address_of_the_environment_is_tried_too(unreached: Unreached, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert "'127.0.0.1:1'" in refused(None)
    assert unreached.called == []


@pytest.mark.parametrize("address", ["127.0.0.1", "head:", ":6379", "ray://head", "head:port"])
def test_an_address_of_another_form_is_refused(unreached: Unreached, address: str) -> None:
    assert refused(address) == f"the address of a Ray cluster is host:port, ray://host:port or auto, found {address!r}"
    assert unreached.called == []


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_another_server_at_the_address_is_refused(unreached: Unreached, answer: bytes) -> None:
    address = answering(answer)
    assert f"what answers at {address!r} is no Ray cluster" in refused(address)
    assert unreached.called == []


def test_a_server_that_says_nothing_is_not_waited_for(unreached: Unreached, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvformat.extract.ray_engine._ANSWER_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert f"no Ray cluster answers at {address!r} (timed out)" in refused(address)
    assert unreached.called == []


def test_what_ray_says_of_an_address_is_passed_on(unreached: Unreached) -> None:
    address = answering(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
    message = refused(address)
    assert f"at {address!r} (could not find any running Ray instance)" in message
    assert "no Ray cluster to work with at 'auto'" in refused("auto")
    assert unreached.called == [address, "auto"]
