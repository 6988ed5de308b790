"""Finds out whether the mean of a loss is over something other than samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from srunddp.train.world import World, all_reduce_max

# torch's default of ignore_index.
_IGNORED = -100
# How many steps are watched: more than one, because a single batch of a single rank has nothing to
# be compared with.
_STEPS = 2
_PARTS = ("", "the weights of the classes", "the labels that are not ignored")
_WATCHED = (functional.cross_entropy, functional.nll_loss)


class MeanWatch(TorchFunctionMode):
    """Watches the first calls of ``cross_entropy`` and ``nll_loss``, without changing their
    results.

    With class weights these functions divide by the weights of the targets, and with ignored labels
    by the number of the other labels. But the mean of a step is over samples, unless the Trainer's
    ``weight`` says otherwise, so it would differ from the loss of all samples of the step at once.

    Attributes:
        shares: For each call, the divisor of its mean, divided by the number of labels. It is 1 if
            the mean is over all labels.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shares: list[float] = []
        # The reason why shares are not 1, as an index of _PARTS. If ranks have different reasons,
        # the greatest index is reported.
        self._reason = 0
        self._steps = 0

    def parts(self, world: World) -> str:
        """Return what the mean of the loss is over, if ``shares`` differ between ranks or calls.

        All ranks call this after each step that is watched.

        Args:
            world: The ranks.

        Returns:
            A phrase for a message; empty if the mean appears to be over samples.
        """
        self._steps += 1
        most, least, reason = all_reduce_max(
            world,
            max(self.shares, default=-math.inf),
            max((-share for share in self.shares), default=-math.inf),
            self._reason,
        )
        if not reason or math.isclose(most, -least, rel_tol=1e-6):
            return ""
        return _PARTS[int(reason)]

    @property
    def is_over(self) -> bool:
        """Whether enough steps were watched, so that the watch can be removed."""
        return self._steps >= _STEPS

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _WATCHED:
            # Within torch.func's transforms, and while a CUDA graph is captured, values cannot be
            # read: the call is then not watched.
            with suppress(RuntimeError, TypeError):
                self._note(*args, **kwargs)
        return func(*args, **kwargs)

    @torch.no_grad()
    def _note(
        self,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = _IGNORED,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        if reduction != "mean" or target.is_floating_point():
            return
        # bool() and float() below wait for the GPU, but only in two steps of a run.
        counted = target != ignore_index
        divisor = counted.sum()
        if weight is not None:
            divisor = weight[target[counted]].sum()
            self._reason = 1
        elif not bool(counted.all()):
            self._reason = 2
        self.shares.append(float(divisor) / max(1, target.numel()))
