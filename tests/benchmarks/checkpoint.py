"""Training while a checkpoint is written.

Wall-clock time of a step, the mean of 40 steps after about 100 MB of model and Adam have begun to
be saved. The longest step is that, or the first one with the call that begins to save. The ways are
srunddp's CheckpointManager, torch's distributed checkpoint (``async_save``), ``torch.save`` between
two steps, and no checkpoint at all. One process, one thread of torch, of two cores; the next window
begins when all is written. srunddp syncs its file to the disk and reads it back. The second case is
the copy to memory alone, for which training waits, beside ``copy.deepcopy``.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as distributed_checkpoint

from srunddp.train import CheckpointManager
from srunddp.train.checkpoint.async_writer import Snapshot
from tests.benchmarks.benchmark import Case, Limit, Sample
from tests.train.local_world import LocalWorld

WIDTH = 860
LAYERS = 12
BATCH = 8
STEPS = 40  # about as long as srunddp's file takes
OURS = "srunddp"
DCP = "torch's async_save"
SAVE = "torch.save"
NOTHING = "no checkpoint"


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS))
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), fused=True)
        self.inputs = torch.randn(BATCH, WIDTH)
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def window(training: Training, begin: Callable[[int], Callable[[], object]], repeat: int) -> Sample:
    """``begin`` begins to save, and returns what waits until that is written."""
    began = time.perf_counter()
    wait = begin(repeat)
    times = [time.perf_counter()]
    for _ in range(STEPS):
        training.step()
        times.append(time.perf_counter())
    wait()
    longest = max(end - start for start, end in pairwise([began, *times[1:]]))
    return {"step": 1000 * (times[-1] - times[0]) / STEPS, "longest step": 1000 * longest}


def ways(training: Training, folder: Path) -> dict[str, Callable[[int], Callable[[], object]]]:
    manager = CheckpointManager(folder / "srunddp", LocalWorld(), keep_last=2, keep_best=0)

    def ours(repeat: int) -> Callable[[], object]:
        manager.save(repeat + 1, training.state())
        return manager.wait

    def dcp(repeat: int) -> Callable[[], object]:
        saving = distributed_checkpoint.async_save(training.state(), checkpoint_id=folder / "dcp")
        assert isinstance(saving, Future)
        return saving.result

    def save(repeat: int) -> Callable[[], object]:
        torch.save(training.state(), folder / "new.pt")
        (folder / "new.pt").replace(folder / "last.pt")
        return lambda: None

    return {OURS: ours, DCP: dcp, SAVE: save, NOTHING: lambda repeat: lambda: None}


def seconds(action: Callable[[], object], repeat: int) -> Sample:
    began = time.perf_counter()
    action()
    return {"wall": 1000 * (time.perf_counter() - began)}


def cases(quick: bool) -> Iterator[Case]:
    torch.set_num_threads(1)
    # torch's async_save wants one.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    training = Training()
    snapshot = Snapshot()
    repeats = 1 if quick else 11
    with TemporaryDirectory() as folder:
        begins = ways(training, Path(folder))
        measures = {way: partial(window, training, begin) for way, begin in begins.items()}
        for measure in measures.values():
            measure(-1)  # it brings memory
        limits = (
            Limit("step", NOTHING, 1.02),
            Limit("step", DCP, 1.0),
            Limit("longest step", DCP, 1.0),
        )
        yield Case("steps beside a checkpoint of 107 MB", measures, repeats, limits, "ms")
    copies = {
        OURS: lambda: snapshot.take(training.state()),
        "copy.deepcopy": lambda: copy.deepcopy(training.state()),
    }
    named = {way: partial(seconds, action) for way, action in copies.items()}
    yield Case(
        "copying these to memory", named, repeats, (Limit("wall", "copy.deepcopy", 1.0),), "ms"
    )
    dist.destroy_process_group()
