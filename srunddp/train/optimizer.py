"""Changes to the user's optimizers: fused kernels, learning rates scaled with the batch,
and modes.
"""

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
# torch's own method, noted at import time: if a tool patches the class later, the tool's method is
# called instead.
_ZERO_GRAD = Optimizer.zero_grad


def as_tuple(one_or_more: Any) -> tuple[Any, ...]:
    """Return a tuple for an argument that may be a single object, a list or None.

    Args:
        one_or_more: The object, or a list or tuple of objects; None for an empty tuple.
    """
    if one_or_more is None:
        return ()
    if isinstance(one_or_more, list | tuple):
        return tuple(one_or_more)
    return (one_or_more,)


def use_fused(optimizer: Optimizer, model: nn.Module) -> bool:
    """Make the optimizer use its fused kernels if it has some for these parameters.

    The optimizer is not changed if the user has chosen an implementation or a differentiable step,
    or if it has a state already.

    Args:
        optimizer: The user's optimizer.
        model: The model. If its layers make sparse gradients, the optimizer is not changed, because
            the fused kernels would refuse these.

    Returns:
        Whether this call has changed the optimizer to fused kernels.
    """
    # A subclass of these optimizers may have its own step(). A state that exists was made by other
    # kernels, whose step counter is on the CPU.
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
    # The optimizer's constructor sets this attribute with fused=True: GradScaler then leaves the
    # division by the scale to the kernel.
    optimizer._step_supports_amp_scaling = fused  # type: ignore[attr-defined]


def leave_fused_for_sparse(optimizer: Optimizer) -> None:
    """Turn off the fused kernels of SGD if a gradient is sparse, because they refuse it.

    :func:`use_fused` checks only whether a layer has ``sparse`` set. That a model calls
    ``torch.nn.functional.embedding(sparse=True)`` shows only in the gradients of the first step.

    Args:
        optimizer: The optimizer, whose parameters have gradients, before its first step.
    """
    if type(optimizer) is not SGD:
        return
    gradients = [parameter.grad for parameter in stepped_parameters([optimizer])]
    if any(gradient is not None and gradient.is_sparse for gradient in gradients):
        _set_fused(optimizer, False)


def zero_grad(optimizer: Optimizer) -> None:
    """Set all gradients of an optimizer to None, as its ``zero_grad()`` does.

    torch's ``zero_grad()`` also records the call for torch's profiler, which takes 15 µs per step.

    Args:
        optimizer: The optimizer; if it has its own ``zero_grad()``, that is called.
    """
    if getattr(optimizer.zero_grad, "__func__", None) is _ZERO_GRAD:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
    else:
        optimizer.zero_grad(set_to_none=True)


def lr_factor(config: Config, world_size: int) -> float:
    """Return by what ``scale_lr`` multiplies the learning rate for the number of samples per step.

    The factor is proportional to that number (``linear``), as in Goyal et al. 2017, or to its
    square root (``sqrt``), as in Krizhevsky 2014; otherwise it is 1.

    Args:
        config: The settings of the training.
        world_size: The number of ranks.
    """
    samples = world_size * config.gradient_accumulation_steps * config.batch_size
    ratio = samples / (config.base_batch_size or config.batch_size)
    return {"no": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[config.scale_lr]


def scale_lr(optimizer: Optimizer, factor: float) -> None:
    """Multiply the learning rates of all groups, including those from which a scheduler will start.

    Args:
        optimizer: The optimizer of the training.
        factor: The factor; 1 changes nothing.
    """
    if factor == 1.0:
        return
    for group in optimizer.param_groups:
        for name in {"lr", "initial_lr"} & group.keys():
            # Do not multiply in place: groups may share a tensor, which would be multiplied several
            # times.
            group[name] = group[name] * factor


# The factors by which the learning rates of optimizers were scaled. If another Trainer gets the
# same optimizer, or if fit() is called again, they must not be scaled a second time.
_scaled: WeakKeyDictionary[Optimizer, float] = WeakKeyDictionary()


def scale_lr_once(optimizer: Optimizer, factor: float) -> None:
    """Multiply the learning rates as :func:`scale_lr` does, but account for an earlier scaling.

    Args:
        optimizer: The optimizer of the training.
        factor: The factor between the script's learning rates and those to use.
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
        optimizers: The optimizers; the parameters come in their order.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def has_gradients(optimizer: Optimizer) -> bool:
    """Return whether any of an optimizer's parameters has a gradient.

    Args:
        optimizer: The optimizer, after a backward pass.
    """
    return any(parameter.grad is not None for parameter in stepped_parameters([optimizer]))


class OptimizerModes:
    """Sets the mode of optimizers that have ``train()`` and ``eval()``, such as schedule-free ones.

    Such optimizers keep one set of weights for training and another for evaluating and saving, and
    put one of them into the model.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        """Note the optimizers, which must be in evaluation mode, as they are before training.

        Args:
            optimizers: The optimizers; those without modes are never changed.
        """
        self._optimizers = optimizers
        self._training = False

    def set(self, training: bool) -> None:
        """Put the optimizers into training or evaluation mode.

        Args:
            training: True for training mode, False for evaluation mode.
        """
        self._training = training
        for optimizer in self._optimizers:
            change = getattr(optimizer, "train" if training else "eval", None)
            if callable(change):
                change()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the optimizers into evaluation mode within the block, to evaluate or to save weights.

        The previous mode is restored afterwards.
        """
        before = self._training
        self.set(False)
        try:
            yield
        finally:
            self.set(before)


def with_kernels_of(optimizer: Optimizer, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a saved state with this optimizer's choice of kernels.

    The choice of the previous run may not suit this device.

    Args:
        optimizer: The optimizer of this run.
        state: The optimizer's ``state_dict()`` of the previous run.
    """
    groups = state["param_groups"]
    # Another number of groups is an error, which the optimizer's load_state_dict() reports.
    if len(groups) != len(optimizer.param_groups):
        return state
    own = [
        {name: group[name] for name in _KERNELS & group.keys()} for group in optimizer.param_groups
    ]
    return {
        **state,
        "param_groups": [group | kernels for group, kernels in zip(groups, own, strict=True)],
    }
