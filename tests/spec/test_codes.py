"""``spec/codes.md`` and ``SPEC.md`` against the list of codes."""

from __future__ import annotations

import re
from pathlib import Path

from kvformat.codes import CODES
from tests.spec.reference import SPEC, script

TEXT = (SPEC / "codes.md").read_text(encoding="utf-8")


def test_codes_md_is_what_the_code_says() -> None:
    assert script("make_codes").document() == TEXT, "run: python spec/make_codes.py"


def test_every_code_is_a_row_of_codes_md() -> None:
    rows = re.findall(r"^\| ([EW]\d{3}) \| ([a-z-]+) \| (\w+) \|", TEXT, flags=re.MULTILINE)
    assert sorted(rows) == sorted((code, row.name, row.kind) for code, row in CODES.items())


def test_reader_codes_stand_in_the_order_of_their_precedence() -> None:
    reader = [code for code, row in CODES.items() if row.kind == "reader"]
    assert reader == sorted(reader)


def test_names_and_rules_are_unique_and_well_formed() -> None:
    assert len({row.name for row in CODES.values()}) == len(CODES)
    for code, row in CODES.items():
        assert re.fullmatch(r"[EW]\d{3}", code)
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", row.name), code
        assert row.rule.endswith("."), code
        assert "|" not in row.rule, f"{code} would break the table"
        stages = {
            "any",
            "audit",
            "clean",
            "commit",
            "extract",
            "load",
            "open",
            "read",
            "seal",
            "touch",
            "verify",
            "write",
        }
        assert set(row.detected.split(", ")) <= stages, code


def test_the_specification_cites_every_reader_code_and_warning_and_no_unknown_one() -> None:
    text = (SPEC / "SPEC.md").read_text(encoding="utf-8")
    cited = set(re.findall(r"\b[EW]\d{3}\b", text))
    assert cited <= set(CODES)
    assert cited >= {code for code, row in CODES.items() if row.kind in ("reader", "warning")}


def test_every_must_of_a_reader_has_a_code() -> None:
    """A numbered rule of the specification that says MUST names its code, unless it is about conduct.

    Annex C is about conduct throughout: of loaders, in which order they draw.
    """
    conduct = {
        "A reader MUST NOT need a listing",
        "A reader MUST ignore files",
        "a reader MUST look at the root loosely",
        "It MUST NOT replace or remove",
        "MUST NOT affect how values are read",
        "Tools MUST NOT print",
        "A reader MUST bound what it allocates",
    }
    text = (SPEC / "SPEC.md").read_text(encoding="utf-8")
    body, annex, _ = text.partition("\n## Annex C. ")
    assert annex
    rules = re.findall(r"^\d+\. (.+(?:\n   .+)*)", body, flags=re.MULTILINE)
    without = [rule for rule in rules if "MUST" in rule and not re.search(r"[EW]\d{3}", rule)]
    assert [rule for rule in without if not any(known in rule for known in conduct)] == []
    assert len(rules) > 60


def test_every_code_without_a_vector_is_tested(repository: Path) -> None:
    """Reader codes have vectors; of all others, one test at least names the code it expects."""
    here = repository / "tests" / "spec" / "test_codes.py"
    tests = "".join(path.read_text(encoding="utf-8") for path in (repository / "tests").rglob("*.py") if path != here)
    others = [code for code, entry in CODES.items() if entry.kind != "reader"]
    assert [code for code in others if not re.search(rf"\b{code}\b", tests)] == []
