"""torch.distributed.rpc: each rank's second layer is on the next rank, with distributed autograd
and optimizer.
"""

import os
from typing import Any

import torch
import torch.distributed.autograd as autograd
import torch.distributed.rpc as rpc
from record import leave, options
from torch.distributed.optim import DistributedOptimizer


class Layer(torch.nn.Module):
    def __init__(self, inputs: int, outputs: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = torch.nn.Linear(inputs, outputs)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(values)
        return outputs

    def references(self) -> list[Any]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]


def main() -> None:
    out = options().out
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
    first = Layer(10, 50, seed=2 * rank)
    second = rpc.remote(f"worker{(rank + 1) % world_size}", Layer, args=(50, 2, 2 * rank + 1))
    parameters = first.references() + second.rpc_sync().references()
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(20):
        batch = torch.randn(64, 10, generator=generator)
        with autograd.context() as context:
            outputs = second.rpc_sync().forward(torch.relu(first(batch)))
            loss = torch.nn.functional.cross_entropy(outputs, (batch.sum(dim=1) > 0).long())
            autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(float(loss.item()).hex())
    owner = second.owner_name()
    leave(out, rank, int(os.environ["LOCAL_RANK"]), world_size, losses, owner=owner)
    rpc.shutdown()


if __name__ == "__main__":
    main()
