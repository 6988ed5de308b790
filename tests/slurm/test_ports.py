"""No port is fought over: steps at once, strangers on the preferred ports, reserved ports, a firewall's range."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from srunddp.bootstrap import channels, ifaces
from srunddp.bootstrap.environment import detect
from tests.cluster.nodes import NODES
from tests.conftest import PROGRAMS
from tests.slurm.conftest import SRUNDDP, Bench

REPORT = str(PROGRAMS / "report.py")
TORCHRUN_STYLE = str(PROGRAMS / "torchrun_style.py")
pytestmark = pytest.mark.slurm


def preferred(job: str, step: int) -> list[int]:
    """The ports that the ranks of a step look at, the likeliest first."""
    names = {"SLURM_JOB_ID": job, "SLURM_STEP_ID": str(step), "SLURM_STEP_NUM_TASKS": "2"}
    environment = detect({**names, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    return channels.line_ports(environment, ifaces.DEFAULT, None)


@contextmanager
def strangers(bench: Bench, ports: list[int]) -> Iterator[None]:
    """Take ports of node01: every other one mute, every other one answering what none of us says."""
    process = bench.cluster.popen(
        sys.executable, str(PROGRAMS / "strangers.py"), NODES[0].data, json.dumps(ports), on="node01"
    )
    assert process.stdout
    assert process.stdout.readline() == "taken\n"
    try:
        yield
    finally:
        process.kill()
        process.communicate()


def test_row_2_twenty_times_two_steps_at_once_with_their_preferred_ports_taken(bench: Bench) -> None:
    bench.cluster.run("salloc", "-Q", "-N2", "-n8", "--no-shell", "-J", "ports")
    job_id = bench.cluster.run("squeue", "--noheader", "--name=ports", "--format=%A").stdout.strip()
    taken = sorted({port for step in range(40) for port in preferred(job_id, step)[:2]})
    srun = f"srun --overlap -N2 -n2 {SRUNDDP} --quiet --timeout 100"
    # The last pair goes all the way to a collective.
    pairs = [REPORT] * 19 + [TORCHRUN_STYLE]
    script = "".join(f"{srun} {program} & {srun} {program} & wait\n" for program in pairs)
    with strangers(bench, taken):
        done = bench.on_login("env", f"SLURM_JOB_ID={job_id}", "bash", "-c", script, timeout=300)
    reports = [report for report in done.reports if "run" in report]
    assert len(reports) == 19 * 4, done.errors
    runs: dict[str, list[tuple[int, str]]] = {}
    for report in reports:
        runs.setdefault(report["run"], []).append((report["rank"], report["master"]))
    assert len(runs) == 38
    for places in runs.values():
        assert sorted(rank for rank, _ in places) == [0, 1]
        assert len({master for _, master in places}) == 1
    assert [report["sum"] for report in done.reports if "sum" in report] == [3.0] * 4
    assert "error" not in done.errors


def test_a_firewall_s_range_is_kept_by_the_file_and_by_the_option(bench: Bench) -> None:
    text = '- nodes: "*"\n  interface: ens1f1\n  address: "{node}-data"\n  ports: 40000-40007\n'
    ranged = bench.write_ifaces("ports.conf", text)
    done = bench.srun("-N2", SRUNDDP, REPORT, ifaces=ranged)
    assert done.code == 0, done.errors
    assert {40000 <= int(report["master"].split()[1]) <= 40007 for report in done.reports} == {True}
    done = bench.srun("-N2", SRUNDDP, "--port", "41000-41001", REPORT)
    assert done.code == 0, done.errors
    assert {41000 <= int(report["master"].split()[1]) <= 41001 for report in done.reports} == {True}


def test_a_range_without_a_free_port_is_named(bench: Bench) -> None:
    with strangers(bench, [42000, 42001]):
        done = bench.srun("-N2", "--kill-on-bad-exit=1", SRUNDDP, "--port", "42000-42001", REPORT)
    assert "all 2 ports from 42000 to 42001 on 10.88.0.11 taken by others" in done.errors


def test_a_signal_of_slurm_s_reaches_the_script_once(bench: Bench) -> None:
    process = bench.cluster.popen(
        "srun", "-N1", "-n1", "-J", "signals", SRUNDDP, "--quiet", str(PROGRAMS / "count_signals.py")
    )
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    job_id = bench.cluster.run("squeue", "--noheader", "--name=signals", "--format=%A").stdout.strip()
    for number in (1, 2, 3):
        bench.cluster.run("scancel", "-s", "USR1", job_id)
        assert process.stdout.readline() == f"signal {number}\n"
    bench.cluster.run("scancel", job_id)
    output, _ = process.communicate(timeout=30)
    assert output == ""
