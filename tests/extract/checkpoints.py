"""Training checkpoints for tests: a small Mixture-of-Transformers, and states saved as DCP or safetensors."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

__all__ = ["MixtureOfTransformers", "Training", "cpu_ranks", "save_dcp", "training_state"]


class MixtureOfTransformers(nn.Module):
    """A language model whose layers have a second set of modules for the tokens of a Generator.

    The Reasoner's modules keep their names; the Generator's end in ``_moe_gen``, but for the norm it gives the
    Reasoner's keys.
    """

    def __init__(self, reasoner: Any) -> None:
        super().__init__()
        self.language_model = reasoner
        width = reasoner.config.head_dim
        for layer in reasoner.model.layers:
            attention = layer.self_attn
            for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
                setattr(attention, f"{name}_moe_gen", copy.deepcopy(getattr(attention, name)))
            attention.k_norm_und_for_gen = nn.RMSNorm(width, dtype=attention.k_proj.weight.dtype)
            for name in ("mlp", "input_layernorm", "post_attention_layernorm"):
                setattr(layer, f"{name}_moe_gen", copy.deepcopy(getattr(layer, name)))
        reasoner.model.norm_moe_gen = copy.deepcopy(reasoner.model.norm)
        self.vae2llm = nn.Linear(4, reasoner.config.hidden_size)
        self.llm2vae = nn.Linear(reasoner.config.hidden_size, 4)


class Training(nn.Module):
    """What a trainer keeps: the model, its moving average, and a VAE."""

    def __init__(self, live: Any, ema: Any) -> None:
        super().__init__()
        self.net = MixtureOfTransformers(live)
        self.net_ema = MixtureOfTransformers(ema)
        self.vae = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3))


def training_state(live: Any, ema: Any) -> dict[str, Any]:
    """State of a training run after one step of its optimizer, whose gradients are zero."""
    training = Training(copy.deepcopy(live), copy.deepcopy(ema))
    optimizer = torch.optim.AdamW(training.net.parameters(), lr=0.0)
    for parameter in training.net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return {**training.state_dict(), "optim": optimizer.state_dict(), "trainer": {"iteration": 7, "note": "résumé"}}


def save_dcp(state: Mapping[str, Any], directory: Path, **options: Any) -> Path:
    """Save a state in this process, without a process group."""
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DCP warns that there is no process group
            dcp.save(dict(state), storage_writer=FileSystemWriter(directory, **options))
    except CheckpointException as error:  # no Exception, which pytest would not report
        raise AssertionError(error) from error
    return directory


def cpu_ranks(repository: Path, *arguments: str | Path, world_size: int = 2, timeout_s: float = 100) -> list[str]:
    """Run ``tests.extract.checkpoint_ranks`` on so many ranks over gloo; what each printed."""
    loopback = "lo" if sys.platform.startswith("linux") else "lo0"
    environment = {
        **os.environ,
        "PYTHONPATH": str(repository),
        "GLOO_SOCKET_IFNAME": loopback,
        "OMP_NUM_THREADS": "1",
    }
    program = [sys.executable, "-W", "ignore", "-m", "tests.extract.checkpoint_ranks", *map(str, arguments)]
    ranks = [
        subprocess.Popen(
            [*program, str(rank), str(world_size)],
            cwd=repository,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    found = []
    try:
        deadline = time.monotonic() + timeout_s
        for process in ranks:
            out, err = process.communicate(timeout=deadline - time.monotonic())
            assert process.returncode == 0, err
            found.append(out.strip())
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.wait()
    return found
