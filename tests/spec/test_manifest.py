"""Root and manifest: package and reference reader name the same fault first, also where there are several."""

from __future__ import annotations

import copy
import hashlib
import random
from collections import defaultdict
from typing import Any

import pytest

from kvformat.errors import FormatError
from kvformat.read.check_covered import InverseFrequencies, TensorList
from kvformat.spec import canonical
from kvformat.spec.manifest import Root, parse_manifest, parse_root
from kvformat.testing.dataset_files import dump
from kvformat.testing.vectors import VALID
from tests.spec.reference import reference_reader

BASES = sorted(set(VALID) - {"nan-payloads"})
ODD: tuple[Any, ...] = (
    0, 1, -1, 65_535, 65_536, 2**24, 2**48, 2**53, True, None, 1.5, "", "a", "0" * 64, "0" * 16, "tokens", "k",
    "other", [], {}, [0], [1, 0], ["tokens"], {"last": 3}, {"last": 0}, "7ff0000000000000", "8000000000000000",
)  # fmt: skip
ADDED = ("quant", "stage", "factor", "truncate", "sections", "activation", "windows", "requires", "comment")


def walk(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(path, value), *(place for key, item in items for place in walk(item, (*path, key)))]


@pytest.fixture(scope="module")
def manifests() -> dict[str, dict[str, Any]]:
    return {name: VALID[name].build().manifest for name in BASES}


@pytest.fixture(scope="module")
def values(manifests) -> dict[Any, list[Any]]:
    """By member name, everything that stands there in any base."""
    found = defaultdict(list)
    for manifest in manifests.values():
        for path, value in walk(manifest)[1:]:
            found[path[-1]].append(value)
    return found


def edit(manifest: dict[str, Any], values: dict[Any, list[Any]], choose: random.Random) -> None:
    places = [path for path, _ in walk(manifest)[1:]]
    about_values = [path for path in places if path[0] in ("schema", "context", "files", "skipped", "text")]
    *parents, last = choose.choice(about_values if choose.random() < 0.9 else places)
    parent: Any = manifest
    for step in parents:
        parent = parent[step]
    how = choose.random()
    if how < 0.75:
        usual = values[last] if choose.random() < 0.75 else ODD
        parent[last] = copy.deepcopy(choose.choice(usual or ODD))
    elif how < 0.85:
        del parent[last]
    elif isinstance(parent, list):
        parent.insert(choose.randrange(len(parent) + 1), copy.deepcopy(choose.choice(parent)))
    else:
        name = choose.choice(ADDED)
        parent[name] = copy.deepcopy(choose.choice(values[name] or ODD))


class Texts:
    """Root and manifest for the reference reader, without a disk."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    def size(self, path: str) -> int:
        return len(self.files[path])

    def read(self, path: str, first: int, length: int) -> bytes:
        return self.files[path][first : first + length]


def codes(manifest: bytes) -> tuple[str | None, str | None]:
    """What the package and what the reference reader say of a manifest."""
    digest = hashlib.sha256(manifest).hexdigest()
    root = dump({"format": "kvformat", "manifest": {"sha256": digest, "size": len(manifest)}, "version": "1.0"})
    ours = theirs = None
    try:
        parse_manifest(manifest, parse_root(root))
    except FormatError as error:
        ours = error.code
    reference = reference_reader()
    store = Texts({"kvformat.json": root, f"manifest/{digest}.json": manifest})
    try:
        reference.open_manifest(store, reference.open_root(store, None)[1])
    except reference.Refused as refused:
        theirs = refused.code
    return ours, theirs


@pytest.mark.parametrize("seed", range(4))
def test_random_edits_of_manifests_are_judged_alike(seed: int, manifests, values) -> None:
    choose = random.Random(seed)
    seen = set()
    for _ in range(700):
        manifest = copy.deepcopy(manifests[choose.choice(BASES)])
        for _ in range(choose.choice((1, 1, 1, 2, 3))):
            edit(manifest, values, choose)
        ours, theirs = codes(dump(manifest))
        assert ours == theirs, manifest
        seen.add(ours)
    assert len(seen) > 15


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"requires": [], "shard_slots": 0, "comment": 1}, "E016"),
        ({"shard_slots": 0, "totals": {}}, "E017"),
        ({"version": "1.1", "shard_slots": "4"}, "E018"),
        ({"version": "1.1", "header_size": 1}, "E019"),
        ({"totals": {"names": 1, "nbytes": 0, "records": 2, "shards": 1, "tokens": 1}, "header_size": 1}, "E020"),
    ],
)
def test_the_first_code_is_reported_where_several_apply(changes: dict[str, Any], code: str, manifests) -> None:
    assert codes(dump(manifests["one-record"] | changes)) == (code, code)


def test_messages_name_the_place() -> None:
    for value, place in (
        ({"format": "kvformat", "manifest": {"sha256": "0" * 64, "size": 1, "x": 1}, "version": "1.0"}, "$.manifest"),
        ({"format": "kvformat", "manifest": {"sha256": "0" * 64}, "version": "1.0"}, "$.manifest"),
        ({"format": "kvformat", "manifest": {"sha256": "0" * 63, "size": 1}, "version": "1.0"}, "$.manifest.sha256"),
    ):
        with pytest.raises(FormatError, match=rf"`\{place}`"):
            canonical.convert(value, Root)


@pytest.mark.parametrize("seed", range(2))
def test_random_edits_of_covered_files_are_judged_alike(seed: int, values) -> None:
    """Their content has one code, whatever is wrong."""
    choose = random.Random(seed)
    case = VALID["model-context"]
    reference = reference_reader()
    forms = {
        "weights": (TensorList, reference.WEIGHTS_FILE),
        "inv_freq": (InverseFrequencies, reference.INV_FREQ_FILE),
    }
    accepted = 0
    for _ in range(600):
        label = choose.choice(sorted(forms))
        ours, theirs = forms[label]
        content = canonical.decode(case.options["files"][label])
        edit_anywhere(content, choose)
        faults: list[Any] = []
        theirs(content, label, faults)
        try:
            canonical.convert(content, ours)
        except FormatError:
            refused = True
        else:
            refused = False
        assert refused == bool(faults), content
        accepted += not refused
    assert 0 < accepted < 500


def edit_anywhere(content: dict[str, Any], choose: random.Random) -> None:
    *parents, last = choose.choice([path for path, _ in walk(content)[1:]])
    parent: Any = content
    for step in parents:
        parent = parent[step]
    if choose.random() < 0.2:
        del parent[last]
    else:
        parent[last] = copy.deepcopy(choose.choice((*ODD, "BF16", "F32", "f" * 64, 65_535, 2**53 - 1)))
