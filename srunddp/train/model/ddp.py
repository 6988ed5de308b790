"""The model on this rank's device, and what DistributedDataParallel makes of a step on it."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from srunddp.errors import ConfigError
from srunddp.train.config import Config, DDPConfig
from srunddp.train.model.step import LossFunction, Step, StepModule
from srunddp.train.world import World
from srunddp.util.hostlist import group_by_key


class DDPModel:
    """One rank's copy of the model, and of the loss function where that is a module.

    Attributes:
        model: the user's, on the device; with SyncBatchNorm in it where that was asked for.
        training: called with a batch or None, returns its loss and outputs; gradients are shared in
            the backward.
        testing: the same of the model alone, without gradients to share.
        runs_always: a micro-batch of weight 0 has to be run as well; else ``training(None)`` stands
            in for it.
    """

    def __init__(
        self,
        model: nn.Module,
        step: Step,
        loss_function: LossFunction | None,
        world: World,
        config: Config,
    ) -> None:
        """Move the model to the device, and give all ranks rank 0's parameters and buffers.

        Raises:
            ConfigError: this device or this backend cannot do what the configuration asks for.
        """
        if config.channels_last:
            layout = torch.channels_last
        else:
            layout = torch.preserve_format
        model = _prepared(model, world, config).to(world.device, memory_format=layout)  # type: ignore[call-overload]
        compiled: Any = torch.compile(model) if config.compile else model
        self.model = model
        self.testing = StepModule(compiled, step, loss_function).to(world.device)
        self._ddp: DistributedDataParallel | None = None
        if world.world_size > 1:
            self._ddp = _wrapped(self.testing, config.ddp)
        # Not the module itself, which would look for hooks that nobody can set.
        self.training: Callable[[Any], tuple[Tensor, Any]] = self._ddp or self.testing.forward
        self._static = self._unknown = config.ddp.static_graph and self._ddp is not None
        sparse = any(getattr(module, "sparse", False) for module in model.modules())
        self.runs_always = self._static or sparse or config.ddp.sync_batchnorm
        self._shares_buffers = self._ddp is not None and config.ddp.broadcast_buffers
        # Once, as DistributedDataParallel does: to look for them takes longer than a small step.
        if self._shares_buffers:
            self._buffers = list(self.testing.buffers())
        else:
            self._buffers = []

    @property
    def rebuilds_buckets(self) -> bool:
        """Whether DistributedDataParallel orders its buckets again after its first backward, as it
        does by default.
        """
        return self._ddp is not None and (
            self._ddp.static_graph or not self._ddp.find_unused_parameters
        )

    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        """Around a forward and backward whose gradients only add to this rank's."""
        if self._ddp is None or self._unknown:
            # A static graph is recorded in the first backward, which torch lets share gradients or
            # else fails. One more mean over ranks changes nothing: what is added to is the same on
            # all of them.
            self._unknown = False
            return contextlib.nullcontext()
        return self._ddp.no_sync()

    def static_graph_recorded(self) -> None:
        """A backward has been made that shared gradients: a static graph is known."""
        self._unknown = False

    def share_buffers(self) -> bool:
        """Give all ranks rank 0's buffers, such as BatchNorm's running statistics; whether there
        are any.
        """
        if self._buffers:
            share(self._buffers)
        return bool(self._buffers)

    def share_all_buffers(self, *modules: nn.Module) -> None:
        """The same of these modules before an evaluation, whatever has become of their buffers.

        After a training step each rank's are its own, and a result would depend on which rank saw
        the sample.
        """
        if self._shares_buffers:
            for module in modules:
                share(module.buffers())


@torch.no_grad()
def share(buffers: Iterable[Tensor]) -> None:
    """Give all ranks rank 0's values of these tensors, with one broadcast for each type; all ranks
    call this.
    """
    for tensors in group_by_key((buffer.dtype, buffer) for buffer in buffers).values():
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.broadcast(flat, src=0)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        torch._foreach_copy_(
            tensors, [part.view(own.shape) for part, own in zip(parts, tensors, strict=True)]
        )


def _prepared(model: nn.Module, world: World, config: Config) -> nn.Module:
    """The model with the modules in it that the configuration asks for; ConfigError where there are
    none such.
    """
    if config.activation_checkpointing:
        _checkpoint_activations(model, config.activation_checkpointing)
    if config.ddp.sync_batchnorm and world.world_size > 1:
        if world.device.type != "cuda":
            raise ConfigError(
                f"ddp.sync_batchnorm on {world.device.type}",
                expected="GPUs, torch's SyncBatchNorm has no other",
                hint="leave it out",
            )
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    return model


def _checkpoint_activations(model: nn.Module, names: tuple[str, ...]) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )

    # Not the model as a whole, which torch leaves out: nothing would be saved.
    found = {type(module).__name__ for module in model.modules() if module is not model}
    if missing := [name for name in names if name not in found]:
        raise ConfigError(
            f"activation_checkpointing names {', '.join(missing)}",
            expected=f"classes of the modules in the model: {', '.join(sorted(found))}",
            hint="correct the names",
        )
    apply_activation_checkpointing(model, check_fn=lambda module: type(module).__name__ in names)


def _wrapped(module: nn.Module, config: DDPConfig) -> DistributedDataParallel:
    # Without its devices: batches are on the device already.
    ddp = DistributedDataParallel(
        module,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
        static_graph=config.static_graph,
        bucket_cap_mb=config.bucket_cap_mb,
        find_unused_parameters=config.find_unused_parameters,
    )
    # Buffers are shared before each step here, where the wait for rank 0's is noted. Not as an
    # argument: with that, torch would not even begin with the same buffers everywhere.
    ddp.broadcast_buffers = False
    _register_hook(ddp, config)
    return ddp


def _register_hook(ddp: DistributedDataParallel, config: DDPConfig) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if config.comm_hook == "fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif config.comm_hook == "bf16":
        if dist.get_backend() != "nccl":
            raise ConfigError(
                f"ddp.comm_hook bf16 with {dist.get_backend()}",
                expected="NCCL, with which alone torch has this hook",
                hint="use ddp.comm_hook=fp16",
            )
        ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
