"""What the training loop needs to know of the ranks, and how ranks exchange numbers and the results
of what rank 0 alone does.
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

# Numbers the calls of on_rank_zero() and any_rank(), which all ranks make in the same order, so
# that a call has the same key in the store on all ranks.
_turns = itertools.count()
T = TypeVar("T")
# The host group, after the default group for which it was made. If the script has destroyed that
# default group and created another one, a new host group has to be made.
_host_group: tuple[Any, Any] = (None, None)


class World(Protocol):
    """The ranks of one run, as seen from one of them: the return value of ``srunddp.init()``, or
    any object like it.

    If ``world_size`` is above 1, torch's default process group must be initialised.
    """

    @property
    def rank(self) -> int:
        """The number of this rank, from 0 to ``world_size - 1``."""

    @property
    def local_rank(self) -> int:
        """The number of this rank among those of its node, from 0."""

    @property
    def world_size(self) -> int:
        """The number of ranks that train together."""

    @property
    def device(self) -> torch.device:
        """The device on which this rank computes."""


def host_group() -> Any:
    """Return the process group for tensors in the host's memory, for ``group=`` of a collective.

    This is the default group if its backend is Gloo; otherwise it is an additional Gloo group. The
    first call creates that group, so it is a collective.
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
        world: The ranks, all of which call this.
        own: This rank's numbers, each of which fits an int64; equally many on all ranks.
    """
    if world.world_size == 1:
        return [list(own)]
    row = torch.tensor(own, device=world.device)
    by_rank = [torch.empty_like(row) for _ in range(world.world_size)]
    dist.all_gather(by_rank, row)
    return [row.tolist() for row in by_rank]


def all_reduce_max(world: World, *values: float) -> list[float]:
    """Return the maximum of each value over all ranks; a collective of the default group.

    Args:
        world: The ranks, all of which call this.
        values: This rank's values; equally many on all ranks.
    """
    if world.world_size == 1:
        return list(values)
    row = torch.tensor(values, dtype=torch.float64, device=world.device)
    dist.all_reduce(row, dist.ReduceOp.MAX)
    return [float(value) for value in row.tolist()]


def on_rank_zero(world: World, action: Callable[[], T]) -> T:
    """Call a function on rank 0 only; all ranks call this, and wait for the result.

    Meanwhile neither a timeout of the process group nor ``--stall-timeout`` applies.

    Args:
        world: The ranks, all of which call this.
        action: The function, which may take any time.

    Returns:
        The function's result, on all ranks; it must be a value that JSON can express.

    Raises:
        PeerError: The function has failed on rank 0. Rank 0 itself raises the original error.
    """
    heartbeat(last=True)
    if world.world_size == 1:
        return action()
    # Send the result over the store. In a broadcast the other ranks would give up after the timeout
    # of the process group, but rank 0 may be waiting for a slow file system for longer.
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
    # Catch a KeyboardInterrupt too: otherwise the other ranks would wait forever for an answer.
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
    """Return whether a flag is set on any rank; all ranks call this.

    There is no time limit, so ranks may call it at different times.

    Args:
        world: The ranks, all of which call this.
        flag: This rank's flag.
    """
    if world.world_size == 1:
        return flag
    store = _get_default_store()
    key = f"srunddp/any_rank/{next(_turns)}"
    store.set(f"{key}/{world.rank}", str(int(flag)))
    keys = [f"{key}/{rank}" for rank in range(world.world_size)]
    return on_rank_zero(world, lambda: "1" in [await_message(store, each) for each in keys])


def absent_ranks(world: World, key: str, within: timedelta) -> list[int]:
    """Wait until all ranks have called this with the same key, and return those that have not.

    The ranks meet over the store, because some may never call this: torch would match a collective
    here with a different collective of such a rank.

    Args:
        world: The ranks, some of which call this.
        key: The key in the store, the same on all ranks that call this; it can be used only once.
        within: How long to wait.

    Returns:
        The ranks that have not called this in time; empty if all have.
    """
    store = _get_default_store()
    keys = [f"srunddp/{key}/{rank}" for rank in range(world.world_size)]
    store.set(keys[world.rank], "1")
    # At the time limit the store raises DistStoreError, a RuntimeError.
    with suppress(RuntimeError):
        store.wait(keys, within)
        return []
    # Check the keys one by one, because wait() does not say which of them are missing.
    return [rank for rank, each in enumerate(keys) if not store.check([each])]


def check_all_leave(world: World, within: timedelta = timedelta(seconds=300)) -> None:
    """Check that all ranks leave a training when this rank leaves it with exit code 0.

    Ranks that stay would wait for this rank in their next collective until its timeout: a process
    that ends with 0 has not failed, so nothing would tell them that it is gone.

    Args:
        world: The ranks; those that leave call this.
        within: How long to wait for the other ranks, which may still be in a step.

    Raises:
        ConfigError: Some ranks have not left in time.
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
