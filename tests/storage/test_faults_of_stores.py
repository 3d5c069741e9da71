"""What servers and packages do wrong, and the fault each becomes. Nothing else comes out."""

from __future__ import annotations

import errno
import http.server
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fsspec.spec import AbstractFileSystem

from kvformat.storage.fsspec_store import FsspecStore
from kvformat.storage.obstore_store import ObstoreStore
from kvformat.storage.store import (
    DeniedFault,
    ExistsFault,
    ExpiredFault,
    FullFault,
    MissingFault,
    ShortFault,
    Stat,
    Store,
    StoreFault,
    ThrottledFault,
    TransportFault,
    UnsupportedFault,
)
from kvformat.storage.store_faults import fault_of

DATA = bytes(range(100))
Answer = Callable[[http.server.BaseHTTPRequestHandler], None]


class Scripted:
    """An HTTP server that answers every request as it is told."""

    def __init__(self) -> None:
        self.answer: Answer = lambda request: None
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.stop = threading.Event()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                pass

            def handle_any(self) -> None:
                # botocore asks before it sends a body.
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                outer.requests.append(
                    (self.command, self.path, {key.lower(): value for key, value in self.headers.items()})
                )
                self.body = body
                self.close_connection = True
                outer.answer(self)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any  # noqa: N815 -- the names of http.server

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self.thread.start()

    def close(self) -> None:
        self.stop.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def server() -> Iterator[Scripted]:
    scripted = Scripted()
    yield scripted
    scripted.close()


@pytest.fixture(params=["fsspec", "obstore"])
def s3_store(request, server: Scripted) -> Iterator[Store]:
    options = {
        "key": "k",
        "secret": "s",
        "endpoint_url": server.endpoint,
        "client_kwargs": {"region_name": "us-east-1"},
    }
    store: Store
    if request.param == "fsspec":
        store = FsspecStore("s3://bucket/ds", options, max_requests=4)
    else:
        store = ObstoreStore("s3://bucket/ds", options, max_requests=4, timeout_s=30)
    yield store
    store.close()


@pytest.fixture
def http_store(server: Scripted) -> Iterator[Store]:
    store = FsspecStore(f"{server.endpoint}/ds?sig=secret", {"headers": {"X-Mine": "1"}}, max_requests=4)
    yield store
    store.close()


def status(code: int, name: str = "", headers: dict[str, str] | None = None) -> Answer:
    """An answer with an error document, as S3 gives them."""

    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        body = f"<?xml version='1.0'?><Error><Code>{name}</Code><Message>m</Message></Error>".encode() if name else b""
        request.send_response(code)
        for key, value in (headers or {}).items():
            request.send_header(key, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)

    return answer


def ranged(
    request: http.server.BaseHTTPRequestHandler, *, sent: int | None = None, claimed: str | None = None
) -> None:
    """Answer a range of DATA; only ``sent`` bytes of it, or with another Content-Range."""
    begin, end = (int(each) for each in request.headers["Range"].removeprefix("bytes=").split("-"))
    body = DATA[begin : end + 1]
    request.send_response(206)
    request.send_header("Content-Range", claimed or f"bytes {begin}-{begin + len(body) - 1}/{len(DATA)}")
    request.send_header("Content-Length", str(len(body)))
    request.send_header("ETag", '"abc"')
    request.end_headers()
    request.wfile.write(body[:sent])


def whole(request: http.server.BaseHTTPRequestHandler) -> None:
    """Answer with the whole object, whatever was asked for."""
    request.send_response(200)
    request.send_header("Content-Length", str(len(DATA)))
    request.send_header("ETag", '"abc"')
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(DATA)


STATUSES = [
    (400, "ExpiredToken", ExpiredFault),
    (400, "InvalidToken", ExpiredFault),
    (403, "RequestTimeTooSkewed", ExpiredFault),
    (403, "AccessDenied", DeniedFault),
    (403, "InvalidAccessKeyId", DeniedFault),
    (404, "NoSuchKey", MissingFault),
    (404, "NoSuchBucket", MissingFault),
    (416, "InvalidRange", ShortFault),
    (429, "TooManyRequests", ThrottledFault),
    (503, "SlowDown", ThrottledFault),
    (503, "RequestLimitExceeded", ThrottledFault),
    (500, "InternalError", TransportFault),
    (502, "BadGateway", TransportFault),
    (504, "GatewayTimeout", TransportFault),
    (507, "InsufficientStorage", FullFault),
]


@pytest.mark.parametrize(("code", "name", "kind"), STATUSES)
def test_statuses_of_s3_reads(s3_store: Store, server: Scripted, code: int, name: str, kind: type) -> None:
    server.answer = status(code, name)
    with pytest.raises(StoreFault) as caught:
        s3_store.get("a", 0, 10, timeout_s=30)
    assert type(caught.value) is kind
    assert len(server.requests) == 1, "one attempt is one request"


@pytest.mark.parametrize(
    ("code", "name", "kind"),
    [
        (409, "ConditionalRequestConflict", ExistsFault),
        (412, "PreconditionFailed", ExistsFault),
        (501, "NotImplemented", UnsupportedFault),
        (503, "SlowDown", ThrottledFault),
        (507, "XMinioStorageFull", FullFault),
        (500, "InternalError", TransportFault),
        (403, "AccessDenied", DeniedFault),
        (404, "NoSuchBucket", MissingFault),
    ],
)
def test_statuses_of_s3_creates(s3_store: Store, server: Scripted, code: int, name: str, kind: type) -> None:
    server.answer = status(code, name)
    with pytest.raises(StoreFault) as caught:
        s3_store.create("a", b"data", timeout_s=30)
    assert type(caught.value) is kind
    assert len(server.requests) == 1
    assert server.requests[0][2]["if-none-match"] == "*"


def test_another_region_is_no_matter_for_retries(server: Scripted) -> None:
    options = {"key": "k", "secret": "s", "endpoint_url": server.endpoint, "client_kwargs": {"region_name": "x"}}
    store = ObstoreStore("s3://bucket/ds", options, max_requests=4, timeout_s=30)
    server.answer = status(301, "PermanentRedirect")
    with pytest.raises(DeniedFault, match="region_name"):
        store.get("a", 0, 10, timeout_s=30)


@pytest.mark.parametrize("sent", [0, 1, 9])
def test_s3_bodies_that_are_cut_off(s3_store: Store, server: Scripted, sent: int) -> None:
    server.answer = lambda request: ranged(request, sent=sent)
    with pytest.raises(TransportFault):
        s3_store.get("a", 5, 10, timeout_s=30)
    assert len(server.requests) == 1


def test_s3_ranges_that_are_ignored(s3_store: Store, server: Scripted) -> None:
    server.answer = whole
    with pytest.raises(TransportFault):
        s3_store.get("a", 5, 10, timeout_s=30)


def test_a_whole_object_of_the_length_of_the_range_is_not_it(s3_store: Store, server: Scripted) -> None:
    server.answer = whole
    with pytest.raises(TransportFault):
        s3_store.get("a", 50, len(DATA), timeout_s=30)


@pytest.mark.parametrize("claimed", ["bytes 50-59/100", "bytes 4-13/100", "bytes */100", "junk"])
def test_other_ranges_than_asked_for(s3_store: Store, http_store: Store, server: Scripted, claimed: str) -> None:
    server.answer = lambda request: ranged(request, claimed=claimed)
    for store in (s3_store, http_store):
        with pytest.raises(TransportFault):
            store.get("a", 5, 10, timeout_s=30)


def test_a_stalled_s3_answer_frees_its_caller(s3_store: Store, server: Scripted) -> None:
    def stall(request: http.server.BaseHTTPRequestHandler) -> None:
        server.stop.wait(100)

    server.answer = stall
    began = time.monotonic()
    with pytest.raises(TransportFault):
        s3_store.get("a", 0, 10, timeout_s=0.3)
    with pytest.raises(TransportFault):
        s3_store.put("a", b"1", timeout_s=0.3)
    assert time.monotonic() - began < 25
    server.stop.set()


def test_nobody_listens() -> None:
    options = {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:1", "client_kwargs": {"region_name": "x"}}
    for store in (
        FsspecStore("s3://bucket/ds", options, max_requests=4),
        ObstoreStore("s3://bucket/ds", options, max_requests=4, timeout_s=30),
        FsspecStore("http://127.0.0.1:1/ds", {}, max_requests=4),
    ):
        with pytest.raises(StoreFault) as caught:
            store.get("a", 0, 10, timeout_s=30)
        assert type(caught.value) is TransportFault
        store.close()


# -- plain HTTP ------------------------------------------------------------------------------------------------------


def test_http_reads(http_store: Store, server: Scripted) -> None:
    server.answer = ranged
    assert http_store.url == f"{server.endpoint}/ds"
    assert http_store.get("a b/%20ü#", 5, 10, timeout_s=30) == DATA[5:15]
    method, path, headers = server.requests[0]
    assert (method, path) == ("GET", "/ds/a%20b/%2520%C3%BC%23?sig=secret")
    assert headers["x-mine"] == "1"
    assert headers["accept-encoding"] == "identity"
    with pytest.raises(ShortFault):
        http_store.get("a", 95, 10, timeout_s=30)
    server.answer = whole
    assert http_store.get_all("a", max_nbytes=100, timeout_s=30) == DATA
    assert http_store.get_all("a", max_nbytes=10, timeout_s=30) == DATA[:11]
    assert http_store.stat("a", timeout_s=30) == Stat("a", 100, "abc")


def test_http_servers_without_ranges_give_right_bytes_or_none(http_store: Store, server: Scripted) -> None:
    server.answer = whole
    assert bytes(http_store.get("a", 5, 10, timeout_s=30)) == DATA[5:15]
    with pytest.raises(ShortFault):
        http_store.get("a", 95, 10, timeout_s=30)
    with pytest.raises(TransportFault, match="whole object"):
        http_store.get("a", 17 << 20, 10, timeout_s=30)


def test_http_sizes_where_head_is_refused(http_store: Store, server: Scripted) -> None:
    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        if request.command == "HEAD":
            status(403)(request)
        else:
            ranged(request)

    server.answer = answer
    assert http_store.stat("a", timeout_s=30) == Stat("a", 100, "abc")
    server.answer = status(403)
    with pytest.raises(DeniedFault):
        http_store.stat("a", timeout_s=30)
    server.answer = status(404)
    with pytest.raises(MissingFault):
        http_store.stat("a", timeout_s=30)


def test_http_bodies_that_are_compressed_or_cut_off(http_store: Store, server: Scripted) -> None:
    server.answer = status(200, "xml", {"Content-Encoding": "gzip"})
    with pytest.raises(TransportFault):
        http_store.get_all("a", max_nbytes=100, timeout_s=30)
    server.answer = lambda request: ranged(request, sent=3)
    with pytest.raises(TransportFault):
        http_store.get("a", 0, 10, timeout_s=30)


def test_http_writes(http_store: Store, server: Scripted) -> None:
    server.answer = status(201)
    http_store.put("a", b"1", timeout_s=30)
    http_store.create("a", b"1", timeout_s=30)
    assert [(method, headers.get("if-none-match")) for method, _, headers in server.requests] == [
        ("PUT", None),
        ("PUT", "*"),
    ]
    server.answer = status(412)
    with pytest.raises(ExistsFault):
        http_store.create("a", b"1", timeout_s=30)
    server.answer = status(405)
    with pytest.raises(UnsupportedFault):
        http_store.put("a", b"1", timeout_s=30)
    server.answer = status(404)
    http_store.delete("a", timeout_s=30)
    with pytest.raises(UnsupportedFault):
        list(http_store.list(timeout_s=30))


# -- file system packages --------------------------------------------------------------------------------------------


class FakeFiles(AbstractFileSystem):
    """A blocking package that fails as it is told, or answers with what it is told."""

    protocol = "fake"
    cachable = False

    def __init__(self, outcome: Any) -> None:
        super().__init__()
        self.outcome = outcome

    def _out(self) -> Any:
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome() if callable(self.outcome) else self.outcome

    def cat_file(self, path, start=None, end=None, **kwargs):
        return self._out()

    def info(self, path, **kwargs):
        return self._out()

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        return self._out()

    def put_file(self, lpath, rpath, **kwargs):
        return self._out()

    def rm_file(self, path):
        return self._out()

    def find(self, path, **kwargs):
        return self._out()

    def makedirs(self, path, exist_ok=False):
        pass


class AnsweredError(Exception):
    """Like the exceptions of many packages."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__("something long\nsecond line")
        for key, value in attributes.items():
            setattr(self, key, value)


class NoCredentialsError(Exception):
    """As botocore names it."""


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


KINDS = [
    (FileNotFoundError("x"), MissingFault),
    (NotADirectoryError("x"), MissingFault),
    (IsADirectoryError("x"), MissingFault),
    (PermissionError("x"), DeniedFault),
    (FileExistsError("x"), ExistsFault),
    (NotImplementedError("x"), UnsupportedFault),
    (TimeoutError("x"), TransportFault),
    (ConnectionResetError("x"), TransportFault),
    (BrokenPipeError("x"), TransportFault),
    (OSError(errno.ENOSPC, "full"), FullFault),
    (OSError(errno.EDQUOT, "full"), FullFault),
    (OSError(errno.EROFS, "read only"), DeniedFault),
    (OSError(errno.EIO, "broken"), TransportFault),
    (NoCredentialsError("x"), DeniedFault),
    (AnsweredError(status=503), ThrottledFault),
    (AnsweredError(status_code=404), MissingFault),
    (AnsweredError(code=412), ExistsFault),
    (AnsweredError(code="429"), ThrottledFault),
    (AnsweredError(response=AnsweredError(status_code=401)), ExpiredFault),
    (AnsweredError(response={"Error": {"Code": "503"}}), ThrottledFault),
    (
        AnsweredError(response={"Error": {"Code": "InternalError"}, "ResponseMetadata": {"HTTPStatusCode": 200}}),
        TransportFault,
    ),
    (caused(OSError(errno.EBUSY, "x"), AnsweredError(status=503)), ThrottledFault),
    (KeyError("x"), TransportFault),
    (TypeError("a bug"), TransportFault),
    (RecursionError("x"), TransportFault),
    (StopIteration("x"), TransportFault),
    (MemoryError(), TransportFault),
]


@pytest.mark.parametrize(("error", "kind"), KINDS, ids=lambda each: getattr(each, "__name__", repr(each))[:60])
def test_exceptions_of_packages(error: Exception, kind: type) -> None:
    assert type(fault_of(error)) is kind
    store = FsspecStore("fake://a/b", {}, max_requests=1, filesystem=FakeFiles(error))
    calls: list[Callable[[], object]] = [
        lambda: store.get("a", 0, 1, timeout_s=30),
        lambda: store.get_all("a", max_nbytes=1, timeout_s=30),
        lambda: store.stat("a", timeout_s=30),
        lambda: store.put("a", b"1", timeout_s=30),
        lambda: store.create("a", b"1", timeout_s=30),
    ]
    for call in calls:
        with pytest.raises(StoreFault) as caught:
            call()
        assert type(caught.value) is kind
        assert "\n" not in str(caught.value)
    upload = store.begin("a", timeout_s=30)
    upload.part(1, b"1", timeout_s=30)
    with pytest.raises(kind):
        upload.complete(timeout_s=30)
    upload.abort(timeout_s=30)
    if kind is MissingFault:
        store.delete("a", timeout_s=30)
    else:
        with pytest.raises(kind):
            list(store.list(timeout_s=30))
        with pytest.raises(kind):
            store.delete("a", timeout_s=30)


@pytest.mark.parametrize("error", [ValueError("beyond"), IndexError("beyond")])
def test_ranges_beyond_the_end_by_exception(error: Exception) -> None:
    store = FsspecStore("fake://a/b", {}, max_requests=1, filesystem=FakeFiles(error))
    with pytest.raises(ShortFault):
        store.get("a", 0, 1, timeout_s=30)


@pytest.mark.parametrize(("found", "kind"), [(b"", ShortFault), (b"123", ShortFault), (b"12345", TransportFault)])
def test_lengths_decide(found: bytes, kind: type) -> None:
    store = FsspecStore("fake://a/b", {}, max_requests=1, filesystem=FakeFiles(found))
    with pytest.raises(StoreFault) as caught:
        store.get("a", 0, 4, timeout_s=30)
    assert type(caught.value) is kind


def test_a_stalled_package_frees_its_caller() -> None:
    stop = threading.Event()
    store = FsspecStore("fake://a/b", {}, max_requests=1, filesystem=FakeFiles(lambda: stop.wait(100)))
    began = time.monotonic()
    with pytest.raises(TransportFault, match="no answer within"):
        store.get("a", 0, 1, timeout_s=0.2)
    assert time.monotonic() - began < 20
    stop.set()


def test_creating_needs_a_package_that_says_it_can() -> None:
    class Forgetful(FakeFiles):
        def pipe_file(self, path, value, **kwargs):
            raise AssertionError("would replace")

    store = FsspecStore("fake://a/b", {}, max_requests=1, filesystem=Forgetful(None))
    with pytest.raises(UnsupportedFault):
        store.create("a", b"1", timeout_s=30)


def test_an_interrupt_is_no_fault() -> None:
    store = FsspecStore("fake://a/b", {}, max_requests=1, filesystem=FakeFiles(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        store.get("a", 0, 1, timeout_s=30)
