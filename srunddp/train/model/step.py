"""The computation of a step: the mean loss of a batch, and the outputs of the model."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from srunddp.errors import ConfigError

LossFunction: TypeAlias = Callable[[Any, Any], Tensor]
"""``loss_function(outputs, targets)``: the mean loss over the batch, a scalar."""

Step: TypeAlias = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Any]]
"""``step(model, batch)``: the mean loss of the batch, a scalar; or the loss and the outputs for the
metrics.
"""


class StepModule(nn.Module):
    """Module that returns the loss of a batch, for DistributedDataParallel to wrap.

    The user's step runs within DistributedDataParallel's forward, so it may call the model as it
    likes.

    Attributes:
        model: The user's model, compiled if that was asked for.
        loss_function: The user's loss function if it is a module, for its parameters and buffers;
            else None.
        uses_all: Whether each step uses each parameter. If not, a parameter that no sample of the
            step uses on any rank gets no gradient, not even one of 0.
    """

    def __init__(
        self,
        model: nn.Module,
        step: Step,
        loss_function: LossFunction | None = None,
        *,
        uses_all: bool = True,
    ) -> None:
        """Create the module; the model is not changed.

        Args:
            model: The user's model, compiled if that was asked for.
            step: Computes the loss of a batch.
            loss_function: The loss function that the step calls; None if the Trainer has none.
            uses_all: Whether each step uses each parameter.
        """
        super().__init__()
        self.model = model
        self.loss_function: nn.Module | None
        if isinstance(loss_function, nn.Module):
            self.loss_function = loss_function
        else:
            self.loss_function = None
        self.uses_all = uses_all
        self._step = step

    def forward(self, batch: Any) -> tuple[Tensor, Any]:
        """Compute the loss of a batch, and the outputs for the metrics.

        Args:
            batch: The output of collate; None for a loss of 0, whose gradients are 0.

        Raises:
            ConfigError: The loss is not a scalar tensor.
        """
        if batch is None:
            return self._zero(), None
        found = self._step(self.model, batch)
        if isinstance(found, tuple) and len(found) == 2:
            loss, outputs = found
        else:
            loss = found
            outputs = None
        if not isinstance(loss, Tensor) or loss.dim():
            if isinstance(loss, Tensor):
                shape = f" of shape {tuple(loss.shape)}"
            else:
                shape = ""
            raise ConfigError(
                f"the loss is a {type(loss).__name__}{shape}",
                expected="a tensor of no dimension, the mean over the batch",
                hint="return loss, or loss and outputs; take the mean",
            )
        return loss, outputs

    def _zero(self) -> Tensor:
        # Each parameter must be in the graph: in the backward pass DistributedDataParallel waits
        # until all of them have a gradient, and its all-reduce needs this rank.
        trained = [each for each in self.parameters() if each.requires_grad]
        if not self.uses_all:
            # DistributedDataParallel needs at least one parameter in the graph to find that the
            # others are unused. The first parameter usually belongs to a part of the model that all
            # samples pass through.
            trained = trained[:1]
        # Sum no elements of each parameter instead of multiplying it by 0: 0 times an infinite
        # parameter would be NaN.
        parts = [each.flatten()[:0].sum() for each in trained]
        return torch.stack([part.float() for part in parts]).sum()


def make_step(loss_function: LossFunction | None, step: Step | None) -> Step:
    """Return the step that computes the loss of a batch.

    Args:
        loss_function: A function of outputs and targets, for samples that are pairs; or None.
        step: The user's step; or None. Without both, the model must return its loss.

    Raises:
        ConfigError: Both are given.
    """
    if loss_function and step:
        raise ConfigError(
            "a loss function and a step",
            expected="one of them",
            hint="call the loss function in the step",
        )
    if step:
        return step
    if loss_function:
        return partial(_pair_step, loss_function)
    return _own_loss_step


def _pair_step(loss_function: LossFunction, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        raise ConfigError(
            f"a batch that is a {type(batch).__name__}{_names(batch)}, and a loss function",
            expected="two parts, inputs and targets",
            hint=(
                "pass step=lambda model, batch: ..., which returns the mean loss, in place of the"
                " loss function"
            ),
        )
    outputs = model(batch[0])
    return loss_function(outputs, batch[1]), outputs


def _own_loss_step(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    if not isinstance(batch, Mapping | Tensor):
        raise ConfigError(
            f"a batch that is a {type(batch).__name__}{_names(batch)}, and no loss function and no"
            " step",
            expected="a mapping, of which the model makes its loss",
            hint=(
                "pass a loss function for pairs of inputs and targets, or step=lambda model,"
                " batch: ..."
            ),
        )
    made = model(**batch) if isinstance(batch, Mapping) else model(batch)
    if isinstance(made, Mapping):
        loss = made.get("loss")
    else:
        loss = getattr(made, "loss", made)
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f"no loss function, no step, and the model returned a {type(made).__name__} without a"
            " loss",
            expected=(
                "a model that returns its loss, as those of Hugging Face do when the batch has"
                " labels"
            ),
            hint="pass a loss function or a step, or add labels to the batch",
        )
    # If a model has no logits, the metrics get everything that it returned.
    if isinstance(made, Mapping):
        outputs = made.get("logits", made)
    else:
        outputs = getattr(made, "logits", made)
    return loss, outputs


def _names(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f" of {', '.join(map(str, batch))}"
    if isinstance(batch, tuple | list):
        return f" of {len(batch)} parts"
    return ""


def targets_of(batch: Any) -> Any:
    """Return the part of a batch that metrics get as targets.

    Args:
        batch: A pair, whose second part has the targets; a mapping with ``labels``; any other batch
            is returned as it is.
    """
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[1]
    if isinstance(batch, Mapping) and "labels" in batch:
        return batch["labels"]
    return batch
