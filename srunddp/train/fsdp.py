"""The model in shards, one on each rank's device: FSDP2, torch's ``fully_shard``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from srunddp.errors import ConfigError
from srunddp.train.config import Config, FSDPConfig
from srunddp.train.replica import check_classes, prepared, share_buffers
from srunddp.train.world import World


class Sharded:
    """One rank's shard of the model, to be used as a :class:`srunddp.train.replica.Replica`.

    Attributes:
        model: the user's, its parameters DTensors now.
        training, testing: the same; all ranks call it equally often.
        rebuilds_buckets: gradients are added in the same order from the first step on.
    """

    rebuilds_buckets = False

    def __init__(self, model: nn.Module, optimizer: Optimizer, world: World, config: Config) -> None:
        """Give all ranks rank 0's parameters and buffers, and keep a shard of the former, for the optimizer too.

        Raises:
            ConfigError: this model or this optimizer cannot be sharded so.
        """
        _check_new(optimizer)
        _check_dtype(model, config.fsdp)
        model = prepared(model, world, config.ddp)
        before = dict(model.named_parameters())
        _share(model, world)
        _shard(model, world, config.fsdp)
        _adopt(optimizer, before, dict(model.named_parameters()))
        self.model: Any = model
        self.training = self.testing = self.model
        self._accumulating = False
        self._shares_buffers = config.ddp.broadcast_buffers and next(model.buffers(), None) is not None
        if self._shares_buffers:
            model.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        """As DistributedDataParallel does."""
        if model.training and not self._accumulating:
            share_buffers(self.model)

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Around a forward and backward whose gradients only add to this rank's, which are whole meanwhile."""
        self._accumulating = True
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)
            self._accumulating = False

    def learnt(self) -> None:
        """Nothing is to be learnt."""

    def around_waits(
        self, before: Callable[[], None], after: Callable[[], None]
    ) -> contextlib.AbstractContextManager[None]:
        """Nothing: a forward waits for shards throughout, among its own work."""
        return contextlib.nullcontext()

    def share_buffers(self, model: nn.Module) -> None:
        """Give all ranks rank 0's buffers of this model, such as BatchNorm's running statistics."""
        if self._shares_buffers:
            share_buffers(model)


def _check_new(optimizer: Optimizer) -> None:
    if optimizer.state:
        raise ConfigError(
            "an optimizer with a state, and parallel=fsdp",
            expected="one that has made no step: its parameters become shards",
            cure="build the optimizer just before the Trainer",
        )


def _check_dtype(model: nn.Module, config: FSDPConfig) -> None:
    if config.param_dtype == "bf16" and any(isinstance(module, _BatchNorm) for module in model.modules()):
        raise ConfigError(
            "fsdp.param_dtype=bf16, and BatchNorm in the model",
            expected="no BatchNorm, whose running statistics stay in fp32, which torch does not mix with bf16",
            cure="use precision=bf16 instead, or another norm",
        )


def _share(model: nn.Module, world: World) -> None:
    """One tensor after the other: the model need not fit on one device."""
    for tensor in chain(model.parameters(), model.buffers()):
        moved = tensor.detach().to(world.device).contiguous()
        dist.broadcast(moved, src=0)
        tensor.detach().copy_(moved)


def _shard(model: nn.Module, world: World, config: FSDPConfig) -> None:
    check_classes("fsdp.modules", config.modules, model)
    mesh = init_device_mesh(world.device.type, (world.world_size,))
    dtype = torch.bfloat16 if config.param_dtype == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    # The loss is computed in fp32 of what comes out at the end.
    last = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=policy.reduce_dtype, output_dtype=torch.float32 if dtype else None
    )
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": config.reshard_after_forward}
    for module in _chosen(model, config.modules):
        fully_shard(module, mp_policy=policy, **options)
    fully_shard(model, mp_policy=last, **options)


def _chosen(model: nn.Module, names: tuple[str, ...]) -> list[nn.Module]:
    """The modules of these classes, inner ones first; with its wrapper where one's activations are checkpointed."""
    inner = {id(module._checkpoint_wrapped_module) for module in model.modules() if _is_wrapper(module)}
    return [
        module
        for module in reversed(list(model.modules()))
        if module is not model
        and id(module) not in inner
        and type(getattr(module, "_checkpoint_wrapped_module", module)).__name__ in names
    ]


def _is_wrapper(module: nn.Module) -> bool:
    return hasattr(module, "_checkpoint_wrapped_module")


def _adopt(optimizer: Optimizer, before: Mapping[str, nn.Parameter], after: Mapping[str, nn.Parameter]) -> None:
    """Have the optimizer step the shards: they are new objects."""
    shards = {id(parameter): after[name] for name, parameter in before.items()}
    for group in optimizer.param_groups:
        group["params"] = [shards[id(parameter)] for parameter in group["params"]]
