"""DistributedDataParallel as in PyTorch's tutorials: a module, for `torchrun -m`."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from tests.interop.programs.record import leave, network, options, samples


def main() -> None:
    out = options().out
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = samples()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(batch), labels)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.item()).hex())
    leave(out, dist.get_rank(), int(os.environ["LOCAL_RANK"]), dist.get_world_size(), losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
