"""The learning rate schedules of a run: set by ``config.schedule``, or torch's schedulers."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from srunddp.errors import ConfigError
from srunddp.train.config import Config
from srunddp.train.optimizer import scale_lr

Scheduler: TypeAlias = LRScheduler | Callable[[Optimizer], LRScheduler]
"""A scheduler of torch, or a function that makes one for an optimizer."""


# Attributes of schedulers with a value for each of the optimizer's groups.
_BY_GROUP = ("base_lrs", "max_lrs", "min_lrs", "lr_lambdas", "base_momentums", "max_momentums")
# Keys that schedulers write into the optimizer's groups.
_WRITTEN = ("lr", "initial_lr", "max_lr", "min_lr")
_WRITTEN_BY_CYCLES = ("momentum", "betas", "base_momentum", "max_momentum")
_OF_ONE_CYCLE = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}


class Schedulers:
    """One scheduler for each optimizer, or none at all; steps each scheduler at the right time.

    Attributes:
        all: The schedulers.
        classes: The class names of the user's schedulers; empty if the settings define the
            schedule.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        wanted: Sequence[Scheduler],
        config: Config,
        total: int | None,
        done: Callable[[], float],
    ) -> None:
        """Create the schedulers.

        Args:
            optimizers: The optimizers of the training.
            wanted: The user's schedulers, which override ``config.schedule``: as many as
                optimizers, or none.
            config: The settings of the training.
            total: The steps of the whole run; None if the number is not known.
            done: Returns how many steps, of the present size, the samples so far make; may be a
                fraction.

        Raises:
            ConfigError: The schedule or a scheduler does not fit the number of steps or
                ``scale_lr``, or a function has returned no scheduler.
        """
        if wanted:
            self.all = tuple(
                _made(each, optimizer, config)
                for each, optimizer in zip(wanted, optimizers, strict=True)
            )
        else:
            self.all = _by_schedule(optimizers, config, total, done)
        self._optimizers = optimizers
        self.classes = [_class(each) for each in self.all] if wanted else []
        # The learning rates, and the other values that schedulers write, as the script has set
        # them: for a resume from a checkpoint that had another schedule.
        self._at_start = [
            [_written(group) for group in optimizer.param_groups] for optimizer in optimizers
        ]
        self._by_epoch = bool(wanted) and config.scheduler_interval == "epoch"
        self._wanted = bool(wanted)
        # The number of groups at the last check: a callback may add one at any time.
        self._groups = sum(len(each.optimizer.param_groups) for each in self.all)

    @property
    def made_for_steps(self) -> str:
        """The class name of the first of the user's schedulers that are stepped after each step;
        empty if there is none.
        """
        if not self._wanted or self._by_epoch:
            return ""
        return next((type(each).__name__ for each in self._others()), "")

    @property
    def wait_for_evaluations(self) -> bool:
        """Whether any scheduler is a ReduceLROnPlateau."""
        return any(isinstance(each, ReduceLROnPlateau) for each in self.all)

    def check_direction(self, monitor: str, mode: str) -> None:
        """Check that each ReduceLROnPlateau and the evaluations agree on which figure is better.

        Args:
            monitor: The name of the figure.
            mode: ``min`` or ``max``: whether a smaller or a greater figure is better.

        Raises:
            ConfigError: A ReduceLROnPlateau has another mode, so it would lower the learning rate
                while the figure gets better.
        """
        for each in self.all:
            if isinstance(each, ReduceLROnPlateau) and each.mode != mode:
                raise ConfigError(
                    f"ReduceLROnPlateau(mode={each.mode!r}), and of {monitor} {mode} is better",
                    expected="one direction",
                    hint=f"pass mode={mode!r} to ReduceLROnPlateau, or set the Trainer's mode",
                )

    def take_in_groups(self) -> None:
        """Let the schedulers schedule the parameter groups that were added to an optimizer since
        the last call.

        torch's schedulers keep a list of values, one for each group that existed when they were
        created, and fail if there are more groups. A new group starts from its own learning rate,
        and gets all other values from the last group.
        """
        groups = sum(len(each.optimizer.param_groups) for each in self.all)
        if groups == self._groups:
            return
        self._groups = groups
        for scheduler in self.all:
            for each in _nested(scheduler):
                _take_in_groups(each)

    def after_step(self) -> None:
        """Step the schedulers if they are stepped after each step, except ReduceLROnPlateau."""
        self.take_in_groups()
        if self.all and not self._by_epoch:
            for each in self._others():
                each.step()

    def after_epoch(self) -> None:
        """Step the schedulers if they are stepped after each epoch, except ReduceLROnPlateau."""
        self.take_in_groups()
        if self._by_epoch:
            for each in self._others():
                each.step()

    def after_evaluation(self, figure: float) -> None:
        """Step each ReduceLROnPlateau.

        Args:
            figure: The result of the evaluation; NaN if it had no sample.
        """
        for each in self.all:
            if isinstance(each, ReduceLROnPlateau):
                each.step(figure)

    def begin_here(self, factor: float) -> None:
        """Begin the script's schedule within a run, after its optimizers were loaded from a
        checkpoint that had another schedule.

        Groups of the script start from its learning rates, and groups that a callback has added
        from those of the checkpoint.

        Args:
            factor: By what to multiply learning rates of the checkpoint, because a step may have
                another number of samples now.
        """
        for optimizer, at_start in zip(self._optimizers, self._at_start, strict=True):
            groups = optimizer.param_groups
            for group, values in zip(groups, at_start, strict=False):
                _forget_schedule(group, values)
            # The other groups were added by a callback in the previous run: the script sets no
            # learning rate for them.
            for group in groups[len(at_start) :]:
                group["lr"] = group.pop("initial_lr", group["lr"]) * factor
        for scheduler in self.all:
            for each in _nested(scheduler):
                _take_in_groups(each)
            # A scheduler of torch changes the rates only when it is stepped, after the next step. A
            # user's scheduler begins as in a new run.
            if not self._wanted:
                _set_by_schedule(scheduler)

    def rescale(self, factor: float) -> None:
        """Multiply the learning rates within a run, and the values from which schedulers compute
        the next ones.

        Args:
            factor: The factor; 1 changes nothing.
        """
        for optimizer in self._optimizers:
            scale_lr(optimizer, factor)
        for scheduler in self.all:
            for each in _nested(scheduler):
                for name in {"base_lrs", "_last_lr"} & vars(each).keys():
                    setattr(each, name, [factor * lr for lr in getattr(each, name)])

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all schedulers."""
        return {"all": [each.state_dict() for each in self.all]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the states of all schedulers.

        Args:
            state: The return value of :meth:`state_dict`.

        Raises:
            ValueError: The state has another number of schedulers.
        """
        for each, saved in zip(self.all, state["all"], strict=True):
            each.load_state_dict(saved)

    def _others(self) -> Iterator[LRScheduler]:
        return (each for each in self.all if not isinstance(each, ReduceLROnPlateau))


def _class(scheduler: LRScheduler) -> str:
    """Return the name of a scheduler's class, with those of its parts in brackets."""
    own = type(scheduler).__name__
    parts = getattr(scheduler, "_schedulers", ())
    return f"{own}({', '.join(map(_class, parts))})" if parts else own


def _written(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the values that schedulers may change in an optimizer's group."""
    values = {name: group[name] for name in (*_WRITTEN, *_WRITTEN_BY_CYCLES) if name in group}
    # Copy a learning rate that is a tensor, as torch.compile needs it, because schedulers change it
    # in place.
    return {n: each.clone() if isinstance(each, Tensor) else each for n, each in values.items()}


def _forget_schedule(group: dict[str, Any], at_start: Mapping[str, Any]) -> None:
    """Reset the values that schedulers write into a group to those ``at_start``."""
    names: tuple[str, ...] = _WRITTEN
    # OneCycleLR and CyclicLR also change the momentum, and leave max_momentum in the group. Without
    # that name no schedule has changed the momentum, so the checkpoint's momentum is used.
    if "max_momentum" in group or "max_momentum" in at_start:
        names += _WRITTEN_BY_CYCLES
    for name in names:
        group.pop(name, None)
    group.update({name: at_start[name] for name in names if name in at_start})


def _set_by_schedule(scheduler: LRScheduler) -> None:
    """Set the learning rates for the next step, according to the steps done."""
    assert isinstance(scheduler, LambdaLR)
    groups = scheduler.optimizer.param_groups
    for group, base, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        group["lr"] = base * factor(scheduler.last_epoch)


def _nested(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    """Yield a scheduler and its parts, such as those of SequentialLR."""
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _nested(part)


def _take_in_groups(scheduler: LRScheduler) -> None:
    groups = scheduler.optimizer.param_groups
    for name in _BY_GROUP:
        values = getattr(scheduler, name, None)
        if not isinstance(values, list):
            continue
        for group in groups[len(values) :]:
            if name == "base_lrs":
                values.append(group.setdefault("initial_lr", group["lr"]))
            else:
                values.append(values[-1])
    # OneCycleLR keeps its limits in the groups, and raises a KeyError for a group without them.
    if isinstance(scheduler, OneCycleLR):
        for group in groups[1:]:
            for name in _OF_ONE_CYCLE & groups[0].keys():
                group.setdefault(name, groups[0][name])


def _by_schedule(
    optimizers: Sequence[Optimizer], config: Config, total: int | None, done: Callable[[], float]
) -> tuple[LRScheduler, ...]:
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
    # Ask done() instead of using LambdaLR's own count of steps: after a resume with another number
    # of ranks, a step is a different share of the run.
    return tuple(
        LambdaLR(each, lambda _: warmup_then_cosine(done(), config.warmup_steps, end))
        for each in optimizers
    )


def _made(wanted: Scheduler, optimizer: Optimizer, config: Config) -> LRScheduler:
    # A scheduler that exists already has read the optimizer's learning rate before scale_lr
    # multiplied it.
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
            expected=(
                "a scheduler that starts from the optimizer's learning rate, this one has rates of"
                " its own"
            ),
            hint="use scale_lr=no, and give it rates for this world's batch",
        )
    return made


def warmup_then_cosine(done: float, warmup: int, end: int | None) -> float:
    """Return the factor of the learning rate: linear up to 1, then a half cosine down to 0.

    As in Loshchilov and Hutter 2017.

    Args:
        done: The number of steps before this step, from 0; may be a fraction.
        warmup: The number of steps before the factor is 1.
        end: The step at which the factor is 0; None to stay at 1.
    """
    # Add 1, because with a learning rate of 0 the first step would have no effect.
    if done < warmup:
        return (done + 1) / (warmup + 1)
    if end is None:
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (done - warmup) / max(1, end - warmup))))
