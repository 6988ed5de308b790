"""A model that was built on torch's meta device, without memory: its values are made here, module by module.

A module's constructor ends by ``reset_parameters()``, those of the modules in it before. What is called in that order
here draws the values that the model would have had, had it been built on the CPU.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from inspect import getattr_static
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from srunddp.errors import ConfigError


class _Made(NamedTuple):
    """A tensor with memory.

    Attributes:
        left: on the meta device; alive, so that no other has its number.
        version: before it had a value.
    """

    left: Tensor
    new: weakref.ref[Tensor]
    version: int


class MetaInitializer:
    """Gives the tensors of one model their memory, on the CPU, and their values; keeps none of them."""

    def __init__(self) -> None:
        self._made: dict[int, _Made] = {}

    def make_all(self, model: nn.Module) -> None:
        """Those of the whole model.

        Raises:
            ConfigError: as :meth:`make` and :meth:`check`.
        """
        for module in inner_first(model):
            self.make(module)
        self.check(model)

    def make(self, module: nn.Module) -> None:
        """Those of a module itself; for those of the modules in it that was done before.

        Raises:
            ConfigError: it would set what is in shards already.
        """
        tensors: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for held in tensors:
            for name, tensor in held.items():
                if tensor is not None and tensor.is_meta:
                    held[name] = self._with_memory(tensor)
        if (reset := _reset_of(module)) is None:
            return
        before = _versions(module)
        with torch.no_grad(), torch.device("cpu"):
            reset()
        if _versions(module) != before:
            raise ConfigError(
                f"reset_parameters() of {type(module).__name__}, on the meta device, sets what is in shards by then",
                expected="the parameters of fsdp.modules to be set by those, or in them",
                hint="move that there, or build the model on the CPU",
            )

    def check(self, module: nn.Module) -> None:
        """All that was made has a value, and no constructor meant another one.

        Raises:
            ConfigError: something has not.
        """
        made = {id(each.new()): each for each in self._made.values()}
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if (each := made.get(id(tensor))) is None:
                continue
            changes = tensor._version - each.version
            if _is_unset(tensor, changes):
                raise ConfigError(
                    f"{name} of a {type(module).__name__}, on the meta device, has no value after reset_parameters()",
                    expected="a method of that name that sets it, in the module that has it or in one around it",
                    hint="add one, or build the model on the CPU",
                )
            if each.left._version > changes:
                raise ConfigError(
                    f"{name} of a {type(module).__name__}, on the meta device, was set by more than reset_parameters()",
                    expected="nothing else to set it, such as a constructor or load_state_dict()",
                    hint="set it in that method, or build the model on the CPU",
                )

    def _with_memory(self, tensor: Tensor) -> Tensor:
        known = self._made.get(id(tensor))
        if known and (shared := known.new()) is not None:
            return shared
        new = torch.empty_like(tensor, device="cpu")
        if (unset := _unset(new.dtype)) is not None:
            new.fill_(unset)
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, requires_grad=tensor.requires_grad)
        self._made[id(tensor)] = _Made(tensor, weakref.ref(new), new._version)
        return new


def is_deferred(model: nn.Module) -> bool:
    """Whether values are to be made.

    Raises:
        ConfigError: some of the parameters have values, and some have not.
    """
    parameters = dict(model.named_parameters())
    without = [name for name, parameter in parameters.items() if parameter.is_meta]
    if without and len(without) < len(parameters):
        raise ConfigError(
            f"{len(without)} of {len(parameters)} parameters on the meta device, the first {without[0]}",
            expected="all or none",
            hint="build the whole model there, or none of it",
        )
    return bool(without) or any(buffer.is_meta for buffer in model.buffers())


def inner_first(model: nn.Module, seen: set[int] | None = None) -> Iterator[nn.Module]:
    """All modules of a model, each once, in the order in which their constructors ended."""
    seen = set() if seen is None else seen
    if id(model) not in seen:
        seen.add(id(model))
        for child in model.children():
            yield from inner_first(child, seen)
        yield model


def _reset_of(module: nn.Module) -> Callable[[], None] | None:
    # Some of torch's own, such as MultiheadAttention, have it by the other name.
    for name in ("reset_parameters", "_reset_parameters"):
        if getattr_static(module, name, None) is not None:  # its own: a checkpointed module's wrapper passes on all
            reset: Callable[[], None] = getattr(module, name)
            return reset
    return None


def _versions(module: nn.Module) -> list[int]:
    """They count the changes of what is in shards."""
    return [each._version for each in module.parameters() if isinstance(each, DTensor)]


def _unset(dtype: torch.dtype) -> float | None:
    """What nobody sets a parameter to; None where any value may be meant."""
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan if dtype.itemsize > 1 else None  # of those of 8 bits torch finds no least
    return torch.iinfo(dtype).min if dtype.is_signed else None


def _is_unset(tensor: Tensor, changes: int) -> bool:
    if not tensor.numel():
        return False
    if (unset := _unset(tensor.dtype)) is None:
        return changes == 0
    # Without a tensor beside it, which may stay in the allocator; torch's least number of any with NaN is NaN.
    lowest = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().min()
    return bool(lowest.isnan() if math.isnan(unset) else lowest == unset)
