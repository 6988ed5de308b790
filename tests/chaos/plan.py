"""What is to fail in a run, how the run is started, and what srunddp has to make of it."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any

WORLD_SIZE = 6
HYDRA = ("mpich4", "mpich", "intelmpi")  # the launchers that are Hydra


@dataclass(frozen=True)
class Expected:
    """The exit code and a pattern of the cause."""

    code: int
    cause: str


KINDS = {
    "exception": Expected(1, r"ValueError: boom"),
    "exit3": Expected(3, r"exit\b"),
    "os_exit": Expected(9, r"exit\b"),
    "sigkill": Expected(137, r"killed by SIGKILL"),
    "supervisor": Expected(137, r"srunddp itself was killed"),
    "segv": Expected(139, r"killed by SIGSEGV"),
    "sigterm": Expected(143, r"killed by SIGTERM"),
    "memory": Expected(1, r"MemoryError"),
    "bad_alloc": Expected(134, r"killed by SIGABRT"),
    "stop": Expected(147, r"stopped by SIGSTOP"),
    "sleep": Expected(124, r"no step for"),
    "gil": Expected(124, r"no step for"),
}
# And `atexit`, when all ranks have said goodbye: nobody need be there any more to say what happens
# then.
PHASES = ("import", "bootstrap", "training", "shutdown")
SUDDEN = (
    "exception",
    "exit3",
    "os_exit",
    "sigkill",
    "supervisor",
    "segv",
    "sigterm",
    "memory",
    "bad_alloc",
)
"""The kinds that end a process at once; the others leave one that does nothing."""


@dataclass(frozen=True)
class Fault:
    """One rank's failure: `delay` seconds after it has come to `phase`."""

    rank: int
    kind: str
    phase: str = "training"
    delay: float = 0.3


@dataclass(frozen=True)
class Plan:
    """A run of six ranks and what fails in it.

    Attributes:
        faults: none for one that only the test disturbs.
        launcher: `none`, `pmi2`, `pmix` for srun's --mpi; or the name of one of tests.mpirun's
            MPIs.
        kill: srun's --kill-on-bad-exit.
        per_node: tasks on each node.
        torch: DDP over Gloo instead of the stand-in.
        peers: whether a lost connection is an error to them (`raise`) or they wait for ever
            (`block`).
        stubborn: peers ignore SIGTERM.
        children: each rank has a forked and a started child.
        steps: how many there are, unless a failure ends the run before; pace: seconds between them.
        heartbeat: whether srunddp.heartbeat() is called at each.
        options: of srunddp.
    """

    faults: tuple[Fault, ...] = ()
    launcher: str = "none"
    kill: bool = False
    per_node: int = 2
    torch: bool = False
    peers: str = "raise"
    stubborn: bool = False
    children: bool = False
    steps: int = 1_000_000
    pace: float = 0.02
    heartbeat: bool = False
    options: tuple[str, ...] = field(default=())

    @property
    def by_srun(self) -> bool:
        return self.launcher in ("none", "pmi2", "pmix")

    def leaves_no_time(self, kind: str) -> bool:
        """Whether the launcher itself kills all others at once, so that nobody can say why."""
        return self.launcher in HYDRA and kind == "supervisor"

    def program(self, folder: str) -> dict[str, Any]:
        """What the program reads; a failure after the last step needs one."""
        if any(fault.phase in ("shutdown", "atexit") for fault in self.faults):
            steps = 10
        else:
            steps = self.steps
        names = ("torch", "peers", "stubborn", "children", "pace", "heartbeat")
        given = {name: value for name, value in asdict(self).items() if name in names}
        return {
            **given,
            "folder": folder,
            "steps": steps,
            "faults": [asdict(fault) for fault in self.faults],
        }


def node_of(rank: int, per_node: int) -> str:
    """The test cluster's node on which srun puts this rank."""
    return f"node{rank // per_node + 1:02}"


def cause_fits(kind: str, cause: str) -> bool:
    return re.search(KINDS[kind].cause, cause) is not None
