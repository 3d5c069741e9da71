"""Weights out of training checkpoints: only the tensors a model needs, whatever else was saved with them.

Importing this loads no torch; :mod:`kvformat.extract.checkpoint.filling` does the reading.
"""

from __future__ import annotations

from kvformat.extract.checkpoint.presets import PRESETS, Preset
from kvformat.extract.checkpoint.source import CheckpointSource, parse_checkpoint

__all__ = ["PRESETS", "CheckpointSource", "Preset", "parse_checkpoint"]
