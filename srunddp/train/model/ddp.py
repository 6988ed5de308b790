"""The model on this rank's device, and what DistributedDataParallel makes of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from srunddp.errors import ConfigError
from srunddp.train.config import DDPConfig
from srunddp.train.world import World


class DDPModel:
    """One rank's copy of the model.

    Attributes:
        model: the user's, on the device; with SyncBatchNorm in it where that was asked for.
        training: what to call in a step, its backward included; testing: what to call without gradients.
    """

    def __init__(self, model: nn.Module, world: World, config: DDPConfig) -> None:
        """Move the model to the device, and give all ranks rank 0's parameters and buffers.

        Raises:
            ConfigError: this device or this backend cannot do what the configuration asks for.
        """
        self._world = world
        layout = torch.channels_last if config.channels_last else torch.preserve_format
        model = _prepared(model, world, config).to(world.device, memory_format=layout)  # type: ignore[call-overload]
        self._ddp = _wrapped(model, world, config) if world.world_size > 1 else None
        self._unknown = config.static_graph
        self.model = model
        self.training: Any = self._ddp or model
        self.testing: Any = model
        if config.compile:
            self.training = torch.compile(self.training)
            self.testing = torch.compile(model)

    @property
    def rebuilds_buckets(self) -> bool:
        """Whether DistributedDataParallel orders its buckets anew after its first backward, as it does by default."""
        return self._ddp is not None and (self._ddp.static_graph or not self._ddp.find_unused_parameters)

    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        """Around a forward and backward whose gradients only add to this rank's."""
        if self._ddp is None or self._unknown:
            # A static graph is recorded in the first backward, which torch lets share gradients or else fails. One more
            # mean over ranks changes nothing: what is added to is the same on all of them.
            self._unknown = False
            return contextlib.nullcontext()
        return self._ddp.no_sync()

    def static_graph_recorded(self) -> None:
        """A backward has been made that shared gradients: a static graph is known."""
        self._unknown = False

    @contextlib.contextmanager
    def time_collective_waits(self, before: Callable[[], None], after: Callable[[], None]) -> Iterator[None]:
        """Have both called around each forward's wait for rank 0's buffers, where there is one."""
        share = getattr(self._ddp, "_sync_buffers", None)
        if share is None or self.training is not self._ddp:  # a compiled one would be compiled anew
            yield
            return

        def timed() -> None:
            before()
            share()
            after()

        # No hook of the model, which the user may save as a whole, or compile.
        self._ddp._sync_buffers = timed
        try:
            yield
        finally:
            del self._ddp._sync_buffers

    def share_buffers(self, model: nn.Module) -> None:
        """Give all ranks rank 0's buffers of this model, or of its copy, such as BatchNorm's running statistics.

        DistributedDataParallel does so before a training step only. After the last one each rank's are its own, and a
        test result would depend on which rank saw the sample.
        """
        if not self._ddp or not self._ddp.broadcast_buffers:
            return
        for buffer in model.buffers():
            shared = buffer.detach().contiguous()  # of one with gaps, Gloo would share the beginning only
            dist.broadcast(shared, src=0)
            if not buffer.is_contiguous():
                buffer.detach().copy_(shared)


def _prepared(model: nn.Module, world: World, config: DDPConfig) -> nn.Module:
    """The model with the modules in it that the configuration asks for.

    Raises:
        ConfigError: there are none on this device, or none of that name.
    """
    if config.activation_checkpointing:
        _checkpoint_activations(model, config.activation_checkpointing)
    if config.sync_batchnorm and world.world_size > 1:
        if world.device.type != "cuda":
            raise ConfigError(
                f"ddp.sync_batchnorm on {world.device.type}",
                expected="GPUs, torch's SyncBatchNorm has no other",
                hint="leave it out",
            )
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    return model


def _checkpoint_activations(model: nn.Module, names: tuple[str, ...]) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    # Not the model as a whole, which torch leaves out: nothing would be saved.
    found = {type(module).__name__ for module in model.modules() if module is not model}
    if missing := [name for name in names if name not in found]:
        raise ConfigError(
            f"ddp.activation_checkpointing names {', '.join(missing)}",
            expected=f"classes of the modules in the model: {', '.join(sorted(found))}",
            hint="correct the names",
        )
    apply_activation_checkpointing(model, check_fn=lambda module: type(module).__name__ in names)


def _wrapped(model: nn.Module, world: World, config: DDPConfig) -> DistributedDataParallel:
    ddp = DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
        static_graph=config.static_graph,
        bucket_cap_mb=config.bucket_cap_mb,
        find_unused_parameters=config.find_unused_parameters,
    )
    # Not as an argument: with that, torch would not even begin with the same buffers everywhere.
    ddp.broadcast_buffers = config.broadcast_buffers
    _register_hook(ddp, config)
    return ddp


def _register_hook(ddp: DistributedDataParallel, config: DDPConfig) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if config.hook == "fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif config.hook == "bf16":
        if dist.get_backend() != "nccl":
            raise ConfigError(
                f"ddp.hook bf16 with {dist.get_backend()}",
                expected="NCCL, with which alone torch has this hook",
                hint="use ddp.hook=fp16",
            )
        ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif config.hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=config.powersgd_rank)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
