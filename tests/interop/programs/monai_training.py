"""MONAI: its network, cached data parted over the ranks, and a Dice metric gathered from all ranks,
as in its tutorials on several GPUs.
"""

import os

import torch
import torch.distributed as dist
from monai.data import CacheDataset, DataLoader, partition_dataset
from monai.losses import DiceLoss
from monai.metrics import DiceMetric
from monai.networks.nets import UNet
from monai.transforms import Compose, RandFlipd, ScaleIntensityd
from monai.utils import evenly_divisible_all_gather, set_determinism
from record import leave, options
from torch.nn.parallel import DistributedDataParallel

SAMPLES = 80
SIZE = 16


def made() -> list[dict[str, torch.Tensor]]:
    """Pictures of one bright square each, and where it is."""
    rows = []
    for _ in range(SAMPLES):
        label = torch.zeros(1, SIZE, SIZE)
        row, column = torch.randint(SIZE // 2, (2,)).tolist()
        label[:, row : row + SIZE // 2, column : column + SIZE // 2] = 1
        rows.append({"image": label + torch.rand(1, SIZE, SIZE), "label": label})
    return rows


def main() -> None:
    out = options().out
    dist.init_process_group("gloo", init_method="env://")
    set_determinism(seed=0)
    part = partition_dataset(
        made(),
        num_partitions=dist.get_world_size(),
        shuffle=True,
        seed=0,
        even_divisible=True,
    )[dist.get_rank()]
    transform = Compose(
        [ScaleIntensityd(keys="image"), RandFlipd(keys=["image", "label"], prob=0.5)]
    )
    data = CacheDataset(part, transform, progress=False)
    loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=0)
    network = UNet(
        spatial_dims=2, in_channels=1, out_channels=1, channels=(4, 8), strides=(2,), norm="batch"
    )
    model = DistributedDataParallel(network)
    dice = DiceMetric()
    loss_of = DiceLoss(sigmoid=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses: list[str] = []
    gathered = {}
    for epoch in range(2):
        if epoch == 1:
            # Of the first epoch, and not at the program's end: a thread of Gloo that still holds
            # what was gathered waits for the GIL, and the end of the process group for the thread.
            last = torch.tensor([float.fromhex(losses[-1])])
            gathered["last"] = evenly_divisible_all_gather(last).tolist()
            gathered["dice"] = float(dice.aggregate()).hex()
        for batch in loader:
            optimizer.zero_grad()
            outputs = model(batch["image"])
            loss = loss_of(outputs, batch["label"])
            loss.backward()
            optimizer.step()
            losses.append(float(loss.item()).hex())
            dice(y_pred=(outputs > 0).float(), y=batch["label"])
    place = dist.get_rank(), int(os.environ["LOCAL_RANK"]), dist.get_world_size()
    leave(out, *place, losses, **gathered)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
