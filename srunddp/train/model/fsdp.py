"""The model in shards, one on each rank's device: FSDP2, torch's ``fully_shard``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import SGD, Adafactor, Optimizer, Rprop

from srunddp.errors import ConfigError
from srunddp.train.config import Config, FSDPConfig
from srunddp.train.model.ddp import DDPModel, check_classes, prepared, share_buffers
from srunddp.train.model.meta_init import MetaInitializer, inner_first, is_deferred
from srunddp.train.world import World

_UNSUPPORTED = (Adafactor, Rprop)


def wrap_model(model: nn.Module, optimizer: Optimizer, world: World, config: Config) -> DDPModel | FSDPModel:
    """The model as this rank trains it: in shards where that is asked for and there is more than one rank.

    Raises:
        ConfigError: the configuration asks for what this model, optimizer, device or backend cannot do.
    """
    if config.parallel == "fsdp" and world.world_size > 1:
        return FSDPModel(model, optimizer, world, config)
    check_classes("fsdp.modules", config.fsdp.modules, model)
    if is_deferred(model):
        before = dict(model.named_parameters())
        _check_state(optimizer)
        MetaInitializer().make_all(model)
        _replace_parameters(optimizer, before, dict(model.named_parameters()))
    return DDPModel(model, world, config.ddp)


class FSDPModel:
    """One rank's shard of the model, to be used as a :class:`srunddp.train.model.ddp.DDPModel`.

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
        _check_optimizer(optimizer)
        _check_model(model, config.fsdp)
        model = prepared(model, world, config.ddp)
        before = dict(model.named_parameters())
        _shard(model, world, config.fsdp)
        _replace_parameters(optimizer, before, dict(model.named_parameters()))
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

    def static_graph_recorded(self) -> None:
        """FSDP records no graph."""

    @contextlib.contextmanager
    def time_collective_waits(self, before: Callable[[], None], after: Callable[[], None]) -> Iterator[None]:
        """Have both called around each wait for a module's shards, and for buffers, before its forward."""
        waiting: list[Any] = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        hooks = [module.register_forward_pre_hook(lambda *_: before(), prepend=True) for module in waiting]
        hooks += [module.register_forward_pre_hook(lambda *_: after()) for module in waiting]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def share_buffers(self, model: nn.Module) -> None:
        """Give all ranks rank 0's buffers of this model, such as BatchNorm's running statistics."""
        if self._shares_buffers:
            share_buffers(model)


def _check_optimizer(optimizer: Optimizer) -> None:
    fused = type(optimizer) is SGD and any(group.get("fused") for group in optimizer.param_groups)
    if fused or isinstance(optimizer, _UNSUPPORTED):
        raise ConfigError(
            f"the optimizer {type(optimizer).__name__}{' with fused=True' * fused}, and parallel=fsdp",
            expected="one whose step torch makes of shards too",
            hint="leave fused out" if fused else "take another optimizer, such as AdamW",
        )
    _check_state(optimizer)


def _check_state(optimizer: Optimizer) -> None:
    if any(parameter.is_meta for parameter in optimizer.state):
        raise ConfigError(
            f"the optimizer {type(optimizer).__name__} with a state already, and a model on the meta device",
            expected="one whose state begins with its first step",
            hint="take another optimizer, such as AdamW, or build the model on the CPU",
        )


def _check_model(model: nn.Module, config: FSDPConfig) -> None:
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ConfigError(
            "a model that is in shards already, and parallel=fsdp",
            expected="a whole one, which the Trainer shards",
            hint="build the model anew for each Trainer, or go on with the first one",
        )
    if config.param_dtype == "bf16" and any(isinstance(module, _BatchNorm) for module in model.modules()):
        raise ConfigError(
            "fsdp.param_dtype=bf16, and BatchNorm in the model",
            expected="no BatchNorm, whose running statistics stay in fp32, which torch does not mix with bf16",
            hint="use precision=bf16 instead, or another norm",
        )
    if scalars := [name for name, parameter in model.named_parameters() if parameter.ndim == 0]:
        raise ConfigError(
            f"the parameter {scalars[0]} without a dimension, and parallel=fsdp",
            expected="one dimension or more, as torch shards the first",
            hint="make it nn.Parameter(torch.ones(1))",
        )
    if any(getattr(module, "sparse", False) for module in model.modules()):
        raise ConfigError(
            "an embedding with sparse=True, and parallel=fsdp",
            expected="gradients that are not sparse, as torch has no shards of those",
            hint="leave sparse out",
        )


def _shard(model: nn.Module, world: World, config: FSDPConfig) -> None:
    """Module by module: the model as a whole need not fit on one device, and where it was built on the meta device not
    into this host's memory either."""
    check_classes("fsdp.modules", config.modules, model)
    mesh = init_device_mesh(world.device.type, (world.world_size,))
    deferred = MetaInitializer() if is_deferred(model) else None
    chosen = _chosen(model, config.modules)
    for module in inner_first(model):
        if deferred:
            deferred.make(module)
        if module is model or id(module) in chosen:
            if deferred:
                deferred.check(module)
            _check_dtypes(module)
            _share(module, world)
            policy = MixedPrecisionPolicy()
            if config.param_dtype == "bf16":  # the loss is computed in fp32 of what comes out at the end
                last = torch.float32 if module is model else None
                policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, last)
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=config.reshard_after_forward)
    share_buffers(model)


def _share(module: nn.Module, world: World) -> None:
    """Give all ranks rank 0's parameters, one after the other; those in shards have them."""
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):
            moved = parameter.detach().to(world.device).contiguous()
            dist.broadcast(moved, src=0)
            parameter.detach().copy_(moved)


def _check_dtypes(module: nn.Module) -> None:
    """What is gathered at once; the parameters that are in shards already are not."""
    left = [each for each in module.parameters() if each.requires_grad and not isinstance(each, DTensor)]
    if len(dtypes := {str(each.dtype).removeprefix("torch.") for each in left}) > 1:
        raise ConfigError(
            f"parameters of {' and '.join(sorted(dtypes))} in one {type(module).__name__}, and parallel=fsdp",
            expected="one type for what is gathered at once",
            hint="use one, or name the classes in fsdp.modules whose parameters are of another",
        )


def _chosen(model: nn.Module, names: tuple[str, ...]) -> set[int]:
    """The ids of the modules of these classes; with its wrapper where one's activations are checkpointed."""
    wrapped = {module: getattr(module, "_checkpoint_wrapped_module", module) for module in model.modules()}
    inner = {id(inside) for module, inside in wrapped.items() if inside is not module}
    return {id(each) for each, inside in wrapped.items() if id(each) not in inner and type(inside).__name__ in names}


def _replace_parameters(
    optimizer: Optimizer, before: Mapping[str, nn.Parameter], after: Mapping[str, nn.Parameter]
) -> None:
    """Have the optimizer step the shards, which are new objects; it may have a state, as Adagrad has at once.

    Raises:
        ConfigError: parameters that were one are two now.
    """
    if parted := after.keys() - before.keys():
        raise ConfigError(
            f"{', '.join(sorted(parted))} shared between modules that are gathered one after the other",
            expected="shared parameters within one of fsdp.modules, or outside of all",
            hint="leave out of fsdp.modules what shares them",
        )
    shards = {id(parameter): after[name] for name, parameter in before.items()}
    for group in optimizer.param_groups:
        group["params"] = [shards[id(parameter)] for parameter in group["params"]]
    for parameter in list(optimizer.state):
        new, values = shards[id(parameter)], optimizer.state.pop(parameter)
        optimizer.state[new] = {name: sharded_as(new, value) for name, value in values.items()}


def sharded_as(like: Tensor, value: Any) -> Any:
    """The shard of a tensor that each rank has as a whole, where it is of the shape of one in shards."""
    if not (isinstance(value, Tensor) and isinstance(like, DTensor) and like.shape == value.shape):
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
