"""DistributedDataParallel by hand with torchmetrics, which sum up over the ranks by themselves; for
torchrun.
"""

import os

import torch
import torch.distributed as dist
from record import leave, options
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC


def main() -> None:
    out = options().out
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    torch.manual_seed(0)
    inputs = torch.randn(640, 10)
    labels = (inputs.sum(dim=1) > 0).long() + (inputs[:, 0] > 1).long()
    model = DistributedDataParallel(torch.nn.Linear(10, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # AUROC keeps lists of what it saw, of other lengths on each rank.
    scores = MetricCollection([MulticlassAccuracy(3), MulticlassAUROC(3)])
    mean = MeanMetric()
    losses = []
    results = []
    for step in range(20):
        own = slice(32 * step + rank, 32 * (step + 1), world_size)
        optimizer.zero_grad()
        outputs = model(inputs[own])
        loss = torch.nn.functional.cross_entropy(outputs, labels[own])
        loss.backward()
        optimizer.step()
        if rank == 0 or step % 2:
            scores.update(outputs.detach().softmax(dim=1), labels[own])
        mean.update(loss.detach())
        losses.append(float(loss.item()).hex())
        if step % 10 == 9:
            found = {**scores.compute(), "loss": mean.compute()}
            results.append({name: value.item().hex() for name, value in found.items()})
            scores.reset()
            mean.reset()
    leave(out, rank, int(os.environ["LOCAL_RANK"]), world_size, losses, results=results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
