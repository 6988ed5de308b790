"""A loop by hand with Fabric. Alone it starts its own ranks: `python lightning_fabric.py --out
FOLDER`.
"""

import lightning
import torch
from record import leave, network, options, samples
from torch.utils.data import DataLoader


def main() -> None:
    given = options(devices={"type": int, "default": 2}, nodes={"type": int, "default": 1})
    fabric = lightning.Fabric(
        accelerator="cpu", strategy="ddp", devices=given.devices, num_nodes=given.nodes
    )
    fabric.launch()
    fabric.seed_everything(0)
    data = samples()
    layers = network()
    model, optimizer = fabric.setup(
        layers, torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
    )
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=16, shuffle=True))
    losses = []
    for _ in range(2):
        for batch, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(batch), labels)
            fabric.backward(loss)
            optimizer.step()
            losses.append(float(loss.item()).hex())
    launch = {
        "environment": type(fabric.strategy.cluster_environment).__name__,
        "started": len(fabric.strategy.launcher.procs),
    }
    place = fabric.global_rank, fabric.local_rank, fabric.world_size
    mean = fabric.all_reduce(loss.detach()).item().hex()
    leave(given.out, *place, losses, node_rank=fabric.node_rank, mean=mean, launch=launch)


if __name__ == "__main__":
    main()
