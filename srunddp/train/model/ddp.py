"""The model on this rank's device, and its steps in DistributedDataParallel."""

import contextlib
import gc
import itertools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from srunddp.errors import ConfigError
from srunddp.train.config import Config, DDPConfig
from srunddp.train.model.collectives import CollectiveWatch
from srunddp.train.model.parameters import NamedParameters
from srunddp.train.model.step import LossFunction, Step, StepModule
from srunddp.train.world import World, absent_ranks, all_gather_ints
from srunddp.util.hostlist import fold_ranks, group_by_key

_numbers = itertools.count()
# How long a rank waits for the others to change their parameters in a callback as well: the slowest
# rank may still be in an earlier callback, such as one that writes pictures.
_CHANGED_WITHIN = timedelta(seconds=300)


class DDPModel:
    """One rank's copy of the model, and of the loss function if that is a module.

    Attributes:
        model: The user's model on the device, with SyncBatchNorm if that was asked for.
        training: A callable that takes a batch and returns its loss and outputs, or takes None for
            a loss of 0; the backward pass shares gradients.
        testing: A module like ``training`` whose backward pass does not share gradients.
        collectives: Whether the step calls collectives in training.
        evaluation_collectives: Whether the step calls collectives in evaluations.
        parameters: The parameters of the model and the loss function, by name.
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

        Args:
            model: The user's model.
            step: Computes the loss of a batch.
            loss_function: The user's loss function; None if the step contains it.
            world: The ranks, all of which create this.
            config: The settings of the training.

        Raises:
            ConfigError: The device or the backend cannot do what the configuration asks for.
        """
        if config.channels_last:
            layout = torch.channels_last
        else:
            layout = torch.preserve_format
        model = _prepared(model, world, config).to(world.device, memory_format=layout)  # type: ignore[call-overload]
        # Compile inside DistributedDataParallel, so that torch.compile need not trace its hooks.
        # The user's model stays as it is, so names in a checkpoint have no "_orig_mod.".
        compiled: Any = torch.compile(model) if config.compile else model
        self.model = model
        uses_all = not config.ddp.find_unused_parameters
        self.testing = StepModule(compiled, step, loss_function, uses_all=uses_all).to(world.device)
        self._world = world
        self._config = config.ddp
        self._ddp: DistributedDataParallel | None = None
        self.parameters = NamedParameters(model=model, loss_function=self.testing.loss_function)
        # The parameters that required a gradient when the model was wrapped.
        self._wrapped_for: Mapping[str, nn.Parameter] = {}
        # A key in the store can be used only once. So it contains the number of this Trainer in the
        # process, which is the same on all ranks, and how often the trained parameters have changed
        # within epochs.
        self._number = next(_numbers)
        self._changes = 0
        # Use forward and not the module, whose __call__ takes some microseconds to look for hooks:
        # nobody can set hooks on it.
        self.training: Callable[[Any], tuple[Tensor, Any]] = self.testing.forward
        self._static = False
        # Whether torch has yet to record a static graph, in the first backward pass that shares
        # gradients.
        self._unknown = False
        if world.world_size > 1:
            self._wrap()
        sparse = any(getattr(module, "sparse", False) for module in model.modules())
        # training(None) gives dense gradients of 0, in a graph without the model's layers. So it
        # cannot replace a batch with a static graph, which has to be the same in each step, nor if
        # other ranks have sparse gradients, nor with SyncBatchNorm, whose forward pass is a
        # collective.
        self._runs_always = self._static or sparse or config.ddp.sync_batchnorm
        self.collectives = CollectiveWatch(world)
        self.evaluation_collectives = CollectiveWatch(world)
        self._shares_buffers = self._ddp is not None and config.ddp.broadcast_buffers
        # List the buffers once, as DistributedDataParallel does: listing takes longer than a small
        # step.
        if self._shares_buffers:
            self._buffers = list(self.testing.buffers())
        else:
            self._buffers = []

    @property
    def runs_always(self) -> bool:
        """Whether the model has to run a micro-batch even if its weight is 0.

        If not, ``training(None)`` replaces the micro-batch.
        """
        return self._runs_always or bool(self.collectives.found)

    @property
    def evaluates_always(self) -> bool:
        """Whether a batch of an evaluation has to be run even if it does not count.

        This is so if the step calls collectives, and until all ranks know whether it does.
        """
        return self.evaluation_collectives.found is not False

    def _wrap(self) -> None:
        self._ddp = _wrapped(self.testing, self._config)
        self.training = self._ddp
        self._static = self._config.static_graph
        self._unknown = self._config.static_graph
        self._wrapped_for = self.parameters.trained()

    def follow_requires_grad(self, *, at_epoch: bool = True) -> None:
        """Wrap the model again if other parameters require a gradient than when it was wrapped.

        DistributedDataParallel shares only gradients of parameters that required one when it was
        created.

        Args:
            at_epoch: Whether all ranks call this now, and compare their parameters. If not, only
                ranks with a change wait for each other.

        Raises:
            ConfigError: The parameters that require a gradient differ between ranks.
        """
        if self._ddp is None:
            return
        if at_epoch:
            self.parameters.refresh()
        trained = self.parameters.trained()
        changed = not _same(trained, self._wrapped_for)
        # Meet over the store first: a rank without a change goes on to its next step, so the
        # collective of _check_alike() would not find it here.
        if changed and not at_epoch:
            self._changes += 1
            key = f"requires_grad/{self._number}/{self._changes}"
            _await_change(self._world, key)
        if changed or at_epoch:
            _check_alike(self._world, [*trained])
        if self._shares_buffers and at_epoch:
            self._buffers = list(self.testing.buffers())
        if changed:
            # Free the old wrapper first: its hooks on the parameters would share each gradient a
            # second time. torch removes the hooks when the wrapper is freed, but the wrapper is in
            # a reference cycle, which only the garbage collector finds.
            self._ddp = None
            self.training = self.testing.forward
            for parameter in self.testing.parameters():
                # With gradient_as_bucket_view a gradient is a view of the old wrapper's buckets,
                # and would keep the buckets in memory.
                parameter.grad = None
            gc.collect()
            self._wrap()

    def check_requires_grad(self) -> None:
        """Check that no parameter was frozen or unfrozen since the step began.

        Such a change would come too late for the step, whose gradients are shared already.

        Raises:
            ConfigError: Other parameters require a gradient than when the step began.
        """
        trained = self.parameters.trained()
        if self._ddp is not None and not _same(trained, self._wrapped_for):
            raise ConfigError(
                "on_before_optimizer_step has changed which parameters require a gradient:"
                f" {_difference([*self._wrapped_for], [*trained])}",
                expected="such a change between steps",
                hint="make it in on_step or on_epoch",
            )

    @property
    def rebuilds_buckets(self) -> bool:
        """Whether DistributedDataParallel reorders its buckets after its first backward pass, as it
        does by default.
        """
        return self._ddp is not None and (
            self._ddp.static_graph or not self._ddp.find_unused_parameters
        )

    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for a forward and backward pass that only adds to this
        rank's gradients.
        """
        if self._ddp is None or self._unknown:
            # torch records a static graph in the first backward pass, and fails if that pass does
            # not share gradients. Sharing them here does not change the gradients of the step:
            # later ones are added to values that are the same on all ranks, and so equal their
            # mean.
            self._unknown = False
            return contextlib.nullcontext()
        return self._ddp.no_sync()

    def static_graph_recorded(self) -> None:
        """Remember that torch recorded a static graph, in a backward pass that shared gradients."""
        self._unknown = False

    def share_buffers(self) -> bool:
        """Give all ranks rank 0's buffers, such as BatchNorm's running statistics; a collective.

        Returns:
            Whether there are any buffers.
        """
        if self._buffers:
            share(self._buffers)
        return bool(self._buffers)

    def share_all_buffers(self, *modules: nn.Module) -> None:
        """Give all ranks rank 0's buffers of these modules, before an evaluation; a collective.

        After a training step the buffers differ between ranks, and the result for a sample would
        depend on which rank evaluates it.

        Args:
            modules: The modules; their buffers are looked up each time, because a module may have
                replaced one.
        """
        if self._shares_buffers:
            for module in modules:
                share(module.buffers())


def _same(some: Mapping[str, nn.Parameter], others: Mapping[str, nn.Parameter]) -> bool:
    """Return whether these are the same parameters; ``==`` would compare their values."""
    return some.keys() == others.keys() and all(each is others[n] for n, each in some.items())


def _await_change(world: World, key: str) -> None:
    """Wait until all ranks have changed which parameters require a gradient, as this rank has.

    The ranks meet over the store, because torch would match a collective here with a collective of
    the next step on a rank without a change.

    Args:
        world: The ranks; those with a change call this.
        key: The key of this change in the store.

    Raises:
        ConfigError: Another rank has no change.
    """
    if absent := absent_ranks(world, key, _CHANGED_WITHIN):
        raise ConfigError(
            f"what requires a gradient has changed on rank {world.rank}, and not on"
            f" {fold_ranks(absent, {})}",
            expected="the same change on all ranks, after the same step",
            hint="freeze and unfreeze by the number of the step or the epoch",
        )


def _check_alike(world: World, trained: list[str]) -> None:
    """Compare the names of the trained parameters between ranks; a collective.

    Raises:
        ConfigError: Another rank trains other parameters.
    """
    # This is called at least once per epoch, so each rank sends only a checksum of its names. Only
    # if the checksums differ, the names are sent, for the message.
    checksum = zlib.crc32("\n".join(trained).encode())
    if len({row[0] for row in all_gather_ints(world, [checksum])}) == 1:
        return
    every: list[Any] = [None] * world.world_size
    dist.all_gather_object(every, trained)
    other = next(rank for rank, names in enumerate(every) if names != trained)
    raise ConfigError(
        f"other parameters require a gradient on rank {other} than on rank {world.rank}:"
        f" {_difference(trained, every[other])}",
        expected="the same on all ranks",
        hint="freeze and unfreeze by the number of the step or the epoch",
    )


def _difference(before: Sequence[str], now: Sequence[str]) -> str:
    """Return a phrase for a message with the first name that is in only one of two lists."""
    for verb, names in (("has", set(now) - set(before)), ("has not", set(before) - set(now))):
        if names:
            more = len(names) - 1
            return f"it {verb} {min(names)}" + (f" and {more} more" if more else "")
    return "in another order"


@torch.no_grad()
def share(buffers: Iterable[Tensor]) -> None:
    """Give all ranks rank 0's values of these tensors; a collective.

    Args:
        buffers: The tensors, equal in number, types and shapes on all ranks.
    """
    # Use one broadcast per dtype. With one per buffer, a ResNet-50, which has 159 buffers, would
    # wait 159 times for the latency of the network.
    for tensors in group_by_key((buffer.dtype, buffer) for buffer in buffers).values():
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.broadcast(flat, src=0)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        torch._foreach_copy_(
            tensors, [part.view(own.shape) for part, own in zip(parts, tensors, strict=True)]
        )


def _prepared(model: nn.Module, world: World, config: Config) -> nn.Module:
    """Return the model, with SyncBatchNorm and activation checkpointing if configured.

    Raises:
        ConfigError: The model has no module of a class in ``activation_checkpointing``, or the
            device has no SyncBatchNorm.
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

    # Leave out the model itself: to recompute all of it in one piece would save no memory, and
    # torch does not wrap it.
    found = {type(module).__name__ for module in model.modules() if module is not model}
    if missing := [name for name in names if name not in found]:
        raise ConfigError(
            f"activation_checkpointing names {', '.join(missing)}",
            expected=f"classes of the modules in the model: {', '.join(sorted(found))}",
            hint="correct the names",
        )
    apply_activation_checkpointing(model, check_fn=lambda module: type(module).__name__ in names)


def _wrapped(module: nn.Module, config: DDPConfig) -> DistributedDataParallel:
    # Pass no device_ids: with them DistributedDataParallel would copy each input to the device
    # again.
    ddp = DistributedDataParallel(
        module,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
        static_graph=config.static_graph,
        bucket_cap_mb=config.bucket_cap_mb,
        find_unused_parameters=config.find_unused_parameters,
    )
    # DDPModel.share_buffers() gives all ranks rank 0's buffers before each step, where the wait for
    # rank 0 can be measured, so torch must not. Do not pass broadcast_buffers=False as an argument:
    # torch would then not even start with the same buffers on all ranks.
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
