"""No port is fought over: steps at once, strangers on the preferred ports, reserved ports, a
firewall's range.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from srunddp.bootstrap.environment.detect import detect
from srunddp.bootstrap.network import ifaces_entry
from srunddp.bootstrap.rendezvous import discovery
from srunddp.bootstrap.rendezvous.messages import Hello, RendezvousMessage
from tests.cluster.nodes import NODES
from tests.conftest import PROGRAMS
from tests.slurm.conftest import SRUNDDP, TRIES, SlurmJobRunner
from tests.support.starting import until

REPORT = str(PROGRAMS / "report.py")
TORCHRUN_STYLE = str(PROGRAMS / "torchrun_style.py")
pytestmark = pytest.mark.slurm


def preferred(job: str, step: int) -> list[int]:
    """The ports that the ranks of a step look at, the likeliest first."""
    names = {"SLURM_JOB_ID": job, "SLURM_STEP_ID": str(step), "SLURM_STEP_NUM_TASKS": "2"}
    environment = detect({**names, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    return discovery.rendezvous_ports(environment, ifaces_entry.DEFAULT, None)


@contextmanager
def strangers(runner: SlurmJobRunner, ports: list[int]) -> Iterator[list[dict[str, Any]]]:
    """Take ports of node01: every other one mute, every other one answering what none of us says.

    Yields a list that has, in the end, the ``port`` of each call and what the stranger ``heard``.
    """
    words = (sys.executable, str(PROGRAMS / "strangers.py"), NODES[0].data, json.dumps(ports))
    log = runner.cluster.shared / "strangers.log"
    calls: list[dict[str, Any]] = []
    with (
        log.open("w") as output,
        runner.cluster.popen(*words, on="node01", stdout=output) as process,
    ):
        try:
            until(lambda: log.read_text() or process.poll() is not None)
            assert log.read_text() == "taken\n"
            yield calls
        finally:
            process.kill()
            calls += [json.loads(call) for call in log.read_text().splitlines()[1:]]


def by_run(reports: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    runs: dict[str, list[dict[str, Any]]] = {}
    for report in reports:
        runs.setdefault(report["run"], []).append(report)
    return runs


def met_strangers(run: str, calls: list[dict[str, Any]]) -> set[int]:
    """The ports of the strangers to whom rank 1 of this run said hello."""
    hellos = ((call["port"], RendezvousMessage.decode(call["heard"].encode())) for call in calls)
    return {
        port
        for port, hello in hellos
        if isinstance(hello, Hello) and (hello.token, hello.rank) == (run, 1)
    }


def test_two_steps_at_once_share_their_preferred_ports(runner: SlurmJobRunner) -> None:
    runner.cluster.run("salloc", "-Q", "-N2", "-n8", "--no-shell", "-J", "ports")
    job_id = runner.cluster.run(
        "squeue", "--noheader", "--name=ports", "--format=%A"
    ).stdout.strip()
    # Steps are counted on where the runner has to repeat them.
    taken = sorted({port for step in range(40 * TRIES) for port in preferred(job_id, step)[:2]})
    srun = f"srun --overlap -N2 -n2 {SRUNDDP} --quiet --timeout 100"
    # The last pair goes all the way to a collective.
    pairs = [REPORT] * 19 + [TORCHRUN_STYLE]
    script = "".join(f"{srun} {program} & {srun} {program} & wait\n" for program in pairs)
    with strangers(runner, taken) as calls:
        done = runner.on_login("env", f"SLURM_JOB_ID={job_id}", "bash", "-c", script, timeout=300)
    assert "error" not in done.errors
    assert [report["sum"] for report in done.reports if "sum" in report] == [3.0] * 4
    runs = by_run(done.reports)
    assert len(runs) == 40, done.errors
    for run, reports in runs.items():
        assert sorted(report["rank"] for report in reports) == [0, 1]
        assert len({report["master"] for report in reports}) == 1
        # Before it found rank 0, rank 1 was at both ports that its step prefers.
        assert set(preferred(job_id, int(run.split(".")[1]))[:2]) <= met_strangers(run, calls)


def test_over_pmi_a_step_meets_although_strangers_hold_all_its_preferred_ports(
    runner: SlurmJobRunner,
) -> None:
    """Any user may hold them, for the job's number is known to all."""
    runner.cluster.run("salloc", "-Q", "-N2", "-n2", "--no-shell", "-J", "held")
    job_id = runner.cluster.run("squeue", "--noheader", "--name=held", "--format=%A").stdout.strip()
    taken = sorted({port for step in range(TRIES) for port in preferred(job_id, step)})
    with strangers(runner, taken):
        words = ("--mpi=pmi2", f"--jobid={job_id}", "-N2", "-n2", SRUNDDP, "--timeout=100", REPORT)
        done = runner.srun(*words)
    runner.cluster.run("scancel", job_id)
    assert done.code == 0, done.errors
    assert "channel pmi," in done.errors
    assert sorted(report["rank"] for report in done.reports) == [0, 1]


@pytest.fixture
def reserving(runner: SlurmJobRunner) -> Iterator[None]:
    """Slurm reserves ports for steps."""
    before = runner.cluster.settings
    runner.cluster.reconfigure(replace(before, resv_ports="12000-12099"))
    try:
        yield
        runner.cluster.cancel_all()
    finally:
        runner.cluster.reconfigure(before)


def listening(runner: SlurmJobRunner) -> set[int]:
    """The ports on which somebody listens in node01's data network."""
    sockets = runner.cluster.sockets("node01")
    return {
        s.local_port for s in sockets if s.state == "listening" and s.local_address == NODES[0].data
    }


@pytest.mark.usefixtures("reserving")
def test_a_step_meets_on_the_first_port_slurm_reserved_for_it(runner: SlurmJobRunner) -> None:
    gate = runner.cluster.shared / "gate"
    # Rank 1 starts once rank 0's line and store have been seen.
    late = f'[ $SLURM_PROCID = 0 ] || until [ -e {gate} ]; do sleep 0.1; done; exec "$@"'
    words = (
        "--resv-ports=3",
        "-N2",
        "bash",
        "-c",
        late,
        "late",
        SRUNDDP,
        "--channel",
        "slurm",
        REPORT,
    )
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(runner.srun, *words)
        try:
            until(lambda: len(listening(runner)) == 2 or started.done())
            ports = listening(runner)
        finally:
            gate.touch()
        done = started.result()
    assert done.code == 0, done.errors
    assert "2 ranks on 2 nodes, launcher Slurm, channel slurm, master 10.88.0.11 " in done.errors
    (reserved,) = {report["reserved"] for report in done.reports}
    first, last = map(int, reserved.split("-"))
    assert last - first == 2
    assert ports & set(range(12000, 12100)) == {first}


@pytest.mark.gate
def test_a_firewalls_range_is_kept_by_the_file_and_by_the_option(runner: SlurmJobRunner) -> None:
    text = '- nodes: "*"\n  interface: ens1f1\n  address: "{node}-data"\n  ports: 40000-40007\n'
    ranged = runner.write_ifaces("ports.conf", text)
    done = runner.srun("-N2", SRUNDDP, REPORT, ifaces=ranged)
    assert done.code == 0, done.errors
    assert {40000 <= int(report["master"].split()[1]) <= 40007 for report in done.reports} == {True}
    done = runner.srun("-N2", SRUNDDP, "--port", "41000-41001", REPORT)
    assert done.code == 0, done.errors
    assert {41000 <= int(report["master"].split()[1]) <= 41001 for report in done.reports} == {True}


def test_a_range_without_a_free_port_is_named(runner: SlurmJobRunner) -> None:
    with strangers(runner, [42000, 42001]):
        done = runner.srun("-N2", "--kill-on-bad-exit=1", SRUNDDP, "--port", "42000-42001", REPORT)
    assert "all 2 ports from 42000 to 42001 on 10.88.0.11 taken by others" in done.errors


@pytest.mark.gate
def test_a_signal_of_slurm_s_reaches_the_script_once(runner: SlurmJobRunner) -> None:
    process = runner.cluster.popen(
        "srun",
        "-N1",
        "-n1",
        "-J",
        "signals",
        SRUNDDP,
        "--quiet",
        str(PROGRAMS / "count_signals.py"),
    )
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    job_id = runner.cluster.run(
        "squeue", "--noheader", "--name=signals", "--format=%A"
    ).stdout.strip()
    for number in (1, 2, 3):
        runner.cluster.run("scancel", "-s", "USR1", job_id)
        assert process.stdout.readline() == f"signal {number}\n"
    runner.cluster.run("scancel", job_id)
    output, _ = process.communicate(timeout=300)
    assert output == ""
