"""A stream of Hugging Face's datasets, split by rank and worker, through srunddp's loader; also
from amid an epoch.
"""

import json
import os

from record import leave, options

if __name__ == "__main__":
    out = options().out
    os.environ["HF_HOME"] = str(out / "cache")

import srunddp
from srunddp.train import DistributedDataLoader

# of each
FILES = 4
ROWS = 13


def main() -> None:
    from datasets import load_dataset
    from datasets.distributed import split_dataset_by_node

    with srunddp.init() as world:
        with world.rank_zero_first():
            if world.rank == 0:
                write()
        files = sorted(str(file) for file in out.glob("*.jsonl"))
        data = load_dataset("json", data_files=files, split="train", streaming=True).with_format(
            "torch"
        )
        data = split_dataset_by_node(
            data.shuffle(seed=0), rank=world.rank, world_size=world.world_size
        )
        loader = DistributedDataLoader(data, world, batch_size=3, num_workers=2, sharded=True)
        epochs: list[list[list[int]]] = []
        states = []
        for epoch in (0, 1):
            loader.set_epoch(epoch)
            epochs.append([])
            for batch in loader:
                epochs[-1].append(batch.data["number"].tolist() if batch.samples else [])
                states.append(loader.state_dict())
        loader.load_state_dict(states[1])
        rest = [batch.data["number"].tolist() if batch.samples else [] for batch in loader]
    leave(out, world.rank, world.local_rank, world.world_size, [], epochs=epochs, rest=rest)


def write() -> None:
    for number in range(FILES):
        lines = [json.dumps({"number": ROWS * number + row}) for row in range(ROWS)]
        (out / f"{number}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
