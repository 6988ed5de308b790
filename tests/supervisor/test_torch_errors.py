"""What torch raises when a peer is gone or late is an echo of that peer's failure; its errors of
this rank's own are not, whatever words and frames they have.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from srunddp.supervisor.failure import of_exception
from tests.support.starting import LONG
from tests.train.local_world import LocalWorld, run_ranks, start_ranks

pytestmark = pytest.mark.slow

SOON = timedelta(seconds=1)


def leaves(rank: int) -> None:
    """Rank 1 is gone before rank 0 goes on."""
    dist.barrier()
    if rank:
        os._exit(7)
    time.sleep(0.5)


def late_group(rank: int) -> Any:
    """A group with a short time limit, to which rank 1 does not come."""
    group = dist.new_group(timeout=SOON)
    dist.barrier()
    if rank:
        time.sleep(5)
        os._exit(0)
    return group


def all_reduce(rank: int) -> None:
    leaves(rank)
    dist.all_reduce(torch.ones(4))


def wait(rank: int) -> None:
    leaves(rank)
    dist.all_reduce(torch.ones(4), async_op=True).wait()


def wait_too_long(rank: int) -> None:
    dist.all_reduce(torch.ones(4), group=late_group(rank), async_op=True).wait()


def receive(rank: int) -> None:
    leaves(rank)
    received = dist.irecv(torch.ones(4), 1)
    assert received
    received.wait()


def broadcast_objects(rank: int) -> None:
    leaves(rank)
    dist.broadcast_object_list([None], 1)


def barrier(rank: int) -> None:
    leaves(rank)
    dist.barrier()


def monitored_barrier(rank: int) -> None:
    dist.barrier()
    if rank:
        time.sleep(5)
        os._exit(0)
    dist.monitored_barrier(timeout=SOON)


def ddp_step(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(10, 10))
    leaves(rank)
    for _ in range(2):
        model(torch.ones(2, 10)).sum().backward()


def ddp_buffers(rank: int) -> None:
    model = DistributedDataParallel(nn.BatchNorm1d(10))
    leaves(rank)
    model(torch.ones(2, 10))


def hook_of_gradient(rank: int) -> None:
    parameter = torch.ones(4, requires_grad=True)

    def reduced(gradient: Tensor) -> Tensor:
        dist.all_reduce(gradient)
        return gradient

    parameter.register_hook(reduced)
    leaves(rank)
    (parameter * 2).sum().backward()


def store_key(_: int) -> None:
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).wait(["never"], SOON)


def file_store_key(_: int) -> None:
    _get_default_store().wait(["never"], SOON)


LOST_PEERS: list[Callable[[int], None]] = [
    all_reduce,
    wait,
    wait_too_long,
    receive,
    broadcast_objects,
    barrier,
    monitored_barrier,
    ddp_step,
    ddp_buffers,
    hook_of_gradient,
    store_key,
    file_store_key,
]


class Samples(Dataset[int]):
    """Of which reading one does what it is told."""

    def __init__(self, read: Callable[[], object]) -> None:
        self.read = read

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        self.read()
        return index


def fail() -> None:
    raise RuntimeError("NCCL data is away: connection reset by storage, timed out after 3 s")


def loader_times_out(_: int) -> None:
    next(iter(DataLoader(Samples(lambda: time.sleep(8)), num_workers=1, timeout=1)))


def loader_worker_dies(_: int) -> None:
    next(iter(DataLoader(Samples(lambda: os._exit(3)), num_workers=1)))


def loader_worker_fails(_: int) -> None:
    next(iter(DataLoader(Samples(fail), num_workers=1)))


def own_words(_: int) -> None:
    fail()


def own_backward(_: int) -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, value: Tensor) -> Tensor:
            return value * 2

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Tensor:
            raise RuntimeError("gloo: connection closed by peer")

    model = DistributedDataParallel(nn.Linear(2, 2))
    result = Broken.apply(model(torch.ones(1, 2)))
    result.sum().backward()


def wrong_shape(_: int) -> None:
    dist.all_gather([torch.ones(2), torch.ones(3)], torch.ones(2))


def no_such_rank(_: int) -> None:
    dist.broadcast(torch.ones(2), 5)


def unused_parameters(_: int) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(2, 2)
            self.unused = nn.Linear(2, 2)

        def forward(self, value: Tensor) -> Any:
            return self.used(value)

    model = DistributedDataParallel(Half())
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()


def full_disk(_: int) -> None:
    torch.save(torch.ones(10**6), "/dev/full")


def no_folder(_: int) -> None:
    torch.save(torch.ones(2), "/nonexistent/gloo/nccl.pt")


OWN_ERRORS: list[Callable[[int], None]] = [
    loader_times_out,
    loader_worker_dies,
    loader_worker_fails,
    own_words,
    own_backward,
    wrong_shape,
    no_such_rank,
    unused_parameters,
    full_disk,
    no_folder,
]


def judged(world: LocalWorld, case: Callable[[int], None]) -> str:
    """How a rank judges the error of a case."""
    try:
        case(world.rank)
    except Exception as error:
        return f"{of_exception(error, error.__traceback__).weight.name}: {error!r}"
    return "no error"


def judged_one_after_the_other(world: LocalWorld) -> dict[str, str]:
    return {case.__name__: judged(world, case) for case in OWN_ERRORS}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """How rank 0 judges each of its own errors: they leave the group as it was."""
    (found, _) = run_ranks(2, tmp_path_factory.mktemp("own"), judged_one_after_the_other)
    return dict(found)


@pytest.mark.parametrize("case", LOST_PEERS, ids=lambda case: str(case.__name__))
def test_an_error_of_a_lost_peer_is_secondary(case: Callable[[int], None], tmp_path: Path) -> None:
    ranks = start_ranks(2, tmp_path, judged, case)
    try:
        ranks[0].join(LONG)
        assert ranks[0].exitcode == 0
        found = str(torch.load(tmp_path / "result0.pt"))
    finally:
        for rank in ranks:
            rank.kill()
    assert found.startswith("SECONDARY: "), found


@pytest.mark.parametrize("case", OWN_ERRORS, ids=lambda case: str(case.__name__))
def test_an_error_of_the_rank_s_own_is_primary(
    case: Callable[[int], None], own: dict[str, str]
) -> None:
    found = own[case.__name__]
    assert found.startswith("PRIMARY: "), found
