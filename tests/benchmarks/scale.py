"""One job of up to 16,384 ranks: meeting, the news of a failure, and a restart

Rank 0 is real: its rendezvous with proofs by HMAC, its supervisor, and the coordinator in it. Two
processes play all other supervisors over loopback, each rank by a connection of its own, from its
node's own address. All figures are microseconds for each rank. `wall` is the time until the last
rank is through, and `CPU` what rank 0's process uses meanwhile. The processes share two cores, so
`wall` has the cost of the played ranks in it.

A *rendezvous* begins when all ranks come at once, where rank 0 listens already. It ends when the
last rank has what rank 0 tells. TCPStore (libuv) does what `init_process_group` needs at least:
each client connects, sets a key of its own, adds to a counter, and gets a key that the last one
sets. Two processes with 16 threads each play them. c10d is torchrun's rendezvous, with one agent
for each node of eight ranks, as a thread in one of two processes, so that its `wall` is mostly
theirs. With more agents it takes minutes here. Its store and TCPStore make no DNS look-ups.

A *verdict* is the time from one rank's failure until the last rank knows of it. A *restart* lasts
from that failure until all ranks have met again, by the real decision of `--restarts`, without the
time of starting processes. *idle* is rank 0's supervisor while nothing fails: its CPU in each
second, in which it gets and sends the ranks' pings.

What the cases "by the number of ranks" divide by is srunddp's own time for each rank in a smaller
job. 1.0 means that the time grows as the number of ranks does.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from functools import cache, partial

from tests.benchmarks.benchmark import FAILED, Case, Limit, NotMeasuredError, Sample
from tests.support.fake_ranks import PER_NODE, Cost, FakeJob, Processes, read

SIZES = (1024, 4096, 16384)
IDLE = 5.5  # longer than from one ping to the next
SPARE_FILES = 64
MOST_AGENTS = 128


def per_rank(cost: Cost, ranks: int) -> Sample:
    return {"wall": 1e6 * cost.wall / ranks, "CPU": 1e6 * cost.cpu / ranks}


@cache  # all steps of one job, and again for comparing sizes
def job(ranks: int, repeat: int) -> dict[str, Sample]:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < ranks + SPARE_FILES:
        raise NotMeasuredError("the hard limit of open files is lower")
    with FakeJob(ranks, restarts=1) as fake:
        rendezvous = fake.meet()
        idle = fake.idle(IDLE)
        verdict, _, restart = fake.fail(ranks // 3, restarts=True)
    assert restart
    steps = {"rendezvous": rendezvous, "verdict": verdict, "restart": restart}
    share = {"CPU": 1e6 * idle.cpu / idle.wall / ranks}
    return {**{step: per_rank(cost, ranks) for step, cost in steps.items()}, "idle": share}


def step_of(step: str, ranks: int, repeat: int) -> Sample:
    return job(ranks, repeat)[step]


def torch_store(ranks: int, _: int) -> Sample:
    return per_rank(joined("store", ranks), ranks)


def c10d(ranks: int, _: int) -> Sample:
    if ranks > PER_NODE * MOST_AGENTS:
        raise NotMeasuredError(f"{ranks // PER_NODE} agents take minutes here")
    cost = joined("c10d", ranks // PER_NODE)
    if cost.wall == FAILED:  # not once more, as it takes a minute each time
        raise NotMeasuredError(f"{ranks // PER_NODE} agents do not meet within 60 s")
    return per_rank(cost, ranks)


def joined(way: str, clients: int) -> Cost:
    with Processes("tests.support.fake_agents", "server") as processes:
        port = read(processes.measured)["port"]
        processes.play("tests.support.fake_agents", (way, port, clients), range(clients))
        return processes.since(processes.say("join"), processes.answers())


def cases(quick: bool) -> Iterator[Case]:
    sizes, repeats = (SIZES[:1], 1) if quick else (SIZES, 3)
    for ranks in sizes:
        ways: dict[str, Callable[[int], Sample]] = {
            "srunddp": partial(step_of, "rendezvous", ranks)
        }
        ways["TCPStore"] = partial(torch_store, ranks)
        if not (quick):
            ways["c10d"] = partial(c10d, ranks)
        limits = (Limit("wall", "TCPStore", 1.0), Limit("wall", "c10d", 1.0))
        yield Case(f"rendezvous of {ranks:,} ranks", ways, repeats, limits, "µs")
    largest, *smaller = sizes[::-1]
    for step in ("rendezvous", "verdict", "restart", "idle"):
        by_size = {
            f"{ranks:,} ranks": partial(step_of, step, ranks) for ranks in (largest, *smaller)
        }
        limit = Limit("CPU" if step == "idle" else "wall", f"{sizes[0]:,} ranks", 1.1)
        yield Case(f"{step}, by the number of ranks", by_size, repeats, (limit,), "µs")
