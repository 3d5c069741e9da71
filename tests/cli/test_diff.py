from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import kvformat
from kvformat.spec import canonical
from kvformat.spec.context import Text, real
from tests.cli.datasets import TENSORS, flip, write

COUNTED = ("context", "weights", "files", "schema", "text")
EMPTY = {name: [] for name in COUNTED}


def changes(found: dict[str, Any], section: str) -> dict[str, tuple[str | None, str | None]]:
    return {change["field"]: (change["a"], change["b"]) for change in found[section]}


def test_equal_datasets(run, published: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(published, tmp_path / "copy")
    result = run("diff", published, copy)
    assert (result.code, result.stderr) == (0, "")
    assert "the datasets are equal in all that counts" in result.stdout
    found = run("diff", published, copy, "--json").json
    assert (found["ok"], found["same"]) == (True, True)
    assert {name: found[name] for name in COUNTED} == EMPTY


def test_provenance_and_shard_sizes_are_no_difference(run, published: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other", provenance={"torch": "9"}, shard_nbytes=1 << 20)
    assert kvformat.open(other).id != kvformat.open(published).id
    result = run("diff", published, other)
    assert result.code == 0
    assert "provenance, not counted as a difference" in result.stdout
    found = run("diff", published, other, "--json").json
    assert changes(found, "provenance") == {"torch": ("1.2.3", "9")}


def test_context_field_by_field(run, published: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other", theta=1_000_000.0)
    result = run("diff", published, other)
    assert result.code == 1
    assert "rope[0].theta   10000.0   1000000.0" in result.stdout
    found = run("diff", published, other, "--json").json
    assert found["ok"] is False
    assert changes(found, "context") == {"rope[0].theta": ("10000.0", "1000000.0")}
    assert [name for name in COUNTED if found[name]] == ["context"]


def test_the_tensors_that_differ_are_named(run, published: Path, tmp_path: Path) -> None:
    tensors = {**TENSORS, "layers.0.v": "changed", "layers.1.k": "new"}
    del tensors["embed"]
    other = write(tmp_path / "other", tensors=tensors)
    found = run("diff", published, other, "--json").json
    named = changes(found, "weights")
    assert list(named) == ["embed", "layers.0.v", "layers.1.k"]
    assert (named["embed"][1], named["layers.1.k"][0]) == (None, None)
    assert list(changes(found, "context")) == ["weights.sha256"]
    shown = run("diff", published, other).stdout
    assert "weights: tensors that differ (3)" in shown
    assert "layers.0.k" not in shown


def test_a_damaged_tensor_list_is_not_compared(run, dataset: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other", tensors={"x": "y"})
    covered = next((dataset / "files").iterdir())
    flip(covered, 5)
    result = run("diff", dataset, other, "--json")
    assert (result.code, result.json["error"]["code"], result.json["error"]["path"]) == (1, "E006", str(covered))


def test_schema_field_by_field(run, published: Path, tmp_path: Path) -> None:
    schema = kvformat.Schema.uniform(
        num_layers=2, num_kv_heads=1, head_dim=4, dtype="F32", key_stage="raw", layers=[0, 3]
    )
    found = run("diff", published, write(tmp_path / "other", schema=schema), "--json").json
    assert changes(found, "schema") == {
        "components.k.layers": ("0-1", "0,3"),
        "components.k.stage": ("attention", "raw"),
        "components.v.layers": ("0-1", "0,3"),
    }
    assert found["records"]["other_values"] is None


def test_text_counts(run, published: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other", text=Text(truncate=7, special_tokens=True))
    result = run("diff", published, other, "--json")
    assert result.code == 1
    assert changes(result.json, "text") == {"special_tokens": (None, "yes"), "truncate": (None, "7")}


def test_unknown_contexts_are_never_equal(run, published: Path, tmp_path: Path) -> None:
    a = write(tmp_path / "a", unknown=True)
    b = write(tmp_path / "b", unknown=True, provenance={"torch": "2"})
    assert run("diff", a, a).code == 0  # one dataset, whatever made it
    result = run("diff", a, b, "--json")
    assert (result.code, changes(result.json, "context")) == (1, {"kind": ("unknown", "unknown")})
    assert len(result.json["notes"]) == 1
    known = run("diff", a, published, "--json").json
    assert changes(known, "context")["kind"] == ("unknown", "model")
    assert (result.json["weights"], known["weights"], run("diff", a, a, "--json").json["weights"]) == (None, None, [])
    assert "; not comparable: weights\n" in run("diff", a, published).stdout


def test_other_documents(run, published: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other", first=2, lengths=[8, 300, 4])
    result = run("diff", published, other, "--json")
    records = result.json["records"]
    assert result.code == 1
    assert (records["a"], records["b"], records["only_a"], records["only_b"]) == (4, 3, 2, 1)
    assert (records["examples_only_a"], records["examples_only_b"]) == (["clip-0", "clip-1"], ["clip-4"])
    assert (records["other_values"], records["same_order"], records["names_moved"]) == (0, True, 0)
    shown = run("diff", published, other).stdout
    assert "documents only in A          2: clip-0, clip-1\n" in shown
    assert "equal: context, weights, covered files, schema, text\n" in shown


def test_other_values_of_the_same_documents(run, published: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other", values=50)
    result = run("diff", published, other, "--json")
    records = result.json["records"]
    assert (result.code, records["other_values"], records["only_a"], records["only_b"]) == (1, 4, 0, 0)
    assert records["examples_other_values"] == ["clip-0", "clip-1", "clip-2", "clip-3"]


def test_other_names_of_the_same_documents(run, published: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other", names=["clip-1", "clip-0", "new [red]", "clip-3"])
    result = run("diff", published, other, "--json")
    records = result.json["records"]
    assert result.code == 1
    assert (records["names_moved"], records["names_only_a"], records["names_only_b"]) == (2, 1, 1)
    assert set(records["examples_names"]) == {"clip-0", "clip-1", "clip-2", "new [red]"}
    assert "new [red]" in run("diff", published, other).stdout


def test_another_order_is_told_and_not_counted(run, tmp_path: Path) -> None:
    from tests.cli.datasets import SCHEMA, add, context, weights

    for name, order in (("a", (0, 1, 2)), ("b", (2, 0, 1))):
        with kvformat.create(
            tmp_path / name, schema=SCHEMA, context=context(weights()), files={"weights": weights()}
        ) as writer:
            for number in order:
                add(writer, f"clip-{number}", tokens=4, seed=number)
    result = run("diff", tmp_path / "a", tmp_path / "b")
    assert result.code == 0
    assert "another order" in result.stdout


def frequencies(*values: float) -> bytes:
    return canonical.encode({"groups": [{"layers": [0, 1], "values": [real(value) for value in values]}]})


@pytest.mark.parametrize(
    ("left", "right", "code", "said"),
    [
        ((1.0, 0.5), (1.0, 0.5 * (1 + 1e-8)), 0, "within the tolerance"),
        ((1.0, 0.5), (1.0, 0.5 * (1 + 1e-4)), 1, "up to 1.0e-04 relative"),
        ((1.0, 0.5), (1.0,), 1, "other groups or lengths"),
        ((1.0, 0.5), None, 0, "recorded in A only"),
    ],
)
def test_inverse_frequencies_are_compared_by_value(
    run, tmp_path: Path, left: tuple[float, ...], right: tuple[float, ...] | None, code: int, said: str
) -> None:
    a = write(tmp_path / "a", files={"inv_freq": frequencies(*left)})
    b = write(tmp_path / "b", files={} if right is None else {"inv_freq": frequencies(*right)})
    result = run("diff", a, b)
    assert result.code == code
    assert said in result.stdout


def test_other_covered_files(run, tmp_path: Path) -> None:
    a = write(tmp_path / "a", files={"notes": b"1"})
    b = write(tmp_path / "b", files={"notes": b"2"})
    result = run("diff", a, b, "--json")
    assert (result.code, list(changes(result.json, "files"))) == (1, ["notes"])
