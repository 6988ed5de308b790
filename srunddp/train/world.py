"""What the loop needs to know of the ranks; :func:`srunddp.init` gives it, and any object like it will do."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

_host_group: tuple[Any, Any] = (None, None)  # the default group beside which it was made, and itself


class World(Protocol):
    """The ranks of one run, seen from one of them.

    With a ``world_size`` above 1 torch's default process group must be initialised.
    """

    @property
    def rank(self) -> int:
        """From 0 to ``world_size - 1``."""

    @property
    def local_rank(self) -> int:
        """Among the ranks of its node, from 0."""

    @property
    def world_size(self) -> int:
        """How many ranks train together."""

    @property
    def device(self) -> torch.device:
        """The one device this rank computes on."""


def host_group() -> Any:
    """The process group for tensors in the host's memory, for ``group=`` of a collective.

    The default group where it is Gloo's; else one of Gloo's beside it, made by the first call, which is a collective.
    """
    global _host_group
    default = dist.group.WORLD
    if dist.get_backend() == "gloo":
        return default
    if _host_group[0] is not default:
        _host_group = default, dist.new_group(backend="gloo")
    return _host_group[1]
