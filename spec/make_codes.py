"""Write ``spec/codes.md`` from the list of codes: ``python spec/make_codes.py [PATH]``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvformat.codes import CODES, Code

HEAD = """\
# Codes

Written by `make_codes.py` from `kvformat/codes.py`; a test keeps the two equal. Codes are stable: none is ever given
another meaning.

Each code stands for one rule, and is reported where that rule is broken. *Class* says whose rule it is:

| class | meaning |
|---|---|
| reader | the bytes of a dataset are not what `SPEC.md` says; the test vectors have a case for each |
| warning | readable, but worth a look: verification reports it and still succeeds |
| usage | a caller asked for something that is not there, or makes no sense |
| writer | data, plans or a target that a writer or an extractor refuses |
| environment | the machine, its storage or what is installed on it |

*Detected* says when: `open` when a dataset is opened, `touch` when the file, record or tensor concerned is first used,
`verify` by verification, `write` and `commit` while a dataset is made, `extract` while a model runs, `clean` while
staging is cleared, `read` when something is looked up, `any` at any time.

## Precedence

Reader codes are listed in their order of precedence, which is that of their numbers: where several rules are broken in
one place, a reader reports the first. It need not look for all, and stops at a file it cannot trust. So a root that is
no JSON is reported as such whatever the manifest holds, and a shard with a wrong header is reported as such although
its digest must be wrong too.

`SPEC.md` makes these exceptions. Size and digest of the root (E004, E007) are looked at before its content. A later
version or feature (E012, E013) is reported although the root may have another form by then (E014 to E018). K and V
that stand exchanged (E071) are reported instead of two slabs that do not have their sums (E072), and another shard's
header (E062) instead of one that is not as it must be (E063).

Verification reports all it finds, sorted by code, except what follows from another finding.

The error class is the exception of this package; other implementations have their own.
"""
TITLES = {
    "reader": "Reader codes",
    "warning": "Warnings",
    "usage": "Usage codes",
    "writer": "Writer codes",
    "environment": "Environment codes",
}


def document() -> str:
    """The whole file."""
    parts = [HEAD]
    for kind, title in TITLES.items():
        rows = [row(code, entry) for code, entry in CODES.items() if entry.kind == kind]
        head = ["| code | name | class | detected | rule | error class |", "|---|---|---|---|---|---|"]
        parts.append("\n".join([f"## {title}", "", *head, *rows, ""]))
    return "\n".join(parts)


def row(code: str, entry: Code) -> str:
    """One line of a table."""
    error = f"`{entry.error}`" if entry.error else ""
    return f"| {code} | {entry.name} | {entry.kind} | {entry.detected} | {entry.rule} | {error} |"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, nargs="?", default=Path(__file__).with_name("codes.md"))
    options = parser.parse_args(arguments)
    options.path.write_text(document(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
