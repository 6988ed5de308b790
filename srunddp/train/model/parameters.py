"""The parameters of a training by name: which are trained, and how optimizers group them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from srunddp.errors import ConfigError
from srunddp.train.checkpoint.file import CheckpointError

# The most names in a message: a model of another size may differ in hundreds of names.
_SHOWN = 3
# activation_checkpointing adds this part to the names of parameters, but not to the keys of a
# state_dict.
_WRAPPER = "_checkpoint_wrapped_module."


class NamedParameters:
    """The parameters of the model and the loss function, by names such as ``model.0.weight``.

    A checkpoint has these names to say to which parameter an optimizer's state belongs. torch goes
    by the position of a parameter, so layers in another order would get each other's state.
    """

    def __init__(self, **modules: nn.Module | None) -> None:
        """Look for the parameters.

        Args:
            modules: The modules, by the first part of their parameters' names, such as ``model``;
                None if there is no such module.
        """
        self._modules = {prefix: each for prefix, each in modules.items() if each is not None}
        self.refresh()

    def refresh(self) -> None:
        """Look for the parameters again, because a callback may have added a module."""
        self._parameters = {
            f"{prefix}.{name.replace(_WRAPPER, '')}": parameter
            for prefix, module in self._modules.items()
            for name, parameter in module.named_parameters()
        }

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that require a gradient, by name, among those that the last
        :meth:`refresh` found.
        """
        return {name: each for name, each in self._parameters.items() if each.requires_grad}

    def set_trained(self, names: Iterable[str]) -> None:
        """Let these parameters, and no others, require a gradient.

        Args:
            names: The names of the parameters.

        Raises:
            CheckpointError: There is no parameter of one of these names.
        """
        wanted = set(names)
        if missing := wanted - self._parameters.keys():
            raise _other_names("trains", missing, self.trained().keys() - wanted)
        for name, parameter in self._parameters.items():
            # Integers, such as quantized weights, cannot require a gradient.
            if parameter.is_floating_point() or parameter.is_complex():
                parameter.requires_grad_(name in wanted)

    def groups(self, optimizer: Optimizer) -> list[list[str]]:
        """Return the names in each of the optimizer's groups.

        Args:
            optimizer: An optimizer of the training.

        Raises:
            ConfigError: A parameter in the optimizer belongs neither to the model nor to the loss
                function.
        """
        # A callback may have added a module since the last refresh. Look parameters up by id(),
        # because == of tensors compares values.
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
        """Add to the optimizer the parameter groups that were added to it in the previous run.

        Args:
            optimizer: The optimizer of this run.
            saved: The names in each group of the previous run.

        Raises:
            CheckpointError: The groups of the optimizer have other parameters.
        """
        for number, names in enumerate(saved[len(optimizer.param_groups) :]):
            if missing := set(names) - self._parameters.keys():
                raise _other_names("steps", missing, set())
            # torch refuses a parameter that is in another group, but does not say which parameter.
            if held := set(names) & set(_flat(self.groups(optimizer))):
                where = f" in group {number + len(optimizer.param_groups)} of the optimizer"
                raise _other_names("steps", held, set(), where)
            # The caller loads the optimizer's state next, which sets the group's options, such as
            # its learning rate.
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
        """Return an optimizer's saved state, renumbered to the present positions of its parameters.

        Args:
            optimizer: The optimizer, with the same parameters in each of its groups.
            state: The ``optimizer.state_dict()`` of the previous run.
            saved: The names in each group of the previous run.
        """
        before = {name: index for index, name in enumerate(_flat(saved))}
        own = self.groups(optimizer)
        # torch numbers the parameters through all groups.
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
