"""Start a run that is to fail, disturb it, wait until nothing of it is left, and judge what it
did.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.plan import KINDS, WORLD_SIZE, Fault, Plan, cause_fits, node_of
from tests.chaos.processes import Watch
from tests.chaos.verdict import Verdict, verdicts
from tests.cluster.cluster import Cluster
from tests.conftest import PROGRAMS, ROOT, SLOWNESS
from tests.mpirun.conftest import MPIS

SRUNDDP = str(ROOT / "bin" / "srunddp")
START_WITHIN = 60.0 * SLOWNESS
END_WITHIN = 45.0 * SLOWNESS
# Ten times what it takes, as the trials say; a rank that stands still is given 10 s.
AT_ONCE = 20.0 * SLOWNESS
STOPPED = 30.0 * SLOWNESS


@dataclass(frozen=True)
class Site:
    """Where runs go: the test cluster with its ifaces.conf, or this machine; and a folder that all
    ranks see.
    """

    folder: Path
    cluster: Cluster | None = None
    ifaces: Path | None = None
    mpi: tuple[tuple[str, str], ...] = ()
    """Variables that mpi4py needs under srun."""

    def popen(
        self, words: Sequence[str], env: dict[str, str], output: Path, errors: Path
    ) -> subprocess.Popen[str]:
        with output.open("w") as out, errors.open("w") as err:
            if self.cluster:
                variables = {"SRUNDDP_IFACES": str(self.ifaces), **dict(self.mpi), **env}
                return self.cluster.popen(*words, env=variables, stdout=out, stderr=err)
            return subprocess.Popen(
                words,
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                text=True,
                start_new_session=True,
            )


@dataclass(frozen=True)
class Result:
    """How it ended. `gone` and `back`: seconds from the failure until no process of a rank was
    left, and until the launcher had returned; None where there was no failure, or no end. `alone`:
    all other ranks and their supervisors had ended before the failure.
    """

    code: int | None
    output: str
    errors: str
    culprit: int | None
    gone: float | None
    back: float | None
    left: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    alone: bool = False

    def describe(self) -> str:
        """For a test's message."""
        return (
            f"rc {self.code}, gone {self.gone}, back {self.back}, left {self.left},"
            f" {self.verdicts}\n{self.errors}"
        )


class Run:
    """A run that was started; see :func:`started`."""

    def __init__(
        self, plan: Plan, site: Site, words: Callable[[list[str]], list[str]] | None = None
    ) -> None:
        self.plan = plan
        self.site = site
        self.mark = f"CHAOS_RUN={uuid.uuid4().hex}"
        self.folder = Path(tempfile.mkdtemp(prefix="chaos-", dir=site.folder))
        self.log_dir = self.folder / "log"
        self.watch = Watch(self.mark)
        command, env = launcher(plan, self.folder)
        name, _, value = self.mark.partition("=")
        env |= {name: value, "CHAOS": json.dumps(plan.program(str(self.folder)))}
        self._command = words(command) if words else command
        self._env = env
        self._failed_at: float | None = None

    def start(self) -> None:
        self.process = self.site.popen(
            self._command, self._env, self.folder / "output", self.folder / "errors"
        )

    def ready(self) -> dict[int, dict[str, Any]]:
        """Wait until all ranks train: by rank its pid, its supervisor's, and its node."""
        self.until(lambda: len(self.said("ready")) == WORLD_SIZE, START_WITHIN)
        return self.said("ready")

    def until(self, condition: Callable[[], object], within: float) -> None:
        end = time.monotonic() + within
        while not condition():
            assert time.monotonic() < end, f"it never happened\n{self._errors()}"
            assert self.process.poll() is None, (
                f"it ended with {self.process.returncode}\n{self._errors()}"
            )
            time.sleep(0.01)

    def failing(self) -> None:
        """The test itself makes it fail now."""
        self._failed_at = time.monotonic()

    def finish(self, within: float = END_WITHIN) -> Result:
        """Wait for the end of all processes, at most `within` seconds from the failure."""
        began = time.monotonic()
        while self.watch.living() or self.process.poll() is None:
            since = self.failed_at
            if time.monotonic() > (since + within if since else began + START_WITHIN + within):
                break
            time.sleep(0.01)
        return self._result()

    @property
    def failed_at(self) -> float | None:
        failed = [said["time"] for said in self.said("failed").values()]
        return self._failed_at or (min(failed) if failed else None)

    def _result(self) -> Result:
        failed = self.failed_at
        said = self.said("failed")
        left = tuple(f"{process.pid} {process.name}" for process in self.watch.living())
        ranks = [process.ended for process in self.watch.all.values() if not process.is_launcher]
        launchers = [process.ended for process in self.watch.all.values() if process.is_launcher]
        if said:
            culprit = min(said, key=lambda rank: said[rank]["time"])
        else:
            culprit = None
        return Result(
            self.process.poll(),
            (self.folder / "output").read_text(errors="replace"),
            self._errors(),
            culprit,
            _last(ranks, failed),
            _last(launchers, failed),
            left,
            tuple(verdicts(self._errors())),
            alone=culprit is not None and self._is_alone(culprit),
        )

    def _is_alone(self, culprit: int) -> bool:
        """Whether no process of another rank was there when this one failed."""
        others = [said for rank, said in self.said("ready").items() if rank != culprit]
        if len(others) < WORLD_SIZE - 1:
            return False
        pids = {pid for said in others for pid in (said["pid"], said["supervisor"])}
        failed = self.failed_at
        assert failed is not None
        ends = [process.ended for process in self.watch.all.values() if process.pid in pids]
        return all(end is not None and end < failed for end in ends)

    def _errors(self) -> str:
        return (self.folder / "errors").read_text(errors="replace")

    def said(self, what: str) -> dict[int, dict[str, Any]]:
        """Of each rank: when it was `ready`, its `steps` so far, and that it `failed`."""
        return {
            int(file.suffix[1:]): json.loads(file.read_text())
            for file in self.folder.glob(f"{what}.*")
        }


@contextmanager
def started(
    plan: Plan, site: Site, words: Callable[[list[str]], list[str]] | None = None
) -> Iterator[Run]:
    """A run that is on its way; nothing of it is left behind.

    Args:
        plan: what is to fail; site: where it runs.
        words: makes another command line of the launcher's, for instance with a wrapper around
            srunddp.
    """
    run = Run(plan, site, words)
    with run.watch:
        run.start()
        try:
            yield run
        finally:
            _end(run)


def carry_out(plan: Plan, site: Site, within: float = END_WITHIN) -> Result:
    """A run whose ranks fail by themselves."""
    with started(plan, site) as run:
        return run.finish(within)


def wrong(plan: Plan, result: Result, limit: float) -> list[str]:
    """What srunddp did not do as promised; empty for a run in which all was right.

    Args:
        plan: with at least one fault.
        result: of carrying it out.
        limit: seconds within which all must have ended.
    """
    fault = next((fault for fault in plan.faults if fault.rank == result.culprit), None)
    if fault is None:
        return ["no rank came to its failure"]
    if result.left:
        found = [f"left: {', '.join(result.left)}"]
    else:
        found = []
    if result.gone is None or result.gone > limit:
        found.append(f"gone after {result.gone} s instead of {limit:g}")
    if plan.leaves_no_time(fault.kind):
        return found if result.code else [*found, "exit code 0"]
    if result.code != KINDS[fault.kind].code:
        found.append(f"exit code {result.code} instead of {KINDS[fault.kind].code}")
    if fault.kind == "supervisor" and result.alone and not result.verdicts:
        # Nobody is left that could say it: the other ranks' scripts were over, and all had left.
        return found
    return [*found, *_verdict_wrong(plan, fault, result.verdicts)]


def _verdict_wrong(plan: Plan, fault: Fault, given: Sequence[Verdict]) -> list[str]:
    if len(given) != 1:
        return [f"{len(given)} verdicts"]
    node = node_of(fault.rank, plan.per_node) if plan.by_srun else os.uname().nodename
    found = []
    if (given[0].ranks, given[0].node) != ((fault.rank,), node):
        found.append(
            f"rank {given[0].ranks} on {given[0].node} named instead of {fault.rank} on {node}"
        )
    if not cause_fits(fault.kind, given[0].cause) or given[0].code != KINDS[fault.kind].code:
        found.append(f"cause {given[0].cause!r}, code {given[0].code} named for {fault.kind}")
    return found


def launcher(plan: Plan, folder: Path) -> tuple[list[str], dict[str, str]]:
    """The command line and its variables."""
    program = str(PROGRAMS / "stand_in.py")
    ours = [SRUNDDP, "--quiet", *(option.format(folder=folder) for option in plan.options), program]
    if plan.by_srun:
        nodes = WORLD_SIZE // plan.per_node
        options = [f"--mpi={plan.launcher}", f"--kill-on-bad-exit={int(plan.kill)}"]
        # By name: nodes that an earlier run has not quite left would be passed over, and others
        # taken.
        layout = [
            f"-N{nodes}",
            f"--nodelist=node[01-{nodes:02}]",
            f"--ntasks-per-node={plan.per_node}",
        ]
        return ["srun", *options, *layout, *ours], {
            "VIRTUAL_ENV": str(ROOT / ".venv"),
            "OMP_NUM_THREADS": "1",
        }
    mpi = MPIS[plan.launcher]
    return [mpi.mpirun, *mpi.options, "-n", str(WORLD_SIZE), *ours], mpi.here()


def _last(ends: Sequence[float | None], since: float | None) -> float | None:
    known = [end for end in ends if end is not None]
    if since and known and len(known) == len(ends):
        return round(max(known) - since, 3)
    return None


def _end(run: Run) -> None:
    if run.process.poll() is not None and not run.watch.living():
        return
    deadline = time.monotonic() + 10.0
    while (run.watch.living() or run.process.poll() is None) and time.monotonic() < deadline:
        run.watch.kill()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(run.process.pid, signal.SIGKILL)
        time.sleep(0.02)
    if run.site.cluster:
        run.site.cluster.cancel_all()


def check(plan: Plan, site: Site, limit: float = AT_ONCE) -> Result:
    result = carry_out(plan, site)
    assert wrong(plan, result, limit) == [], result.describe()
    return result
