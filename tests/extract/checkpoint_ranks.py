"""One rank of a job that shards a model's tensors, saves them with DCP, and reads the checkpoint while the job lives.

Arguments: directory of the model; directory to save to; a file to meet at; rank; number of ranks. Rank 0 prints the
digest over the weights it read back.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from kvformat.extract.checkpoint import CheckpointSource


def main(model: str, out: str, store: str, rank: str, world_size: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=int(rank),
        world_size=int(world_size),
        timeout=timedelta(seconds=60),
    )
    mesh = init_device_mesh("cpu", (int(world_size),))
    state = {
        f"net.language_model.{name}": distribute_tensor(tensor, mesh, [Shard(0)])
        for name, tensor in load_file(f"{model}/model.safetensors").items()
    }
    state["net.vae.weight"] = torch.ones(3)  # replicated: one rank saves it
    dcp.save(state, checkpoint_id=out)
    if rank == "0":
        from kvformat.extract.hf.loading import load_decoder
        from kvformat.extract.weights import state_digest

        # A reader that took part in the job's collectives would wait for the other ranks.
        source = CheckpointSource(kind="dcp", path=out, preset="mot")
        print(state_digest(load_decoder(model, checkpoint=source).state_dict()))  # noqa: T201 -- the test reads it
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
