"""Ranks of one world on this machine, for tests that need no launcher.

They are forked from a server that has imported torch: each start of Python would import it again, 2
s of CPU a rank.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from srunddp.bootstrap.process_group.world import wait_for_gloo_threads
from srunddp.train.checkpoint import async_writer

CPU = torch.device("cpu")
_LIMIT = 300.0  # seconds, which only what is broken reaches
# Within it, so that ranks say where they wait for one that is gone.
_COLLECTIVE = datetime.timedelta(seconds=240)
_FORKSERVER = multiprocessing.get_context("forkserver")
# The first optimizer of a process imports torch._dynamo: 2 s of CPU in each rank.
_FORKSERVER.set_forkserver_preload(
    ["tests.train.conftest", "tests.train.problems", "torch._dynamo", "torchmetrics"]
)


@dataclass(frozen=True)
class LocalWorld:
    """A :class:`srunddp.train.World` on one node; a single process unless given."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    device: torch.device = CPU

    @contextmanager
    def rank_zero_first(self, *, per_node: bool = False) -> Iterator[None]:
        """Examples' data are made so; here by one rank at a time."""
        assert self.world_size == 1
        yield


def run_ranks(size: int, folder: Path, action: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``action(world, *args)`` returns on each rank of a new world; all ranks must end
    well.
    """
    ranks = start_ranks(size, folder, action, *args)
    try:
        for rank in ranks:
            rank.join(_LIMIT)
        assert [rank.exitcode for rank in ranks] == [0] * size
    finally:
        for rank in ranks:
            rank.kill()
    return results(size, folder)


def start_ranks(
    size: int, folder: Path, action: Callable[..., Any], *args: Any
) -> list[ForkServerProcess]:
    """Start the ranks of a new world; ``action`` is a module's, so that they can be sent its
    name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meeting").unlink(missing_ok=True)
    ranks = [
        _FORKSERVER.Process(target=_run, args=(rank, size, folder, action, args))
        for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    return ranks


def results(size: int, folder: Path) -> list[Any]:
    """What the ranks have returned."""
    return [torch.load(folder / f"result{rank}.pt", weights_only=False) for rank in range(size)]


def _run(
    rank: int, size: int, folder: Path, action: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    async_writer._PATIENCE = _LIMIT  # no checkpoint is left out because this machine is busy
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=size, timeout=_COLLECTIVE
    )
    torch.save(action(LocalWorld(rank, rank, size), *args), folder / f"result{rank}.pt")
    dist.destroy_process_group()
    wait_for_gloo_threads()
