"""A reference reader of kvformat 1.0, written from SPEC.md alone: simple and literal, not fast.

``read`` verifies a dataset completely (level 4) and returns its records, or raises ``Refused`` with the first fault.
Comments such as ``# 13.5`` name the section of SPEC.md that a check implements. Files are looked at in the order of
4.7; where several faults are in one file or record, the first code is reported.

    python reference_reader.py PATH [--expected-id HEX]        prints one JSON object, never a value
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import math
import os
import re
import stat
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import xxhash

MINOR = 0  # of the version this reader knows, 1.0
KNOWN_FEATURES: frozenset[str] = frozenset()
ITEM = {"U64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1}
COMPONENT_DTYPES = {"BF16", "F16", "F32", "F8_E4M3", "F8_E5M2", "I8"}
EIGHT_BIT = {"F8_E4M3", "F8_E5M2", "I8"}
KV_ROLES = ("key", "value", "latent", "rope_key", "key_scale", "value_scale")
ROLES = (*KV_ROLES, "hidden", "state", "other")
TABLES = ("shards", "rows", "names", "document_keys", "name_keys")
LIMIT = 2**48


class Refused(Exception):  # noqa: N818 - the name the specification's word suggests
    """The dataset is not what the specification says; ``code`` names the rule it breaks."""

    def __init__(self, code: str, message: str, path: str = "") -> None:
        super().__init__(f"{code} {path}: {message}")
        self.code, self.message, self.path = code, message, path


@dataclass
class Record:
    """One record. ``tensors`` holds the components and extras (not ``sums`` and ``pad``): (dtype, shape, bytes)."""

    names: list[str]
    document: str
    dims: dict[str, int]
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = field(default_factory=dict)


@dataclass
class Dataset:
    """A dataset that passed every check; ``warnings`` holds each code at most once."""

    id: str
    records: list[Record]
    warnings: list[str]


def lowest(faults: Iterable[Refused]) -> None:
    """Raises the fault with the lowest code, the earliest of those, if there is any."""
    first = min(faults, key=lambda fault: fault.code, default=None)
    if first is not None:
        raise first


def ascending(values: list[Any]) -> bool:
    """Whether the values ascend strictly."""
    return all(a < b for a, b in pairwise(values))


def align(n: int, a: int) -> int:
    """The least multiple of ``a`` that is not below ``n``."""
    return -(-n // a) * a


# -------------------- files: sections 2, 4


class Store:
    """The files of a dataset by relative path."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def size(self, path: str) -> int:
        """The size of a regular file; E002 where nothing is there, E003 where it is another thing."""
        try:
            info = (self.directory / path).lstat()
        except ValueError:  # the caller's path cannot be a path
            raise Refused("E002", "no such file", path) from None  # 4.1
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                raise Refused("E002", "no such file", path) from None  # 4.1
            if error.errno == errno.ELOOP:
                raise Refused("E003", "a directory on the way is a link to itself", path) from None  # 4.2
            raise
        if not stat.S_ISREG(info.st_mode):
            raise Refused("E003", "not a regular file", path)  # 4.2
        return info.st_size

    def chunks(self, path: str, first: int, length: int) -> Iterator[bytes]:
        """``length`` bytes from ``first``; what is allocated is bounded by the file (19)."""
        if first + length > self.size(path):
            raise Refused("E005", "shorter than stated", path)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(self.directory / path, flags), "rb") as file:
            file.seek(first)
            while length:
                chunk = file.read(min(length, 1 << 24))
                if not chunk:
                    raise Refused("E005", "shorter than stated", path)
                length -= len(chunk)
                yield chunk

    def read(self, path: str, first: int, length: int) -> bytes:
        """``length`` bytes from ``first``."""
        return b"".join(self.chunks(path, first, length))

    def sha256(self, path: str, size: int) -> str:
        """The SHA-256 of a file of ``size`` bytes."""
        digest = hashlib.sha256()
        for chunk in self.chunks(path, 0, size):
            digest.update(chunk)
        return digest.hexdigest()

    def unknown(self, known: set[str]) -> set[str]:
        """W001 where a file or link is not in ``known``, W002 where one lies below ``.staging`` (4.2, 4.6)."""
        found, stack = set(), [""]
        while stack:
            folder = stack.pop()
            with os.scandir(self.directory / folder) as entries:
                for entry in entries:
                    name = folder + entry.name
                    if entry.is_dir(follow_symlinks=False):
                        stack.append(name + "/")
                    elif name not in known:
                        found.add("W002" if name.startswith(".staging/") else "W001")
        return found


def check_size(store: Store, path: str, size: int) -> None:
    """The file is there, is regular, and has the size its parent states."""
    if store.size(path) != size:
        raise Refused("E005", "not the size its parent states", path)  # 4.3


def check_digest(path: str, found: str, stated: str) -> None:
    """The SHA-256 is the one its parent states."""
    if found != stated:
        raise Refused("E006", "not the digest its parent states", path)  # 4.4


def read_stated(store: Store, path: str, stated: dict[str, Any]) -> bytes:
    """All bytes of the manifest or of a part, of the size and digest its parent states."""
    check_size(store, path, stated["size"])
    data = store.read(path, 0, stated["size"])
    check_digest(path, hashlib.sha256(data).hexdigest(), stated["sha256"])
    return data


# -------------------- canonical JSON: section 5


class Number(NamedTuple):
    """A number as it is written."""

    literal: str


class Members(NamedTuple):
    """An object as it is written: its members in order, duplicates included."""

    pairs: list[tuple[str, Any]]


def not_json(name: str) -> NoReturn:
    """NaN and Infinity, which Python takes for numbers, are not JSON."""
    raise ValueError(name)


DECODER = json.JSONDecoder(object_pairs_hook=Members, parse_int=Number, parse_float=Number, parse_constant=not_json)
ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def nesting(data: bytes) -> int:
    """The greatest depth of brackets outside strings; also of what is not JSON."""
    depth = deepest = 0
    for match in re.finditer(rb'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', data, re.DOTALL):
        if match[0] in b"[{":
            depth += 1
            deepest = max(depth, deepest)
        elif match[0] in b"]}":
            depth = max(depth - 1, 0)
    return deepest


def duplicates(value: Any) -> bool:
    """Whether some object inside has a member twice."""
    if isinstance(value, Members):
        names = [name for name, _ in value.pairs]
        return len(set(names)) < len(names) or any(duplicates(item) for _, item in value.pairs)
    return isinstance(value, list) and any(duplicates(item) for item in value)


def plain(value: Any) -> Any:
    """The value in Python's types; ValueError where it is not in the subset (5.4, 5.5)."""
    if isinstance(value, Number):
        if not re.fullmatch(r"0|[1-9][0-9]{0,15}", value.literal) or int(value.literal) > 2**53 - 1:
            raise ValueError("a number that is not an integer of 0 to 2^53 - 1")
        return int(value.literal)
    if isinstance(value, Members):
        if not all(name.isascii() for name, _ in value.pairs):
            raise ValueError("a member name that is not ASCII")
        return {name: plain(item) for name, item in value.pairs}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if value is None:
        raise ValueError("null")
    return value


def quoted(text: str) -> str:
    """A string as canonical JSON writes it (5.6)."""
    return '"' + re.sub(r'["\\\x00-\x1f]', lambda c: ESCAPES.get(c[0], f"\\u{ord(c[0]):04x}"), text) + '"'


def encode(value: Any) -> str:
    """Canonical JSON (5)."""
    if isinstance(value, dict):
        return "{" + ",".join(quoted(name) + ":" + encode(value[name]) for name in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(encode, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return quoted(value) if isinstance(value, str) else str(value)


def decode(data: bytes, path: str, look: Callable[[Members], None] | None = None) -> dict[str, Any]:
    """The object of a canonical JSON file; ``look`` sees it before its form is checked (6.2)."""
    if nesting(data) > 32:
        raise Refused("E010", "nests deeper than 32", path)  # 5.2, 5.8
    try:
        loose = DECODER.decode(data.decode("utf-8"))
    except ValueError:
        raise Refused("E011", "not JSON in UTF-8", path) from None  # 5.1
    if not isinstance(loose, Members):
        raise Refused("E011", "not a JSON object", path)  # 5.1
    if look:
        look(loose)
    if duplicates(loose):
        raise Refused("E014", "an object has a member twice", path)  # 5.3
    try:
        value = plain(loose)
        canonical = encode(value).encode("utf-8")  # UnicodeEncodeError, a ValueError, where there are surrogates
    except ValueError:
        raise Refused("E015", "a value outside the subset", path) from None  # 5.4 to 5.6
    if canonical != data:
        raise Refused("E015", "not in canonical form", path)  # 5.4 to 5.7
    assert isinstance(value, dict)
    return value


# -------------------- members and values: section 5

Faults = list[Refused]
Check = Callable[[Any, str, Faults], None]


def integer(low: int = 0, high: int = 2**53 - 1) -> Check:
    """An integer in a range."""

    def check(value: Any, at: str, faults: Faults) -> None:
        if type(value) is not int or not low <= value <= high:
            faults.append(Refused("E018", f"not an integer of {low} to {high}", at))

    return check


def string(pattern: str = r"(?s:.*)") -> Check:
    """A string that matches a pattern."""

    def check(value: Any, at: str, faults: Faults) -> None:
        if type(value) is not str or not re.fullmatch(pattern, value):
            faults.append(Refused("E018", f"not a string of the form {pattern}", at))

    return check


def boolean(value: Any, at: str, faults: Faults) -> None:
    """A boolean."""
    if type(value) is not bool:
        faults.append(Refused("E018", "not a boolean", at))


def choice(*values: str) -> Check:
    """One of some strings."""
    return string("|".join(map(re.escape, values)))


def array(item: Check, low: int = 0, high: int | None = None) -> Check:
    """An array of items."""

    def check(value: Any, at: str, faults: Faults) -> None:
        if type(value) is not list or len(value) < low or (high is not None and len(value) > high):
            faults.append(Refused("E018", "not an array of the given length", at))
        else:
            for n, element in enumerate(value):
                item(element, f"{at}/{n}", faults)

    return check


def members(required: dict[str, Check], optional: dict[str, Check] | None = None) -> Check:
    """An object with these members and no other."""
    optional = optional or {}
    known = required | optional

    def check(value: Any, at: str, faults: Faults) -> None:
        if type(value) is not dict:
            faults.append(Refused("E018", "not an object", at))
            return
        faults += [Refused("E016", f"unknown member {name}", at) for name in value if name not in known]
        faults += [Refused("E017", f"member {name} is missing", at) for name in required if name not in value]
        for name in sorted(value.keys() & known.keys()):
            known[name](value[name], f"{at}/{name}", faults)

    return check


def mapping(item: Check | None) -> Check:
    """An object with any members."""

    def check(value: Any, at: str, faults: Faults) -> None:
        if type(value) is not dict:
            faults.append(Refused("E018", "not an object", at))
        elif item:
            for name, element in value.items():
                item(element, f"{at}/{name}", faults)

    return check


def axis_size(value: Any, at: str, faults: Faults) -> None:
    """The size of an axis: an integer, the name of a dim, or {"last": n} (8)."""
    if type(value) is dict:
        members({"last": integer()})(value, at, faults)
    elif type(value) is not str:
        integer()(value, at, faults)


def requires_array(value: Any, at: str, faults: Faults) -> None:
    """``requires``: strings, strictly ascending, at least one (6)."""
    before = len(faults)
    array(string(), 1)(value, at, faults)
    if len(faults) == before and not ascending(value):
        faults.append(Refused("E018", "not strictly ascending", at))


# fmt: off
HEX64, HEX16, LABEL = string("[0-9a-f]{64}"), string("[0-9a-f]{16}"), string("[a-z0-9][a-z0-9_.+-]{0,63}")
REAL, INTEGERS = HEX16, array(integer())
FORMAT, VERSION = choice("kvformat"), string(r"1\.(0|[1-9][0-9]{0,3})")
ROOT = members(
    {"format": FORMAT, "manifest": members({"sha256": HEX64, "size": integer()}), "version": VERSION},
    {"requires": requires_array},
)
AXIS = members({"name": string(), "size": axis_size})
SCHEMA = members({
    "components": array(members(
        {"axes": array(AXIS, 1, 7), "codec": string(), "dtype": string(), "layers": INTEGERS, "name": string(),
         "role": choice(*ROLES)},
        {"quant": members({"scale": string()}), "stage": choice("raw", "normed", "attention")}), 1),
    "dims": array(string()),
    "extras": array(members({"axes": array(AXIS, 1, 8), "dtype": string(), "name": string()})),
    "shared": array(members({"layer": integer(), "source": integer()})),
})
ROPE_REALS = ("attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor", "low_freq_factor", "mscale",
              "mscale_all_dim")
ROPE_OTHER: dict[str, Check] = {
    "long_factor": array(REAL), "short_factor": array(REAL), "original_max_position": integer(1),
    "sections": INTEGERS, "truncate": boolean,
}
ROPE_KINDS: dict[str, tuple[set[str], set[str]]] = {  # kind: needs, may have
    "default": (set(), {"sections"}),
    "linear": ({"factor"}, {"sections"}),
    "llama3": ({"factor", "high_freq_factor", "low_freq_factor", "original_max_position"}, {"sections"}),
    "longrope": ({"attention_factor", "long_factor", "original_max_position", "short_factor"}, {"factor", "sections"}),
    "yarn": ({"attention_factor", "beta_fast", "beta_slow", "factor", "original_max_position"},
             {"mscale", "mscale_all_dim", "sections", "truncate"}),
    "proportional": (set(), {"factor", "sections"}),
}
TENSOR_DIGEST = {"scheme": choice("kvf-tensors-1"), "sha256": HEX64}
SIZES = ("head_dim", "hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads")
MORE_SIZES = ("intermediate_size", "kv_lora_rank", "moe_intermediate_size", "num_expert_groups", "num_experts",
              "num_experts_per_token", "num_topk_groups", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
              "v_head_dim", "vocab_size")
SCALARS = ("attention_scale", "attention_softcap", "embedding_scale", "residual_scale", "routed_scale")
CONTEXT = members({"kind": choice("unknown", "model")}, {"model": members({
    "adapters": array(members({"scale": REAL, **TENSOR_DIGEST})),
    "compute_dtype": choice("BF16", "F16", "F32"),
    "family": LABEL,
    "norm_eps": REAL,
    "qk_norm": choice("none", "rms_head", "rms_full", "layer_head", "l2"),
    "rope": array(members(
        {"interleaved": boolean, "kind": choice(*ROPE_KINDS), "layers": INTEGERS, "rotary_dim": integer(1),
         "theta": REAL},
        {**dict.fromkeys(ROPE_REALS, REAL), **ROPE_OTHER})),
    "scalars": members({}, dict.fromkeys(SCALARS, REAL)),
    "sizes": members(
        dict.fromkeys(SIZES, integer(1)),
        {**dict.fromkeys(MORE_SIZES, integer(1)), "first_dense_layers": integer(), "num_shared_experts": integer()}),
    "weights": members(TENSOR_DIGEST),
    "windows": array(members({"layers": INTEGERS, "size": integer(1)})),
}, {"activation": LABEL})})
TEXT = members({}, {
    "add_generation_prompt": boolean,
    "canary": members({"text": string(), "token_ids": array(integer(0, 2**31 - 1))}),
    "chat_template": HEX64, "special_tokens": boolean, "tokenizer": HEX64, "truncate": integer(1),
})
PART = {"count": integer(), "sha256": HEX64, "size": integer()}
KEYS_PART = members(PART | {"first_key": HEX16})
MANIFEST = members({
    "context": CONTEXT,
    "files": array(members({"name": string("[a-z0-9_.-]{1,64}"), "sha256": HEX64, "size": integer(0, LIMIT - 1)})),
    "format": FORMAT,
    "header_size": integer(),
    "index": members({
        "document_keys": array(KEYS_PART), "name_keys": array(KEYS_PART),
        "names": array(members(PART | {"nbytes": integer()})),
        "rows": array(members(PART)), "shards": array(members(PART))}),
    "provenance": mapping(string()),
    "schema": SCHEMA,
    "shard_slots": integer(1, 10_000),
    "skipped": array(members({"input": integer(0, LIMIT - 1), "name": string(), "reason": string()})),
    "text": TEXT,
    "totals": members(dict.fromkeys(("names", "nbytes", "records", "shards", "tokens"), integer())),
    "version": VERSION,
}, {"extensions": mapping(None), "requires": requires_array})
WEIGHTS_FILE = members({"tensors": array(members(
    {"dtype": choice("BF16", "F16", "F32"), "name": string(), "sha256": HEX64, "shape": INTEGERS}))})
INV_FREQ_FILE = members({"groups": array(members({"layers": INTEGERS, "values": array(REAL)}))})
BOUNDS_FILE = members({"components": array(members(
    {"name": string(), "relative_rms": REAL}, {"quantisation": LABEL}))})
COVERED_FILES = {"bounds": BOUNDS_FILE, "inv_freq": INV_FREQ_FILE, "weights": WEIGHTS_FILE}
# fmt: on


def well_formed(value: dict[str, Any], check: Check, path: str) -> None:
    """Raises the lowest of E016, E017, E018 over the whole file."""
    faults: Faults = []
    check(value, path, faults)
    lowest(faults)


# -------------------- layout of records: sections 8, 12.1


class Tensor(NamedTuple):
    """A tensor at its place; offsets from the start of the record."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    first: int
    end: int


def shape_of(axes: list[dict[str, Any]], dims: dict[str, int]) -> list[int]:
    """The sizes of axes under given dims (8)."""
    sizes = [axis["size"] for axis in axes]
    return [dims[s] if type(s) is str else min(dims["tokens"], s["last"]) if type(s) is dict else s for s in sizes]


def layout(schema: dict[str, Any], dims: dict[str, int]) -> list[Tensor]:
    """The tensors of a record in their order, ``pad`` included; the last one ends with the record (12.1)."""
    tensors = [(c["name"], c["dtype"], [len(c["layers"]), *shape_of(c["axes"], dims)]) for c in schema["components"]]
    slabs = sum(len(c["layers"]) for c in schema["components"])
    tensors.append(("sums", "U64", [slabs + len(schema["extras"])]))  # 12.1.2
    tensors += [(e["name"], e["dtype"], shape_of(e["axes"], dims)) for e in schema["extras"]]
    tensors.sort(key=lambda tensor: -ITEM[tensor[1]])  # 12.1.1; the sort is stable
    placed, at = [], 0
    for name, dtype, shape in tensors:
        end = at + ITEM[dtype] * math.prod(shape)
        placed.append(Tensor(name, dtype, tuple(shape), at, end))
        at = end
    if at % 4096:  # 12.1.3
        placed.append(Tensor("pad", "U8", (align(at, 4096) - at,), at, align(at, 4096)))
    return placed


def tensor_entry(name: str, dtype: str, shape: Iterable[int], first: int, end: int) -> str:
    """One member of a safetensors header (12.2.2, 13.2)."""
    sizes = ",".join(map(str, shape))
    return f',"{name}":{{"dtype":"{dtype}","shape":[{sizes}],"data_offsets":[{first},{end}]}}'


def shard_header(version: str, ordinal: int, schema_digest: str, records: list[tuple[int, list[Tensor]]]) -> str:
    """The header of a shard without its spaces (12.2.2); ``records`` are offsets and layouts."""
    head = f'{{"__metadata__":{{"kvformat":"{version}","ordinal":"{ordinal}","schema":"{schema_digest}"}}'
    entries = [
        tensor_entry(f"{position:04}/{t.name}", t.dtype, t.shape, offset + t.first, offset + t.end)
        for position, (offset, tensors) in enumerate(records)
        for t in tensors
    ]
    return head + "".join(entries) + "}"


def derived_header_size(schema: dict[str, Any], slots: int, version: str) -> int:
    """``header_size`` (12.3): every record of the widest header is equally wide."""
    wide = dict.fromkeys(schema["dims"], 2**32 - 1) | {"tokens": 2**24}
    tensors = [t._replace(first=0, end=0) for t in layout(schema, wide) if t.name != "pad"]
    empty = len(shard_header(version, 99_999_999, "0" * 64, []))
    record = sum(len(tensor_entry("0000/" + t.name, t.dtype, t.shape, LIMIT - 1, LIMIT - 1)) for t in tensors)
    pad = len(tensor_entry("0000/pad", "U8", [4095], LIMIT - 1, LIMIT - 1))
    return align(8 + empty + slots * (record + pad), 4096)


def digest(domain: str, *parts: bytes) -> str:
    """SHA-256 of a domain, a zero byte and what follows (8, 9, 11)."""
    return hashlib.sha256(b"\0".join([domain.encode(), b""]) + b"".join(parts)).hexdigest()


# -------------------- root and manifest: sections 6, 7


def look_loosely(root: Members) -> None:
    """Version and features, before anything else is asked of the root (6.2)."""
    loose = dict(root.pairs)
    version, requires = loose.get("version"), loose.get("requires")
    if loose.get("format") == "kvformat" and type(version) is str:
        match = re.fullmatch(r"0*([0-9]*)\.[0-9]+", version)
        if match and match[1] not in ("", "1"):
            raise Refused("E012", "the major version is newer", "kvformat.json")
    if type(requires) is list and any(type(name) is str and name not in KNOWN_FEATURES for name in requires):
        raise Refused("E013", "needs an unknown feature", "kvformat.json")


def open_root(store: Store, expected_id: str | None) -> tuple[str, dict[str, Any]]:
    """The dataset id and the root's members."""
    path = "kvformat.json"
    try:
        size = store.size(path)
    except Refused as fault:
        raise (Refused("E001", "no dataset", path) if fault.code == "E002" else fault) from None
    if size > 65_536:
        raise Refused("E004", "the root is too large", path)  # 6.1
    data = store.read(path, 0, size)
    dataset_id = hashlib.sha256(data).hexdigest()  # 6.4
    if expected_id is not None and dataset_id != expected_id:
        raise Refused("E007", "not the expected dataset id", path)  # 4.5
    root = decode(data, path, look_loosely)
    well_formed(root, ROOT, path)
    if root["manifest"]["size"] > 67_108_864:
        raise Refused("E004", "the manifest is too large", path)  # 6.1
    return dataset_id, root


def open_manifest(store: Store, root: dict[str, Any]) -> dict[str, Any]:  # noqa: C901
    """The manifest, checked by itself (level 1)."""
    path = f"manifest/{root['manifest']['sha256']}.json"
    manifest = decode(read_stated(store, path, root["manifest"]), path)
    well_formed(manifest, MANIFEST, path)
    for name in ("format", "version", "requires"):
        if manifest.get(name) != root.get(name):
            raise Refused("E019", f"{name} is not the root's", path)  # 7.1
    totals, index, schema = manifest["totals"], manifest["index"], manifest["schema"]
    counts = {table: sum(part["count"] for part in index[table]) for table in TABLES}
    of_table = {
        "rows": "records",
        "document_keys": "records",
        "names": "names",
        "name_keys": "names",
        "shards": "shards",
    }
    if not 1 <= totals["records"] < LIMIT or any(counts[t] != totals[of_table[t]] for t in TABLES):
        raise Refused("E020", "totals are not the sums of the parts' counts", path)  # 7.4
    check_schema(schema, manifest)
    if manifest["header_size"] != derived_header_size(schema, manifest["shard_slots"], root["version"]):
        raise Refused("E041", "header_size is not the derived one", path)  # 12.3
    check_context(manifest["context"], path)
    files = {file["name"]: file["sha256"] for file in manifest["files"]}
    if not ascending([file["name"] for file in manifest["files"]]):
        raise Refused("E043", "files are not in order", path)  # 7.2
    if manifest["context"]["kind"] == "model" and (
        files.get("weights") != manifest["context"]["model"]["weights"]["sha256"]
    ):
        raise Refused("E043", "no covered file has the weights' digest", path)  # 9.4
    if not ascending([entry["input"] for entry in manifest["skipped"]]) or not all(
        1 <= len(entry["name"].encode()) <= 512 and entry["reason"] for entry in manifest["skipped"]
    ):
        raise Refused("E045", "skipped is not in order, or a name or reason is not as it must be", path)  # 7.3
    for table in TABLES:
        for part in index[table]:
            _, _, size = part_layout(table, part, root["version"], len(schema["dims"]))
            if not 1 <= part["count"] <= 2**20 or part["size"] != size:
                raise Refused("E050", f"a part of {table} has an impossible count or size", path)  # 13.1
    for table in ("document_keys", "name_keys"):
        keys = [part["first_key"] for part in index[table]]
        if keys != sorted(keys):
            raise Refused("E059", f"the parts of {table} are not in order", path)  # 13.10
    return manifest


def check_schema(schema: dict[str, Any], manifest: dict[str, Any]) -> None:  # noqa: C901, PLR0912
    """The rules of section 8, in the order of their codes."""
    path = "manifest: schema"
    components, extras, dims, shared = (schema[k] for k in ("components", "extras", "dims", "shared"))
    tensors = components + extras
    names = [tensor["name"] for tensor in tensors]
    lists_of_names = [names, dims, *([axis["name"] for axis in tensor["axes"]] for tensor in tensors)]
    sizes = [axis["size"] for tensor in tensors for axis in tensor["axes"]]

    def fault(code: str, message: str) -> NoReturn:
        raise Refused(code, message, path)

    if any(not re.fullmatch("[a-z][a-z0-9_]{0,63}", name) for entry in lists_of_names for name in entry):
        fault("E030", "a name is not well-formed")  # 8.1
    if any(len(set(entry)) < len(entry) for entry in lists_of_names) or {"sums", "pad"} & set(names):
        fault("E030", "a name is not unique, or reserved")  # 8.1
    if any(c["dtype"] not in COMPONENT_DTYPES for c in components) or any(e["dtype"] not in ITEM for e in extras):
        fault("E031", "a dtype is unknown or not allowed there")  # 8.2
    if not 1 <= len(dims) <= 16 or dims[0] != "tokens" or any(type(s) is str and s not in dims for s in sizes):
        fault("E032", "dims do not begin with tokens, or an axis names no dim")  # 8.3
    if any(size == 0 or (type(size) is dict and size["last"] == 0) for size in sizes):
        fault("E033", "a size is 0")  # 8.4
    if sum(t.end - t.first for t in layout(schema, dict.fromkeys(dims, 1)) if t.name not in ("sums", "pad")) >= LIMIT:
        fault("E033", "the least record is too large")  # 8.4
    if derived_header_size(schema, manifest["shard_slots"], manifest["version"]) > 100_000_000:
        fault("E033", "the header of a shard is too large")  # 8.4
    if any(not c["layers"] or not ascending(c["layers"]) or c["layers"][-1] > 65_535 for c in components):
        fault("E034", "layers are empty, not ascending or too large")  # 8.5
    for role in ROLES[:-1]:
        layers = [layer for c in components if c["role"] == role for layer in c["layers"]]
        if len(set(layers)) < len(layers):
            fault("E035", f"a layer has role {role} twice")  # 8.6
    if any(("stage" in c) != (c["role"] in ("key", "rope_key", "latent")) for c in components):
        fault("E036", "stage is missing or out of place")  # 8.7
    if any(c["codec"] != "raw" for c in components):
        fault("E037", "a codec is not raw")  # 8.8
    by_name, scales = {c["name"]: c for c in components}, scale_names(schema)
    for c in components:
        if (c["dtype"] not in EIGHT_BIT or c["role"] == "other") and "quant" in c:
            fault("E038", "quant at a component of another dtype, or of role other")  # 8.9
        if c["dtype"] in EIGHT_BIT and "quant" not in c and c["role"] != "other":
            fault("E038", "an 8-bit component without quant")  # 8.9
        if c["role"] in ("key_scale", "value_scale") and c["name"] not in scales:
            fault("E038", "a scale that no component names")  # 8.9
        if "quant" in c:
            s = by_name.get(c["quant"]["scale"])
            role = {"key": "key_scale", "value": "value_scale"}.get(c["role"], "other")
            if (
                s is None
                or (s["dtype"], s["role"], s["layers"]) != ("F32", role, c["layers"])
                or "quant" in s
                or len(s["axes"]) != len(c["axes"])
                or any(a["size"] not in (b["size"], 1) for a, b in zip(s["axes"], c["axes"], strict=True))
            ):
                fault("E038", "a scale does not fit")  # 8.9
    owned = {layer for c in components if c["role"] in KV_ROLES for layer in c["layers"]}
    if not ascending([entry["layer"] for entry in shared]) or any(
        entry["layer"] in owned or entry["layer"] >= 65_536 or entry["source"] not in owned for entry in shared
    ):
        fault("E039", "shared layers are not in order, or own K/V, or their source does not")  # 8.10
    forms: dict[str, list[Any]] = {
        "token_ids": [("I32", ["tokens"])],
        "position_ids": [("I32", [1, "tokens"]), ("I32", [3, "tokens"])],
        "mask": [("U64", [2])],
        "media": [("U8", ["media", 49])],
    }
    for e in extras:
        if e["name"] in forms and (
            (e["dtype"], [axis["size"] for axis in e["axes"]]) not in forms[e["name"]]
            or "token_ids" not in [other["name"] for other in extras]
        ):
            fault("E040", f"the extra {e['name']} has another form, or stands alone")  # 8.11


def scale_names(schema: dict[str, Any]) -> set[str]:
    """The components named as scales."""
    return {c["quant"]["scale"] for c in schema["components"] if "quant" in c}


def bad_real(text: str) -> bool:
    """Whether a real of the right form is not finite, or -0 (5)."""
    return not math.isfinite(struct.unpack(">d", bytes.fromhex(text))[0]) or text == "8000000000000000"


def bad_groups(groups: list[list[int]]) -> bool:
    """Whether layers of groups are empty, not in order, too large, or in two groups (9.1, 9.7)."""
    every = [layer for layers in groups for layer in layers]
    return any(not layers or not ascending(layers) or layers[-1] > 65_535 for layers in groups) or (
        len(set(every)) < len(every) or not ascending([layers[0] for layers in groups])
    )


def check_context(context: dict[str, Any], path: str) -> None:
    """The rules of section 9 about the context."""
    if (context["kind"] == "model") != ("model" in context):
        raise Refused("E042", "kind and model do not fit", path)
    if context["kind"] == "unknown":
        return
    model = context["model"]
    reals = [model["norm_eps"], *model["scalars"].values(), *(adapter["scale"] for adapter in model["adapters"])]
    for group in model["rope"]:
        reals += [group[name] for name in ("theta", *ROPE_REALS) if name in group]
        reals += [*group.get("long_factor", []), *group.get("short_factor", [])]
        needs, may = ROPE_KINDS[group["kind"]]
        own = group.keys() - {"interleaved", "kind", "layers", "rotary_dim", "theta"}
        if not needs <= own <= needs | may:
            raise Refused("E042", "a RoPE group does not fit its kind", path)  # 9.2
    if any(map(bad_real, reals)):
        raise Refused("E042", "a real is not finite, or -0", path)  # 9.3
    for groups in (model["rope"], model["windows"]):
        if bad_groups([group["layers"] for group in groups]):
            raise Refused("E042", "layers of groups are not in order, or overlap", path)  # 9.1


# -------------------- index and covered files: sections 9, 13


def part_layout(table: str, part: dict[str, Any], version: str, dims: int) -> tuple[bytes, list[Tensor], int]:
    """The header of a part (with length and spaces), its columns (offsets from the data's start), its size (13.2)."""
    n = part["count"]
    columns: list[tuple[str, str, list[int]]] = {
        "shards": [("sha256", "U8", [n, 32]), ("size", "U64", [n]), ("first_record", "U64", [n])],
        "rows": [
            ("offset", "U64", [n]),
            ("dims", "U32", [n, dims]),
            ("document", "U8", [n, 32]),
            ("record_sum", "U8", [n, 16]),
        ],
        "names": [
            ("record", "U64", [n]),
            ("end", "U64", [n]),
            ("input", "U64", [n]),
            ("bytes", "U8", [part.get("nbytes", 0)]),
        ],
    }.get(table, [("key", "U64", [n]), ("slot", "U64", [n])])
    placed, at = [], 0
    for name, dtype, shape in columns:
        end = at + {"U8": 1, "U32": 4, "U64": 8}[dtype] * math.prod(shape)
        placed.append(Tensor(name, dtype, tuple(shape), at, end))
        at = align(end, 64)
        if end < at:
            placed.append(Tensor(name + ".pad", "U8", (at - end,), end, at))
    text = f'{{"__metadata__":{{"kvformat":"{version}","table":"{table}"}}' + "".join(
        tensor_entry(*tensor) for tensor in placed
    )
    length = align(8 + len(text) + 1, 64) - 8
    return struct.pack("<Q", length) + (text + "}").ljust(length).encode(), placed, 8 + length + at


class Index(NamedTuple):
    """The tables, as lists over all parts."""

    shards: list[tuple[str, int, int]]  # sha256, size, first record
    offsets: list[int]
    dims: list[dict[str, int]]
    documents: list[bytes]
    record_sums: list[bytes]
    names: list[list[str]]  # by record


def check_covered(store: Store, path: str, file: dict[str, Any], manifest: dict[str, Any]) -> None:
    """The content of a covered file that section 9 owns; E044 whatever is wrong (9.5 to 9.8)."""
    label = file["name"]
    if file["size"] > 67_108_864:
        raise Refused("E044", "the covered file is too large", path)  # 9.6
    try:
        content = decode(store.read(path, 0, file["size"]), path)
        well_formed(content, COVERED_FILES[label], path)  # 9.5
    except Refused as fault:
        raise Refused("E044", fault.message, path) from None
    if label == "bounds":
        names = [bound["name"] for bound in content["components"]]
        schema = manifest["schema"]
        if not ascending([name.encode() for name in names]):
            raise Refused("E044", "names are not in order", path)  # 9.8
        if not set(names) <= {component["name"] for component in schema["components"]} - scale_names(schema):
            raise Refused("E044", "a name is that of a scale, or of no component", path)  # 9.8
        values = [bound["relative_rms"] for bound in content["components"]]
        if any(bad_real(value) or value >= "8" for value in values):
            raise Refused("E044", "a bound is negative or not finite", path)  # 5, 9.8
        return
    if label == "inv_freq":
        if any(not group["values"] or any(map(bad_real, group["values"])) for group in content["groups"]):
            raise Refused("E044", "values are missing, not finite, or -0", path)  # 5, 9.7
        if bad_groups([group["layers"] for group in content["groups"]]):
            raise Refused("E044", "layers of groups are not in order, or overlap", path)  # 9.7
        return
    if not ascending([tensor["name"] for tensor in content["tensors"]]):
        raise Refused("E044", "tensors are not in order", path)  # 9.5
    model = manifest["context"].get("model")
    if model and any(tensor["dtype"] != model["compute_dtype"] for tensor in content["tensors"]):
        raise Refused("E044", "a dtype is not the compute dtype", path)  # 9.5


def read_index(store: Store, manifest: dict[str, Any]) -> tuple[Index, set[str]]:
    """All parts and covered files, checked; and their paths (level 2, and the padding of level 4)."""
    paths: set[str] = set()
    tables: dict[str, list[dict[str, bytes]]] = {table: [] for table in TABLES}
    for table in TABLES:
        for part in manifest["index"][table]:
            path = f"index/{part['sha256']}.safetensors"
            paths.add(path)
            data = read_stated(store, path, part)
            header, tensors, _ = part_layout(table, part, manifest["version"], len(manifest["schema"]["dims"]))
            if not data.startswith(header):
                raise Refused("E051", "the header is not the one that table and counts demand", path)  # 13.2
            columns = {t.name: data[len(header) + t.first : len(header) + t.end] for t in tensors}
            if any(name.endswith(".pad") and any(column) for name, column in columns.items()):
                raise Refused("E076", "padding is not zero", path)  # 13.2
            tables[table].append(columns)
    index = check_tables(tables, manifest)
    for file in manifest["files"]:
        path = "files/" + file["sha256"]
        paths.add(path)
        check_size(store, path, file["size"])
        check_digest(path, store.sha256(path, file["size"]), file["sha256"])
        if file["name"] in COVERED_FILES:
            check_covered(store, path, file, manifest)
    return index, paths


def check_tables(tables: dict[str, list[dict[str, bytes]]], manifest: dict[str, Any]) -> Index:  # noqa: C901, PLR0912, PLR0915
    """The contents of the tables, rule by rule (7.4, 13.3 to 13.10)."""
    schema, totals = manifest["schema"], manifest["totals"]
    total = totals["records"]

    def numbers(table: str, column: str, dtype: str = "<u8") -> list[int]:
        joined = b"".join(part[column] for part in tables[table])
        return [int(n) for n in np.frombuffer(joined, dtype).tolist()]

    def fixed(table: str, column: str, width: int) -> list[bytes]:
        joined = b"".join(part[column] for part in tables[table])
        return [joined[i : i + width] for i in range(0, len(joined), width)]

    def fault(code: str, table: str, message: str) -> NoReturn:
        raise Refused(code, message, f"index: {table}")

    sha256, sizes = [digest.hex() for digest in fixed("shards", "sha256", 32)], numbers("shards", "size")
    firsts = numbers("shards", "first_record")
    offsets, flat = numbers("rows", "offset"), numbers("rows", "dims", "<u4")
    width = len(schema["dims"])
    dims = [dict(zip(schema["dims"], flat[i : i + width], strict=True)) for i in range(0, len(flat), width)]
    documents, record_sums = fixed("rows", "document", 32), fixed("rows", "record_sum", 16)

    if sum(row["tokens"] for row in dims) != totals["tokens"] or sum(sizes) != totals["nbytes"]:
        fault("E020", "rows, shards", "totals of tokens or bytes are not those of the tables")  # 7.4

    if len(sizes) > 10**8 or firsts[:1] != [0] or not ascending([*firsts, total]):
        fault("E052", "shards", "first records do not ascend from 0")  # 13.3
    if any(b - a > manifest["shard_slots"] for a, b in zip(firsts, [*firsts[1:], total], strict=True)):
        fault("E052", "shards", "a shard has more records than shard_slots")  # 13.3
    if any(size % 4096 or not manifest["header_size"] < size < LIMIT for size in sizes):
        fault("E052", "shards", "a shard has an impossible size")  # 13.3

    if any(not 1 <= row["tokens"] <= 2**24 for row in dims):
        fault("E053", "rows", "tokens is not in 1 to 2^24")  # 13.4
    lengths = [layout(schema, row)[-1].end for row in dims]
    if any(length >= LIMIT for length in lengths):
        fault("E053", "rows", "a record is too large")  # 13.4

    starts = set(firsts)
    for record in range(total):
        if offsets[record] != (0 if record in starts else offsets[record - 1] + lengths[record - 1]):
            fault("E054", "rows", f"record {record} does not begin where the one before it ends")  # 13.5
    for first, end, size in zip(firsts, [*firsts[1:], total], sizes, strict=True):
        if manifest["header_size"] + offsets[end - 1] + lengths[end - 1] != size:
            fault("E054", "rows", f"the shard of record {first} does not end with its last record")  # 13.5

    at = 0
    for part in manifest["index"]["rows"]:
        if at not in starts:
            fault("E055", "rows", "the rows of a shard lie in two parts")  # 13.6
        at += part["count"]

    of_record, inputs = numbers("names", "record"), numbers("names", "input")
    if of_record != sorted(of_record) or sorted(set(of_record)) != list(range(total)):
        fault("E056", "names", "records descend, or one has no name, or one does not exist")  # 13.7
    every_input = inputs + [entry["input"] for entry in manifest["skipped"]]
    if len(set(every_input)) < len(every_input) or max(inputs) >= LIMIT:
        fault("E056", "names", "an input occurs twice, or in skipped too, or is too large")  # 13.7
    if not ascending(list(zip(of_record, inputs, strict=True))):
        fault("E056", "names", "inputs of a record do not ascend")  # 13.7
    texts: list[str] = []
    for part in tables["names"]:
        ends = [int(n) for n in np.frombuffer(part["end"], "<u8").tolist()]
        bounds = list(pairwise([0, *ends]))
        if any(not 1 <= b - a <= 512 for a, b in bounds) or ends[-1] != len(part["bytes"]):
            fault("E056", "names", "ends do not ascend by 1 to 512 up to the last byte")  # 13.7
        try:
            texts += [part["bytes"][a:b].decode() for a, b in bounds]
        except UnicodeDecodeError:
            fault("E056", "names", "a name is not UTF-8")  # 13.7

    if len(set(texts)) < len(texts) or set(texts) & {entry["name"] for entry in manifest["skipped"]}:
        fault("E057", "names", "a name occurs twice, or also in skipped")  # 13.8
    if len(set(documents)) < len(documents):
        fault("E058", "rows", "a document occurs twice")  # 13.9

    document_keys = [int.from_bytes(document[:8], "big") for document in documents]
    name_keys = [xxhash.xxh3_64_intdigest(text.encode()) for text in texts]
    for table, expected in (("document_keys", document_keys), ("name_keys", name_keys)):
        keys, slots = numbers(table, "key"), numbers(table, "slot")
        if not ascending(list(zip(keys, slots, strict=True))):
            fault("E059", table, "not in order")  # 13.10
        if sorted(slots) != list(range(len(expected))) or any(
            key != expected[slot] for key, slot in zip(keys, slots, strict=True)
        ):
            fault("E059", table, "slots are not a permutation, or a key is not that of its slot")  # 13.10
        at = 0
        for part in manifest["index"][table]:
            if part["first_key"] != f"{keys[at]:016x}":
                fault("E059", table, "first_key is not the part's first key")  # 13.10
            at += part["count"]

    names: list[list[str]] = [[] for _ in range(total)]
    for record, text in zip(of_record, texts, strict=True):
        names[record].append(text)
    return Index(list(zip(sha256, sizes, firsts, strict=True)), offsets, dims, documents, record_sums, names)


# -------------------- shards: section 12.2


def shard_path(ordinal: int, sha256: str) -> str:
    """The path of a shard (4)."""
    return f"shards/{ordinal // 1000:05}/{ordinal:08}-{sha256[:16]}.safetensors"


def read_shards(store: Store, manifest: dict[str, Any], index: Index) -> tuple[list[Record], set[str]]:
    """All shards with their records, verified, and their paths (levels 2 to 4)."""
    records: list[Record] = []
    paths = set()
    ends = [*(first for _, _, first in index.shards[1:]), len(index.offsets)]
    for ordinal, ((sha256, size, first), end) in enumerate(zip(index.shards, ends, strict=True)):
        path = shard_path(ordinal, sha256)
        paths.add(path)
        check_size(store, path, size)
        numbers = range(first, end)
        check_header(store, path, manifest, ordinal, [(index.offsets[r], index.dims[r]) for r in numbers])
        records += [read_record(store, path, manifest, index, record) for record in numbers]
        if store.sha256(path, size) != sha256:
            raise Refused("E077", "not the digest the shards table states", path)  # 12.2.4
    return records, paths


def check_header(
    store: Store, path: str, manifest: dict[str, Any], ordinal: int, rows: list[tuple[int, dict[str, int]]]
) -> None:
    """The header of a shard whose records have these offsets and dims."""
    length = manifest["header_size"] - 8
    data = store.read(path, 0, manifest["header_size"])
    if data[:8] != struct.pack("<Q", length):
        raise Refused("E061", "the header length is not header_size - 8", path)  # 12.2.1
    schema_digest = digest("kvf1/schema", encode(manifest["schema"]).encode())
    records = [(offset, layout(manifest["schema"], dims)) for offset, dims in rows]
    if data[8:] != shard_header(manifest["version"], ordinal, schema_digest, records).encode().ljust(length):
        metadata = r'\{"__metadata__":\{"kvformat":"[0-9.]+","ordinal":"([0-9]+)","schema":"([0-9a-f]{64})"\}'
        found = re.match(metadata, data[8:].decode("latin-1"))
        if found and (found[1], found[2]) != (str(ordinal), schema_digest):
            raise Refused("E062", "the header is that of another shard or schema", path)  # 12.2.3
        raise Refused("E063", "the header is not the one its rows demand", path)  # 12.2.2


# -------------------- records: sections 11, 12.1


def read_record(store: Store, path: str, manifest: dict[str, Any], index: Index, number: int) -> Record:  # noqa: C901, PLR0912
    """One record, verified."""
    schema, dims = manifest["schema"], index.dims[number]
    begin, at = manifest["header_size"] + index.offsets[number], f"{path}: record {number}"
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for t in layout(schema, dims):
        tensors[t.name] = (t.dtype, t.shape, store.read(path, begin + t.first, t.end - t.first))
    sums = tensors["sums"][2]
    summed = b"kvf1.rec" + struct.pack(f"<{len(dims)}Q", *dims.values()) + sums
    if xxhash.xxh3_128_digest(summed) != index.record_sums[number]:
        raise Refused("E070", "dims and sums do not have the record_sum", at)  # 12.1.4

    stated = [int(n) for n in np.frombuffer(sums, "<u8").tolist()]
    actual: list[int] = []
    slabs: dict[tuple[str, int], int] = {}  # (role, layer) to the position in sums; unique but for role `other`
    for c in schema["components"]:
        data, layers = tensors[c["name"]][2], len(c["layers"])
        step = len(data) // layers
        for i, layer in enumerate(c["layers"]):
            slabs[c["role"], layer] = len(actual)
            actual.append(xxhash.xxh3_64_intdigest(data[i * step : (i + 1) * step]))
    count = len(actual)
    actual += [xxhash.xxh3_64_intdigest(tensors[e["name"]][2]) for e in schema["extras"]]
    for role, layer in slabs:
        if role == "key" and ("value", layer) in slabs:
            k, v = slabs["key", layer], slabs["value", layer]
            if actual[k] != stated[k] and (actual[k], actual[v]) == (stated[v], stated[k]):
                raise Refused("E071", f"key and value of layer {layer} are exchanged", at)  # 12.1.5
    if actual[:count] != stated[:count]:
        raise Refused("E072", "a slab does not have its sum", at)  # 12.1.5
    if actual[count:] != stated[count:]:
        raise Refused("E073", "an extra does not have its sum", at)  # 12.1.5
    for name in scale_names(schema):
        values = np.frombuffer(tensors[name][2], "<f4")
        if not (np.isfinite(values) & (values > 0)).all():
            raise Refused("E074", f"a scale of {name} is not finite and positive", at)  # 12.1.6
    if "token_ids" in [e["name"] for e in schema["extras"]]:
        inputs = {e["name"]: tensors[e["name"]][2] for e in schema["extras"]}
        document = document_bytes(inputs, dims["tokens"])
        if document is None or hashlib.sha256(document).digest() != index.documents[number]:
            raise Refused("E075", "the document digest is not that of the stored inputs", at)  # 11.1
    if any(tensors["pad"][2] if "pad" in tensors else b""):
        raise Refused("E076", "padding is not zero", at)  # 12.1.3
    kept = {t["name"]: tensors[t["name"]] for t in schema["components"] + schema["extras"]}
    return Record(index.names[number], index.documents[number].hex(), dims, kept)


def document_bytes(inputs: dict[str, bytes], tokens: int) -> bytes | None:
    """The document bytes of stored inputs in normal form (11); None where they are no document."""
    ids = np.frombuffer(inputs["token_ids"], "<i4")
    if (ids < 0).any():
        return None
    kind, length = struct.unpack("<QQ", inputs.get("mask", bytes(16)))
    if kind > 2 or (not 0 < length < tokens if kind == 1 else length != 0):
        return None
    rows = np.frombuffer(inputs.get("position_ids", b""), "<i4").reshape(-1, tokens)
    if len(rows) == 3 and (rows == rows[0]).all():
        rows = rows[:1]
    if len(rows) == 1 and (rows[0] == np.arange(tokens)).all():
        rows = rows[:0]
    media = inputs.get("media", b"")
    before = 0
    for i in range(0, len(media), 49):
        scheme, first, count = struct.unpack_from("<BQQ", media, i)
        if scheme > 2 or first < before or first + count > tokens:
            return None
        before = first
    mask = struct.pack("<BQ", 1, length) if kind == 1 else bytes([kind])
    positions = bytes([len(rows)]) + rows.tobytes()
    head = b"kvf1/document\0" + struct.pack("<Q", tokens) + ids.tobytes()
    return head + mask + positions + struct.pack("<I", len(media) // 49) + media


# -------------------- the whole


def read(path: str | os.PathLike[str], expected_id: str | None = None) -> Dataset:
    """Verifies everything (level 4) and returns all records; raises ``Refused`` with the first fault."""
    try:
        store = Store(Path(path))
        dataset_id, root = open_root(store, expected_id)
        manifest = open_manifest(store, root)
        index, known = read_index(store, manifest)
        records, shards = read_shards(store, manifest, index)
        known |= shards | {"kvformat.json", f"manifest/{root['manifest']['sha256']}.json"}
        warnings = store.unknown(known)
    except PermissionError as error:
        raise Refused("E207", f"not permitted: {error.strerror}") from None
    except (OSError, MemoryError) as error:
        raise Refused("E203", f"the storage or the memory failed: {type(error).__name__}") from None
    if int(root["version"].split(".")[1]) > MINOR:
        warnings.add("W003")  # 6.3
    return Dataset(dataset_id, records, sorted(warnings))


def check(path: str | os.PathLike[str], expected_id: str | None = None) -> list[tuple[str, str, str]]:
    """The first fault as (code, path in the dataset, message), or nothing."""
    try:
        read(path, expected_id)
    except Refused as fault:
        return [(fault.code, fault.path, fault.message)]
    return []


def main(arguments: list[str] | None = None) -> int:
    """Prints one JSON object; digests in place of values."""
    parser = argparse.ArgumentParser(description="Reads and verifies a dataset by the specification alone.")
    parser.add_argument("path")
    parser.add_argument("--expected-id")
    options = parser.parse_args(arguments)
    try:
        dataset = read(options.path, options.expected_id)
    except Refused as fault:
        print(json.dumps({"ok": False, "code": fault.code, "message": f"{fault.path}: {fault.message}"}))
        return 1
    records = []
    for record in dataset.records:
        tensors = {
            name: {"dtype": dtype, "shape": shape, "sha256": hashlib.sha256(data).hexdigest()}
            for name, (dtype, shape, data) in record.tensors.items()
        }
        records.append(vars(record) | {"tensors": tensors})
    print(json.dumps({"ok": True, "id": dataset.id, "warnings": dataset.warnings, "records": records}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
