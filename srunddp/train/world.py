"""What the loop needs to know of the ranks; :func:`srunddp.init` gives it, and any object like it will do."""

from __future__ import annotations

from typing import Protocol

import torch


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
