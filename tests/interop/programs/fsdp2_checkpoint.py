"""FSDP2 on Gloo, with sharded checkpoints of torch.distributed.checkpoint; `--load` goes on from
one.
"""

import hashlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from record import leave, network, options
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def build(mesh: DeviceMesh) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = network()
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> list[str]:
    """Twenty steps, on other samples on each rank."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    losses = []
    for _ in range(20):
        batch = torch.randn(16, 10, generator=generator)
        loss = torch.nn.functional.cross_entropy(model(batch), (batch.sum(dim=1) > 0).long())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.item()).hex())
    return losses


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all weights and the optimizer's moments, whole."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        for tensor in (
            parameter,
            optimizer.state[parameter]["exp_avg"],
            optimizer.state[parameter]["exp_avg_sq"],
        ):
            assert isinstance(tensor, DTensor)
            found.update(tensor.full_tensor().detach().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    given = options(save={"type": Path}, load={"type": Path})
    dist.init_process_group("gloo")
    model, optimizer = build(init_device_mesh("cpu", (dist.get_world_size(),)))
    place = (dist.get_rank(), int(os.environ["LOCAL_RANK"]), dist.get_world_size())
    more = {}
    if given.load:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=given.load)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        more["loaded"] = digest(model, optimizer)
    losses = train(model, optimizer, seed=1 if given.load else 0)
    if given.save:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=given.save)
        more["saved"] = digest(model, optimizer)
    leave(given.out, *place, losses, **more)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
