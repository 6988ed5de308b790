"""Which job and which start ``srunddp triage`` judges, what else it names, and what Slurm says of the end."""

from __future__ import annotations

import json
import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from srunddp.triage import jobs, logs
from tests.report.test_slurm import prints, stub
from tests.support.starting import one_message, srunddp, write

ERROR = "OSError: [Errno 116] Stale file handle"
STALE = f'Traceback (most recent call last):\n  File "/p/a.py", line 3, in <module>\n{ERROR}\n'
MEMORY = "step 1\nsrunddp: rank 0 on node01 failed: torch.OutOfMemoryError: CUDA out of memory.\n"
WELL = "step 1\nstep 2\nTraining finished\n"
PLACED = "srunddp: 2 ranks on 2 nodes, launcher Slurm, channel pmi\n"
DAY = 86400.0
NOW = time.time()
FAILURE = json.dumps({"cause": ERROR, "rank": 2, "node": "node02", "victims": []})
# What Slurm 22.05 was seen to write of a job that was requeued.
REQUEUED = """\
srun: Job step aborted: Waiting up to 7 seconds for job step to finish.
slurmstepd-node01: error: *** JOB 4711 ON node01 CANCELLED AT {0} DUE TO JOB REQUEUE ***
slurmstepd-node01: error: *** STEP 4711.0 ON node01 CANCELLED AT {0} DUE TO JOB REQUEUE ***
"""


def log(folder: Path, name: str, text: str = WELL, age: float = 0.0) -> Path:
    path = write(folder / name, text)
    os.utime(path, (NOW - age, NOW - age))
    return path


def triage(folder: Path, *words: object, **variables: str) -> dict[str, Any]:
    done = srunddp("triage", "--json", *words, folder=folder, **variables)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Two failed jobs, and a newer healthy one."""
    log(tmp_path, "logs/train-101.out", STALE, 2 * DAY)
    log(tmp_path, "logs/101.0/failure.json", FAILURE, 2 * DAY)
    log(tmp_path, "logs/train-102.out", MEMORY, DAY)
    log(tmp_path, "logs/train-103.out", WELL)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "cause", "job", "others"),
    [
        ("", None, "103", ["102", "101"]),
        ("logs/", None, "103", ["102", "101"]),
        ("logs/ logs/train-102.out", "cuda-out-of-memory", "102", ["103", "101"]),
        ("logs/101.0/failure.json logs/train-102.out", "cuda-out-of-memory", "102", ["101"]),
        ("logs/train-102.out", "cuda-out-of-memory", "102", []),
        ("102", "cuda-out-of-memory", "102", []),
        ("101", "file-missing", "101", []),
        ("101.0", "file-missing", "101", []),
        ("101.1", "file-missing", "101", []),
    ],
)
def test_three_jobs_in_a_folder_are_never_mixed(
    words: str, cause: str | None, job: str, others: list[str], three: Path
) -> None:
    found = triage(three, *words.split())
    assert (found["cause"], found["job"], [each["job"] for each in found["other_jobs"]]) == (cause, job, others)
    assert all(job in file for file in found["files"])
    assert len(found["files"]) == len(set(found["files"])) == (2 if words in ("101", "101.0") else 1)


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("", "102"),
        ("logs", "102"),
        (".", "--log-dir=. 102"),
        ("--log-dir=./logs", "--log-dir=./logs 102"),
        ("logs/train-103.out logs/train-102.out", "logs/train-102.out"),
    ],
)
def test_the_command_for_another_job_works_as_printed(words: str, command: str, three: Path) -> None:
    last = srunddp("triage", *words.split(), folder=three).stdout.splitlines()[-1 if "103" in words else -2]
    day = datetime.fromtimestamp(NOW - DAY).isoformat(" ", "minutes")
    assert last.startswith(f"also in {'.' if words == '.' else 'logs'}/: job 102, {day} -> srunddp triage {command}")
    found = triage(three, *command.split())
    assert (found["job"], found["cause"]) == ("102", "cuda-out-of-memory")


def test_of_many_jobs_the_newest_eight_are_listed(tmp_path: Path) -> None:
    """A tie in time is broken by the number."""
    for number in range(201, 214):
        log(tmp_path, f"logs/{number}/rank0.log", age=0.0 if number in (205, 213) else DAY)
    said = srunddp("triage", folder=tmp_path).stdout.splitlines()
    listed = [line.partition(": job ")[2][:3] for line in said if ": job " in line]
    assert listed == ["213", "205", *map(str, range(212, 205, -1))]
    assert said[-1] == "and 4 others"


def test_of_too_many_files_the_newest_jobs_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MOST_FILES", 3)
    for number in (99, 100, 101, 102):
        log(tmp_path, f"{number}.0/node01.rank0.log")
    assert jobs.find([str(tmp_path)], "logs").job == "102"
    assert jobs.find(["99"], str(tmp_path)).job == "99"


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        ("slurm-7.out t-123.out t.o123 preflight.123.txt 123.0/n1.rank0.log 123.1/n.rank0.log 123/out", "123 7"),
        ("slurm-123_1.out slurm-123_2.out t_123_2.err 123_2/out", "123_1 123_2"),
        ("t-123.sh.out t-123_0.out t-123_1.out 123_4abcdefg/attempt_0/0/stdout.log", "123"),
        ("slurm-123-0.out slurm-123-1.out slurm-124-0.out", "123 124"),
        ("bert-512-4711.out bert-512-4711-100.err 4711_0_log.out", "4711"),
        ("rank-100.log n-1.rank5.log node-101.log dgx-102.rank1.log epoch-100.txt 100.txt/out", ""),
        ("".join(f"out.{rank} " for rank in range(130)), ""),
        ("none_4abcdefg/attempt_0/0/stdout.log none_5abcdefg/attempt_0/1/stdout.log", ""),
        ("rank0.log slurm-123.out", "123"),
        ("rank0.log slurm-123.out slurm-124.out", " 123 124"),
    ],
)  # fmt: skip
def test_names_tell_jobs(names: str, groups: str, tmp_path: Path) -> None:
    for name in names.split():
        log(tmp_path, name)
    assert sorted(jobs.by_job(logs.find([str(tmp_path)]))) == groups.split(" ")


def test_an_old_file_without_a_number_is_no_part_of_a_job(tmp_path: Path) -> None:
    log(tmp_path, "run.log", STALE, DAY)
    log(tmp_path, "slurm-123.out")
    assert triage(tmp_path, ".")["cause"] is None
    found = triage(tmp_path, "slurm-123.out", "run.log")
    assert (found["cause"], found["job"], found["other_jobs"]) == ("file-missing", "123", [])
    assert "files without a job's number" in srunddp("triage", ".", folder=tmp_path).stdout


def test_without_a_folder_for_logs_the_newest_here_is_judged(tmp_path: Path) -> None:
    assert "no logs in logs, and none here" in one_message(srunddp("triage", folder=tmp_path))
    assert "no logs of job 104 in logs" in one_message(srunddp("triage", "104", folder=tmp_path))
    log(tmp_path, "slurm-101.out", STALE)
    log(tmp_path, "slurm-102.out")
    log(tmp_path, "notes-103.txt")
    assert triage(tmp_path)["job"] == "102"
    log(tmp_path, "logs/101.0/node01.rank0.log", MEMORY, DAY)
    assert triage(tmp_path, "101")["files"] == ["logs/101.0/node01.rank0.log", "slurm-101.out"]


# Starts.


@pytest.mark.parametrize(
    ("after", "begin"),
    [
        (PLACED + WELL, 7),
        ("srun: error: node01: task 0: Terminated\n" + PLACED + WELL, 8),
        ("KeyboardInterrupt\n", 0),  # of the old start, as far as anybody knows
    ],
)
def test_of_a_requeued_job_the_last_start_is_judged(after: str, begin: int, tmp_path: Path) -> None:
    text = STALE + REQUEUED.format("2026-11-23T15:01:39") + after
    found = triage(tmp_path, log(tmp_path, "slurm-4711.out", text))
    assert (found["start"], found["cause"] is None) == (int(begin > 0), begin > 0)
    notes = [f"left out, of earlier starts: slurm-4711.out before line {begin}"] if begin else []
    assert found["notes"] == notes


def test_files_of_earlier_starts_are_left_out(tmp_path: Path) -> None:
    log(tmp_path, "4711.0/failure.1.json", FAILURE)
    for attempt, text in enumerate((STALE, WELL)):
        log(tmp_path, f"4711_4abcdefg/attempt_{attempt}/0/stderr.log", text)
    log(tmp_path, "4711_5abcdefg/attempt_0/0/stderr.log")  # another agent's only attempt
    (tmp_path / "4711.0" / "monitor.2").mkdir()
    log(tmp_path, "4711.0/node01.rank0.log")
    found = triage(tmp_path, ".")
    assert (found["cause"], found["start"]) == (None, 2)
    earlier = "4711.0/failure.1.json, 4711_4abcdefg/attempt_0/0/stderr.log"
    assert found["notes"] == [f"left out, of earlier starts: {earlier}"]
    assert triage(tmp_path, "4711.0/failure.1.json")["cause"] == "file-missing"  # named by the user


def test_a_rank_log_of_two_runs_is_read_from_the_second(tmp_path: Path) -> None:
    write(tmp_path / "a.py", "import sys\nif sys.argv[1] == '0': open('/nowhere/x')\nprint('Training finished')\n")
    for start in "01":
        variables = {"SRUNDDP_LOG_DIR": "logs", "SLURM_RESTART_COUNT": start, "PATH": os.environ["PATH"]}
        srunddp("run", "a.py", start, folder=tmp_path, **variables)
    found = triage(tmp_path)
    assert (found["cause"], found["start"]) == (None, 1)


# Slurm's word.


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write(tmp_path / "asked", "")
    stub(tmp_path, "scontrol", "exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return tmp_path


def sacct(folder: Path, state: str, began: float = 60.0, ended: float | str = 0.0) -> None:
    end = ended if isinstance(ended, str) else f"{NOW - ended:.0f}"
    stub(folder, "sacct", prints(f"4711|{state}|1:0|01:00:00|00:00:05|{NOW - began:.0f}|{end}|/work\n"))


@pytest.mark.parametrize(
    ("state", "text", "cause"),
    [
        ("TIMEOUT", "step 1\n", "time-limit"),
        ("OUT_OF_MEMORY", "step 1\n", "host-out-of-memory"),
        ("NODE_FAIL", "step 1\n", "node-failure"),
        ("PREEMPTED", "step 1\n", "preempted"),
        ("CANCELLED by 1000", "step 1\n", "cancelled"),
        ("FAILED", WELL, "unknown"),
        ("FAILED", STALE, "file-missing"),
        ("TIMEOUT", STALE, "file-missing"),
        ("COMPLETED", "".join(f"step {step}\n" for step in range(9)), None),
        ("COMPLETED", STALE, "file-missing"),
    ],
)
def test_slurms_state_of_the_job_counts(state: str, text: str, cause: str | None, slurm: Path) -> None:
    sacct(slurm, state)
    log(slurm, "slurm-4711.out", text)
    found = triage(slurm, "4711", PATH=os.environ["PATH"])
    assert found["cause"] == cause
    if cause and text != STALE:
        said = f"Slurm: job 4711 ended as {state.split()[0]}, exit code 1:0"
        assert (found["text"], found["file"]) == (said, "Slurm")


@pytest.mark.parametrize(
    ("began", "ended"), [(9 * DAY, 8 * DAY), (-900.0, -1800.0), (60.0, "Unknown")], ids=["old", "new", "none"]
)
def test_another_jobs_state_of_the_same_number_does_not(began: float, ended: float | str, slurm: Path) -> None:
    sacct(slurm, "TIMEOUT", began=began, ended=ended)
    found = triage(slurm, log(slurm, "slurm-4711.out"), PATH=os.environ["PATH"])
    assert (found["cause"] == "time-limit") == (ended == "Unknown")


def test_a_job_that_runs_is_said_to(slurm: Path) -> None:
    sacct(slurm, "RUNNING", ended="Unknown")
    assert triage(slurm, log(slurm, "slurm-4711.out"), PATH=os.environ["PATH"])["notes"] == ["job 4711 still runs"]


def test_slurm_knows_when_the_last_start_began(slurm: Path) -> None:
    sacct(slurm, "COMPLETED", began=600.0)
    text = STALE + REQUEUED.format(datetime.fromtimestamp(NOW - 700).isoformat(timespec="seconds"))
    text += "srun: error: node01: task 0: Terminated\nstart 1\nok\n"
    log(slurm, "slurm-4711.out", text)
    log(slurm, "logs/4711.0/node02.rank1.log", STALE, 1200.0)  # a node that the second start does not have
    found = triage(slurm, "4711", PATH=os.environ["PATH"])
    assert (found["cause"], found["start"], found["files"]) == (None, 1, ["slurm-4711.out"])
    assert found["notes"][0].endswith("slurm-4711.out before line 8")


def test_a_job_is_found_where_slurm_says_it_ran(slurm: Path) -> None:
    """A task of an array too, whose folder has the number of its own."""
    work = slurm / "a work"
    shown = "JobId=4714 ArrayJobId=4711 ArrayTaskId=3 JobState=FAILED ExitCode=1:0 StartTime={} EndTime={} "
    shown += "WorkDir={} StdErr=/x StdIn=/dev/null StdOut={} Power=\n"
    stub(slurm, "scontrol", prints(shown.format(int(NOW) - 60, int(NOW), work, work / "job.txt")))
    log(work, "job.txt")
    log(work, "logs/4714.0/node01.rank0.log", STALE, 5.0)
    log(work, "logs/4715.0/node01.rank0.log", MEMORY, 9.0)
    found = triage(slurm, "4711_3", PATH=os.environ["PATH"])
    assert (found["cause"], found["files"]) == (
        "file-missing",
        [f"{work}/logs/4714.0/node01.rank0.log", f"{work}/job.txt"],
    )
    log(work, "slurm-4711_3.out")
    for words in ([], ["4711_3"]):
        found = triage(work, *words, PATH=os.environ["PATH"])
        assert sorted(found["files"]) == ["logs/4714.0/node01.rank0.log", "slurm-4711_3.out"]
