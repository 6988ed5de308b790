"""What Slurm is asked for a report. The stubs print what sacct(1) and scontrol(1) of Slurm 22.05
describe.
"""

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
from srunddp.util.slurm_command import Job, job
from tests.support.made_up_run import MadeUp
from tests.support.starting import srunddp, write

RUN = MadeUp(nodes=2, ranks_per_node=1, seconds=60)


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


def report(what: str, folder: Path) -> str:
    return srunddp("report", "--text", what, folder=folder, PATH=os.environ["PATH"]).stdout


@pytest.mark.parametrize("name", ["run", "namespace-3", "4711;touch x.0", "-j.0"])
def test_what_is_no_jobs_number_is_never_given_to_a_command(name: str, commands: Path) -> None:
    for command in ("sacct", "scontrol"):
        stub(commands, command, "")
    slurm.completed(
        summary_of(read(replace(RUN, name=name, code=None).write(commands)), RUN.start + 64)
    )
    assert asked(commands) == []


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
def test_a_run_that_was_killed_just_now_is_not_called_running(
    body: str, said: str, commands: Path
) -> None:
    """As in a job script, where the report follows the run at once."""
    stub(commands, "scontrol", body)
    replace(RUN, code=None, start=time.time() - 65).write(commands / "logs")
    assert said in report("4711", commands)
    assert "scontrol --oneliner show step 4711.0" in asked(commands)


# The job's time limit, which ranks of Slurm 22.05 are not told.
ARRAY = "JobId=4712 ArrayJobId=4711 RunTime=00:00:01 TimeLimit=00:01:00\n"
OF_JOB = (
    "JobId=4711 JobName=x JobState=RUNNING Restarts=0 RunTime=00:02:03 TimeLimit=1-02:00:00"
    " TimeMin=N/A\n"
)


@pytest.mark.parametrize(
    ("scontrol", "sacct", "expected"),
    [
        (prints(ARRAY + OF_JOB), "", (93600.0, 123.0)),
        (prints("JobId=4711 RunTime=00:02:03 TimeLimit=UNLIMITED\n"), "", (None, 123.0)),
        (
            "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1",
            "4711|COMPLETED|0:0|00:20:00|00:01:10|1800000000|1800000070|/work\n",
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
    assert re.search(
        r", 65\.3 s of 10 h\n(?s:.*)time limit: 66 s of 10 h used", report("4711", commands)
    )


# Where a job ran.
SCONTROL = (
    "JobId=4714 ArrayJobId=4711 ArrayTaskId=3 JobName=train.sh UserId=me(1000) WorkDir={} StdErr=/x"
    " Power=\n"
)


def test_a_job_is_found_where_it_ran_that_of_an_array_too(commands: Path) -> None:
    work = commands / "at work"
    replace(RUN, name="4714.0").write(work / "logs")
    stub(commands, "scontrol", prints(SCONTROL.format(work)))
    assert report("4711_3", commands).startswith("run 4714.0: ")
    assert "scontrol --oneliner show job 4711_3" in asked(commands)
    # Accounting still knows a job that the controller forgot.
    stub(commands, "scontrol", "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1")
    stub(commands, "sacct", prints("4714|COMPLETED|0:0|00:20:00|00:01:10|1|71|/home/me/work\n"))
    assert job("4711_3") == Job(
        "4714", "/home/me/work", 1200.0, 70.0, "COMPLETED", "0:0", 1.0, 71.0
    )
