"""What a store's faults become: the code, and what to look at next."""

from __future__ import annotations

import pytest

from kvformat.errors import KVFormatError
from kvformat.storage.retry import ExhaustedFault
from kvformat.storage.store import TransportFault
from kvformat.storage.store_errors import Redactor, translated


@pytest.mark.parametrize(("url", "named"), [("s3://b/ds", True), ("s3a://b/ds", True), ("gs://b/ds", False)])
def test_a_store_that_never_answers_may_be_another_one(url: str, named: bool) -> None:
    fault = ExhaustedFault(3, 60.0, TransportFault("nobody listens"))
    with pytest.raises(KVFormatError, match="3 attempts in 60 s failed") as told, translated(url, Redactor({})):
        raise fault
    assert told.value.code == "E208"
    assert ("AWS_ENDPOINT_URL" in told.value.message) is named
    assert "`deadline_s`" in told.value.message
