"""Stand-ins for what :func:`srunddp.init` gives."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from srunddp.bootstrap.process_group.world import wait_for_gloo_threads

CPU = torch.device("cpu")


@dataclass(frozen=True)
class StandIn:
    """A :class:`srunddp.train.World`; alone unless told otherwise."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    device: torch.device = CPU

    @contextmanager
    def rank0_first(self, *, per_node: bool = False) -> Iterator[None]:
        """On one node."""
        if self.rank == 0:
            yield
        if self.world_size > 1:
            dist.barrier()
        if self.rank:
            yield


@contextmanager
def joined() -> Iterator[StandIn]:
    """The world that ``conftest.start`` announced, with its process group."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['MEETING_FILE']}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=60),
    )
    yield StandIn(rank, rank, world_size)
    dist.destroy_process_group()
    wait_for_gloo_threads()
