"""The plain loop: one process of PyTorch, written by hand.

Nothing of srunddp is imported here. The loop takes all samples of a step at once, and all
validation data at once, so that it needs no weights of batches and no sums over ranks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import default_collate
from torch.utils.data.distributed import DistributedSampler

SEED = 0  # of the order of samples

Figures = dict[str, float]
Weights = dict[str, Tensor]
Change = Callable[[nn.Module, Sequence[Optimizer], int], None]
"""``change(model, optimizers, number)``: of the step, or of the epoch."""
Number = float | Tensor
"""A tensor is of no dimension."""


class Moment(Enum):
    """When a scheduler is stepped."""

    STEP = "after each step"
    EPOCH = "after each epoch"
    EVALUATION = "after each evaluation"


@dataclass(frozen=True)
class Schedule:
    """One optimizer's scheduler.

    Attributes:
        moment: When it is stepped.
        make: Makes torch's scheduler of the optimizer.
    """

    moment: Moment
    make: Callable[[Optimizer], Any]


@dataclass(frozen=True)
class Figure:
    """A figure beside the loss, as a mean.

    Attributes:
        total: Of the outputs and the batch: what is to be divided.
        over: Of the batch: by what.
    """

    total: Callable[[Any, Any], Number]
    over: Callable[[Any], Number]


@dataclass(frozen=True)
class Journey:
    """Where a program is trained.

    Attributes:
        ranks: How many of them begin.
        cut: The last step of these; None where they train to the end.
        then: How many ranks go on after ``cut``.
    """

    ranks: int
    cut: int | None = None
    then: int | None = None

    def ranks_at(self, step: int) -> int:
        """How many ranks make this step, and the evaluation after it."""
        if self.cut is None or self.then is None or step <= self.cut:
            return self.ranks
        return self.then

    def __str__(self) -> str:
        if self.cut is None:
            return f"on {self.ranks}"
        return f"on {self.ranks}, from step {self.cut + 1} on {self.then}"


def pair_loss(model: nn.Module, loss_function: Any, batch: Any) -> tuple[Tensor, Any]:
    """The loss of a batch of inputs and targets, and the outputs."""
    outputs = model(batch[0])
    return loss_function(outputs, batch[1]), outputs


def samples_in(batch: Any) -> int:
    """How many samples a batch has, which is a tensor or is made of some."""
    if isinstance(batch, Mapping):
        return samples_in(next(iter(batch.values())))
    if isinstance(batch, list | tuple):
        return samples_in(batch[0])
    return len(batch)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is to be trained, in terms of torch alone.

    Attributes:
        model: Makes the model, with the same weights each time.
        train: The training data, with indices; its ``set_epoch`` is called, if any.
        val: The validation data; None for none.
        optimizers: Makes the optimizers of the model and the loss function.
        loss_function: Makes the loss function.
        mean: Of the model, the loss function and a batch: the mean loss, and the outputs.
        collate: Makes a batch of samples.
        over: What the mean of a batch is over: by default its samples.
        figures: Of training and of evaluations, beside the loss.
        val_figures: Of evaluations alone.
        order: The samples of an epoch, counted from 1; None for DistributedSampler's.
        epochs: How many there are.
        max_steps: Steps of the whole training; None goes by the epochs.
        step_samples: Samples of a step.
        drop_last: Leave out an epoch's last step if it is not full.
        schedules: One for each optimizer, or none at all.
        lr_factor: Of the optimizers' learning rates at the beginning.
        max_grad_norm: Gradients are clipped to it.
        ema_decay: Of the average of the weights that is evaluated.
        evaluate_every_steps: Beside the evaluations at the epochs' ends; 0 for never.
        monitor: The figure that tells the best model.
        greater_is_better: Whether the best one is the greatest.
        patience: Evaluations without a better figure that end the training; 0 for never.
        before_step: Called before each step of the optimizers, with the step's number.
        after_step: Called after it.
        after_epoch: Called after each epoch and its evaluation, with the epoch's number.
        by_rank: Why the result depends on which samples a rank sees together; empty where it does
            not. Then the loop takes each rank's samples of a step apart.
    """

    model: Callable[[], nn.Module]
    train: Any
    val: Any
    optimizers: Callable[[nn.Module, Any], list[Optimizer]]
    loss_function: Callable[[], Any] = nn.CrossEntropyLoss
    mean: Callable[[nn.Module, Any, Any], tuple[Tensor, Any]] = pair_loss
    collate: Callable[[list[Any]], Any] = default_collate
    over: Callable[[Any], Number] = samples_in
    figures: Mapping[str, Figure] = field(default_factory=dict)
    val_figures: Mapping[str, Figure] = field(default_factory=dict)
    order: Callable[[int], list[int]] | None = None
    epochs: int = 3
    max_steps: int | None = None
    step_samples: int = 12
    drop_last: bool = False
    schedules: Sequence[Schedule] = ()
    lr_factor: float = 1.0
    max_grad_norm: float | None = None
    ema_decay: float | None = None
    evaluate_every_steps: int = 0
    monitor: str = "loss"
    greater_is_better: bool = False
    patience: int = 0
    before_step: Change | None = None
    after_step: Change | None = None
    after_epoch: Change | None = None
    by_rank: str = ""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What has come of a training.

    Attributes:
        weights: At the end, also of the loss function and the average.
        rates: The learning rate of each group of parameters at the end.
        train: The figures of training by epoch.
        val: Those of the epochs' evaluations.
        evaluations: Those of all evaluations, by step.
        last: Those of an evaluation after the end; empty without validation data.
        resumed_at: The step after which the ranks that came to the end have begun.
        steps: How many steps were made.
        best_step: After which the figure to monitor was best.
        best_weights: What was evaluated then.
    """

    weights: Weights
    rates: list[float]
    train: dict[int, Figures]
    val: dict[int, Figures]
    evaluations: dict[int, Figures]
    last: Figures
    resumed_at: int
    steps: int
    best_step: int
    best_weights: Weights


class Sums:
    """Figures as totals, and what they are to be divided by."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._over: dict[str, float] = {}

    def add(self, name: str, total: float, over: float) -> None:
        self._totals[name] = self._totals.get(name, 0.0) + total
        self._over[name] = self._over.get(name, 0.0) + over

    def means(self) -> Figures:
        return {name: total / self._over[name] for name, total in self._totals.items()}


class PlainLoop:
    """One training of a problem."""

    def __init__(self, problem: Problem, journey: Journey, *, evaluate_at_cut: bool) -> None:
        """``evaluate_at_cut``: the ranks that begin evaluate before they end, as at a run's end."""
        self._problem = problem
        self._journey = journey
        self._evaluates_at = journey.cut if evaluate_at_cut else None
        self._model = problem.model()
        self._average: nn.Module | None = None
        self._loss_function = problem.loss_function()
        self._optimizers = problem.optimizers(self._model, self._loss_function)
        for group in self._groups():
            group["lr"] = group["lr"] * problem.lr_factor
        self._schedulers = [
            (schedule.moment, schedule.make(optimizer))
            for schedule, optimizer in zip(problem.schedules, self._optimizers, strict=False)
        ]
        self._step = 0
        self._train: dict[int, Figures] = {}
        self._val: dict[int, Figures] = {}
        self._evaluations: dict[int, Figures] = {}
        self._best = math.inf
        self._best_step = 0
        self._best_weights: Weights = {}
        self._since_best = 0

    def run(self) -> Outcome:
        """Train to the end."""
        epoch = 0
        while not self._is_over and epoch < self._problem.epochs:
            epoch += 1
            self._one_epoch(epoch)
        if self._problem.val is None:
            last = {}
        else:
            last = self._evaluated()
        return Outcome(
            weights=weights_of(self._model, self._loss_function, self._average),
            rates=[float(group["lr"]) for group in self._groups()],
            train=self._train,
            val=self._val,
            evaluations=self._evaluations,
            last=last,
            resumed_at=self._journey.cut or 0,
            steps=self._step,
            best_step=self._best_step,
            best_weights=self._best_weights,
        )

    @property
    def _is_over(self) -> bool:
        patience = self._problem.patience
        return self._step == self._problem.max_steps or 0 < patience <= self._since_best

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _one_epoch(self, epoch: int) -> None:
        problem = self._problem
        if hasattr(problem.train, "set_epoch"):
            problem.train.set_epoch(epoch)
        sums = Sums()
        for indices in self._steps(epoch):
            self._one_step(indices, sums)
            every = problem.evaluate_every_steps
            if self._step == self._evaluates_at or (every and self._step % every == 0):
                self._evaluate()
            if self._is_over:
                break
        self._train[epoch] = sums.means()
        if problem.val is None:
            self._take(self._train[epoch])
        else:
            if self._step not in self._evaluations:
                self._evaluate()
            self._val[epoch] = self._evaluations[self._step]
        self._step_schedulers(Moment.EPOCH)
        if problem.after_epoch is not None:
            problem.after_epoch(self._model, self._optimizers, epoch)

    def _steps(self, epoch: int) -> list[list[int]]:
        """The samples of each step of an epoch."""
        problem = self._problem
        if problem.order is None:
            sampler: Any = DistributedSampler(problem.train, num_replicas=1, rank=0, seed=SEED)
            sampler.set_epoch(epoch)
            order = list(sampler)
        else:
            order = problem.order(epoch)
        size = problem.step_samples
        steps = [order[start : start + size] for start in range(0, len(order), size)]
        if problem.drop_last and len(steps[-1]) < size:
            steps.pop()
        return steps

    def _one_step(self, indices: list[int], sums: Sums) -> None:
        problem = self._problem
        self._step += 1
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        batches = self._batches(problem.train, indices)
        over = sum(float(problem.over(batch)) for batch in batches)
        buffers: list[Tensor] = []
        for batch in batches:
            loss, outputs = problem.mean(self._model, self._loss_function, batch)
            if over:
                share = float(problem.over(batch)) / over
            else:
                share = 0.0  # as where all labels are ignored
            (share * loss).backward()
            with torch.no_grad():
                self._add(sums, problem.figures, batch, loss, outputs)
            buffers = buffers or [buffer.clone() for buffer in self._model.buffers()]
        # The first rank's are kept.
        for buffer, first in zip(self._model.buffers(), buffers, strict=True):
            buffer.copy_(first)
        if problem.before_step is not None:
            problem.before_step(self._model, self._optimizers, self._step)
        if problem.max_grad_norm is not None:
            stepped = [parameter for group in self._groups() for parameter in group["params"]]
            nn.utils.clip_grad_norm_(stepped, problem.max_grad_norm)
        for optimizer in self._optimizers:
            optimizer.step()
        self._update_average()
        if problem.after_step is not None:
            problem.after_step(self._model, self._optimizers, self._step)
        self._step_schedulers(Moment.STEP)

    def _batches(self, data: Any, indices: list[int]) -> list[Any]:
        """All samples as one batch; where a rank's belong together, those of each rank."""
        if self._problem.by_rank:
            ranks = self._journey.ranks_at(self._step)
        else:
            ranks = 1
        parts = [indices[rank::ranks] for rank in range(ranks)]
        return [self._problem.collate([data[index] for index in part]) for part in parts if part]

    def _add(
        self, sums: Sums, figures: Mapping[str, Figure], batch: Any, loss: Tensor, outputs: Any
    ) -> None:
        over = float(self._problem.over(batch))
        if over:
            sums.add("loss", float(loss) * over, over)
        for name, figure in figures.items():
            sums.add(name, float(figure.total(outputs, batch)), float(figure.over(batch)))

    @torch.no_grad()
    def _update_average(self) -> None:
        decay = self._problem.ema_decay
        if decay is None:
            return
        if self._average is None:
            self._average = copy.deepcopy(self._model)
            return
        for own, new in zip(self._average.parameters(), self._model.parameters(), strict=True):
            own.copy_(decay * own + (1 - decay) * new)
        for kept, current in zip(self._average.buffers(), self._model.buffers(), strict=True):
            kept.copy_(current)

    def _step_schedulers(self, moment: Moment, *figure: float) -> None:
        for its_moment, scheduler in self._schedulers:
            if its_moment is moment:
                scheduler.step(*figure)

    def _evaluate(self) -> None:
        self._evaluations[self._step] = self._evaluated()
        self._take(self._evaluations[self._step])

    @torch.no_grad()
    def _evaluated(self) -> Figures:
        problem = self._problem
        evaluated = self._average or self._model
        modes = [module.training for module in evaluated.modules()]
        evaluated.eval()
        sums = Sums()
        for indices in self._evaluated_together():
            for batch in self._batches(problem.val, indices):
                loss, outputs = problem.mean(evaluated, self._loss_function, batch)
                figures = {**problem.figures, **problem.val_figures}
                self._add(sums, figures, batch, loss, outputs)
        for module, training in zip(evaluated.modules(), modes, strict=True):
            module.training = training
        return sums.means()

    def _evaluated_together(self) -> list[list[int]]:
        every = list(range(len(self._problem.val)))
        if not self._problem.by_rank:
            return [every]
        size = self._problem.step_samples
        ranks = self._journey.ranks_at(self._step)
        together = []
        for start in range(0, len(every), size):
            part = every[start : start + size]
            # Ranks have equally many samples of a batch; fewer than there are ranks come last.
            equal = len(part) - len(part) % ranks
            together += [each for each in (part[:equal], part[equal:]) if each]
        return together

    def _take(self, figures: Figures) -> None:
        """See whether these are the best."""
        figure = figures[self._problem.monitor]
        if self._problem.greater_is_better:
            score = -figure
        else:
            score = figure
        self._since_best += 1
        if score < self._best:
            self._best = score
            self._best_step = self._step
            self._best_weights = weights_of(self._average or self._model)
            self._since_best = 0
        self._step_schedulers(Moment.EVALUATION, figure)


def weights_of(
    model: nn.Module, loss_function: Any = None, average: nn.Module | None = None
) -> Weights:
    """A copy of all weights by name."""
    found = {name: value.clone() for name, value in model.state_dict().items()}
    if isinstance(loss_function, nn.Module):
        for name, value in loss_function.state_dict().items():
            found[f"loss_function.{name}"] = value.clone()
    if average is not None:
        for name, value in average.state_dict().items():
            found[f"average.{name}"] = value.clone()
    return found
