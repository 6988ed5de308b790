"""A user's errors, found before they hang the ranks or make a figure wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch.distributed as dist
from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.utils.data import Dataset, IterableDataset

from srunddp.errors import ConfigError
from srunddp.train.config import Config, DDPConfig, FSDPConfig
from srunddp.train.data.order import Order, check_order
from srunddp.train.data.sampler import check_agreement, length_of
from srunddp.train.metrics.accumulator import LossFunction, Metric
from srunddp.train.preemption import signals
from srunddp.train.profiler import parse
from srunddp.train.world import World

_LEAST = {
    "epochs": 1,
    "batch_size": 1,
    "accumulation": 1,
    "base_batch_size": 1,
    "warmup_steps": 0,
    "seed": 0,
    "evaluate_every_epochs": 0,
    "evaluate_every_steps": 0,
    "patience": 0,
    "log_every": 0,
    "ddp.bucket_cap_mb": 1,
    "ddp.powersgd_rank": 1,
    "loading.num_workers": 0,
    "loading.prefetch_factor": 1,
    "loading.threads": 1,
    "checkpoint.every_epochs": 0,
    "checkpoint.every_steps": 0,
    "checkpoint.every_minutes": 0,
    "checkpoint.keep_last": 1,
    "checkpoint.keep_best": 0,
    "preemption.lead_seconds": 0,
    "preemption.max_requeues": 0,
}
_LARGEST_SEED = 2**62
_DDP_ALONE = ("static_graph", "bucket_cap_mb", "find_unused_parameters", "hook", "channels_last", "compile")


def check_parts(
    world: World,
    model: nn.Module,
    optimizer: Optimizer,
    loss_function: LossFunction,
    metrics: Mapping[str, Metric],
    config: Config,
) -> None:
    """What a Trainer is made of fits together.

    Raises:
        ConfigError: it does not.
    """
    check_group(world)
    check_optimizer(optimizer, model)
    check_loss_function(loss_function)
    check_metrics(metrics, config)
    check_settings(config, world)


def check_group(world: World) -> None:
    """The process group is there when there is more than one rank, and is as large as the world."""
    if world.world_size == 1:
        return
    found = dist.get_world_size() if dist.is_initialized() else 0
    if found != world.world_size:
        state = f"one of {found} ranks" if found else "none"
        raise ConfigError(
            f"a world of {world.world_size} ranks, but torch's default process group is {state}",
            expected="both alike",
            hint="build the Trainer inside 'with srunddp.init() as world:'",
        )


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """The optimizer steps this model's parameters, and no others."""
    if isinstance(optimizer, LBFGS):
        raise ConfigError(
            "the optimizer LBFGS", expected="one that makes a step of one gradient", hint="take another optimizer"
        )
    own = {id(parameter) for parameter in model.parameters()}
    foreign = sum(id(p) not in own for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise ConfigError(
            f"{foreign} of the optimizer's parameters are not the model's",
            expected="the same objects",
            hint="build the optimizer from model.parameters(), and pass that model, not wrapped in "
            "DistributedDataParallel or copied",
        )


def check_loss_function(loss_function: LossFunction) -> None:
    """The loss is a mean, as DistributedDataParallel's averaging of gradients and our sums take it."""
    reduction = getattr(loss_function, "reduction", "mean")
    if reduction != "mean":
        raise ConfigError(
            f"a loss function with reduction={reduction!r}", expected="'mean'", hint="use reduction='mean'"
        )


def check_metrics(metrics: Mapping[str, Metric], config: Config) -> None:
    """No metric takes the loss's name, and the one that tells the best model is among them."""
    if "loss" in metrics:
        raise ConfigError("a metric named 'loss'", expected="another name, the loss has that one", hint="rename it")
    if config.best.split("/")[0] not in ("loss", *metrics):
        known = ", ".join(("loss", *metrics))
        raise ConfigError(f"best={config.best}", expected=f"one of {known}", hint="correct it, or pass that metric")


def check_fit(
    world: World, train_data: Dataset[Any], test_data: Dataset[Any] | None, order: Order | None, config: Config
) -> None:
    """There is something to read, and all ranks were given the same.

    Else one rank would wait in a collective that another never enters.
    """
    sizes = {"len(train_data)": _length(train_data), "len(test_data)": _length(test_data)}
    first_epoch = None if order is None else order.indices(1).numpy().tobytes()
    check_agreement(world, {**sizes, "order": first_epoch, **dict(leaves(config))})
    for name, size in sizes.items():
        if size == 0:
            raise ConfigError(f"{name} is 0", expected="at least 1", hint="check what was passed to fit()")
    if order is not None:
        check_order(order, None if isinstance(train_data, IterableDataset) else sizes["len(train_data)"])


def pair(data: Any) -> tuple[Any, Any]:
    """The inputs and the targets of a batch."""
    if isinstance(data, list | tuple) and len(data) == 2:
        return data[0], data[1]
    parts = data if isinstance(data, list | tuple) else [data]
    raise ConfigError(
        f"a batch of {[type(part).__name__ for part in parts]}",
        expected="two parts, inputs and targets",
        hint="let the data set's __getitem__, or collate, return such a pair",
    )


def _length(data: Dataset[Any] | None) -> int:
    if data is None:
        return -1
    length = length_of(data)
    return -2 if length is None else length


def check_settings(config: Config, world: World) -> None:
    """Each setting for itself, and those that need another.

    Raises:
        ConfigError: one would fail later, hang, or be of no effect.
    """
    values = dict(leaves(config))
    for name, least in _LEAST.items():
        # Not `<`: NaN is no number of anything.
        if values[name] is not None and not values[name] >= least:
            raise _wrong(name, values[name], f"at least {least}")
    if config.seed > _LARGEST_SEED:
        raise _wrong("seed", config.seed, f"at most {_LARGEST_SEED}")
    if config.clip_norm is not None and not config.clip_norm > 0:
        raise _wrong("clip_norm", config.clip_norm, "above 0")
    if config.ema_decay is not None and not 0 < config.ema_decay < 1:
        raise _wrong("ema_decay", config.ema_decay, "above 0 and below 1")
    _check_words(config)
    _check_parallel(config)
    signals.numbers(config.preemption.signals)
    _check_profile(config, world)
    if config.resume not in ("no", "auto") and config.resume.lower() in ("no", "auto", ""):
        raise _wrong("resume", repr(config.resume), "no, auto or the path of a checkpoint")
    if config.resume != "no" and config.output_dir is None:
        raise ConfigError(
            f"resume is {config.resume}, and there is no output_dir",
            expected="the folder of the run's checkpoints",
            hint="add --output_dir=FOLDER, or leave resume out",
        )


def leaves(config: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """All settings by dotted name."""
    found: list[tuple[str, Any]] = []
    for field in fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        found += leaves(value, f"{name}.") if is_dataclass(value) else [(name, value)]
    return found


def _check_words(config: Any, prefix: str = "") -> None:
    """Else a misspelt word would count as the last of a chain of ifs."""
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if is_dataclass(value):
            _check_words(value, f"{prefix}{name}.")
        options = [hint, *get_args(hint)] if value is not None else []
        words = [word for option in options if get_origin(option) is Literal for word in get_args(option)]
        if words and value not in words:
            raise _wrong(prefix + name, repr(value), f"one of {', '.join(words)}")


def _check_parallel(config: Config) -> None:
    """No setting of the one with the other."""
    sharded = config.parallel == "fsdp"
    if sharded and config.precision == "fp16":
        raise _wrong("precision", "fp16, with parallel=fsdp", "fp32 or bf16, a GradScaler knows nothing of shards")
    if sharded and config.ema_decay is not None:
        raise _wrong("ema_decay", f"{config.ema_decay}, with parallel=fsdp", "null, shards are not averaged")
    if sharded:
        unfit = [f"ddp.{name}" for name in _DDP_ALONE if getattr(config.ddp, name) != getattr(DDPConfig(), name)]
    else:
        unfit = [
            name for name, value in leaves(config.fsdp, "fsdp.") if value != dict(leaves(FSDPConfig(), "fsdp."))[name]
        ]
    if unfit:
        raise ConfigError(
            f"{', '.join(unfit)} with parallel={config.parallel}",
            expected=f"parallel={'ddp' if sharded else 'fsdp'}, which alone has {'it' if len(unfit) == 1 else 'them'}",
            hint="change parallel, or leave it out",
        )


def _check_profile(config: Config, world: World) -> None:
    if not config.profile:
        return
    parse(config.profile)
    if config.output_dir is None:
        raise ConfigError("profile, and no output_dir for the trace", expected="both", hint="set output_dir")
    if not set(config.profile_ranks) & set(range(world.world_size)):
        raise _wrong("profile_ranks", config.profile_ranks, f"ranks from 0 to {world.world_size - 1}")


def _wrong(name: str, value: Any, expected: str) -> ConfigError:
    return ConfigError(f"{name} is {value}", expected=expected, hint="correct the configuration")
