"""torch.distributed.pipelining: one stage a rank, 1F1B; the last rank has the losses, which rank 0
gets for its record.
"""

import os

import torch
import torch.distributed as dist
from record import leave, options
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

MICROBATCHES = 4


def main() -> None:
    out = options().out
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    last = rank == world_size - 1
    torch.manual_seed(rank)
    if last:
        layers = torch.nn.Sequential(torch.nn.Linear(50, 2))
    else:
        layers = torch.nn.Sequential(torch.nn.Linear(10 if rank == 0 else 50, 50), torch.nn.ReLU())
    stage = PipelineStage(layers, rank, world_size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=torch.nn.functional.cross_entropy)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(0)  # the same on the first and last rank
    losses = []
    for _ in range(20):
        batch = torch.randn(32, 10, generator=generator)
        labels = (batch.sum(dim=1) > 0).long()
        found: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(batch)
        elif last:
            schedule.step(target=labels, losses=found)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.stack(found).mean().detach() if last else torch.zeros(())
        dist.broadcast(mean, world_size - 1)
        losses.append(float(mean.item()).hex())
    weights = sum(parameter.detach().sum() for parameter in layers.parameters())
    place = rank, int(os.environ["LOCAL_RANK"]), world_size
    leave(out, *place, losses, weights=float(weights).hex())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
