"""What a script gets of the signals that Slurm sends: as plain Python below srun, and below
srunddp, in one run.
"""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.cluster.slurm import URGENT
from tests.conftest import BED, ROOT, SLOWNESS
from tests.recorded_signals import LIMIT, RECORDER, Recorded, table
from tests.slurm.conftest import PYTHON, SRUNDDP, TRIES, SlurmJobRunner
from tests.support.starting import until

COMMANDS = {"plain": PYTHON, "srunddp": f"{SRUNDDP} --quiet --channel slurm"}
SETTLED = 2.5 * SLOWNESS  # seconds without a new signal
# A process that stays outside the script's user namespace, as the starter of Apptainer without
# setuid does. It passes on what it gets; a while after, for a signal that is still pending does not
# come twice.
CONTAINER = (
    """bash -c 'unshare --user --map-root-user "$@" & """
    """trap "sleep 0.3; kill -USR1 $!" USR1; wait; wait' bash"""
)
# A shell that passes on what it gets, as in the job scripts of many sites.
FORWARDING = (
    "srun {command} &\nSRUN_PID=$!\ntrap 'kill -USR2 $SRUN_PID' USR2\nwait $SRUN_PID\nwait"
    " $SRUN_PID"
)
# A batch script that a signal does not end, and its step with it.
UNMOVED = "trap : USR1\nsrun {command} &\nwait\nwait"
NEAR_END = ("--time=60",)
DAEMON = "slurmstepd"
APART = "node05,node06"  # what is preempted there takes no other job along

SignalAction = Callable[[SlurmJobRunner, Recorded], object]


def scancel(*options: str) -> SignalAction:
    return lambda runner, job: runner.cluster.run("scancel", *options, job.number)


def interrupt(times: int) -> SignalAction:
    """Press Ctrl-C so many times at srun's terminal."""

    def act(_: SlurmJobRunner, job: Recorded) -> None:
        assert job.srun
        for _press in range(times):
            job.srun.send_signal(signal.SIGINT)
            time.sleep(0.4)

    return act


def draw_near(runner: SlurmJobRunner, job: Recorded) -> None:
    """Bring the job's end near, upon which Slurm sends the signal that was asked for."""
    runner.cluster.run("scontrol", "update", f"jobid={job.number}", "TimeLimit=5")


def preempt(runner: SlurmJobRunner, job: Recorded) -> None:
    node = runner.cluster.run(
        "squeue", "--noheader", f"--jobs={job.number}", "--format=%N"
    ).stdout.strip()
    taking = (
        f"--partition={URGENT}",
        f"--nodelist={node}",
        "--gpus-per-node=8",
        "--output=/dev/null",
    )
    runner.cluster.run("sbatch", *taking, "--wrap=true")


def nothing(_: SlurmJobRunner, __: Recorded) -> None:
    return


def go(_: SlurmJobRunner, job: Recorded) -> None:
    """Have the recorder that sends a signal do so."""
    (job.folder / "go").touch()


def kill(number: signal.Signals, *, group: bool) -> SignalAction:
    """Signal what Slurm has started for each rank, or its process group, as a user on the node
    may.
    """

    def act(_: SlurmJobRunner, job: Recorded) -> None:
        pids = [
            process.pid
            for process in processes(job)
            if (parent := process.parent()) and parent.name() == DAEMON
        ]
        for target in {os.getpgid(pid) for pid in pids} if group else pids:
            (os.killpg if group else os.kill)(target, number)

    return act


def processes(job: Recorded) -> list[psutil.Process]:
    """The processes of a job on its nodes, all of which are on this machine."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "name"])
        if str(job.folder) in (process.info["cmdline"] or ()) and process.info["name"] != "srun"
    ]


@dataclass(frozen=True)
class Row:
    """One way in which signals come.

    Attributes:
        act: what is done once the ranks are ready; least: how many signals a script gets upon that.
        options: of sbatch, or of srun; body: of the batch script, empty for srun from the login
            node.
        linger: seconds for which the script goes on after a signal that asks for an end; Slurm
            looks every 30 s whether a time is over, as that of a preempted job.
        ranks: how many.
        wait: seconds after which a row that has got less is repeated.
        sender: the rank that sends a signal itself.
    """

    act: SignalAction
    least: int
    options: tuple[str, ...] = ()
    body: str = "srun {command}"
    linger: float = 2.0
    ranks: int = 2
    wait: float = math.inf
    sender: str = ""


ROWS = {
    "scancel": Row(scancel(), 2),
    "scancel --signal=USR1": Row(scancel("--signal=USR1"), 1),
    "scancel --signal=USR2": Row(scancel("--signal=USR2"), 1),
    "scancel --signal=INT": Row(scancel("--signal=INT"), 1),
    "scancel --full --signal=USR1": Row(scancel("--full", "--signal=USR1"), 1, body=UNMOVED),
    "scancel --full --signal=USR1, srun alone": Row(scancel("--full", "--signal=USR1"), 0, body=""),
    "scancel --batch --signal=USR1": Row(scancel("--batch", "--signal=USR1"), 0, body=UNMOVED),
    "one Ctrl-C at srun": Row(interrupt(1), 0, body=""),
    "two Ctrl-C at srun": Row(interrupt(2), 1, body="", wait=30.0),
    "the time limit": Row(nothing, 3, ("--time=1",)),
    "--signal=USR2@280": Row(draw_near, 2, (*NEAR_END, "--signal=USR2@280")),
    "--signal=B:USR2@280": Row(draw_near, 2, (*NEAR_END, "--signal=B:USR2@280")),
    "--signal=B:USR2@280, kill -USR2 $SRUN_PID": Row(
        draw_near, 1, (*NEAR_END, "--signal=B:USR2@280"), FORWARDING
    ),
    "preemption": Row(
        preempt,
        5,
        ("--exclude=node[01-04]", "-N1", "--gpus-per-node=8", "--no-requeue"),
        linger=90.0,
    ),
    "scancel --signal=TSTP": Row(scancel("--signal=TSTP"), 1),
    "kill PID": Row(kill(signal.SIGUSR1, group=False), 1),
    "kill -- -PGID": Row(kill(signal.SIGUSR1, group=True), 1),
    # srun puts all tasks of a node into one group.
    "killpg(0) by one of two tasks of a node": Row(
        go, 1, ("-N1",), body="srun -N1 -n2 {command}", sender="0"
    ),
    "a task of an array": Row(scancel("--signal=USR1"), 1, ("--array=7",)),
    "srun -n1": Row(scancel("--signal=USR2"), 1, body="srun -N1 -n1 {command}", ranks=1),
    "a container without setuid": Row(
        scancel("--signal=USR1"), 1, body=f"srun {CONTAINER} {{command}}"
    ),
}


def start(runner: SlurmJobRunner, name: str, row: Row, kind: str) -> Recorded:
    folder = Path(
        tempfile.mkdtemp(prefix=re.sub(r"\W+", "-", f"{kind} {name} "), dir=runner.cluster.shared)
    )
    folder.chmod(0o755)
    command = f"{COMMANDS[kind]} {RECORDER} {folder} {row.linger} {row.sender}"
    environment = {"SRUNDDP_IFACES": str(runner.ifaces), "PYTHONUNBUFFERED": "1"}
    if not row.body:
        job = folder.name
        words = (
            "srun",
            "-N2",
            "-n2",
            f"--exclude={APART}",
            f"--job-name={job}",
            *row.options,
            *command.split(),
        )
        process = runner.cluster.popen(
            *words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        return Recorded(folder, _number(runner, job), process)
    script = folder / "job.sh"
    script.write_text(f"#!/bin/bash\n{row.body.format(command=command)}\n")
    layout = (
        "-N2",
        "-n2",
        f"--exclude={APART}",
        "--parsable",
        f"--chdir={ROOT}",
        f"--output={folder}/out",
    )
    submitted = runner.cluster.run("sbatch", *layout, *row.options, str(script), env=environment)
    return Recorded(folder, submitted.stdout.strip())


def _number(runner: SlurmJobRunner, job: str) -> str:
    end = time.monotonic() + LIMIT
    while not (
        found := runner.cluster.run(
            "squeue", "--noheader", f"--name={job}", "--format=%A"
        ).stdout.strip()
    ):
        assert time.monotonic() < end, job
        time.sleep(0.1)
    return found


def _is_over(runner: SlurmJobRunner, job: Recorded) -> bool:
    return not runner.cluster.run(
        "squeue", "--noheader", f"--jobs={job.number}", check=False
    ).stdout.strip()


# How many rows run at once. Most of it is waiting. But User Mode Linux has one CPU, of which each
# start of a Python takes seconds: beside a slow row, another row's job would reach its time limit.
AT_ONCE = 1 if BED.endswith("uml") else len(ROWS)


def record(runner: SlurmJobRunner) -> dict[str, dict[str, Recorded]]:
    """All rows, as many at once as the machine can take: for each of its name, the job of each kind
    with its records.

    A row is repeated where a script has got less than Slurm sends: of two signals of a kind at once
    the kernel delivers one, and where the batch shell ends, Slurm now and then kills the step
    without a signal. On a busy machine srun of 26.05 misses the second of two Ctrl-C every other
    time. What srunddp loses or adds is the same in each try.
    """
    jobs: dict[str, dict[str, Recorded]] = {}
    names = list(ROWS)
    for first in range(0, len(names), AT_ONCE):
        jobs |= _record(runner, {name: ROWS[name] for name in names[first : first + AT_ONCE]})
    for _ in range(TRIES):
        short = {
            name: row
            for name, row in ROWS.items()
            if not all(job.has(row.least) for job in jobs[name].values())
        }
        if not short:
            break
        jobs |= _record(runner, short)
    return jobs


def _record(runner: SlurmJobRunner, rows: Mapping[str, Row]) -> dict[str, dict[str, Recorded]]:
    jobs = {
        name: {kind: start(runner, name, row, kind) for kind in COMMANDS}
        for name, row in rows.items()
    }
    each = [(rows[name], job) for name, kinds in jobs.items() for job in kinds.values()]
    until(lambda: all([job.is_ready(row.ranks) for row, job in each]), LIMIT, lambda: table(jobs))
    for row, job in each:
        row.act(runner, job)
    acted = time.monotonic()
    until(
        lambda: all(
            [
                kinds["plain"].has(rows[name].least)
                or _is_over(runner, kinds["plain"])
                or time.monotonic() > acted + rows[name].wait
                for name, kinds in jobs.items()
            ]
        ),
        LIMIT,
        lambda: table(jobs),
    )
    settled = time.monotonic() + SETTLED
    while time.monotonic() < settled:
        if any([job.read() for _, job in each]):
            settled = time.monotonic() + SETTLED
        time.sleep(0.2)
    return jobs
