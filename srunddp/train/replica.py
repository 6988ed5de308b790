"""The model on this rank's device, and its DistributedDataParallel wrap."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from srunddp.train.world import World


def replicate(model: nn.Module, world: World) -> nn.Module:
    """The module to call in a training step; the model itself in a world of one.

    The model must be on ``world.device``. All ranks get rank 0's parameters and buffers here.
    """
    if world.world_size == 1:
        return model
    return DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        # Gradients live in the all-reduce's buckets: one copy of them less, in memory and in time.
        gradient_as_bucket_view=True,
    )


def share_buffers(model: nn.Module, world: World) -> None:
    """Give all ranks rank 0's buffers, such as BatchNorm's running statistics.

    DistributedDataParallel does so before a training step only. After the last one each rank's are its
    own, and a test result would depend on which rank saw the sample.
    """
    if world.world_size > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
