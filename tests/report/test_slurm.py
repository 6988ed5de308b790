"""Slurm's figures beside ours. The stubs print what sacct(1) and scontrol(1) of Slurm 22.05 describe."""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from srunddp.report import slurm
from srunddp.report.run import read
from srunddp.report.summarize import summary_of
from srunddp.util.slurm_job import Job, job, seconds
from tests.support.made_up_run import MadeUp
from tests.support.starting import srunddp, write

RUN = MadeUp(nodes=2, ranks_per_node=1, seconds=60)
# Of JobIDRaw, State, Start, ElapsedRaw, TimelimitRaw, TotalCPU, MaxRSS, AveRSS, with --units=K.
SACCT = """\
4711|COMPLETED|1799999998|70|20|00:12:40.000||
4711.batch|COMPLETED|1799999998|70||00:00.532|12345.00K|12345.00K
4711.0|COMPLETED|1800000000|66||12:40.000|6291456.00K|6200000.00K
"""


def stub(folder: Path, name: str, body: str) -> None:
    path = write(folder / "bin" / name, f'#!/bin/sh\necho "{name} $*" >>"{folder}/asked"\n{body}\n')
    path.chmod(0o755)


def prints(text: str) -> str:
    return f"cat <<'END'\n{text}END"


def asked(folder: Path) -> list[str]:
    return (folder / "asked").read_text().splitlines()


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write(tmp_path / "asked", "")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return tmp_path


def view(made_up: MadeUp, folder: Path, now: float | None = None) -> slurm.SlurmAccounting:
    return slurm.view(summary_of(read(made_up.write(folder)), now))


def report(what: str, folder: Path) -> str:
    return srunddp("report", "--text", what, folder=folder, PATH=os.environ["PATH"]).stdout


def test_after_the_job_the_steps_record_is_compared(commands: Path) -> None:
    stub(commands, "sacct", prints(SACCT))
    found = view(RUN, commands)
    assert found.sentence == "Step 4711.0 by sacct: COMPLETED."
    assert found.rows == (
        ("CPU time", "13 min 8 s", "12 min 40 s", "+3.7 %"),
        ("MaxRSS of a task", "6.00 GiB", "6.00 GiB", "+0.0 %"),
        ("AveRSS of the tasks", "6.00 GiB", "5.91 GiB", "+1.5 %"),
        ("elapsed", "65.3 s", "66 s", "-1.1 %"),
        ("time limit", "20 min", "20 min", "+0.0 %"),
    )
    (sacct,) = asked(commands)
    assert sacct.startswith("sacct -P -n --units=K -j 4711 -o JobID")


def test_while_the_job_runs_only_what_slurm_knows_is_compared(commands: Path) -> None:
    """Its accounting has CPU time and memory of a step when that has ended."""
    running = SACCT.replace("COMPLETED", "RUNNING").replace("12:40.000|6291456.00K|6200000.00K", "00:00:00||")
    stub(commands, "sacct", prints(running))
    found = view(replace(RUN, code=None), commands, RUN.start + 64)
    assert found.sentence == "Step 4711.0 by sacct: RUNNING."
    assert [name for name, *_ in found.rows] == ["elapsed", "time limit"]


@pytest.mark.parametrize(
    ("sacct", "what"),
    [
        ("echo Slurm accounting storage is disabled; exit 1", "does not answer for this run"),
        ("exit 0", "does not answer for this run"),
        (prints("4712.0|COMPLETED|1|2|3|4|5|6\n"), "does not answer for this run"),
        (prints("|\n"), "does not answer for this run"),
        # After a requeue sacct has the last start alone.
        (prints(SACCT.replace("18000000", "18000099")), "has another start of this job"),
    ],
)
def test_without_accounting_there_is_one_sentence(sacct: str, what: str, commands: Path) -> None:
    stub(commands, "sacct", sacct)
    found = view(RUN, commands, RUN.start + 64)
    assert found == slurm.SlurmAccounting(f"Slurm's accounting {what}: nothing to compare with.")


@pytest.mark.parametrize("name", ["run", "namespace-3", "4711;touch x.0", "-j.0"])
def test_what_is_no_jobs_number_is_never_given_to_a_command(name: str, commands: Path) -> None:
    stub(commands, "sacct", prints(SACCT))
    assert view(replace(RUN, name=name), commands).sentence == "Not started by Slurm: nothing to compare with."
    assert asked(commands) == []


def test_times_and_sizes_are_read_as_sacct_writes_them() -> None:
    times = {"00:00.532": 0.532, "12:40.000": 760.0, "01:02:03": 3723.0, "2-03:04:05": 183845.0, "": None, "x": None}
    assert {text: seconds(text) for text in times} == times
    sizes = {"5272K": 5398528.0, "1.37M": 1.37 * 2**20, "5398528": 5398528.0, "0": 0.0, "": None}
    assert {text: slurm.size(text) for text in sizes} == sizes


# What scontrol of Slurm 22.05 was seen to print.
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("echo Job step 4711.0 not found; exit 1", "no end recorded of all ranks: killed"),
        (
            "echo slurm_get_job_steps error: Invalid job id specified >&2; exit 1",
            "no end recorded of all ranks: killed",
        ),
        ("echo StepId=4711.0 UserId=0 State=RUNNING Tasks=2", "still running"),
        ("echo Unable to contact slurm controller >&2; exit 1", "still running"),
    ],
)
def test_a_run_that_was_killed_just_now_is_not_called_running(body: str, said: str, commands: Path) -> None:
    """As in a job script, where the report follows the run at once."""
    stub(commands, "scontrol", body)
    replace(RUN, code=None, start=time.time() - 65).write(commands / "logs")
    assert said in report("4711", commands)
    assert "scontrol --oneliner show step 4711.0" in asked(commands)


# The job's time limit, which ranks of Slurm 22.05 are not told.
ARRAY = "JobId=4712 ArrayJobId=4711 RunTime=00:00:01 TimeLimit=00:01:00\n"
OF_JOB = "JobId=4711 JobName=x JobState=RUNNING Restarts=0 RunTime=00:02:03 TimeLimit=1-02:00:00 TimeMin=N/A\n"


@pytest.mark.parametrize(
    ("scontrol", "sacct", "expected"),
    [
        (prints(ARRAY + OF_JOB), "", (93600.0, 123.0)),
        (prints("JobId=4711 RunTime=00:02:03 TimeLimit=UNLIMITED\n"), "", (None, 123.0)),
        (
            "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1",
            "4711|COMPLETED|0:0|20|70|1800000000|1800000070|/work\n",
            (1200.0, 70.0),
        ),
    ],
)
def test_the_limit_is_the_controllers_or_accountings(
    scontrol: str, sacct: str, expected: tuple[float | None, float], commands: Path
) -> None:
    stub(commands, "scontrol", scontrol)
    stub(commands, "sacct", prints(sacct))
    found = slurm.completed(summary_of(read(replace(RUN, time_limit=None).write(commands))))
    assert (found.time_limit_s, found.job_s) == expected


def test_the_limit_that_slurm_says_stands_in_the_report(commands: Path) -> None:
    stub(commands, "scontrol", prints("JobId=4711 RunTime=00:01:06 TimeLimit=10:00:00\n"))
    replace(RUN, time_limit=None).write(commands / "logs")
    assert re.search(r", 65\.3 s of 10 h\n(?s:.*)time limit: 66 s of 10 h used", report("4711", commands))


# Where a job ran.
SCONTROL = "JobId=4714 ArrayJobId=4711 ArrayTaskId=3 JobName=train.sh UserId=me(1000) WorkDir={} StdErr=/x Power=\n"


def test_a_job_is_found_where_it_ran_that_of_an_array_too(commands: Path) -> None:
    work = commands / "at work"
    replace(RUN, name="4714.0").write(work / "logs")
    stub(commands, "scontrol", prints(SCONTROL.format(work)))
    assert report("4711_3", commands).startswith("run 4714.0: ")
    assert "scontrol --oneliner show job 4711_3" in asked(commands)
    # Accounting still knows a job that the controller forgot.
    stub(commands, "scontrol", "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1")
    stub(commands, "sacct", prints("4714|COMPLETED|0:0|20|70|1|71|/home/me/work\n"))
    assert job("4711_3") == Job("4714", "/home/me/work", 1200.0, 70.0, "COMPLETED", "0:0", 1.0, 71.0)


def test_a_summary_is_there_where_no_slurm_is(tmp_path: Path) -> None:
    RUN.write(tmp_path / "logs")
    done = srunddp("report", "--text", "4711", folder=tmp_path, PATH="/nowhere")
    assert done.returncode == 0
    assert "Slurm's view: Slurm's accounting does not answer for this run" in done.stdout
