"""An exponential moving average of the model's weights, which often gives better results than the
weights themselves.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from srunddp.errors import ConfigError

_STATISTICS = ("running_mean", "running_var")


class EMA:
    """The average of torch's ``AveragedModel`` with ``get_ema_multi_avg_fn``, with two differences.

    In each step torch's ``update_parameters()`` waits for the GPU to read a counter; ``update()``
    here does not wait. And torch averages either all buffers or none; here BatchNorm's running
    statistics are averaged like the weights to which they belong, and all other buffers, such as
    counters and masks, are copied from the model.

    Attributes:
        model: A copy of the model with averaged weights, in evaluation mode.
        testing: The callable for evaluations: ``model``, compiled if ``compile`` was set.
    """

    def __init__(self, model: nn.Module, decay: float, *, compile: bool = False) -> None:
        """Copy the model.

        Args:
            model: The user's model, on its device.
            decay: The share of the average that each step keeps, above 0 and below 1.
            compile: Whether ``testing`` calls the copy through ``torch.compile``.

        Raises:
            ConfigError: The model cannot be copied.
        """
        self.model = _copied(model).eval()
        self.testing: Any = torch.compile(self.model) if compile else self.model
        self._merge = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        parameters = zip(self.model.parameters(), model.parameters(), strict=True)
        self._parameters = [
            (own, new, new.is_floating_point() or new.is_complex()) for own, new in parameters
        ]
        modules = zip(self.model.modules(), model.modules(), strict=True)
        self._modules = [(own, source) for own, source in modules if source._buffers]

    def check(self, model: nn.Module) -> None:
        """Check that the model still has the parameters that are averaged.

        Args:
            model: The model that was copied.

        Raises:
            ConfigError: A callback has replaced parameters.
        """
        present = list(model.parameters())
        averaged = [new for _, new, _ in self._parameters]
        # Compare by identity: a replacement may have the same shape, and the average would go on
        # with the values of a parameter that is no longer trained.
        if len(present) != len(averaged) or any(
            one is not other for one, other in zip(present, averaged, strict=True)
        ):
            raise ConfigError(
                "ema_decay, and a model into which a callback has put other parameters",
                expected="the parameters that it had when the Trainer was made",
                hint="leave ema_decay out, or make the module before the Trainer and freeze it",
            )

    @torch.no_grad()
    def update(self, *, first: bool) -> None:
        """Update the average after an optimizer step.

        Args:
            first: Whether this is the first step, whose weights replace the average: the script may
                have loaded other weights since the copy was made.
        """
        averaged: list[Tensor] = []
        weights: list[Tensor] = []
        copies: list[Tensor] = []
        sources: list[Tensor] = []
        for own, new, merges in (*self._parameters, *self._buffers()):
            # Integers and masks cannot be averaged, so they are copied.
            if merges and not first:
                averaged.append(own)
                weights.append(new)
            else:
                copies.append(own)
                sources.append(new)
        if averaged:
            self._merge(averaged, weights, 0)
        if copies:
            torch._foreach_copy_(copies, sources)

    def _buffers(self) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """Yield, for each buffer, that of the copy, that of the model, and whether it is averaged.

        The buffers are looked up at each call, because a module may replace a buffer by another
        tensor. A buffer that the copy lacks, or has in another shape, is first copied to it.
        """
        for module, source in self._modules:
            for name, new in source.named_buffers(recurse=False):
                own = getattr(module, name)
                if own is None or own.shape != new.shape:
                    own = new.clone()
                    setattr(module, name, own)
                yield own, new, name in _STATISTICS


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"ema_decay, and a model that cannot be copied: {' '.join(str(error).split())[:200]}",
            expected="one that copy.deepcopy copies",
            hint="leave out what is neither a parameter nor a module, or leave out ema_decay",
        ) from error
