"""A loop by hand with Fabric. Alone it starts its own ranks: `python lightning_fabric.py --out FOLDER`."""

import argparse
import json
from pathlib import Path

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=1)
    options = parser.parse_args()
    fabric = lightning.Fabric(accelerator="cpu", strategy="ddp", devices=options.devices, num_nodes=options.nodes)
    fabric.launch()
    fabric.seed_everything(0)
    inputs = torch.randn(320, 10)
    data = TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
    layers = torch.nn.Sequential(torch.nn.Linear(10, 50), torch.nn.ReLU(), torch.nn.Linear(50, 2))
    model, optimizer = fabric.setup(layers, torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=16, shuffle=True))
    losses = []
    for _ in range(2):
        for batch, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(batch), labels)
            fabric.backward(loss)
            optimizer.step()
            losses.append(loss.item().hex())
    record = {
        "rank": fabric.global_rank,
        "local_rank": fabric.local_rank,
        "node_rank": fabric.node_rank,
        "world_size": fabric.world_size,
        "losses": losses,
        "mean": fabric.all_reduce(loss.detach()).item().hex(),
        "launch": {
            "environment": type(fabric.strategy.cluster_environment).__name__,
            "started": len(fabric.strategy.launcher.procs),
        },
    }
    (options.out / f"rank{fabric.global_rank}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
