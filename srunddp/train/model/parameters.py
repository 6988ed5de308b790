"""The parameters of a training by name: which are trained, and the optimizers' groups of them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from srunddp.errors import ConfigError
from srunddp.train.checkpoint.file import CheckpointError

# Names in a message: a model of another size differs in hundreds.
_SHOWN = 3
# What activation_checkpointing puts into names of parameters, but not into those of a state_dict.
_WRAPPER = "_checkpoint_wrapped_module."


class NamedParameters:
    """The parameters of the model and of the loss function, each by the name of its module and its
    own, as in ``model.0.weight``.

    A checkpoint says by these names what an optimizer's state belongs to. By position, as torch
    has it, layers in another order would get each other's state.
    """

    def __init__(self, **modules: nn.Module | None) -> None:
        """Look for the parameters.

        Args:
            modules: By the first part of their parameters' names; None where there is no such
                module.
        """
        self._modules = {prefix: each for prefix, each in modules.items() if each is not None}
        self.refresh()

    def refresh(self) -> None:
        """Look for the parameters again, as a callback may have put in a module of its own."""
        self._parameters = {
            f"{prefix}.{name.replace(_WRAPPER, '')}": parameter
            for prefix, module in self._modules.items()
            for name, parameter in module.named_parameters()
        }

    def trained(self) -> dict[str, nn.Parameter]:
        """Return those that require a gradient, of the parameters at the last :meth:`refresh`."""
        return {name: each for name, each in self._parameters.items() if each.requires_grad}

    def set_trained(self, names: Iterable[str]) -> None:
        """Let these parameters, and no others, require a gradient.

        Args:
            names: Of the parameters.

        Raises:
            CheckpointError: There are none of these names.
        """
        wanted = set(names)
        if missing := wanted - self._parameters.keys():
            raise _other_names("trains", missing, self.trained().keys() - wanted)
        for name, parameter in self._parameters.items():
            # Whole numbers, such as quantized weights, cannot require one.
            if parameter.is_floating_point() or parameter.is_complex():
                parameter.requires_grad_(name in wanted)

    def groups(self, optimizer: Optimizer) -> list[list[str]]:
        """Return the names in each of the optimizer's groups.

        Args:
            optimizer: Of the training.

        Raises:
            ConfigError: A parameter in it is neither the model's nor the loss function's.
        """
        # A callback may have added a module since. Looked up by id(), as == of tensors compares
        # values.
        self.refresh()
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        try:
            return [
                [names[id(parameter)] for parameter in group["params"]]
                for group in optimizer.param_groups
            ]
        except KeyError:
            raise ConfigError(
                f"{type(optimizer).__name__} has a parameter that is not the model's",
                expected="parameters of the model, or of the loss function",
                hint="put the new module into the model before its parameters into the optimizer",
            ) from None

    def add_groups(self, optimizer: Optimizer, saved: Sequence[Sequence[str]]) -> None:
        """Give the optimizer the groups that were added to it in the run before.

        Args:
            optimizer: Of this run.
            saved: The names in each group of the run before.

        Raises:
            CheckpointError: The groups that it has are of other parameters.
        """
        for number, names in enumerate(saved[len(optimizer.param_groups) :]):
            if missing := set(names) - self._parameters.keys():
                raise _other_names("steps", missing, set())
            # torch refuses a parameter that is in another group, without a word on which.
            if held := set(names) & set(_flat(self.groups(optimizer))):
                where = f" in group {number + len(optimizer.param_groups)} of the optimizer"
                raise _other_names("steps", held, set(), where)
            # The group's options, such as its learning rate, come with the state that is loaded
            # next.
            optimizer.add_param_group({"params": [self._parameters[name] for name in names]})
        own = self.groups(optimizer)
        for number, (here, before) in enumerate(zip(own, saved, strict=False)):
            if set(here) != set(before):
                where = f" in group {number} of the optimizer"
                only_before = set(before) - set(here)
                raise _other_names("steps", only_before, set(here) - set(before), where)
        if len(own) > len(saved):
            raise CheckpointError(
                f"the optimizer has {len(own)} groups of parameters, and in the checkpoint"
                f" {len(saved)}",
                expected="those of the script that wrote it, before it added any",
                hint="add groups in a callback, or start with another output_dir",
            )

    def ordered(
        self, optimizer: Optimizer, state: Mapping[str, Any], saved: Sequence[Sequence[str]]
    ) -> dict[str, Any]:
        """Return an optimizer's saved state with the positions that its parameters have now.

        Args:
            optimizer: With the same parameters in each of its groups.
            state: As ``optimizer.state_dict()`` returned it in the run before.
            saved: The names in each group then.
        """
        before = {name: index for index, name in enumerate(_flat(saved))}
        own = self.groups(optimizer)
        # torch numbers the parameters over all groups, in their order in each of them.
        states: dict[int, Any] = {}
        for index, name in enumerate(_flat(own)):
            if before[name] in state["state"]:
                states[index] = state["state"][before[name]]
        groups = []
        first = 0
        for group, names in zip(state["param_groups"], own, strict=True):
            positions = list(range(first, first + len(names)))
            groups.append({**group, "params": positions})
            first += len(names)
        return {**state, "state": states, "param_groups": groups}


def _flat(groups: Sequence[Sequence[str]]) -> list[str]:
    return [name for names in groups for name in names]


def _other_names(
    verb: str, before: Iterable[str], now: Iterable[str], where: str = ""
) -> CheckpointError:
    found = f"the run before {verb} {_some(before)}{where}"
    if now:
        found += f", and this one {_some(now)}"
    return CheckpointError(
        found,
        expected="the parameters of the script that wrote the checkpoint",
        hint="keep their names, or start with another output_dir",
    )


def _some(names: Iterable[str]) -> str:
    every = sorted(names)
    if not every:
        return "no other"
    more = len(every) - _SHOWN
    return ", ".join(every[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
