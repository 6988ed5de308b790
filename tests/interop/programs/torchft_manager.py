"""torchft: one replica group of all ranks, whose Managers are clients of the launcher's store
before there is a process group. Rank 0 has the lighthouse.
"""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from record import leave, network, options
from torch.nn.parallel import DistributedDataParallel
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer


def local(address: str) -> str:
    """The same port for a client on its node."""
    return f"http://127.0.0.1:{address.rpartition(':')[2]}"


def main() -> None:
    out = options().out
    rank = int(os.environ["RANK"])
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1) if rank == 0 else None
    torch.manual_seed(0)
    layers = network()

    def load(state: dict[str, Any]) -> None:
        layers.load_state_dict(state["model"])

    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=lambda: {"model": layers.state_dict()},
        min_replica_size=1,
        lighthouse_addr=local(lighthouse.address()) if lighthouse else None,
        # By itself it tells the other ranks its node's name, which is that of another network on
        # many clusters.
        hostname=os.environ["MASTER_ADDR"],
        replica_id="group",
        timeout=timedelta(seconds=60),
    )
    dist.init_process_group("gloo")
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    commits = []
    for _ in range(20):
        manager.start_quorum()
        batch = torch.randn(16, 10, generator=generator)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(batch), (batch.sum(dim=1) > 0).long())
        loss.backward()
        for parameter in layers.parameters():
            manager.allreduce(parameter.grad).wait()
        commits.append(manager.should_commit())
        if commits[-1]:
            optimizer.step()
        losses.append(float(loss.item()).hex())
    place = dist.get_rank(), int(os.environ["LOCAL_RANK"]), dist.get_world_size()
    leave(out, *place, losses, commits=commits, steps=manager.current_step())
    dist.barrier()
    manager.shutdown(wait=False)
    if lighthouse is not None:
        lighthouse.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
