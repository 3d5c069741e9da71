"""Filling a model's tensors from a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from kvformat.extract.checkpoint.matching import Match, ModelNames, TensorForm, match_tensors
from kvformat.extract.checkpoint.names import select_names
from kvformat.extract.checkpoint.presets import PRESETS
from kvformat.extract.checkpoint.reading import CountedFiles
from kvformat.extract.checkpoint.safetensors_files import SafetensorsCheckpoint
from kvformat.extract.checkpoint.source import CheckpointSource

__all__ = ["Checkpoint", "Filling", "open_checkpoint"]


class Checkpoint(Protocol):
    """Something tensors are read from by name."""

    @property
    def forms(self) -> Mapping[str, TensorForm]:
        """Everything that is there."""

    def read(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Fill tensors from those of the same names, casting to their dtype."""


class Filling(NamedTuple):
    """A checkpoint in which every tensor a model needs was found; nothing is read before :meth:`into`.

    Attributes
    ----------
    matches
        Tensors of the checkpoint, and where they go.
    dtypes
        What they are stored in, sorted.
    """

    source: CheckpointSource
    checkpoint: Checkpoint
    files: CountedFiles
    matches: Sequence[Match]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """What the tensors are stored in, sorted."""
        forms = self.checkpoint.forms
        return tuple(sorted({str(forms[match.stored].dtype) for match in self.matches}))

    @property
    def provenance(self) -> dict[str, str]:
        """What is recorded of where the weights came from, and never compared."""
        source = self.source
        found = {"checkpoint": source.text(), "checkpoint_dtype": ",".join(self.dtypes)}
        if source.preset is not None:
            found["checkpoint_preset"] = source.preset
            found["checkpoint_weights"] = source.weights or self._weights(source.preset)
        if source.select is not None:
            found["checkpoint_select"] = source.select
        if source.rename:
            found["checkpoint_rename"] = " ".join(f"{pattern}={replacement}" for pattern, replacement in source.rename)
        return found

    def into(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Read every needed tensor, casting to the dtype of its target.

        Parameters
        ----------
        tensors
            The model's, by name, on the CPU; they are written in place.

        Returns
        -------
        int
            Bytes read of the checkpoint's files so far, metadata included.

        Raises
        ------
        InputError
            E308 for files that are missing or damaged.
        StorageError
            E203, E207.
        """
        targets = {}
        for match in self.matches:
            piece = match.piece
            if piece is None:
                targets[match.stored] = tensors[match.name]
            else:
                targets[match.stored] = tensors[piece.whole].detach()[piece.expert, piece.first : piece.last]
        self.checkpoint.read(targets)
        return self.files.nbytes

    def _weights(self, preset: str) -> str:
        head = PRESETS[preset].ema
        return "ema" if any(re.match(head, match.stored) for match in self.matches) else "live"


@contextmanager
def open_checkpoint(source: CheckpointSource, model: ModelNames) -> Iterator[Filling]:
    """Find what a model needs in a checkpoint; its files are closed at the end of the block.

    Raises
    ------
    InputError
        E308 where the checkpoint is none, or is damaged, and where what it holds is not what the model needs: the
        tensors are named.
    StorageError
        E203, E207.
    """
    with CountedFiles() as files:
        checkpoint = _open(source, files)
        strict = source.select is not None or source.preset is not None
        forms = checkpoint.forms
        # Without a selection, objects that stand beside the weights are nothing to talk about.
        names = forms if strict else [name for name, form in forms.items() if form.dtype is not None]
        matches = match_tensors(
            select_names(names, source), forms, model, strict=strict, dtype=source.dtype, path=source.path
        )
        yield Filling(source, checkpoint, files, matches)


def _open(source: CheckpointSource, files: CountedFiles) -> Checkpoint:
    path = Path(source.path)
    if source.kind == "safetensors":
        return SafetensorsCheckpoint(path, files)
    from kvformat.extract.checkpoint.dcp import DcpCheckpoint

    return DcpCheckpoint(path, files)
