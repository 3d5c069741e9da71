"""What a user says of how an object store is used."""

from __future__ import annotations

from msgspec import Struct

from kvformat.errors import make_error

__all__ = ["RemoteOptions"]

_TRANSPORTS = ("auto", "obstore", "fsspec")


class RemoteOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an object store is used.

    Attributes
    ----------
    transport
        ``obstore`` or ``fsspec``; ``auto`` is obstore where it is installed and knows the scheme.
    request_nbytes
        Most bytes of one ranged request, and of one part of an upload.
    max_requests
        Requests of this process under way at once, for each open dataset.
    max_inflight_nbytes
        Bytes they ask for together.
    attempt_timeout_s
        For one attempt of one request.
    deadline_s
        For an operation with all its retries; of a transfer, without any byte arriving. At most 60 before the store
        has answered for the first time.
    """

    transport: str = "auto"
    request_nbytes: int = 8 << 20
    max_requests: int = 16
    max_inflight_nbytes: int = 256 << 20
    attempt_timeout_s: float = 30.0
    deadline_s: float = 300.0

    def __post_init__(self) -> None:
        """Check the values; E081."""
        if self.transport not in _TRANSPORTS:
            raise make_error("E081", f"transport is one of {', '.join(_TRANSPORTS)}, found {self.transport!r}")
        for name in ("request_nbytes", "max_requests", "max_inflight_nbytes", "attempt_timeout_s", "deadline_s"):
            value = getattr(self, name)
            whole = isinstance(value, int) or (name.endswith("_s") and isinstance(value, float))
            if isinstance(value, bool) or not whole or not value > 0:
                raise make_error("E081", f"{name} must be a number above 0, found {value!r}")
