"""All-reduce over all ranks, first whether the sum is right, then how fast; in a process of its
own, which may hang.

Gloo's connecting can ignore every time limit, and the process that asks is not to touch CUDA; so
the ranks fork.
"""

import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

from srunddp.bootstrap.process_group import store
from srunddp.bootstrap.process_group.world import World, open_world
from srunddp.check.finding import FAIL, WARN, Finding
from srunddp.check.messages import CheckMessage
from srunddp.supervisor import signals

NAME = "collective"
WRONG_SUM = "the sum of a small all-reduce is wrong"
# Sizes of the sweep in bytes, each so many times the one before. It ends early where a call takes
# so many seconds that the next size would hold up the job.
_SMALLEST = 1 << 15
_LARGEST = 1 << 30
_GROWTH = 8
_LONGEST_CALL = 0.25
_MEASURED = 0.3  # seconds of calls of one size
_WARM_UPS = 2  # calls before: the first ones connect and allocate
# Of the link's rate: NCCL comes near it, Gloo at 0.60 to 0.71 of what plain sockets carry.
THRESHOLDS = {"nccl": 0.9, "gloo": 0.5}


@dataclass(frozen=True, kw_only=True)
class AllReduceFacts(CheckMessage, kind="all_reduce_facts"):
    """What one rank measured.

    Attributes:
        wrong: why there is no sum, or that it is a wrong one; else empty.
        backend: ``nccl`` or ``gloo``; empty where none was started.
        sweep: for each size its bytes, and the bytes per second of busbw, as nccl-tests counts it:
            2(n-1)/n of the bytes, over the time of one call.
    """

    wrong: str = ""
    backend: str = ""
    sweep: tuple[tuple[int, float], ...] = ()


def run(place: store.ProcessGroupContext, within: float) -> AllReduceFacts:
    """Measure in a forked process, which may hang.

    Args:
        place: what the process group is made of, as in a run.
        within: seconds, after which the process is killed.

    Returns:
        This rank's facts; with ``wrong`` where the process failed, was killed or ended by itself.
    """
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    child = fork.Process(target=_child, args=(place, within, theirs), daemon=True)
    child.start()
    # As long as this process has the writing end open, the reading end never comes to its end, and
    # a child that has died would not be noticed.
    theirs.close()
    try:
        if ours.poll(within):
            facts = ours.recv()
        else:
            facts = AllReduceFacts(wrong=f"no end after {within:.0f} s")
    except EOFError:
        # The pipe closes a moment before the process can be waited for.
        child.join(1.0)
        facts = AllReduceFacts(wrong=f"its process ended with {child.exitcode}")
    child.kill()
    child.join()
    assert isinstance(facts, AllReduceFacts)
    return facts


def _child(place: store.ProcessGroupContext, within: float, answer: Connection) -> None:
    signals.die_with_parent(os.getppid())  # it may be in NCCL, and hold a GPU
    try:
        facts = _measured(place, within)
    except Exception as error:
        # Whatever torch, Gloo or NCCL raise: it is what the user has to know.
        facts = AllReduceFacts(
            wrong=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        )
    answer.send(facts)


def _measured(place: store.ProcessGroupContext, within: float) -> AllReduceFacts:
    store.install(place)
    import torch
    import torch.distributed as dist

    world, _ = open_world(place, place.backend, timedelta(seconds=within))
    # Sums of whole numbers below 2**53 are exact in float64, in whatever order the backend adds.
    numbers = torch.arange(1000, dtype=torch.float64, device=world.device) + world.rank
    dist.all_reduce(numbers)
    ranks = world.world_size
    wanted = torch.arange(1000, dtype=torch.float64) * ranks + ranks * (ranks - 1) / 2
    if (numbers.cpu() == wanted).all():
        wrong = ""
    else:
        wrong = WRONG_SUM
    return AllReduceFacts(backend=world.backend, wrong=wrong, sweep=tuple(_sweep(world)))


def _sweep(world: World) -> Iterator[tuple[int, float]]:
    """Yield size and busbw of ever larger all-reduces, until one call takes long. All ranks go by
    the slowest one's time.
    """
    size = _SMALLEST
    share = 2 * (world.world_size - 1) / world.world_size
    while size <= _LARGEST:
        seconds = _call(world, size, _WARM_UPS)
        # The time is the same on all ranks, so all make equally many calls; else some would wait
        # for ever.
        seconds = _call(world, size, max(1, min(20, int(_MEASURED / seconds))))
        yield size, share * size / seconds
        if seconds > _LONGEST_CALL:
            return
        size *= _GROWTH


def _call(world: World, size: int, count: int) -> float:
    """Return the seconds that one all-reduce of ``size`` bytes takes on the slowest rank, as the
    mean of ``count``.
    """
    import torch
    import torch.distributed as dist

    # torch.ones() makes float32, of four bytes each.
    tensor = torch.ones(size // 4, device=world.device)
    # All begin together, so that the time by which a rank is late is not measured.
    dist.barrier()
    began = time.monotonic()
    for _ in range(count):
        dist.all_reduce(tensor)
    if world.device.type == "cuda":
        # NCCL's calls return once they are queued.
        torch.cuda.synchronize()
    taken = torch.tensor(
        [(time.monotonic() - began) / count], dtype=torch.float64, device=world.device
    )
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return max(float(taken), 1e-9)


def evaluate(
    facts: Mapping[int, AllReduceFacts], nodes: Mapping[int, str], link: float
) -> Iterator[Finding]:
    """Judge the all-reduce: no sum or a wrong one stops a job; a slow one is warned of.

    Args:
        facts: by rank.
        nodes: by rank, too.
        link: bytes per second that the slowest node's network can carry; 0 where that is not known.
    """
    for rank, one in facts.items():
        if one.wrong:
            hint = "repair what the other lines name; else try --backend gloo, or NCCL_DEBUG=INFO"
            yield Finding(
                FAIL, one.wrong, "one sum on all ranks", hint, nodes=(nodes[rank],), ranks=(rank,)
            )
    best = max((rate for _, rate in facts[0].sweep), default=0.0)
    share = THRESHOLDS.get(facts[0].backend, 0.0)
    if 0 < best < share * link:
        found = f"all-reduce has a busbw of {best / 1e9:.2f} GB/s over {facts[0].backend}"
        expected = f"{share * link / 1e9:.2f} GB/s, {share} of the link's {link / 1e9:.2f}"
        hint = "see the lines on rate, interface and GPUs"
        yield Finding(WARN, found, expected, hint, nodes=tuple(sorted(set(nodes.values()))))


def summary(facts: Mapping[int, AllReduceFacts], link: float) -> str:
    """Write the sweep and the threshold in one line; for the arguments see :func:`evaluate`."""
    sizes = {
        size: f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
        for size, _ in facts[0].sweep
    }
    shown = ", ".join(f"{sizes[size]} {rate / 1e9:.3f}" for size, rate in facts[0].sweep)
    share = THRESHOLDS.get(facts[0].backend, 0.0)
    if link:
        threshold = f"threshold {share * link / 1e9:.2f}, {share} of the link's rate"
    else:
        threshold = "no link's rate is known"
    return f"{facts[0].backend} all-reduce, busbw in GB/s: {shown}; {threshold}"
