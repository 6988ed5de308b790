"""When one rank fails under srun, all end within two seconds and the one that failed is named.
Mostly without torch.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.plan import SUDDEN, Fault, Plan
from tests.chaos.run import AT_ONCE, STOPPED, Run, Site, carry_out, check, started, wrong
from tests.chaos.verdict import victims
from tests.conftest import PROGRAMS, ROOT
from tests.slurm.conftest import SRUNDDP, SlurmJobRunner, gated, need_pmix, site_mpi
from tests.slurm.jobs import look, submit, until

pytestmark = pytest.mark.slurm

STALL = 4
SUSPENDED = 12.0
# Ten times KillWait, for which Slurm waits before it kills what ignores its SIGTERM.
SLURM_ENDS_ALL = 60.0
REPORT = str(PROGRAMS / "report.py")


@pytest.fixture
def site(runner: SlurmJobRunner) -> Site:
    return Site(runner.cluster.shared, runner.cluster, runner.ifaces, tuple(site_mpi().items()))


@pytest.mark.parametrize("kind", gated(SUDDEN, "exit3", "sigkill", "supervisor"))
def test_all_end_and_the_culprit_is_named_however_it_failed(kind: str, site: Site) -> None:
    check(Plan((Fault(3, kind),), kill=True), site)


@pytest.mark.parametrize("kind", gated(("exception", "exit3", "sigkill", "supervisor"), "sigkill"))
def test_rank_0s_failure_ends_all_where_srun_lets_others_run_on(kind: str, site: Site) -> None:
    check(Plan((Fault(0, kind),), peers="block"), site)


@pytest.mark.parametrize("phase", ["import", "bootstrap", "shutdown"])
@pytest.mark.parametrize(("rank", "kind"), [(4, "exception"), (0, "sigkill")])
def test_it_does_not_matter_how_far_the_script_was(
    phase: str, rank: int, kind: str, site: Site
) -> None:
    check(Plan((Fault(rank, kind, phase),), peers="block"), site)


@pytest.mark.parametrize(("kind", "code"), [("segv", 139), ("os_exit", 9)])
def test_a_rank_that_fails_when_all_is_done_keeps_its_exit_code(
    kind: str, code: int, site: Site
) -> None:
    result = carry_out(Plan((Fault(3, kind, "atexit"),)), site)
    assert (result.code, result.left) == (code, ()), result.describe()


@pytest.mark.parametrize("mpi", ["pmi2", "pmix"])
@pytest.mark.parametrize(("rank", "kind"), [(5, "supervisor"), (1, "exit3")])
def test_it_does_not_matter_which_mpi_type_srun_has(
    mpi: str, rank: int, kind: str, site: Site, runner: SlurmJobRunner
) -> None:
    if mpi == "pmix":
        need_pmix(runner.cluster)
    check(Plan((Fault(rank, kind),), launcher=mpi), site)


def test_six_nodes_end_as_one(site: Site) -> None:
    check(Plan((Fault(5, "sigkill"),), per_node=1, peers="block"), site)


@pytest.mark.parametrize("kill", [True, False])
def test_peers_that_ignore_sigterm_and_wait_for_ever_end_too(kill: bool, site: Site) -> None:
    check(Plan((Fault(2, "sigkill"),), kill=kill, peers="block", stubborn=True), site)


def test_a_rank_that_may_save_ends_its_write(runner: SlurmJobRunner) -> None:
    """srun kills the step when a task ends with an error, so no supervisor leaves before."""
    folder = runner.cluster.shared / "victim"
    folder.mkdir(exist_ok=True)
    command = (SRUNDDP, str(PROGRAMS / "victim.py"), "write", str(folder))
    done = runner.srun("-N2", "--kill-on-bad-exit=1", *command)
    assert done.code == 1, done.errors
    assert "rank 1 on node02 failed: ValueError: boom" in done.errors
    assert (folder / "saved").read_text().endswith("END")


@pytest.mark.parametrize("kind", ["exception", "sigkill", "supervisor"])
def test_the_children_of_every_rank_end_too(kind: str, site: Site) -> None:
    check(Plan((Fault(3, kind),), peers="block", children=True), site)


@pytest.mark.alone  # on a busy machine the first of two that fail 0.15 s apart need not end first
def test_of_two_failures_the_first_is_the_verdict(site: Site) -> None:
    plan = Plan((Fault(1, "exit3", delay=0.3), Fault(4, "exception", delay=0.45)), peers="block")
    assert check(plan, site).culprit == 1


@pytest.mark.parametrize("peers", gated(("raise", "block"), "raise"))
def test_victims_are_said_to_be_victims(peers: str, site: Site) -> None:
    result = check(Plan((Fault(3, "exception"),), peers=peers), site)
    assert "ValueError: boom" in result.errors.partition("srunddp: rank 3 on node02 failed: ")[2]
    assert "node01" in victims(result.errors), result.errors
    assert "ranks 0-1" in victims(result.errors), result.errors


def test_failure_json_says_all_that_the_verdict_says(site: Site) -> None:
    plan = Plan((Fault(3, "exception"),), options=("--log-dir", "{folder}/log"))
    with started(plan, site) as run:
        result = run.finish()
        found = list(run.log_dir.glob("*/failure.json"))
        assert len(found) == 1, result.describe()
        record = json.loads(found[0].read_text())
    assert wrong(plan, result, AT_ONCE) == [], result.describe()
    assert (record["rank"], record["node"], record["exit_code"]) == (3, "node02", 1)
    assert "ValueError: boom" in record["cause"]
    assert "boom" in record["traceback"]
    assert {(victim["rank"], victim["node"]) for victim in record["victims"]} == {
        (0, "node01"),
        (1, "node01"),
        (2, "node02"),
        (4, "node03"),
        (5, "node03"),
    }
    assert record["time"]


@pytest.mark.parametrize(("rank", "kind"), [(3, "sigkill"), (0, "exception")])
def test_gloo_s_own_errors_do_not_hide_the_culprit(rank: int, kind: str, site: Site) -> None:
    result = check(Plan((Fault(rank, kind),), torch=True), site)
    assert result.errors.count("Traceback") == (kind == "exception"), result.describe()


def test_a_good_run_has_no_verdict(site: Site) -> None:
    result = carry_out(Plan(steps=50, children=False), site)
    assert (result.code, result.verdicts, result.left) == (0, (), ()), result.describe()


@pytest.mark.parametrize("rank", [0, pytest.param(3, marks=pytest.mark.gate)])
def test_a_rank_that_was_stopped_for_ten_seconds_is_named(rank: int, site: Site) -> None:
    check(Plan((Fault(rank, "stop"),)), site, STOPPED)


@pytest.mark.parametrize("kind", gated(("sleep", "gil"), "sleep"))
def test_a_rank_that_makes_no_step_is_named_with_where_it_stands(kind: str, site: Site) -> None:
    plan = Plan((Fault(4, kind),), heartbeat=True, options=("--stall-timeout", str(STALL)))
    result = check(plan, site, STALL + 20.0)
    assert "faults.py" in result.errors, result.describe()


def test_without_a_heartbeat_no_script_stalls(site: Site) -> None:
    result = carry_out(Plan(steps=3, pace=2.0, options=("--stall-timeout", "1")), site)
    assert (result.code, result.verdicts) == (0, ()), result.describe()


def late(rank: int, seconds: int) -> Callable[[list[str]], list[str]]:
    """A wrapper with which this rank does not come for so long."""

    def words(command: list[str]) -> list[str]:
        at = command.index(SRUNDDP)
        script = f'[ "$SLURM_PROCID" = {rank} ] && sleep {seconds}; exec "$@"'
        return [*command[:at], "sh", "-c", script, "sh", *command[at:]]

    return words


def test_a_rank_that_never_starts_is_named_and_all_end(site: Site) -> None:
    plan = Plan(kill=True, options=("--timeout", "4"))
    with started(plan, site, late(4, 600)) as run:
        result = run.finish(120)
    assert result.left == (), result.describe()
    assert result.code != 0
    assert "rank 4 on node03" in result.errors
    assert "Traceback" not in result.errors


def test_a_supervisor_killed_during_the_rendezvous_ends_all(site: Site) -> None:
    with started(Plan(kill=True), site, late(4, 600)) as run:
        run.until(lambda: len(supervisors(run)) == 5, 120)
        victim = next(pid for pid in supervisors(run) if b"SLURM_PROCID=3\0" in environment(pid))
        run.until(lambda: has_met(site, "node02", victim), 120)
        run.until(lambda: at_rest(supervisors(run)), 120)  # rank 0 has checked who it is
        run.failing()
        os.kill(victim, signal.SIGKILL)
        result = run.finish(120)
    assert result.left == (), result.describe()
    assert result.code != 0
    assert "rank 3 on node02" in result.errors, result.describe()


SAVES_LAST = """
import os, pathlib, sys, time
if os.environ["RANK"] == "0":
    time.sleep(9)
    pathlib.Path(sys.argv[1]).write_text("the last model")
"""


@pytest.mark.parametrize("how", ["option", "variable"])
def test_srun_kills_no_rank_that_saves_when_the_others_are_done(
    runner: SlurmJobRunner, how: str
) -> None:
    """Job scripts with --wait are common, and a site may set WaitTime."""
    script = runner.cluster.shared / "saves_last.py"
    script.write_text(SAVES_LAST)
    saved = runner.cluster.shared / f"saved.{how}"
    options = ["--wait=3"] if how == "option" else []
    variables = {} if options else {"SLURM_WAIT": "3"}
    words = ("-N2", "-n2", "--kill-on-bad-exit=1", *options, SRUNDDP, "--quiet", str(script))
    done = runner.srun(*words, str(saved), env=variables)
    assert (done.code, saved.is_file()) == (0, True), done.errors


def test_a_job_that_slurm_suspends_and_resumes_has_not_failed(
    site: Site, runner: SlurmJobRunner
) -> None:
    """Longer than a rank may be stopped for, and than a line may be silent for."""
    with started(Plan(heartbeat=True, options=("--stall-timeout", "8")), site) as run:
        rank = run.ready()[0]
        job = next(
            word
            for word in environment(rank["pid"]).split(b"\0")
            if word.startswith(b"SLURM_JOB_ID=")
        )
        words = job.decode().removeprefix("SLURM_JOB_ID=")
        runner.cluster.run("scontrol", "suspend", words)
        run.until(lambda: is_suspended(rank["supervisor"]), 120)
        time.sleep(SUSPENDED)
        assert is_suspended(rank["pid"])
        runner.cluster.run("scontrol", "resume", words)
        resumed = time.monotonic()
        run.until(
            lambda: all(said["time"] > resumed + 12.0 for said in run.said("steps").values()), 120
        )
        assert run.process.poll() is None, run.finish(0).describe()


def is_suspended(pid: int) -> bool:
    """Whether a process is stopped, or frozen with its control group.

    Frozen with a group of version 1 it is in a call that cannot be interrupted; of version 2 it
    sleeps like any other, and the group alone says so.
    """
    if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "TD":
        return True
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        hierarchy, _, group = line.split(":", 2)
        events = Path(f"/sys/fs/cgroup{group}/cgroup.events")
        if hierarchy == "0" and events.is_file():
            return "frozen 1" in events.read_text().splitlines()
    return False


@pytest.mark.gate
def test_with_munge_the_ranks_prove_who_they_are(site: Site, runner: SlurmJobRunner) -> None:
    """And one that cannot is refused, with a word on what it lacks."""
    munge = {"SRUNDDP_MUNGE_SOCKET": str(runner.cluster.munge_socket)}
    good = runner.srun("-N3", "--ntasks-per-node=2", SRUNDDP, "--quiet", REPORT, env=munge)
    assert (good.code, len(good.reports)) == (0, 6), good.errors
    script = (
        f'[ "$SLURM_PROCID" = 3 ] && export SRUNDDP_MUNGE_SOCKET=/nowhere; exec {SRUNDDP} --timeout'
        f" 20 {REPORT}"
    )
    refused = runner.srun("-N3", "--ntasks-per-node=2", "sh", "-c", script, env=munge)
    assert refused.code != 0
    assert "rank 3 on node02" in refused.errors
    assert "munge" in refused.errors
    assert "Traceback" not in refused.errors


def environment(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def has_met(site: Site, node: str, supervisor: int) -> bool:
    """Whether it has connected to rank 0."""
    assert site.cluster
    sockets = (socket for socket in site.cluster.sockets(node) if socket.state == "established")
    return any(owner.pid == supervisor for socket in sockets for owner in socket.owners)


def at_rest(pids: list[int]) -> bool:
    """Whether these processes use no CPU for a second."""
    before = [Path(f"/proc/{pid}/schedstat").read_text() for pid in pids]
    time.sleep(1.0)
    return before == [Path(f"/proc/{pid}/schedstat").read_text() for pid in pids]


def supervisors(run: Run) -> list[int]:
    """Of those ranks that have forked their worker."""
    there = [process.pid for process in run.watch.living() if process.name.startswith("python")]
    parents = {parent(pid) for pid in there}
    return [pid for pid in there if pid in parents]


def parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None  # it has just ended


def by_batch(runner: SlurmJobRunner) -> Callable[[list[str]], list[str]]:
    def words(command: list[str]) -> list[str]:
        script = runner.cluster.shared / "job.sh"
        script.write_text(
            f"#!/bin/bash\nexport SRUNDDP_IFACES={runner.ifaces}\n{' '.join(command)}\n"
        )
        layout = (
            "-N3",
            "--ntasks-per-node=2",
            f"--chdir={ROOT}",
            "--output",
            str(runner.cluster.shared / "job.out"),
        )
        return ["sbatch", "--wait", *layout, str(script)]

    return words


@pytest.mark.gate
def test_scancel_leaves_nothing(site: Site, runner: SlurmJobRunner) -> None:
    with started(Plan(stubborn=True, children=True), site) as run:
        run.ready()
        run.failing()
        runner.cluster.run("scancel", "--user=root")
        result = run.finish(SLURM_ENDS_ALL)
    assert result.gone is not None, result.describe()
    assert result.left == ()


def test_the_batch_shell_s_end_leaves_nothing(site: Site, runner: SlurmJobRunner) -> None:
    with started(Plan(stubborn=True, children=True), site, by_batch(runner)) as run:
        run.ready()
        (shell,) = (process.pid for process in run.watch.living() if process.name == "slurm_script")
        run.failing()
        os.kill(shell, signal.SIGKILL)
        result = run.finish(SLURM_ENDS_ALL)
    # `left` may have sbatch itself, which looks less and less often whether the job is over.
    assert result.gone is not None, result.describe()


def test_srun_s_end_leaves_nothing(site: Site) -> None:
    with started(Plan(children=True), site) as run:
        run.ready()
        run.failing()
        run.process.kill()
        result = run.finish(SLURM_ENDS_ALL)
    assert result.gone is not None, result.describe()
    assert result.left == ()


def test_the_next_run_on_the_same_nodes_is_not_disturbed(site: Site) -> None:
    plan = Plan((Fault(3, "sigkill"),))
    check(plan, site)
    good = carry_out(replace(plan, faults=(), steps=20), site)
    assert good.code == 0, good.describe()


HANGING = """import os, time
from pathlib import Path
folder, rank = Path(os.environ["FOLDER"]), os.environ["RANK"]
def load():
    (folder / f"at.{rank}").touch()
    while not (folder / "go").exists(): time.sleep(0.05)
def wait():
    load()
load() if rank == "2" else wait()
"""


@pytest.mark.gate
def test_each_rank_of_a_job_that_hangs_prints_where_it_is(runner: SlurmJobRunner) -> None:
    """As somebody asks for it by scancel; and then the job goes on."""
    script = runner.cluster.shared / "hanging.py"
    script.write_text(HANGING)
    job = submit(runner, "hanging", f"srun {SRUNDDP} {script}\n", "--ntasks-per-node=2")
    until(lambda: len(list(job.folder.glob("at.*"))) == 4, [job])
    runner.cluster.run("scancel", "--signal=URG", job.number)
    until(lambda: not look([job]) and job.output.count("in load\n") == 4, [job])
    for rank in range(4):
        assert re.search(
            rf"srunddp: rank {rank} on node0\d is in load \(hanging.py:6\)\nStack \(most",
            job.output,
        )
    assert job.output.count("in wait\n") == 3
    triage = runner.cluster.run(*SRUNDDP.split(), "triage", str(job.folder / "out"), check=False)
    assert triage.stdout.startswith("no failure found, and no end either"), triage.stdout
    (job.folder / "go").touch()
    until(lambda: look([job]), [job])
    assert job.state == "COMPLETED"
