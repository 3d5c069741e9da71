"""Both transports go to the same place, with the same credentials; what cannot be meant is refused at once."""

from __future__ import annotations

import os

import pytest

from kvformat.errors import KVFormatError
from kvformat.storage.connect import connect
from kvformat.storage.fsspec_store import FsspecStore
from kvformat.storage.obstore_options import Inexpressible, target_of
from kvformat.storage.obstore_store import ObstoreStore
from kvformat.storage.remote import Remote
from kvformat.storage.remote_options import RemoteOptions
from kvformat.storage.store import StoreFault, TransportFault
from kvformat.storage.store_faults import fault_of
from kvformat.testing.faulty_store import FaultyStore, Rule, flipped
from kvformat.testing.memory_store import MemoryStore

KEYS = {"key": "k", "secret": "s", "client_kwargs": {"region_name": "eu-west-1"}}
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_REGION": "eu-west-1"}
ENDPOINT = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch, tmp_path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


def target(url="s3://bucket/ds", options=None, **environment):
    return target_of(url, options or {}, timeout_s=30, environment=environment)


# ------------------------------------------------------------------------------------------------------ the same place


@pytest.mark.parametrize("name", ["a#b", "#", "a b", "50%", "a%20b", "a+b", "é", "日本", "x&y=z;", "a\\b", "[x]*"])
def test_both_transports_name_the_same_objects(seaweed, name) -> None:
    bucket = seaweed.bucket()
    for transport, other in (("obstore", "fsspec"), ("fsspec", "obstore")):
        url = f"{bucket}/{name}/{transport}"
        options = {"storage_options": dict(seaweed.storage_options)}
        one, two = (
            Remote(url, options=RemoteOptions(transport=each, deadline_s=20.0), **options)
            for each in (transport, other)
        )
        assert one.create("object", transport.encode())
        assert two.read("object") == transport.encode()
        assert not Remote(f"{bucket}/{name.partition('#')[0] or 'else'}/{other}x", **options).stat("object")
        one.close()
        two.close()


def test_a_name_is_everything_behind_the_bucket() -> None:
    assert target("s3://bucket/a#b/c", KEYS).prefix == "a#b/c"
    assert target("gs://bucket/a#b").prefix == "a#b"
    with pytest.raises(Inexpressible, match="control characters"):
        target("s3://bucket/a\tb", KEYS)


@pytest.mark.parametrize("text", [f"endpoint_url = {ENDPOINT}", f"[services x]\ns3 =\n  endpoint_url = {ENDPOINT}"])
def test_an_endpoint_of_a_configuration_file_counts(tmp_path, monkeypatch, text) -> None:
    """The environment's credentials do not mean that nothing is configured."""
    file = tmp_path / "config"
    file.write_text(f"[default]\n{text}\n", "utf-8")
    with pytest.raises(Inexpressible, match="configuration file"):
        target(**CREDENTIALS, AWS_CONFIG_FILE=str(file))
    assert target(**CREDENTIALS, AWS_CONFIG_FILE=str(file), AWS_ENDPOINT_URL=ENDPOINT).config["endpoint"] == ENDPOINT
    (tmp_path / ".aws").mkdir()
    file.rename(tmp_path / ".aws" / "config")
    with pytest.raises(Inexpressible, match="configuration file"):
        target(options=KEYS)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    assert isinstance(connect("s3://bucket/ds", {}, RemoteOptions()), FsspecStore)
    monkeypatch.setenv("AWS_ENDPOINT_URL", ENDPOINT)
    assert isinstance(connect("s3://bucket/ds", {}, RemoteOptions()), ObstoreStore)


def test_endpoints_that_are_to_be_ignored() -> None:
    ignoring = {**CREDENTIALS, "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"}
    with pytest.raises(Inexpressible):
        target(**ignoring, AWS_ENDPOINT_URL=ENDPOINT)
    assert target(**ignoring).kind == "S3Store"
    assert target(options={"endpoint_url": ENDPOINT}, **ignoring).config["endpoint"] == ENDPOINT


# --------------------------------------------------------------------------------------------------- the same settings


def test_a_session_token_of_other_credentials_is_not_sent() -> None:
    with pytest.raises(Inexpressible, match="session token"):
        target(options=KEYS, AWS_SESSION_TOKEN="of-others")
    assert target(options={**KEYS, "token": "mine"}, AWS_SESSION_TOKEN="of-others").config["session_token"] == "mine"
    assert target(**CREDENTIALS, AWS_SESSION_TOKEN="its-own").kind == "S3Store"


def test_certificates_of_a_file_are_used(tmp_path) -> None:
    bundle = str(tmp_path / "ca.pem")
    with pytest.raises(Inexpressible, match="certificates"):
        target(options={**KEYS, "client_kwargs": {"region_name": "x", "verify": bundle}})
    with pytest.raises(Inexpressible, match="certificates"):
        target(options=KEYS, AWS_CA_BUNDLE=bundle)
    assert target(options={**KEYS, "endpoint_url": ENDPOINT}, AWS_CA_BUNDLE=bundle).config["endpoint"] == ENDPOINT


def test_variables_of_obstore_alone_change_nothing(seaweed, monkeypatch) -> None:
    """Least of all whether a commit has a condition."""
    for name, value in (("AWS_CONDITIONAL_PUT", "disabled"), ("AWS_SKIP_SIGNATURE", "true"), ("AWS_BUCKET", "other")):
        monkeypatch.setenv(name, value)
    remote = Remote(
        seaweed.bucket(),
        storage_options=dict(seaweed.storage_options),
        options=RemoteOptions(transport="obstore", deadline_s=20.0),
    )
    assert remote.create("object", b"first")
    assert not remote.create("object", b"second")
    remote.close()


# ----------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("transport", ["auto", "obstore", "fsspec"])
@pytest.mark.parametrize(
    "options",
    [
        {"endpoint_url": "localhost:9000"},
        {"endpoint_url": "//host"},
        {"endpoint_url": ""},
        {"endpoint_url": "http://host:port"},
        {"endpoint_url": 9000},
        {"endpoint_url": "http://me:SECRET-1@host"},
        {"client_kwargs": {"endpoint_url": "localhost:9000"}},
        {"client_kwargs": "SECRET-1"},
        {"config_kwargs": 5},
        {"config_kwargs": {"s3": "SECRET-1"}},
        {"key": 5},
        {1: 2},
    ],
    ids=str,
)
def test_options_that_cannot_be_meant(transport, options) -> None:
    with pytest.raises(KVFormatError) as caught:
        connect("s3://bucket/ds", {**KEYS, **options}, RemoteOptions(transport=transport))
    assert caught.value.code == "E081"
    assert "SECRET" not in str(caught.value)


def test_endpoint_of_the_environment(monkeypatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:9000")
    with pytest.raises(KVFormatError, match="AWS_ENDPOINT_URL must be http"):
        connect("s3://bucket/ds", KEYS, RemoteOptions())
    connect("memory://bucket/ds", {}, RemoteOptions()).close()


def test_an_unknown_option_is_not_tried_again() -> None:
    """S3's client is made with the first call, and refuses it there."""
    remote = Remote("s3://bucket/ds", storage_options={**KEYS, "nonsense": "SECRET-1", "endpoint_url": ENDPOINT})
    with pytest.raises(KVFormatError, match="nonsense") as caught:
        remote.stat("object")
    assert caught.value.code == "E203"
    assert "SECRET" not in str(caught.value)
    remote.close()


def test_other_type_errors_are_tried_again() -> None:
    """Packages raise them over answers they do not expect."""
    assert type(fault_of(TypeError("'NoneType' object is not subscriptable"))) is TransportFault
    assert type(fault_of(TypeError("f() got an unexpected keyword argument 'x'"))) is StoreFault


# -------------------------------------------------------------------------------------------------------------- probes


def test_a_byte_flipped_once_is_no_store_that_replaces() -> None:
    store = FaultyStore(MemoryStore(), [Rule("get_all", flipped(3), nth=1)])
    remote = Remote("memory://test", connect=lambda *_: store, options=RemoteOptions(deadline_s=20.0))
    remote.require_create(".staging/")
    always = FaultyStore(MemoryStore(), [Rule("get_all", flipped(3))])
    with pytest.raises(KVFormatError, match="E209"):
        Remote("memory://test", connect=lambda *_: always, options=RemoteOptions(deadline_s=20.0)).require_create("p/")


def test_a_client_that_connects_when_it_is_made() -> None:
    """As that of FTP does: its failure has the URL's path."""
    remote = Remote("ftp://127.0.0.1:1/ds", options=RemoteOptions(deadline_s=5.0))
    with pytest.raises(KVFormatError) as caught:
        remote.stat("object")
    assert (caught.value.code, caught.value.path) == ("E203", "ftp://127.0.0.1:1/ds/object")
    remote.close()
