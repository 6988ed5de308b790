"""The optimizers' fused kernels, and their learning rates: scaled with the batch, and scheduled."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LRScheduler, OneCycleLR

from srunddp.errors import ConfigError
from srunddp.train.config import Config

Scheduler: TypeAlias = LRScheduler | Callable[[Optimizer], LRScheduler]
"""A torch scheduler, or what makes one of the optimizer."""

_FUSED = (Adam, AdamW, SGD)
_FUSED_ON = ("cpu", "cuda")
_KERNELS = {"fused", "foreach"}


def as_tuple(one_or_more: Any) -> tuple[Any, ...]:
    """What a user may pass alone or in a list."""
    if one_or_more is None:
        return ()
    return tuple(one_or_more) if isinstance(one_or_more, list | tuple) else (one_or_more,)


def use_fused(optimizer: Optimizer, model: nn.Module) -> None:
    """Have the optimizer use its fused kernels where it has some for these parameters.

    What the user has chosen stays: an implementation, a differentiable step, a state that is there already.
    """
    if type(optimizer) not in _FUSED or optimizer.state or any(getattr(m, "sparse", False) for m in model.modules()):
        return
    for group in optimizer.param_groups:
        if any(group.get(name) is not None for name in _KERNELS) or group.get("differentiable"):
            return
        if not all(p.is_floating_point() and p.device.type in _FUSED_ON for p in group["params"]):
            return
    for group in optimizer.param_groups:
        group["fused"] = True
    # As the optimizer's constructor does with fused=True: GradScaler then leaves the division to the kernel.
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]


def lr_factor(config: Config, world_size: int) -> float:
    """What the learning rate is multiplied by, for the samples of one step.

    In proportion to them (``linear``) as Goyal et al. 2017 do, or to their root (``sqrt``) as Krizhevsky 2014.
    """
    samples = world_size * config.gradient_accumulation_steps * config.batch_size
    ratio = samples / (config.base_batch_size or config.batch_size)
    return {"no": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[config.scale_lr]


def scale_lr(optimizer: Optimizer, factor: float) -> None:
    """Multiply the learning rate of all groups, and what a scheduler will start from."""
    if factor == 1.0:
        return
    for group in optimizer.param_groups:
        for name in {"lr", "initial_lr"} & group.keys():
            group[name] = group[name] * factor  # a new tensor: groups may share one


def rescale(optimizer: Optimizer, scheduler: LRScheduler | None, factor: float) -> None:
    """Multiply the learning rate amid a run, and what the scheduler computes the next ones from."""
    scale_lr(optimizer, factor)
    for each in _nested(scheduler):
        for name in {"base_lrs", "_last_lr"} & vars(each).keys():
            setattr(each, name, [factor * lr for lr in getattr(each, name)])


def with_kernels_of(optimizer: Optimizer, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A saved state with this optimizer's choice of kernels: that of the run before may not suit this device."""
    groups = state["param_groups"]
    if len(groups) != len(optimizer.param_groups):
        return state
    own = [{name: group[name] for name in _KERNELS & group.keys()} for group in optimizer.param_groups]
    return {**state, "param_groups": [group | kernels for group, kernels in zip(groups, own, strict=True)]}


def _nested(scheduler: LRScheduler | None) -> Iterator[LRScheduler]:
    """It, and those that it is made of."""
    if scheduler is not None:
        yield scheduler
        for part in getattr(scheduler, "_schedulers", ()):
            yield from _nested(part)


def make_schedulers(
    optimizers: Sequence[Optimizer],
    wanted: Sequence[Scheduler],
    config: Config,
    total: int | None,
    done: Callable[[], float],
) -> tuple[LRScheduler, ...]:
    """A scheduler of each optimizer; none where the learning rate stays as it is.

    Args:
        wanted: the user's, which go before ``config.schedule``: as many as optimizers, or none.
        total: steps of the whole run; None where that is not known.
        done: steps of this world that the samples so far would have taken, which need not be a whole number.

    Raises:
        ConfigError: the learning rate cannot be scheduled so.
    """
    if wanted:
        return tuple(_made(each, optimizer, config) for each, optimizer in zip(wanted, optimizers, strict=True))
    if total is not None and config.warmup_steps > total:
        raise ConfigError(
            f"warmup_steps is {config.warmup_steps}",
            expected=f"at most the {total} steps of the run",
            hint="correct warmup_steps or epochs",
        )
    if config.schedule == "cosine" and total is None:
        raise ConfigError(
            "schedule cosine, and data without a length",
            expected="a known number of steps",
            hint="set max_steps, give the data set a __len__, or pass a scheduler",
        )
    if config.schedule == "constant" and not config.warmup_steps:
        return ()
    end = total if config.schedule == "cosine" else None
    return tuple(LambdaLR(each, lambda _: warmup_then_cosine(done(), config.warmup_steps, end)) for each in optimizers)


def _made(wanted: Scheduler, optimizer: Optimizer, config: Config) -> LRScheduler:
    if isinstance(wanted, LRScheduler):
        if config.scale_lr != "no":
            raise ConfigError(
                f"a finished {type(wanted).__name__} and scale_lr={config.scale_lr}",
                expected="the scheduler to start from the scaled learning rate",
                hint="pass a function instead: scheduler=lambda optimizer: StepLR(optimizer, 1000)",
            )
        return wanted
    made = wanted(optimizer)
    if not isinstance(made, LRScheduler):
        raise ConfigError(
            f"the function for the scheduler returned a {type(made).__name__}",
            expected="a scheduler of torch.optim.lr_scheduler",
            hint="return one",
        )
    own = [each for each in _nested(made) if isinstance(each, OneCycleLR | CyclicLR)]
    if own and config.scale_lr != "no":
        raise ConfigError(
            f"{type(own[0]).__name__} and scale_lr={config.scale_lr}",
            expected="a scheduler that starts from the optimizer's learning rate, this one has rates of its own",
            hint="use scale_lr=no, and give it rates for this world's batch",
        )
    return made


def warmup_then_cosine(done: float, warmup: int, end: int | None) -> float:
    """The factor of the learning rate: linear up to 1, then a half cosine down to 0 (Loshchilov and Hutter 2017).

    Args:
        done: steps before this one, from 0; need not be a whole number.
        warmup: steps before the full rate; end: the step at which it is 0; None to stay at 1.
    """
    if done < warmup:
        return (done + 1) / (warmup + 1)
    if end is None:
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (done - warmup) / max(1, end - warmup))))
