"""Build the test vectors: ``python spec/make_vectors.py spec/vectors/v1``. Equal sources give equal bytes.

    valid/CASE/dataset          a dataset, and in expected.json what a reader finds in it
    warn/CASE/dataset           likewise, with the codes verification warns with
    invalid/CODE-WHAT/dataset   a dataset with one defect: expected.json has its code, when it is detected at the
                                latest (open, touch, verify), and the dataset id to insist on where that matters

Values follow from a formula in integers; nothing is random, and no clock, host or library version enters a byte.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from kvformat.testing.dataset_files import DatasetFiles
from kvformat.testing.mutations import MUTATIONS
from kvformat.testing.vectors import VALID, WARN


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("outdir", type=Path)
    parser.add_argument("--force", action="store_true", help="remove what is in OUTDIR first")
    options = parser.parse_args(arguments)
    if options.outdir.exists() and any(options.outdir.iterdir()):
        if not options.force:
            parser.error(f"{options.outdir} is not empty; --force removes what is in it")
        shutil.rmtree(options.outdir)
    bases = {name: case.build() for name, case in VALID.items()}
    for name, case in VALID.items():
        write(options.outdir / "valid" / name, bases[name], case.expected(bases[name].id))
    for name, case in WARN.items():
        files = case.build()
        write(options.outdir / "warn" / name, files, case.expected(files.id))
    for mutation in MUTATIONS:
        if mutation.vector:
            files = bases[mutation.base].copy()
            mutation.apply(files)
            expected = {"code": mutation.code, "detected": mutation.found}
            if mutation.expected_id is not None:
                expected["expected_id"] = mutation.expected_id
            write(options.outdir / "invalid" / mutation.case, files, expected)
    return 0


def write(case: Path, files: DatasetFiles, expected: dict[str, Any]) -> None:
    files.save(case / "dataset")
    text = json.dumps(expected, ensure_ascii=True, indent=1, sort_keys=True)
    (case / "expected.json").write_text(text + "\n", encoding="ascii")


if __name__ == "__main__":
    sys.exit(main())
