"""PyTorch Geometric: batches of graphs, split over the ranks by a DistributedSampler, as in its
tutorial on several GPUs.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from record import leave, options
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool
from torch_geometric.transforms import Compose, NormalizeFeatures, ToUndirected

GRAPHS = 320
NODES = 6


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = GCNConv(8, 32)
        self.second = GCNConv(32, 32)
        self.last = torch.nn.Linear(32, 2)

    def forward(self, data: Data) -> torch.Tensor:
        values = self.first(data.x, data.edge_index).relu()
        values = self.second(values, data.edge_index).relu()
        outputs: torch.Tensor = self.last(global_mean_pool(values, data.batch))
        return outputs


def made() -> Any:
    """Rings of nodes of two kinds, which differ in half of their features."""
    ring = torch.arange(NODES)
    edges = torch.stack([ring, ring.roll(1)])
    finish = Compose([ToUndirected(), NormalizeFeatures()])
    graphs = []
    for number in range(GRAPHS):
        features = torch.rand(NODES, 8)
        features[:, 4 * (number % 2) :][:, :4] += 1
        graphs.append(finish(Data(x=features, edge_index=edges, y=torch.tensor([number % 2]))))
    return graphs


def main() -> None:
    out = options().out
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    graphs = made()
    sampler: DistributedSampler[Data] = DistributedSampler(graphs)
    loader = DataLoader(graphs, batch_size=16, sampler=sampler)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for data in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(data), data.y)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.item()).hex())
    leave(out, dist.get_rank(), int(os.environ["LOCAL_RANK"]), dist.get_world_size(), losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
