"""The settings of a script at a start, which a resume compares with those of the checkpoint.

A checkpoint restores the old settings of optimizers and schedulers, so changing them in the script
has no effect. Values that change in training, such as a learning rate under a scheduler, are not
compared: only the values that were given to constructors, and the configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from srunddp.train.config import Config
from srunddp.train.validate import OWN_SETTINGS, leaves

Settings = dict[str, Any]

# Values of an optimizer's group that are not compared: parameters, kernels, and the learning rate,
# which is compared separately.
_NOT_TOLD = {"params", "fused", "foreach", "capturable", "differentiable", "lr", "initial_lr"}
# Values of a scheduler that are not compared: those that change when it is stepped, and learning
# rates, which are compared as settings of the optimizer.
_MOVES = {"last_epoch", "_step_count", "_last_lr", "base_lrs", "best", "num_bad_epochs"}
_MOVES |= {"cooldown_counter", "_get_lr_called_within_step", "_is_initial"}
# Settings that are not compared, because a user may change them at any start: how long to train,
# where to write, how often to evaluate and report, and how to compute.
_FREE = {"epochs", "max_steps", "output_dir", "resume", "resume_changed_data", "num_threads"}
_FREE |= {"patience", "log_every", "tensorboard", "fused", "compile", "evaluate_every_epochs"}
_FREE |= {"evaluate_every_steps", "monitor", "mode", "seed", "channels_last"}
_FREE_GROUPS = ("dataloader.", "checkpoint.", "preemption.", "ddp.")


@dataclass(kw_only=True)
class StartSettings:
    """The settings of a start.

    Attributes:
        optimizer: The settings of optimizers; after a resume those of the checkpoint are used.
        scheduler: The settings of schedulers; after a resume those of the checkpoint are used.
        rates: The learning rates; after a resume those of the checkpoint are used, unless the
            schedule has changed.
        config: The configuration; after a resume the new one is used.
    """

    optimizer: Settings = field(default_factory=dict)
    scheduler: Settings = field(default_factory=dict)
    rates: Settings = field(default_factory=dict)
    config: Settings = field(default_factory=dict)

    def differences(self, now: StartSettings, *, same_schedule: bool) -> Iterator[str]:
        """Yield a line for each setting that differs: the old and the new value, and which one is
        used.

        Args:
            now: The settings of this start; ``self`` has those of the checkpoint.
            same_schedule: Whether the learning rate is scheduled as before.
        """
        kept = [(self.optimizer, now.optimizer), (self.scheduler, now.scheduler)]
        replaced = [(self.config, now.config)]
        if same_schedule:
            kept.append((self.rates, now.rates))
        else:
            replaced.append((self.rates, now.rates))
        for before, own in kept:
            for name, old, new in _changed(before, own):
                yield (
                    f"{name}: the checkpoint's {old} is used, not the script's {new}; set it in"
                    " on_fit_start to change it"
                )
        for before, own in replaced:
            for name, old, new in _changed(before, own):
                yield f"{name} was {old}, and is {new} from here on"

    def keep(self, before: StartSettings, *, same_schedule: bool) -> None:
        """Take over the settings of the checkpoint that the run goes on with, so that later
        checkpoints contain the settings in use.

        Args:
            before: The settings of the checkpoint.
            same_schedule: Whether the learning rate is scheduled as before.
        """
        self.optimizer |= before.optimizer
        if same_schedule:
            self.scheduler |= before.scheduler
            self.rates |= before.rates


def of_optimizers(optimizers: Sequence[Optimizer]) -> Settings:
    """Return the plain values in the groups of optimizers, without the learning rates.

    Args:
        optimizers: The optimizers, as the script made them.
    """
    found = {}
    for group_name, group in _named_groups(optimizers):
        for name, value in group.items():
            value = _number(value)
            if name not in _NOT_TOLD and _is_plain(value):
                found[f"{name} of {group_name}"] = value
    return found


def rates_of(optimizers: Sequence[Optimizer]) -> Settings:
    """Return the learning rates of optimizers.

    Args:
        optimizers: The optimizers, which no Trainer has changed yet.
    """
    return {
        f"lr of {name}": _number(group.get("initial_lr", group["lr"]))
        for name, group in _named_groups(optimizers)
        if "lr" in group
    }


def _named_groups(optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for optimizer in optimizers:
        owner = _unique(type(optimizer).__name__, optimizers, optimizer)
        for number, group in enumerate(optimizer.param_groups):
            yield f"{owner}, group {number}" if number else owner, group


def of_schedulers(schedulers: Sequence[LRScheduler]) -> Settings:
    """Return the plain values of schedulers.

    Args:
        schedulers: The schedulers, just created.
    """
    found: Settings = {}
    for scheduler in schedulers:
        owner = _unique(type(scheduler).__name__, schedulers, scheduler)
        for name, value in _plain_values(scheduler.state_dict()):
            found[f"{name} of {owner}"] = value
    return found


def of_config(config: Config) -> Settings:
    """Return the settings that are compared at a resume, by their dotted names.

    Args:
        config: The settings of the training.
    """
    return {
        name: value
        for name, value in leaves(config)
        if name.split(".")[0] in OWN_SETTINGS
        and name not in _FREE
        and not name.startswith(_FREE_GROUPS)
    }


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    # Compare only settings that both have: one that is missing, as with another version of torch,
    # was not changed by the user.
    for name in before.keys() & now.keys():
        old = before[name]
        new = now[name]
        if _as_list(old) != _as_list(new):
            yield name, old, new


def _as_list(value: Any) -> Any:
    """Return a value with its tuples turned into lists, so that both compare as equal."""
    if isinstance(value, list | tuple):
        return [_as_list(each) for each in value]
    return value


def _unique(name: str, every: Sequence[Any], one: Any) -> str:
    if len(every) == 1:
        return name
    # Compare by identity, because optimizers and schedulers may define their own ``==``.
    position = next(number for number, each in enumerate(every, 1) if each is one)
    return f"{name} number {position}"


def _plain_values(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the plain values in a scheduler's state that do not change in training, by name; also
    those of nested schedulers.
    """
    for name, value in state.items():
        if name == "_schedulers":
            for number, inner in enumerate(value, 1):
                yield from _plain_values(inner, f"{prefix}part {number}, ")
        elif name not in _MOVES:
            plain = _number(value)
            if _is_plain(plain):
                yield f"{prefix}{name}", plain


def _number(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
