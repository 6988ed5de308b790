"""MosaicML streaming: rank 0 writes shards, and DistributedDataParallel trains on the stream that
all ranks and their workers read.
"""

import os

import numpy as np
import torch
import torch.distributed as dist
import vision  # noqa: F401
from record import leave, network, options, samples
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from torch.nn.parallel import DistributedDataParallel

COLUMNS = {"number": "int", "inputs": "ndarray:float32:10", "label": "int"}


def main() -> None:
    out = options().out
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    if dist.get_rank() == 0:
        with MDSWriter(out=str(out / "shards"), columns=COLUMNS, size_limit=4096) as writer:
            for number, (inputs, label) in enumerate(samples()):
                row = np.asarray(inputs.numpy())
                writer.write({"number": number, "inputs": row, "label": int(label)})
    dist.barrier()
    # With as many canonical nodes, the order does not depend on the number of nodes.
    data = StreamingDataset(
        local=str(out / "shards"),
        shuffle=True,
        shuffle_seed=1,
        batch_size=16,
        num_canonical_nodes=2,
    )
    loader = StreamingDataLoader(data, batch_size=16, num_workers=1)
    torch.manual_seed(0)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    epochs = []
    for _ in range(2):
        numbers = []
        for batch in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(batch["inputs"]), batch["label"])
            loss.backward()
            optimizer.step()
            losses.append(float(loss.item()).hex())
            numbers += batch["number"].tolist()
        epochs.append(numbers)
    place = dist.get_rank(), int(os.environ["LOCAL_RANK"]), dist.get_world_size()
    leave(out, *place, losses, epochs=epochs)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
