"""Checks that find mistakes of the user before they hang the ranks or falsify a figure."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch.distributed as dist
from torch import nn
from torch.nn.modules.loss import _Loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from torch.utils.data import Dataset

from srunddp.errors import ConfigError
from srunddp.train.config import Config
from srunddp.train.data.sampler import check_agreement, length_of
from srunddp.train.metrics.accumulator import Metric
from srunddp.train.preemption import signals
from srunddp.train.world import World

_FROM_0 = """
warmup_steps seed evaluate_every_epochs evaluate_every_steps patience log_every
dataloader.num_workers checkpoint.every_epochs checkpoint.every_steps checkpoint.every_minutes
checkpoint.keep_best preemption.lead_seconds preemption.max_requeues
"""
_FROM_1 = """
epochs max_steps batch_size gradient_accumulation_steps base_batch_size num_threads
ddp.bucket_cap_mb dataloader.prefetch_factor checkpoint.keep_last
"""
_LEAST = dict.fromkeys(_FROM_0.split(), 0) | dict.fromkeys(_FROM_1.split(), 1)
# Epochs and ranks are added to the seed, and the sum must fit an int64.
_LARGEST_SEED = 2**62
# Reductions to a mean. "batchmean" is that of KLDivLoss over samples; its "mean" is over all
# elements.
_MEANS = ("mean", "batchmean")


def check_group(world: World) -> None:
    """Check that several ranks have a process group, as large as the world.

    Args:
        world: The ranks.

    Raises:
        ConfigError: There is no process group, or one of another size.
    """
    if world.world_size == 1:
        return
    size = dist.get_world_size() if dist.is_initialized() else 0
    if size != world.world_size:
        state = f"one of {size} ranks" if size else "none"
        raise ConfigError(
            f"a world of {world.world_size} ranks, but torch's default process group is {state}",
            expected="both alike",
            hint="build the Trainer inside 'with srunddp.init() as world:'",
        )


def check_model(model: nn.Module, optimizers: Sequence[Optimizer], loss_function: object) -> None:
    """Check that optimizers step only parameters of this model and loss function, each only once.

    Args:
        model: The user's model.
        optimizers: The user's optimizers.
        loss_function: The user's loss function; its parameters count if it is a module.

    Raises:
        ConfigError: A parameter is in two optimizers, or belongs neither to the model nor to the
            loss function; none requires a gradient; or DistributedDataParallel cannot copy the
            model.
    """
    if isinstance(model, DistributedDataParallel):
        raise ConfigError(
            "a model in DistributedDataParallel",
            expected="the model itself",
            hint="leave the wrap out, it is made here",
        )
    _check_tensors(model)
    modules = [each for each in (model, loss_function) if isinstance(each, nn.Module)]
    own = {id(parameter) for module in modules for parameter in module.parameters()}
    if not any(parameter.requires_grad for module in modules for parameter in module.parameters()):
        raise ConfigError(
            "no parameter requires a gradient",
            expected="one at least",
            hint="unfreeze some of them",
        )
    stepped = [id(p) for each in optimizers for group in _groups(each) for p in group["params"]]
    # An optimizer of a copy of the model would train the copy, and this model would not change.
    foreign = len([parameter for parameter in stepped if parameter not in own])
    if foreign:
        raise ConfigError(
            f"{foreign} of the optimizer's parameters are not the model's",
            expected="the same objects",
            hint=(
                "build the optimizer from model.parameters(), and pass that model, not a copy of it"
            ),
        )
    if len(set(stepped)) < len(stepped):
        raise ConfigError(
            "a parameter in two optimizers",
            expected="each in one",
            hint="give each optimizer parameters of its own",
        )
    if isinstance(loss_function, nn.Module):
        _check_loss_parameters(loss_function, set(stepped))


def _check_tensors(model: nn.Module) -> None:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if without := [name for name, tensor in tensors.items() if tensor.is_meta]:
        raise ConfigError(
            f"{len(without)} of the model's tensors on the meta device, the first {without[0]}",
            expected="tensors with values",
            hint="build the model on the CPU",
        )
    # Recognise DTensor by an attribute, because importing the class takes a second.
    if any(hasattr(tensor, "full_tensor") for tensor in tensors.values()):
        raise ConfigError(
            "a model whose parameters are DTensors, as fully_shard() makes them",
            expected="a whole one, which DistributedDataParallel copies to each rank",
            hint=(
                "pass it as it was before, or write a loop of your own, such as"
                " docs/examples/fsdp_loop.py"
            ),
        )


def _groups(optimizer: object) -> list[dict[str, Any]]:
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"a {type(optimizer).__name__} for an optimizer",
            expected="one of torch.optim, or a list of these",
            hint="build it from model.parameters()",
        )
    # LBFGS calls the model several times in each step, by a closure, which this training loop does
    # not pass.
    if isinstance(optimizer, LBFGS):
        raise ConfigError(
            "the optimizer LBFGS",
            expected="one that makes a step of one gradient",
            hint="take another optimizer",
        )
    return optimizer.param_groups


def _check_loss_parameters(loss_function: nn.Module, stepped: set[int]) -> None:
    if left := [
        n
        for n, each in loss_function.named_parameters()
        if each.requires_grad and id(each) not in stepped
    ]:
        raise ConfigError(
            f"the loss function has the parameter {left[0]}, which no optimizer has",
            expected="its parameters in an optimizer, or frozen",
            hint="build the optimizer from [*model.parameters(), *loss_function.parameters()]",
        )


def check_loss_function(loss_function: object) -> None:
    """Check that the loss is a mean, because the loop multiplies it by the batch's weight.

    Args:
        loss_function: The user's loss function; None if the step contains it.

    Raises:
        ConfigError: The loss is a sum, or has one value per sample.
    """
    if isinstance(loss_function, _Loss):
        reduction = getattr(loss_function, "reduction", "mean")
    else:
        reduction = "mean"
    # The script may have set the reduction of a function, such as cross_entropy, by
    # functools.partial.
    reduction = getattr(loss_function, "keywords", {}).get("reduction", reduction)
    if reduction not in _MEANS:
        raise ConfigError(
            f"a loss function with reduction={reduction!r}",
            expected="'mean'",
            hint="use reduction='mean'",
        )


def check_metrics(
    metrics: Mapping[str, Metric], val_metrics: Mapping[str, Metric], config: Config
) -> None:
    """Check that metrics have unique names, and that the monitored one exists.

    Args:
        metrics: The metrics of training and evaluations, by name.
        val_metrics: The metrics of evaluations only, by name.
        config: The settings, whose ``monitor`` may have the name of a validation set before the
            metric's.

    Raises:
        ConfigError: Two metrics have the same name, or no metric has the name in ``monitor``.
    """
    if both := metrics.keys() & val_metrics.keys():
        raise ConfigError(
            f"{min(both)} in metrics and in val_metrics",
            expected="it in one of them: metrics are of evaluations, too",
            hint="leave it out of val_metrics",
        )
    metrics = {**metrics, **val_metrics}
    if "loss" in metrics:
        raise ConfigError(
            "a metric named 'loss'",
            expected="another name, the loss has that one",
            hint="rename it",
        )
    if not {*config.monitor.split("/")} & {"loss", *metrics}:
        known = ", ".join(("loss", *metrics))
        raise ConfigError(
            f"monitor={config.monitor}",
            expected=f"one of {known}",
            hint="correct it, or pass that metric",
        )


def check_fit(
    world: World, data: Mapping[str, Dataset[Any] | None], weight: object, config: Config
) -> None:
    """Check that data sets are not empty, and that all ranks were given the same; a collective.

    Otherwise one rank would wait in a collective that another never enters.

    Args:
        world: The ranks, all of which call this.
        data: The data sets by the names of their parameters.
        weight: The user's function; ranks compare whether there is one.
        config: The settings of the training.

    Raises:
        ConfigError: Ranks have different data sets or settings, or a data set is empty.
    """
    sizes = {f"len({name})": _length(each) for name, each in data.items()}
    own = {name: value for name, value in leaves(config) if name.split(".")[0] in OWN_SETTINGS}
    # Compare the names first: with other names, the rows of numbers compared next would differ in
    # length, and the collective would fail without saying why.
    check_agreement(world, {"the names of the data sets": str([*data])})
    check_agreement(world, {**sizes, "weight": int(weight is not None), **own})
    for name, size in sizes.items():
        if size == 0:
            raise ConfigError(
                f"{name} is 0", expected="at least 1", hint="check what was passed to fit()"
            )


def check_batch_norm(model: nn.Module, samples: int | None, world: World, config: Config) -> None:
    """Check that with BatchNorm1d no rank has only one sample in a micro-batch.

    BatchNorm1d needs two samples, or one with several positions.

    Args:
        model: The user's model.
        samples: The samples of an epoch, over all ranks; None if the number is not known.
        world: The ranks.
        config: The settings of the training.

    Raises:
        ConfigError: The last micro-batch of an epoch gives a rank only one sample.
    """
    if samples is None or config.dataloader.drop_last:
        last = 0
    else:
        last = samples % (world.world_size * config.batch_size)
    modules = list(model.modules())
    # After a Conv1d a sample has several positions, so BatchNorm1d accepts a single sample.
    if not last or any(isinstance(module, nn.Conv1d) for module in modules):
        return
    # Rank r has the samples r, r + world_size and so on of the last micro-batch.
    per_rank = {len(range(rank, last, world.world_size)) for rank in range(world.world_size)}
    if 1 in per_rank and any(
        isinstance(module, nn.BatchNorm1d) and module.training for module in modules
    ):
        sizes = f"{samples} samples, {world.world_size} ranks, batch_size {config.batch_size}"
        raise ConfigError(
            f"BatchNorm1d, and an epoch whose last micro-batch gives a rank one sample: {sizes}",
            expected="two samples or more on each rank",
            hint="set dataloader.drop_last=true, or another batch_size",
        )


def check_steps_per_epoch(before: int | None, now: int | None, scheduler: str) -> None:
    """Check that an epoch has as many steps as in the checkpoint.

    Args:
        before: The number in the checkpoint; None if it was not known.
        now: The number in this run.
        scheduler: The class of the user's scheduler, which is stepped after each step.

    Raises:
        ConfigError: The numbers differ.
    """
    if before != now:
        raise ConfigError(
            f"{scheduler} is stepped after each step, and an epoch had {before} steps and now has"
            f" {now}",
            expected="the same number, for which it was made",
            hint=(
                "use schedule=, scheduler_interval=epoch, or the ranks and the batch_size of before"
            ),
        )


def _length(data: Dataset[Any] | None) -> int:
    # Ranks compare the results, so also return a number, each a different one, for a missing data
    # set and for one of unknown length.
    if data is None:
        return -1
    if (length := length_of(data)) is None:
        return -2
    return length


def check_settings(config: Config) -> None:
    """Check that each setting has an allowed value, and that settings fit together.

    Args:
        config: The settings of the training.

    Raises:
        ConfigError: A setting would fail later, hang, or have no effect.
    """
    for name, value in leaves(config):
        # `value < least` would be False for NaN.
        if name in _LEAST and value is not None and not value >= _LEAST[name]:
            raise _wrong(name, value, f"at least {_LEAST[name]}")
    if config.seed > _LARGEST_SEED:
        raise _wrong("seed", config.seed, f"at most {_LARGEST_SEED}")
    if config.max_grad_norm is not None and not config.max_grad_norm > 0:
        raise _wrong("max_grad_norm", config.max_grad_norm, "above 0")
    if config.ema_decay is not None and not 0 < config.ema_decay < 1:
        raise _wrong("ema_decay", config.ema_decay, "above 0 and below 1")
    _check_words(config)
    signals.numbers(config.preemption.signals)
    # Refuse these values of resume: "Never" or an empty value would otherwise be taken for the path
    # of a checkpoint.
    if config.resume not in ("never", "auto") and config.resume.lower() in (
        "never",
        "auto",
        "no",
        "",
    ):
        raise _wrong("resume", repr(config.resume), "never, auto or the path of a checkpoint")
    if config.resume != "never" and config.output_dir is None:
        raise ConfigError(
            f"resume is {config.resume}, and there is no output_dir",
            expected="the folder of the run's checkpoints",
            hint="add --output_dir=FOLDER, or leave resume out",
        )


def check_callbacks(callbacks: Sequence[object], kind: type) -> None:
    """Check that callbacks are instances, not classes.

    Args:
        callbacks: The user's callbacks.
        kind: The class ``Callback``.

    Raises:
        ConfigError: One of them is not an instance of ``kind``.
    """
    if wrong := [callback for callback in callbacks if not isinstance(callback, kind)]:
        raise ConfigError(
            f"{wrong[0]!r} among the callbacks",
            expected="instances of srunddp.train.Callback",
            hint="derive its class from Callback, and pass an instance",
        )


def check_schedulers(schedulers: Sequence[object], optimizers: Sequence[Optimizer]) -> None:
    """Check that there is no scheduler, or one for each optimizer.

    Args:
        schedulers: The user's schedulers.
        optimizers: The user's optimizers.

    Raises:
        ConfigError: There is another number of schedulers.
    """
    if schedulers and len(schedulers) != len(optimizers):
        raise ConfigError(
            f"{len(schedulers)} schedulers for {len(optimizers)} optimizers",
            expected="one for each, or none",
            hint="pass a list as long as that of the optimizers",
        )


def leaves(config: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Return all settings of a dataclass and of those nested in it, with their dotted names.

    Args:
        config: A dataclass, which may contain others.
        prefix: The beginning of the names.
    """
    found: list[tuple[str, Any]] = []
    for field in fields(config):
        value = getattr(config, field.name)
        name = prefix + field.name
        if is_dataclass(value):
            found += leaves(value, f"{name}.")
        else:
            found.append((name, value))
    return found


# The settings that ranks compare. Settings that a script adds in a subclass of Config may differ
# between nodes.
OWN_SETTINGS = frozenset(field.name for field in fields(Config))


def _check_words(config: Any, prefix: str = "") -> None:
    """Check that each setting with a list of allowed words has one of them.

    Python itself does not check a value against a Literal: a misspelt word would be treated like
    the last branch of an ``if``.

    Raises:
        ConfigError: A setting has another word.
    """
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if is_dataclass(value):
            _check_words(value, f"{prefix}{name}.")
        if value is not None:
            options = [hint, *get_args(hint)]
        else:
            options = []
        words = [
            word for option in options if get_origin(option) is Literal for word in get_args(option)
        ]
        if words and value not in words:
            raise _wrong(prefix + name, repr(value), f"one of {', '.join(words)}")


def _wrong(name: str, value: Any, expected: str) -> ConfigError:
    return ConfigError(f"{name} is {value}", expected=expected, hint="correct the configuration")
