"""FSDP2 on Gloo, with sharded checkpoints of torch.distributed.checkpoint; `--load` goes on from one."""

import argparse
import hashlib
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def build(mesh: dist.DeviceMesh) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(10, 50), torch.nn.ReLU(), torch.nn.Linear(50, 2))
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
        losses.append(loss.item().hex())
    return losses


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all weights and the optimizer's moments, whole."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        for tensor in (parameter, optimizer.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg_sq"]):
            found.update(tensor.full_tensor().detach().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--load", type=Path)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    model, optimizer = build(init_device_mesh("cpu", (dist.get_world_size(),)))
    record = {"rank": dist.get_rank(), "local_rank": int(os.environ["LOCAL_RANK"])}
    record["world_size"] = dist.get_world_size()
    if options.load:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=options.load)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        record["loaded"] = digest(model, optimizer)
    record["losses"] = train(model, optimizer, seed=1 if options.load else 0)
    if options.save:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=options.save)
        record["saved"] = digest(model, optimizer)
    (options.out / f"rank{record['rank']}.json").write_text(json.dumps(record))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
