"""``--restarts``: each kind of failure again and again, and failures, also of srunddp itself, amid
restarts.
"""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.chaos.plan import WORLD_SIZE, Plan
from tests.chaos.run import Result, Run, started
from tests.chaos.trials import Sites, sites
from tests.mpirun.conftest import MPIS, there
from tests.slurm.conftest import SRUNDDP, SlurmJobRunner
from tests.slurm.jobs import submit, until
from tests.slurm.test_restarts import CAUSES, PROGRAM, TRAINING, trained, weights
from tests.soak.conftest import Show
from tests.support.starting import workers_of

pytestmark = pytest.mark.soak

COUNTS = {
    "sigkill": 20,
    "exception": 20,
    **dict.fromkeys(CAUSES.keys() - {"sigkill", "exception"}, 5),
    "memory": 5,
}
# Open MPI's own variables by the names that a script of torchrun's reads: a way to rank 0 without
# MPI.
BY_ENV = (
    "RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE"
    ' LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK exec "$@"'
)
CAMPAIGNS = 100
MOST = 3
LAUNCHERS = ("none", "pmi2", *sorted(MPIS))
ENDS_WITHIN = 30.0
LAST = ("cancel", "supervisor")  # what no restart follows


@pytest.fixture(scope="module")
def whole(runner: SlurmJobRunner) -> str:
    folder = runner.cluster.shared / "whole"
    (found,) = weights(trained(runner, "none", 0, folder, "--mpi=none", per_node=1))
    return found


@pytest.mark.parametrize("kind", COUNTS)
def test_each_kind_of_failure_ends_in_the_same_bits(
    kind: str, whole: str, runner: SlurmJobRunner, show: Show
) -> None:
    """All have a handler of SIGTERM, Trainer's."""
    if kind == "stall":
        options: tuple[str, ...] = ("--stall-timeout=3",)
    else:
        options = ()
    if kind == "memory":
        limit: tuple[str, ...] = ("--mem=900M",)
    else:
        limit = ()
    good = 0
    for number in range(COUNTS[kind]):
        folder = runner.cluster.shared / f"{kind}-{number}"
        done = trained(runner, kind, 1, folder, "--mpi=none", *limit, options=options, per_node=1)
        said = "srunddp: ended with 0 after 1 restart" in done.errors
        found = {report["weights"] for report in done.by_rank().values()}
        good += said and found == {whole} and done.code == (1 if kind == "memory" else 0)
        assert good == number + 1, (done.code, done.errors[-3000:])
    show(f"{kind}: {good} of {COUNTS[kind]}")


@pytest.mark.parametrize("name", sorted(MPIS))
def test_under_each_mpi_a_training_goes_on(name: str, tmp_path: Path) -> None:
    mpi = there(name)
    seen = set()
    for number, times in enumerate((0, 1, 1, 1, 1, 1)):
        ours = (SRUNDDP, "--restarts=9", *by_env(name), PROGRAM, "sigkill", str(times), *TRAINING)
        done = mpi.run(2, *without_mpi(name, [*ours, f"--output-dir={tmp_path / str(number)}"]))
        assert done.errors.count("all ranks start anew") == times, done.errors
        seen |= weights(done)
    assert len(seen) == 1


def by_env(launcher: str) -> tuple[str, ...]:
    if launcher.startswith("openmpi"):
        return ("--channel=env",)
    return ()


def without_mpi(launcher: str, ours: list[str]) -> list[str]:
    if not by_env(launcher):
        return ours
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return ["env", "MASTER_ADDR=127.0.0.1", f"MASTER_PORT={port}", "sh", "-c", BY_ENV, "sh", *ours]


def drawn(draw: random.Random) -> Plan:
    launcher = draw.choice(LAUNCHERS)
    stubborn = draw.random() < 0.3
    return Plan(
        launcher=launcher,
        kill=draw.random() < 0.5,
        torch=draw.random() < 0.1,
        peers=draw.choice(("raise", "block")),
        stubborn=stubborn,
        children=not stubborn and draw.random() < 0.4,  # which would ignore SIGTERM too
        steps=150,
        heartbeat=draw.random() < 0.8,
        options=(
            f"--restarts={MOST}",
            "--restart-grace=1s",
            # mpirun's SIGTERM ends no rank that ignores it, and mpirun itself has no limit: the
            # other ranks could save for 300 s.
            "--signal-grace=5s",
            "--timeout=15s",
            *by_env(launcher),
        ),
    )


def disturb(run: Run, draw: random.Random) -> tuple[set[int], str]:
    """Kill some ranks' processes, one or two at a time, amid a restart or not; returns whose, and
    what came last.
    """
    supervisors = {rank: said["supervisor"] for rank, said in run.ready().items()}
    killed: set[int] = set()
    for _ in range(draw.randint(1, MOST + 1)):
        # What a rank has started outlives an srunddp that is killed, and mpirun waits for it.
        kind = draw.choices(("worker", "two", *LAST), (5, 2, 1, 0 if run.plan.children else 1))[0]
        time.sleep(draw.choice((0.0, draw.uniform(0.0, 0.6), draw.uniform(0.0, 2.5))))
        if run.process.poll() is not None:
            break
        if kind == "cancel":
            run.site.cluster.cancel_all() if run.site.cluster else os.kill(
                run.process.pid, signal.SIGTERM
            )
            return killed, kind
        ranks = draw.sample(range(WORLD_SIZE), 2 if kind == "two" else 1)
        killed |= {*ranks}
        for rank in ranks:
            with suppress(psutil.NoSuchProcess, IndexError):
                supervisor = supervisors[rank]
                pids = [supervisor] if kind == "supervisor" else workers_of(supervisor)
                psutil.Process(draw.choice(pids)).kill()
        if kind == "supervisor":
            return killed, kind
    return killed, "worker"


def problems(killed: set[int], last: str, result: Result) -> list[str]:
    """What is not as it should be."""
    restarts = [
        int(each)
        for each in re.findall(rf"srunddp: restart (\d) of {MOST}: all ranks", result.errors)
    ]
    found = [f"left: {result.left}"] * bool(result.left) + ["it did not end"] * (
        result.code is None
    )
    if restarts != list(range(1, len(restarts) + 1)) or len(restarts) > MOST:
        found.append(f"restarts {restarts}")
    # With explicit variables nobody knows the launcher: its SIGTERM, and its SIGKILL of srunddp
    # later, are causes.
    named = [
        verdict for verdict in result.verdicts if last != "cancel" or verdict.code not in (137, 143)
    ]
    found += [f"{verdict}" for verdict in named if not set(verdict.ranks) <= killed]
    if last == "worker":
        ended = (
            f"srunddp: ended with 0 after {len(restarts)} restart" in result.errors or not restarts
        )
        refused = "srunddp: not restarted: " in result.errors
        amid = "killed by SIGKILL" in result.errors.rpartition("all ranks start anew")[2]
        if result.code == 0:
            good = ended and not refused
        else:
            good = result.code in (137, 69) and (refused or amid)
        found += [f"exit code {result.code}"] * (not good)
    elif last == "supervisor" and result.code == 0:
        found.append("exit code 0")
    return found


@pytest.mark.parametrize("seed", range(CAMPAIGNS))
def test_failures_at_random_moments_of_restarts(
    seed: int, runner: SlurmJobRunner, tmp_path: Path
) -> None:
    draw = random.Random(seed)
    plan = drawn(draw)
    where: Sites = sites(runner.cluster, tmp_path)

    def words(command: list[str]) -> list[str]:
        first = command.index(SRUNDDP)
        return [*command[:first], *without_mpi(plan.launcher, command[first:])]

    with started(plan, where.of(plan), words) as run:
        killed, last = disturb(run, draw)
        run.failing()
        # torch is imported anew by six ranks.
        result = run.finish(2 * ENDS_WITHIN if plan.torch else ENDS_WITHIN)
    assert problems(killed, last, result) == [], (plan, killed, last, result.describe())


def test_the_time_limit_ends_a_run_that_starts_anew_all_the_time(runner: SlurmJobRunner) -> None:
    script = runner.cluster.shared / "fails_again.py"
    script.write_text(
        "import os, time, srunddp\nsrunddp.heartbeat()\ntime.sleep(0.3)\nos._exit(9)\n"
    )
    job = submit(runner, "limit", f"srun -n2 {SRUNDDP} --restarts=9999 {script}\n", "--time=1")
    until(job.is_over, [job], 240.0)
    assert job.state == "TIMEOUT", job
    assert job.output.count("all ranks start anew") > 10
    assert "Traceback" not in job.output
