"""torch.distributed.tensor.parallel: two layers split over the ranks by columns and by rows; all
ranks have the same samples.
"""

import os

import torch
import torch.distributed as dist
from record import leave, network, options
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


def main() -> None:
    out = options().out
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    torch.manual_seed(0)
    model = network()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    losses = []
    for _ in range(20):
        batch = torch.randn(32, 10)
        loss = torch.nn.functional.cross_entropy(model(batch), (batch.sum(dim=1) > 0).long())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.item()).hex())
    weight = model[0].weight
    place = dist.get_rank(), int(os.environ["LOCAL_RANK"]), dist.get_world_size()
    leave(
        out,
        *place,
        losses,
        part=list(weight.to_local().shape),
        weights=float(weight.full_tensor().sum().item()).hex(),
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
