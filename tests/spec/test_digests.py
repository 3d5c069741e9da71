"""Digests: the same in every process, and different wherever something differs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import msgspec
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import kvformat
from kvformat.spec import canonical, digests
from kvformat.spec.schema import Schema
from kvformat.testing.strategies import schemas
from kvformat.testing.vectors import COLLIDING_NAMES, VALID
from tests.spec.reference import SPEC

SCRIPT = """
import hashlib, json, sys
from kvformat.spec import digests
from kvformat.testing.vectors import VALID
found = {}
for name, case in VALID.items():
    documents = [entry.document.digest for entry in case.entries]
    found[name] = [
        digests.schema_digest(case.schema).hex(),
        digests.context_digest(case.context).hex(),
        *(digest.hex() for digest in documents),
        *((digests.fingerprint(case.context, case.schema, digest) or b"").hex() for digest in documents),
    ]
found["id"] = VALID["model-context"].build().id
print(json.dumps(found, sort_keys=True))
"""


def in_process(seed: str) -> str:
    environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(SPEC.parent)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True, env=environment, timeout=120
    )
    return done.stdout


def test_digests_do_not_depend_on_the_process() -> None:
    first, second = in_process("1"), in_process("4294967295")
    assert first == second
    vector = json.loads((SPEC / "vectors/v1/valid/model-context/expected.json").read_text(encoding="ascii"))
    assert json.loads(first)["id"] == vector["id"]


def test_golden_digests() -> None:
    """Published bytes: a change here is a change of the format."""
    schema = Schema.uniform(num_layers=36, num_kv_heads=8, head_dim=128)
    assert canonical.encode(schema).startswith(b'{"components":[{"axes":[{"name":"tokens","size":"tokens"},{"name":')
    assert digests.schema_digest(schema).hex() == ("f5d1ba94d0d30eb7fa71067fbd67c3b05c626ee320b14dcde578c6e599511203")
    assert digests.context_digest(kvformat.Context.unknown()).hex() == (
        "a2d394b2c0ffecc9f476f3f8fc0eeb3f6a9429b62bb6678893d793b91cf53e85"
    )
    assert kvformat.document_digest(token_ids=[1, 2, 3]).hex() == (
        "ede93395544c6cc115e81da35821e933e7484f45f0bc9906fe9a2ded35deca05"
    )
    assert digests.record_sum((3,), bytes(8)).hex() == "b6f31f3483ba5e628a4509b09b2e7832"
    assert digests.name_key(b"clip-0001") == 0xCAF8CE4D8313DE3
    assert digests.document_key(bytes(range(32))) == 0x0001020304050607


@given(first=schemas(), second=schemas())
@settings(max_examples=100)
def test_schemas_with_one_digest_are_equal(first: Schema, second: Schema) -> None:
    assert (digests.schema_digest(first) == digests.schema_digest(second)) == (first == second)
    again = msgspec.convert(json.loads(canonical.encode(first)), Schema, strict=True)
    assert again == first
    assert digests.schema_digest(again) == digests.schema_digest(first)


def test_a_fingerprint_needs_a_known_context_and_depends_on_all_three() -> None:
    case, other = VALID["model-context"], VALID["rope-kinds"]
    documents = [entry.document.digest for entry in case.entries]
    found = {
        digests.fingerprint(context, schema, document)
        for context in (case.context, other.context)
        for schema in (case.schema, VALID["wide-values"].schema)
        for document in documents
    }
    assert len(found) == 8
    assert digests.fingerprint(kvformat.Context.unknown(), case.schema, documents[0]) is None


@given(
    dims=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4),
    sums=st.lists(st.integers(0, 2**64 - 1), max_size=4),
)
def test_a_record_sum_covers_dims_and_sums(dims: list[int], sums: list[int]) -> None:
    stored = b"".join(value.to_bytes(8, "little") for value in sums)
    text = b"kvf1.rec" + b"".join(value.to_bytes(8, "little") for value in dims) + stored
    assert digests.record_sum(dims, stored) == xxhash.xxh3_128(text).digest()


def test_the_colliding_names_collide() -> None:
    for first, second in COLLIDING_NAMES:
        assert first != second
        assert digests.name_key(first.encode()) == digests.name_key(second.encode())
