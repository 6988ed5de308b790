"""Measures an all-reduce over all ranks: first whether the sum is right, then how fast it is.

Gloo can ignore every time limit while it connects, and the process of the check must not touch
CUDA. So each rank measures in a forked process, which can be killed.
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
# The sweep's sizes in bytes: each is _GROWTH times the one before. The sweep ends early when one
# call takes more than _LONGEST_CALL seconds, because the next size would delay the job.
_SMALLEST = 1 << 15
_LARGEST = 1 << 30
_GROWTH = 8
_LONGEST_CALL = 0.25
_MEASURED = 0.3  # seconds of calls for each size
_WARM_UPS = 2  # unmeasured calls before each size: the first ones connect and allocate
# Shares of the link's rate below which an all-reduce counts as slow. NCCL comes near the link's
# rate; Gloo reaches 0.60 to 0.71 of what plain sockets carry.
THRESHOLDS = {"nccl": 0.9, "gloo": 0.5}


@dataclass(frozen=True, kw_only=True)
class AllReduceFacts(CheckMessage, kind="all_reduce_facts"):
    """The measurements of one rank.

    Attributes:
        wrong: Why there is no sum, or that the sum is wrong; empty if the sum is right.
        backend: ``nccl`` or ``gloo``; empty if no process group was opened.
        sweep: Pairs of a size in bytes and its busbw in bytes per second. Busbw is what nccl-tests
            reports: 2(n-1)/n of the size for n ranks, divided by the seconds of one call.
    """

    wrong: str = ""
    backend: str = ""
    sweep: tuple[tuple[int, float], ...] = ()


def run(place: store.ProcessGroupContext, within: float) -> AllReduceFacts:
    """Measure the all-reduce in a forked process, and kill that process at the end.

    Args:
        place: This rank's place in the world, from which the process group is opened as in a run.
        within: Seconds to wait for the facts before the process is killed.

    Returns:
        This rank's facts. If the process failed, took too long or exited without an answer,
        ``wrong`` says so.
    """
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    child = fork.Process(target=_child, args=(place, within, theirs), daemon=True)
    child.start()
    # Close this process's copy of the writing descriptor. Otherwise poll() would not notice that
    # the child has died, because a pipe reports its end only when all writers have closed it.
    theirs.close()
    try:
        if ours.poll(within):
            facts = ours.recv()
        else:
            facts = AllReduceFacts(wrong=f"no end after {within:.0f} s")
    except EOFError:
        # The pipe closes a moment before the child can be waited for.
        child.join(1.0)
        facts = AllReduceFacts(wrong=f"its process ended with {child.exitcode}")
    child.kill()
    child.join()
    assert isinstance(facts, AllReduceFacts)
    return facts


def _child(place: store.ProcessGroupContext, within: float, answer: Connection) -> None:
    signals.die_with_parent(os.getppid())  # a child that hangs in NCCL would keep a GPU
    try:
        facts = _measured(place, within)
    except Exception as error:
        # Torch, Gloo and NCCL raise errors of many types, and the user has to see each of them.
        facts = AllReduceFacts(
            wrong=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        )
    answer.send(facts)


def _measured(place: store.ProcessGroupContext, within: float) -> AllReduceFacts:
    store.install(place)
    import torch
    import torch.distributed as dist

    world, _ = open_world(place, place.backend, timedelta(seconds=within))
    # Float64 holds whole numbers below 2**53 exactly, so the order of the additions does not
    # matter.
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
    """Yield size and busbw of ever larger all-reduces, until one call takes longer than
    ``_LONGEST_CALL``. All ranks use the time of the slowest rank.
    """
    size = _SMALLEST
    share = 2 * (world.world_size - 1) / world.world_size
    while size <= _LARGEST:
        seconds = _call(world, size, _WARM_UPS)
        # The time is the same on all ranks, so all make the same number of calls. Otherwise some
        # ranks would wait forever.
        seconds = _call(world, size, max(1, min(20, int(_MEASURED / seconds))))
        yield size, share * size / seconds
        if seconds > _LONGEST_CALL:
            return
        size *= _GROWTH


def _call(world: World, size: int, count: int) -> float:
    """Return how many seconds one all-reduce of ``size`` bytes takes on the slowest rank, as the
    mean of ``count`` calls.
    """
    import torch
    import torch.distributed as dist

    # torch.ones() makes float32: four bytes each.
    tensor = torch.ones(size // 4, device=world.device)
    # All ranks begin together, so a rank that comes late does not lengthen the measured time.
    dist.barrier()
    began = time.monotonic()
    for _ in range(count):
        dist.all_reduce(tensor)
    if world.device.type == "cuda":
        # An NCCL call returns once it is queued, before it is done.
        torch.cuda.synchronize()
    taken = torch.tensor(
        [(time.monotonic() - began) / count], dtype=torch.float64, device=world.device
    )
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return max(float(taken), 1e-9)


def evaluate(
    facts: Mapping[int, AllReduceFacts], nodes: Mapping[int, str], link: float
) -> Iterator[Finding]:
    """Judge the all-reduce: a missing or wrong sum is a failure, a slow all-reduce a warning.

    Args:
        facts: What each rank measured, by rank.
        nodes: Each rank's node, by rank.
        link: Bytes per second that the slowest node's network can carry; 0 if that is not known.
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
    """Write rank 0's sweep and the threshold in one line.

    Args:
        facts: What each rank measured, by rank.
        link: Bytes per second that the slowest node's network can carry; 0 if that is not known.
    """
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
