"""pytorch-metric-learning: a loss and a miner that gather the embeddings of all ranks."""

import os

import torch
import torch.distributed as dist
from pytorch_metric_learning.losses import NTXentLoss
from pytorch_metric_learning.miners import MultiSimilarityMiner
from pytorch_metric_learning.utils.distributed import (
    DistributedLossWrapper,
    DistributedMinerWrapper,
)
from record import leave, options
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    out = options().out
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(10, 50), torch.nn.ReLU(), torch.nn.Linear(50, 8))
    )
    # What a rank sees of the others has no gradient: their losses differ.
    loss_of = DistributedLossWrapper(NTXentLoss(), efficient=True)
    mine = DistributedMinerWrapper(MultiSimilarityMiner(), efficient=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    pairs = []
    for _ in range(20):
        batch = torch.randn(32, 10, generator=generator)
        labels = (batch.sum(dim=1) > 0).long()
        optimizer.zero_grad()
        embeddings = model(batch)
        pairs.append(sum(len(indices) for indices in mine(embeddings.detach(), labels)))
        loss = loss_of(embeddings, labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.item()).hex())
    place = dist.get_rank(), int(os.environ["LOCAL_RANK"]), dist.get_world_size()
    leave(out, *place, losses, pairs=pairs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
