"""What an answer, or an exception of a client library, means for the caller: the faults of a store."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator

from kvformat.storage.store import (
    DeniedFault,
    ExistsFault,
    ExpiredFault,
    FullFault,
    MissingFault,
    ShortFault,
    StoreFault,
    ThrottledFault,
    TransportFault,
    UnsupportedFault,
)

__all__ = ["fault_of", "fault_of_status", "plain_etag"]

# Codes of S3, Azure and GCS that say more than their status does; the others go by status.
_CODES: dict[str, type[StoreFault]] = {
    **dict.fromkeys(
        ["ExpiredToken", "ExpiredTokenException", "InvalidToken", "RequestExpired", "RequestTimeTooSkewed"],
        ExpiredFault,
    ),
    "TokenRefreshRequired": ExpiredFault,
    **dict.fromkeys(
        ["AuthorizationHeaderMalformed", "InvalidSecurity", "PermanentRedirect", "SignatureDoesNotMatch"], DeniedFault
    ),
    **dict.fromkeys(
        ["RequestLimitExceeded", "ServerBusy", "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests"],
        ThrottledFault,
    ),
    **dict.fromkeys(["ContainerNotFound", "InvalidBucketName", "NoSuchBucket", "NoSuchKey"], MissingFault),
    "NotImplemented": UnsupportedFault,
    **dict.fromkeys(["QuotaExceeded", "StorageFull", "XMinioStorageFull"], FullFault),
    **dict.fromkeys(
        ["BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"],
        TransportFault,  # damaged or cut off on its way there
    ),
}
_STATUSES: dict[int, type[StoreFault]] = {
    301: DeniedFault,  # the bucket is in another region
    401: ExpiredFault,  # what a stale bearer token gets
    403: DeniedFault,
    404: MissingFault,
    405: UnsupportedFault,
    408: TransportFault,
    409: ExistsFault,
    412: ExistsFault,
    416: ShortFault,
    425: TransportFault,
    429: ThrottledFault,
    501: UnsupportedFault,
    503: ThrottledFault,
    507: FullFault,
}
_ERRNOS: dict[int, type[StoreFault]] = {
    errno.ENOSPC: FullFault,
    errno.EDQUOT: FullFault,
    errno.EFBIG: FullFault,
    errno.EROFS: DeniedFault,
    errno.ENOSYS: UnsupportedFault,
    errno.EOPNOTSUPP: UnsupportedFault,
}
# By name, for none of these packages need be installed.
_CLASSES: dict[str, type[StoreFault]] = {
    "ClientAuthenticationError": DeniedFault,
    "ClientPayloadError": TransportFault,  # aiohttp's parser speaks of a status 400 then
    "CredentialRetrievalError": DeniedFault,
    "DefaultCredentialsError": DeniedFault,
    "NoCredentialsError": DeniedFault,
    "ParamValidationError": MissingFault,  # botocore refuses the name of a bucket
    "PartialCredentialsError": DeniedFault,
    "ProfileNotFound": DeniedFault,
    "RefreshError": ExpiredFault,
    "ResourceExistsError": ExistsFault,
    "ResourceNotFoundError": MissingFault,
    "TokenRetrievalError": ExpiredFault,
}
_BUILTINS: list[tuple[type[BaseException], type[StoreFault]]] = [
    (TimeoutError, TransportFault),
    (asyncio.TimeoutError, TransportFault),
    (FileNotFoundError, MissingFault),
    (NotADirectoryError, MissingFault),
    (IsADirectoryError, MissingFault),
    (FileExistsError, ExistsFault),
    (PermissionError, DeniedFault),
    (NotImplementedError, UnsupportedFault),
]
_TEXT_CHARS = 300


def fault_of_status(status: int, code: str = "", text: str = "") -> StoreFault:
    """The fault of an HTTP status, and of the code in the answer's body where there is one.

    Of the client errors, those that are not known here are no better for being repeated.
    """
    other = StoreFault if 400 <= status < 500 else TransportFault
    kind = _CODES.get(code) or _STATUSES.get(status, other)
    return kind(" ".join(filter(None, [f"HTTP {status}", code, _short(text)])))


def fault_of(error: BaseException) -> StoreFault:
    """The fault of whatever a client library raised; its own exceptions carry the status somewhere."""
    if isinstance(error, StoreFault):
        return error
    for each in _chain(error):
        if isinstance(each, StoreFault):
            return each
        if (answer := _answer(each)) is not None:
            return fault_of_status(*answer, text=str(error))
        names = [each_class.__name__ for each_class in type(each).__mro__]
        if kind := next((_CLASSES[name] for name in names if name in _CLASSES), None):
            return kind(_text(each))
    for builtin, kind in _BUILTINS:
        if isinstance(error, builtin):
            return kind(_text(error))
    if isinstance(error, OSError) and error.errno in _ERRNOS:
        return _ERRNOS[error.errno](_text(error))
    if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
        return StoreFault(
            f"storage_options that the client does not know: {_text(error)}"
        )  # it is made with the first call
    return TransportFault(_text(error))


def plain_etag(etag: object) -> str | None:
    """An ETag without its quotes; None for a weak one, which promises nothing about bytes."""
    if not isinstance(etag, str) or etag.startswith("W/"):
        return None
    return etag.strip('"') or None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The exception and its causes: packages translate what they got, and lose the status."""
    for _ in range(8):
        if error is None:
            return
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _answer(error: BaseException) -> tuple[int, str] | None:
    """HTTP status and error code that an exception carries: botocore, aiohttp, gcsfs, azure, requests, httpx."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        code = str(response.get("Error", {}).get("Code", ""))
        if status is None and code.isdigit():
            status = int(code)
        # An answer of 200 may hold an error (CompleteMultipartUpload).
        return (status if isinstance(status, int) else 0), code
    for found in (
        getattr(error, "status", None),
        getattr(error, "status_code", None),
        getattr(response, "status_code", None),
        getattr(error, "code", None),
    ):
        number = int(found) if isinstance(found, str) and found.isdigit() else found
        if isinstance(number, int) and 300 <= number < 600:
            return number, str(getattr(error, "error_code", None) or "")
    return None


def _text(error: BaseException) -> str:
    text = _short(str(error))
    name = type(error).__name__
    return f"{name}: {text}" if text else name


def _short(text: str) -> str:
    """One line: answers may be whole pages, and repeat what was signed."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= _TEXT_CHARS else line[:_TEXT_CHARS] + "..."
