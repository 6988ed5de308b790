"""What the loop needs to know of the ranks, and how they tell each other numbers and what rank 0
has done.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from srunddp.bootstrap.process_group.world import await_message
from srunddp.errors import ConfigError, PeerError
from srunddp.telemetry import heartbeat
from srunddp.util.hostlist import fold_ranks

# Numbers the calls of on_rank_zero() and any_rank(), which all ranks make in one order: the same
# call has the same key in the store on all of them.
_turns = itertools.count()
T = TypeVar("T")
# The default group beside which it was made, and the group itself: a script may leave its process
# group and begin another.
_host_group: tuple[Any, Any] = (None, None)


class World(Protocol):
    """The ranks of one run, seen from one of them: what ``srunddp.init()`` gives, or any object
    like it.

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
    """Return the process group for tensors in the host's memory, for ``group=`` of a collective.

    The default group where it is Gloo's; else one of Gloo's beside it, made by the first call,
    which is a collective.
    """
    global _host_group
    default = dist.group.WORLD
    if dist.get_backend() == "gloo":
        return default
    if _host_group[0] is not default:
        _host_group = default, dist.new_group(backend="gloo")
    return _host_group[1]


def all_gather_ints(world: World, own: Sequence[int]) -> list[list[int]]:
    """Return the numbers of all ranks, by rank; a collective of the default process group.

    Args:
        world: All of its ranks call this.
        own: Within int64; equally many on all ranks.
    """
    if world.world_size == 1:
        return [list(own)]
    row = torch.tensor(own, device=world.device)
    by_rank = [torch.empty_like(row) for _ in range(world.world_size)]
    dist.all_gather(by_rank, row)
    return [row.tolist() for row in by_rank]


def all_reduce_max(world: World, *values: float) -> list[float]:
    """Return the greatest of each of the values over all ranks; a collective of the default group.

    Args:
        world: All of its ranks call this.
        values: Equally many on all ranks.
    """
    if world.world_size == 1:
        return list(values)
    row = torch.tensor(values, dtype=torch.float64, device=world.device)
    dist.all_reduce(row, dist.ReduceOp.MAX)
    return [float(value) for value in row.tolist()]


def on_rank_zero(world: World, action: Callable[[], T]) -> T:
    """Call a function on rank 0 alone; all ranks call this.

    Neither a time limit nor ``--stall-timeout`` counts meanwhile.

    Args:
        world: All of its ranks call this.
        action: It may take any time.

    Returns:
        What it returned there, on all ranks: what JSON has.

    Raises:
        PeerError: It has failed; on rank 0 its own error.
    """
    heartbeat(last=True)
    if world.world_size == 1:
        return action()
    # Over the store and not by a broadcast, which the other ranks would give up after the time
    # limit of the process group: rank 0 may be at a slow file system.
    store = _get_default_store()
    key = f"srunddp/rank_zero/{next(_turns)}"
    if world.rank:
        answer: dict[str, Any] = json.loads(await_message(store, key))
        if "error" in answer:
            raise PeerError(f"rank 0 failed: {answer['error']}", code=answer["code"])
        result: T = answer["result"]
        return result
    try:
        result = action()
    # Also a KeyboardInterrupt: the others would wait for an answer for ever.
    except BaseException as error:
        failure = {
            "error": str(error) or type(error).__name__,
            "code": getattr(error, "exit_code", 1),
        }
        store.set(key, json.dumps(failure))
        raise
    store.set(key, json.dumps({"result": result}))
    return result


def any_rank(world: World, flag: bool) -> bool:
    """Return whether a flag is set on one of the ranks; all call this.

    No time limit counts, so that they may come at different times.

    Args:
        world: All of its ranks call this.
        flag: This rank's.
    """
    if world.world_size == 1:
        return flag
    store = _get_default_store()
    key = f"srunddp/any_rank/{next(_turns)}"
    store.set(f"{key}/{world.rank}", str(int(flag)))
    keys = [f"{key}/{rank}" for rank in range(world.world_size)]
    return on_rank_zero(world, lambda: "1" in [await_message(store, each) for each in keys])


def absent_ranks(world: World, key: str, within: timedelta) -> list[int]:
    """Wait for all ranks to come to the same place, over the store, where not all may come.

    A collective would meet another one of a rank that does not come here.

    Args:
        world: Its ranks that come call this.
        key: Of the place and time, in the store; used once.
        within: How long to wait.

    Returns:
        The ranks that have not come; none where all have.
    """
    store = _get_default_store()
    keys = [f"srunddp/{key}/{rank}" for rank in range(world.world_size)]
    store.set(keys[world.rank], "1")
    # At the time limit the store raises DistStoreError, which is a RuntimeError.
    with suppress(RuntimeError):
        store.wait(keys, within)
        return []
    # Asked again, one by one: wait() does not say which of them were missing.
    return [rank for rank, each in enumerate(keys) if not store.check([each])]


def check_all_leave(world: World, within: timedelta = timedelta(seconds=300)) -> None:
    """See that all ranks leave a training, where this one does so with exit code 0.

    The others would wait for it in their next collective, up to its time limit, as the end of a
    process is no failure.

    Args:
        world: Its ranks that leave call this.
        within: For the step that the others may still be in.

    Raises:
        ConfigError: Others stay.
    """
    if world.world_size == 1:
        return
    if absent := absent_ranks(world, "leaves", within):
        raise ConfigError(
            f"rank {world.rank} leaves the training with exit code 0, and"
            f" {fold_ranks(absent, {})} did not within {within.total_seconds():g} s",
            expected="all ranks to leave after the same step",
            hint="let all ranks decide alike, by figures that are the same on all of them",
        )
