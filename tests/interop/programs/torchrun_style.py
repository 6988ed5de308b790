"""DistributedDataParallel as in PyTorch's tutorials: `torchrun --nproc-per-node=2 torchrun_style.py --out FOLDER`."""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(320, 10)
    data = TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(10, 50), torch.nn.ReLU(), torch.nn.Linear(50, 2))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(batch), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item().hex())
    rank = dist.get_rank()
    place = {"rank": rank, "local_rank": int(os.environ["LOCAL_RANK"]), "world_size": dist.get_world_size()}
    out.mkdir(parents=True, exist_ok=True)
    (out / f"rank{rank}.json").write_text(json.dumps(place | {"losses": losses}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
