"""What is done to optimizers: fused kernels, learning rates scaled with the batch, and modes."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from srunddp.train.config import Config

_FUSED = (Adam, AdamW, SGD)
_FUSED_ON = ("cpu", "cuda")
_KERNELS = {"fused", "foreach"}
# torch's own, noted at the import: a tool that patches the class later has its function called.
_ZERO_GRAD = Optimizer.zero_grad


def as_tuple(one_or_more: Any) -> tuple[Any, ...]:
    """Return a tuple of what a user may pass alone, in a list or not at all.

    Args:
        one_or_more: None for nothing.
    """
    if one_or_more is None:
        return ()
    if isinstance(one_or_more, list | tuple):
        return tuple(one_or_more)
    return (one_or_more,)


def use_fused(optimizer: Optimizer, model: nn.Module) -> bool:
    """Have the optimizer use its fused kernels where it has some for these parameters.

    What the user has chosen stays: an implementation, a differentiable step, a state that is there
    already.

    Args:
        optimizer: The user's.
        model: Whose layers may make sparse gradients, which the fused kernels refuse.

    Returns:
        Whether it uses them from now on.
    """
    # A class that is derived from one of these may have a step of its own. A state that is there
    # was made by other kernels, whose step counter is on the CPU.
    if (
        type(optimizer) not in _FUSED
        or optimizer.state
        or any(getattr(m, "sparse", False) for m in model.modules())
    ):
        return False
    for group in optimizer.param_groups:
        if any(group.get(name) is not None for name in _KERNELS) or group.get("differentiable"):
            return False
        if not all(p.is_floating_point() and p.device.type in _FUSED_ON for p in group["params"]):
            return False
    _set_fused(optimizer, True)
    return True


def _set_fused(optimizer: Optimizer, fused: bool) -> None:
    # Groups that are added later take their options from the defaults.
    optimizer.defaults["fused"] = fused
    for group in optimizer.param_groups:
        group["fused"] = fused
    # As the optimizer's constructor does with fused=True: GradScaler then leaves the division to
    # the kernel.
    optimizer._step_supports_amp_scaling = fused  # type: ignore[attr-defined]


def leave_fused_for_sparse(optimizer: Optimizer) -> None:
    """Take the other kernels of SGD where a gradient is sparse: the fused ones refuse it.

    A layer that makes sparse gradients says so by its ``sparse``, at which :func:`use_fused` looks.
    A call of ``torch.nn.functional.embedding(sparse=True)`` shows only in the gradients of the
    first step.

    Args:
        optimizer: Of which no step was made yet, with gradients.
    """
    if type(optimizer) is not SGD:
        return
    gradients = [parameter.grad for parameter in stepped_parameters([optimizer])]
    if any(gradient is not None and gradient.is_sparse for gradient in gradients):
        _set_fused(optimizer, False)


def zero_grad(optimizer: Optimizer) -> None:
    """Set all gradients to None, without what the optimizer's method notes for torch's profiler.

    That takes 15 µs a step.

    Args:
        optimizer: Whose own method is called if it is another one than torch's.
    """
    if getattr(optimizer.zero_grad, "__func__", None) is _ZERO_GRAD:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
    else:
        optimizer.zero_grad(set_to_none=True)


def lr_factor(config: Config, world_size: int) -> float:
    """Return by what the learning rate is multiplied, for the samples of one step.

    In proportion to them (``linear``) as Goyal et al. 2017 do, or to their root (``sqrt``) as
    Krizhevsky 2014.

    Args:
        config: Of the training.
        world_size: How many ranks there are.
    """
    samples = world_size * config.gradient_accumulation_steps * config.batch_size
    ratio = samples / (config.base_batch_size or config.batch_size)
    return {"no": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[config.scale_lr]


def scale_lr(optimizer: Optimizer, factor: float) -> None:
    """Multiply the learning rate of all groups, and what a scheduler will start from.

    Args:
        optimizer: Of the training.
        factor: 1 changes nothing.
    """
    if factor == 1.0:
        return
    for group in optimizer.param_groups:
        for name in {"lr", "initial_lr"} & group.keys():
            # Not in place: groups may share one tensor, which would be multiplied once for each.
            group[name] = group[name] * factor


# By what an optimizer's learning rate was scaled. A second Trainer may get the same optimizer, or
# fit() may be called again, and must not scale it twice.
_scaled: WeakKeyDictionary[Optimizer, float] = WeakKeyDictionary()


def scale_lr_once(optimizer: Optimizer, factor: float) -> None:
    """Multiply the learning rate as :func:`scale_lr` does, but for what was done before.

    Args:
        optimizer: Of the training.
        factor: By which the rate that the script gave is multiplied.
    """
    ratio = factor / _scaled.get(optimizer, 1.0)
    scale_lr(optimizer, ratio)
    # Groups that are added later take their rate from the defaults.
    if "lr" in optimizer.defaults:
        optimizer.defaults["lr"] = optimizer.defaults["lr"] * ratio
    _scaled[optimizer] = factor


def stepped_parameters(optimizers: Sequence[Optimizer]) -> Iterator[nn.Parameter]:
    """Yield the parameters that optimizers step.

    Args:
        optimizers: One after the other.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def has_gradients(optimizer: Optimizer) -> bool:
    """Return whether one of an optimizer's parameters has a gradient.

    Args:
        optimizer: After a backward pass.
    """
    return any(parameter.grad is not None for parameter in stepped_parameters([optimizer]))


class OptimizerModes:
    """In which mode the optimizers are that have modes, such as schedule-free ones.

    They keep one set of weights to train and another to evaluate and to save, and put the one or
    the other into the model.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        """Take them to be in evaluation mode, as they are before training.

        Args:
            optimizers: Those without modes are left alone.
        """
        self._optimizers = optimizers
        self._training = False

    def set(self, training: bool) -> None:
        """Put them into training or evaluation mode.

        Args:
            training: Else evaluation.
        """
        self._training = training
        for optimizer in self._optimizers:
            change = getattr(optimizer, "train" if training else "eval", None)
            if callable(change):
                change()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put them into evaluation mode, for an evaluation or a saving of weights within.

        The mode of before comes back.
        """
        before = self._training
        self.set(False)
        try:
            yield
        finally:
            self.set(before)


def with_kernels_of(optimizer: Optimizer, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a saved state with this optimizer's choice of kernels.

    That of the run before may not suit this device.

    Args:
        optimizer: Of this run.
        state: As its ``state_dict()`` was in the run before.
    """
    groups = state["param_groups"]
    # Groups of another number are an error, which the optimizer's load_state_dict() reports.
    if len(groups) != len(optimizer.param_groups):
        return state
    own = [
        {name: group[name] for name in _KERNELS & group.keys()} for group in optimizer.param_groups
    ]
    return {
        **state,
        "param_groups": [group | kernels for group, kernels in zip(groups, own, strict=True)],
    }
