"""Which client is chosen, what is missing, and that a forked child gets one that works."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fsspec.registry import _registry as loaded_file_systems

from kvformat.errors import KVFormatError
from kvformat.storage import connect as module
from kvformat.storage.connect import connect
from kvformat.storage.fsspec_store import FsspecStore
from kvformat.storage.obstore_options import Inexpressible, target_of
from kvformat.storage.obstore_store import ObstoreStore
from kvformat.storage.remote_options import RemoteOptions

KEYS = {"key": "k", "secret": "s", "client_kwargs": {"region_name": "eu-west-1"}}
AUTO = RemoteOptions()
OBSTORE = RemoteOptions(transport="obstore")
FSSPEC = RemoteOptions(transport="fsspec")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)


def without(monkeypatch, *packages: str) -> None:
    """Let packages be missing."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name in packages else find(name, *rest)
    )
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        monkeypatch.delitem(sys.modules, name)
    for name in packages:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(loaded_file_systems, "s3", raising=False)  # what fsspec imported once


def test_auto_is_obstore_where_it_can_serve() -> None:
    store = connect("s3://bucket/ds", KEYS, AUTO)
    assert isinstance(store, ObstoreStore)
    assert store.url == "s3://bucket/ds"


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("memory://x", {}),
        ("http://127.0.0.1:1/ds", {}),
        ("s3://bucket/ds", {}),
        ("s3://bucket/ds", {"profile": "work"}),
        ("s3://bucket/ds", {"key": "k", "secret": "s"}),
        ("s3://bucket/ds", {**KEYS, "s3_additional_kwargs": {"ServerSideEncryption": "aws:kms"}}),
        ("s3://bucket/ds", {**KEYS, "config_kwargs": {"signature_version": "s3v4"}}),
        ("s3://bucket/a//b", KEYS),
    ],
)
def test_auto_is_fsspec_elsewhere(url: str, options: dict) -> None:
    assert isinstance(connect(url, options, AUTO), FsspecStore)


@pytest.mark.parametrize(("url", "options"), [("memory://x", {}), ("s3://bucket/ds", {"profile": "work"})])
def test_obstore_by_name_never_turns_into_another(url: str, options: dict) -> None:
    with pytest.raises(KVFormatError, match=r"E081.*transport='auto'"):
        connect(url, options, OBSTORE)


def test_fsspec_by_name() -> None:
    assert isinstance(connect("s3://bucket/ds", KEYS, FSSPEC), FsspecStore)


def test_no_such_transport() -> None:
    with pytest.raises(KVFormatError, match=r"E081.*'boto'"):
        connect("s3://bucket/ds", KEYS, RemoteOptions(transport="boto"))


def test_no_such_scheme() -> None:
    with pytest.raises(KVFormatError, match="E206"):
        connect("nosuch://bucket/ds", {}, AUTO)


def test_options_the_file_system_refuses_are_not_shown() -> None:
    with pytest.raises(KVFormatError, match="E081") as caught:
        connect("s3://bucket", {"key": "hunter2", "max_concurrency": -1}, FSSPEC)
    assert "hunter2" not in str(caught.value)


def test_missing_packages_are_named(monkeypatch) -> None:
    without(monkeypatch, "s3fs", "obstore")
    with pytest.raises(KVFormatError, match=r"E205.*pip install 'kvformat\[s3\]'"):
        connect("s3://bucket/ds", KEYS, AUTO)
    with pytest.raises(KVFormatError, match=r"E205.*pip install 'kvformat\[obstore\]'"):
        connect("s3://bucket/ds", KEYS, OBSTORE)


def test_without_obstore_auto_is_fsspec(monkeypatch) -> None:
    without(monkeypatch, "obstore")
    assert isinstance(connect("s3://bucket/ds", KEYS, AUTO), FsspecStore)


@pytest.mark.skipif(importlib.util.find_spec("gcsfs") is not None, reason="gcsfs is installed")
def test_other_schemes_name_their_package() -> None:
    with pytest.raises(KVFormatError, match=r"E205.*gcsfs"):
        connect("gs://bucket/ds", {}, FSSPEC)


def test_connections_import_nothing_early() -> None:
    code = "import sys, kvformat.storage.connect; assert not {'fsspec', 'obstore', 's3fs'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=Path(__file__).parents[2])


# -- options of obstore ----------------------------------------------------------------------------------------------


def test_s3_options_are_translated() -> None:
    target = target_of(
        "s3a://bucket/a/b",
        {**KEYS, "token": "t", "endpoint_url": "http://127.0.0.1:9/", "requester_pays": True, "use_listings_cache": 0},
        timeout_s=1.5,
        environment={},
    )
    assert (target.kind, target.bucket, target.prefix) == ("S3Store", "bucket", "a/b")
    assert target.config == {
        "access_key_id": "k",
        "secret_access_key": "s",
        "session_token": "t",
        "region": "eu-west-1",
        "endpoint": "http://127.0.0.1:9/",
        "request_payer": True,
        "conditional_put": "etag",
        "skip_signature": False,
        "unsigned_payload": False,
        "virtual_hosted_style_request": False,
    }
    assert target.client_options == {"timeout": "1500ms", "connect_timeout": "1500ms", "allow_http": True}


def test_virtual_hosts_stand_in_the_endpoint() -> None:
    options = {**KEYS, "endpoint_url": "https://s3.example", "config_kwargs": {"s3": {"addressing_style": "virtual"}}}
    target = target_of("s3://bucket", options, timeout_s=30, environment={})
    assert target.config["endpoint"] == "https://bucket.s3.example"
    assert target.config["virtual_hosted_style_request"] is True
    assert target.client_options["allow_http"] is False


@pytest.mark.parametrize(("signed", "unsigned"), [(False, True), (True, False), (None, False)])
def test_payloads_may_stay_out_of_signatures(signed: bool | None, unsigned: bool) -> None:
    options = {**KEYS, "config_kwargs": {"s3": {"payload_signing_enabled": signed}}}
    assert target_of("s3://bucket", options, timeout_s=30, environment={}).config["unsigned_payload"] is unsigned


def test_anonymous_and_environment() -> None:
    found = target_of("s3://b", {"anon": True}, timeout_s=30, environment={"AWS_REGION": "eu-west-1"})
    assert found.config["skip_signature"] is True
    environment = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_ENDPOINT_URL": "http://h:1"}
    found = target_of("s3://b", {}, timeout_s=30, environment=environment)
    assert found.config["endpoint"] == "http://h:1"
    assert found.client_options["allow_http"] is True
    with pytest.raises(Inexpressible, match="AWS_PROFILE"):
        target_of("s3://b", {}, timeout_s=30, environment={**environment, "AWS_PROFILE": "work"})


@pytest.mark.parametrize(
    ("url", "options", "kind"),
    [
        ("gs://bucket/p", {"token": "anon"}, "GCSStore"),
        ("gcs://bucket/p", {"project": "x"}, "GCSStore"),
        ("az://container/p", {"account_name": "a", "account_key": "a2V5"}, "AzureStore"),
        ("abfs://container@acc.dfs.core.windows.net/p", {"sas_token": "sv=1&sig=2"}, "AzureStore"),
    ],
)
def test_other_clouds_are_translated(url: str, options: dict, kind: str) -> None:
    target = target_of(url, options, timeout_s=30, environment={})
    assert (target.kind, target.prefix) == (kind, "p")
    assert target.bucket in ("bucket", "container")
    assert ObstoreStore(url, options, max_requests=1, timeout_s=30).url == url


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("gs://b", {"token": {"type": "service_account"}}),
        ("gs://b", {"endpoint_url": "http://h"}),
        ("az://c", {"account_key": "x"}),
        ("az://c", {"account_name": "a"}),
        ("az://c", {"connection_string": "x", "account_name": "a", "anon": True}),
        ("abfs://c@acc.other.example", {"account_key": "x"}),
        ("s3://b", {"use_ssl": False, **KEYS}),
        ("hf://datasets/a/b", {}),
    ],
)
def test_what_is_left_to_fsspec(url: str, options: dict) -> None:
    with pytest.raises(Inexpressible):
        target_of(url, options, timeout_s=30, environment={})


# -- fork ------------------------------------------------------------------------------------------------------------

FORK = """
import json, os, signal, sys
from kvformat.storage.connect import connect
from kvformat.storage.remote_options import RemoteOptions

url, options, transport = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
store = connect(url, options, RemoteOptions(transport=transport))
store.put("a", b"0123456789", timeout_s=30)
assert bytes(store.get("a", 2, 3, timeout_s=30)) == b"234"
pid = os.fork()
if pid == 0:
    signal.alarm(60)
    child = connect(url, options, RemoteOptions(transport=sys.argv[4]))
    assert bytes(child.get("a", 2, 3, timeout_s=30)) == b"234"
    upload = child.begin("b", timeout_s=30)
    upload.part(1, b"child", timeout_s=30)
    upload.complete(timeout_s=30)
    print(type(child).__name__, flush=True)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert store.get_all("b", max_nbytes=10, timeout_s=30) == b"child"
print(type(store).__name__, flush=True)
"""


@pytest.mark.parametrize(
    ("parent", "child", "printed"),
    [
        ("obstore", "auto", ["FsspecStore", "ObstoreStore"]),
        ("fsspec", "auto", ["ObstoreStore", "FsspecStore"]),
        ("fsspec", "fsspec", ["FsspecStore", "FsspecStore"]),
    ],
)
def test_a_forked_child_is_served(s3: tuple[str, dict], parent: str, child: str, printed: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK, s3[0], json.dumps(s3[1]), parent, child],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == printed


def test_obstore_is_refused_after_a_fork(monkeypatch) -> None:
    monkeypatch.setattr(module._Fork, "lost_obstore", True)
    with pytest.raises(KVFormatError, match=r"E081.*forkserver"):
        connect("s3://bucket/ds", KEYS, OBSTORE)
    assert isinstance(connect("s3://bucket/ds", KEYS, AUTO), FsspecStore)
