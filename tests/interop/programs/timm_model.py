"""A model of timm with its distributed start, optimizer, loss, schedule, averages over the ranks
and moving average of the weights, as its train.py has them.
"""

import hashlib
from argparse import Namespace

import torch
import vision  # noqa: F401
from record import leave, options
from timm import create_model
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import (
    AverageMeter,
    ModelEmaV2,
    accuracy,
    distribute_bn,
    init_distributed_device,
    reduce_tensor,
)
from torch.nn.parallel import DistributedDataParallel

STEPS = 20
BATCH = 8


def digest(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    out = options().out
    place = Namespace(device="cpu")
    init_distributed_device(place)
    torch.manual_seed(0)
    layers = create_model("resnet10t", num_classes=2, stem_width=8, in_chans=1)
    optimizer = create_optimizer_v2(layers, opt="adamw", lr=0.005, weight_decay=0.01)
    schedule = CosineLRScheduler(optimizer, t_initial=STEPS, lr_min=1e-4, t_in_epochs=False)
    average = ModelEmaV2(layers, decay=0.9)
    model = DistributedDataParallel(layers)
    criterion = LabelSmoothingCrossEntropy(smoothing=0.01)
    generator = torch.Generator().manual_seed(place.rank)
    meter = AverageMeter()
    losses = []
    for step in range(STEPS):
        if step == STEPS // 2:
            distribute_bn(layers, place.world_size, reduce=True)
        labels = torch.randint(2, (BATCH,), generator=generator)
        images = torch.randn(BATCH, 1, 32, 32, generator=generator) + 2 * labels.view(-1, 1, 1, 1)
        outputs = model(images)
        loss = criterion(outputs, labels)
        meter.update(reduce_tensor(accuracy(outputs, labels)[0], place.world_size).item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step_update(num_updates=step + 1)
        average.update(layers)
        losses.append(float(loss.item()).hex())
    leave(
        out,
        place.rank,
        place.local_rank,
        place.world_size,
        losses,
        accuracy=meter.avg.hex(),
        weights=digest(layers),
    )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
