"""A training with DistributedDataParallel over Gloo that fails as the plan says."""

import faults

plan = faults.Plan()
plan.begin()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

plan.at("bootstrap")
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def train():
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()


train()
plan.ready()
while plan.step():
    train()
dist.destroy_process_group()
plan.at("shutdown")
