"""Which job and which start ``srunddp triage`` judges, what else it names, and what Slurm says of
the end.
"""

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
from tests.support.cases import slow_after
from tests.support.facts import tells
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
srun: error: node01: task 0: Terminated
"""


def log(folder: Path, name: str, text: str = WELL, age: float = 0.0) -> Path:
    path = write(folder / name, text)
    os.utime(path, (NOW - age, NOW - age))
    return path


def triage(folder: Path, *words: object, **environ: str) -> dict[str, Any]:
    done = srunddp("triage", "--json", *words, folder=folder, **environ)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Two failed jobs, and a newer healthy one."""
    log(tmp_path, "project/logs/train-101.out", STALE, 2 * DAY)
    log(tmp_path, "project/logs/101.0/failure.json", FAILURE, 2 * DAY)
    log(tmp_path, "project/logs/train-102.out", MEMORY, DAY)
    log(tmp_path, "project/logs/train-103.out")
    return tmp_path / "project"


@pytest.mark.parametrize(
    ("words", "cause", "files", "others"),
    slow_after(
        4,
        [
            ("", None, "train-103.out", ["102", "101"]),
            ("logs/", None, "train-103.out", ["102", "101"]),
            ("logs/ logs/train-102.out", "cuda-out-of-memory", "train-102.out", ["103", "101"]),
            (
                "logs/101.0/failure.json logs/train-102.out",
                "cuda-out-of-memory",
                "train-102.out",
                ["101"],
            ),
            ("102", "cuda-out-of-memory", "train-102.out", []),
            ("101", "file-missing", "101.0/failure.json train-101.out", []),
            ("101.0", "file-missing", "101.0/failure.json train-101.out", []),
            ("101.1", "file-missing", "train-101.out", []),
        ],
    ),
)
def test_three_jobs_in_a_folder_are_never_mixed(
    words: str, cause: str | None, files: str, others: list[str], three: Path
) -> None:
    found = triage(three, *words.split())
    assert (found["cause"], [each["job"] for each in found["other_jobs"]]) == (cause, others)
    assert found["files"] == [f"logs/{name}" for name in files.split()]


@pytest.mark.parametrize(
    ("setting", "words", "folder", "option"),
    slow_after(
        2,
        [
            ("", "", "logs", ""),
            ("", ".", ".", "--log-dir=. "),
            ("", "--log-dir=../project/logs", "../project/logs", "--log-dir=../project/logs "),
            ("", "logs/train-103.out logs/train-102.out", "logs", ""),
            ("logs", "", "logs", ""),
            ("other", "logs/", "logs", "--log-dir=logs "),
            ("../project/logs", "", "../project/logs", ""),
        ],
    ),
)
def test_the_command_for_another_job_works_as_printed(
    setting: str, words: str, folder: str, option: str, three: Path
) -> None:
    if setting:
        environ = {"SRUNDDP_LOG_DIR": setting}
    else:
        environ = {}
    day = datetime.fromtimestamp(NOW - DAY).isoformat(" ", "minutes")
    said = srunddp("triage", *words.split(), folder=three, **environ).stdout
    assert f"\nalso in {folder}/: job 102, {day} -> srunddp triage {option}102\n" in said
    assert triage(three, *option.split(), "102", **environ)["cause"] == "cuda-out-of-memory"


def test_of_many_jobs_the_newest_eight_are_listed(tmp_path: Path) -> None:
    """A tie in time is broken by the number."""
    for number in range(201, 214):
        log(tmp_path, f"logs/{number}/rank0.log", age=0.0 if number in (205, 213) else DAY)
    said = srunddp("triage", folder=tmp_path).stdout.splitlines()
    listed = [line.partition(": job ")[2][:3] for line in said if ": job " in line]
    assert listed == ["213", "205", *map(str, range(212, 205, -1))]
    assert said[-1] == "and 4 others"


def test_of_too_many_files_the_newest_jobs_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MOST_FILES", 3)
    for number in (99, 100, 101, 102):
        log(tmp_path, f"{number}.0/node01.rank0.log")
    assert jobs.find([str(tmp_path)], "logs").job == "102"
    assert jobs.find(["99"], str(tmp_path)).job == "99"


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (
            "slurm-7.out t-123.out t.o123 preflight.123.txt 123.0/n1.rank0.log 123.1/n.rank0.log"
            " 123/out",
            "123 7",
        ),
        ("slurm-123_1.out slurm-123_2.out t_123_2.err 123_2/out", "123_1 123_2"),
        ("t-123.sh.out t-123_0.out t-123_1.out 123_4abcdefg/attempt_0/0/stdout.log", "123"),
        ("slurm-123-0.out slurm-123-1.out slurm-124-0.out", "123 124"),
        ("bert-512-4711.out bert-512-4711-100.err 4711_0_log.out", "4711"),
        (
            "t-20261122-123.out t-20261122-124.out u-2026-125.out exp-20000-4711.out",
            "123 124 125 4711",
        ),
        ("rank-100.log n-1.rank5.log node-101.log dgx-102.rank1.log 100.txt/out", ""),
        ("".join(f"out.{rank} " for rank in range(130)), ""),
        ("none_4abcdefg/attempt_0/0/stdout.log none_5abcdefg/attempt_0/1/stdout.log", ""),
        ("rank0.log slurm-123.out", "123"),
        ("preflight.local.txt rank0.log slurm-123.out", " 123"),
        ("rank0.log slurm-123.out slurm-124.out", " 123 124"),
    ],
)
def test_names_tell_jobs(names: str, groups: str, tmp_path: Path) -> None:
    for name in names.split():
        log(tmp_path, name)
    assert sorted(jobs.by_job(logs.find([str(tmp_path)]))) == groups.split(" ")


def test_an_old_file_without_a_number_is_no_part_of_a_job(tmp_path: Path) -> None:
    log(tmp_path, "run.log", STALE, DAY)
    log(tmp_path, "slurm-123.out")
    assert tells(srunddp("triage", ".", folder=tmp_path).stdout, "./", "without a job's number")
    found = triage(tmp_path, "slurm-123.out", "run.log")
    assert (found["cause"], found["job"], found["other_jobs"]) == ("file-missing", "123", [])


def test_without_a_folder_for_logs_the_newest_here_is_judged(tmp_path: Path) -> None:
    assert tells(one_message(srunddp("triage", folder=tmp_path)), "no logs", "logs")
    assert tells(one_message(srunddp("triage", "104", folder=tmp_path)), "104", "logs")
    for name in ("slurm-101.out", "slurm-102.out", "notes-103.txt"):
        log(tmp_path, name)
    assert triage(tmp_path)["job"] == "102"
    log(tmp_path, "logs/101.0/node01.rank0.log", MEMORY, DAY)
    assert triage(tmp_path, "101")["files"] == ["logs/101.0/node01.rank0.log", "slurm-101.out"]


@pytest.mark.parametrize(
    ("after", "begin"),
    [(PLACED + WELL, 8), ("KeyboardInterrupt\n", 0)],
    ids=["another", "perhaps the old"],
)
def test_of_a_requeued_job_the_last_start_is_judged(after: str, begin: int, tmp_path: Path) -> None:
    text = STALE + REQUEUED.format("2026-11-23T15:01:39") + after
    found = triage(tmp_path, log(tmp_path, "slurm-4711.out", text))
    assert (found["start"], found["cause"] is None) == (int(begin > 0), begin > 0)
    assert len(found["notes"]) == int(begin > 0)
    for note in found["notes"]:
        assert tells(note, "slurm-4711.out", f"line {begin}")


def test_files_of_earlier_starts_are_left_out(tmp_path: Path) -> None:
    log(tmp_path, "4711.0/failure.1.json", FAILURE)
    for attempt, text in enumerate((STALE, WELL)):
        log(tmp_path, f"4711_4abcdefg/attempt_{attempt}/0/stderr.log", text)
    log(tmp_path, "4711_5abcdefg/attempt_0/0/stderr.log")  # another agent's only attempt
    found = triage(tmp_path, ".")
    assert (found["cause"], found["start"], len(found["files"])) == (None, 1, 2)
    (note,) = found["notes"]
    assert tells(note, "4711.0/failure.1.json, 4711_4abcdefg/attempt_0/0/stderr.log")
    assert "4711_5abcdefg" not in note
    assert triage(tmp_path, "4711.0/failure.1.json")["cause"] == "file-missing"  # named by the user


def test_a_rank_log_of_two_runs_is_read_from_the_second(tmp_path: Path) -> None:
    write(
        tmp_path / "a.py",
        "import sys\nif sys.argv[1] == '0': open('/nowhere/x')\nprint('Training finished')\n",
    )
    for start in "01":
        srunddp(
            "run", "a.py", start, folder=tmp_path, SRUNDDP_LOG_DIR="logs", SLURM_RESTART_COUNT=start
        )
    found = triage(tmp_path)
    assert (found["cause"], found["start"]) == (None, 1)


def test_after_restarts_within_the_job_the_last_start_is_judged(tmp_path: Path) -> None:
    """Also in what the terminal had."""
    text = "import os\nif os.environ['TORCHELASTIC_RESTART_COUNT'] < '{}': open('/nowhere/x')\n"
    for number, fails in enumerate((1, 9)):
        write(tmp_path / "b.py", text.format(fails))
        done = srunddp("run", "--restarts=1", "b.py", folder=tmp_path)
        log(tmp_path, f"slurm-471{number}.out", done.stdout + done.stderr)
    assert triage(tmp_path, "slurm-4710.out")["cause"] is None
    found = triage(tmp_path, "slurm-4711.out")
    (note,) = (note for note in found["notes"] if "earlier starts" in note)
    assert (found["cause"], "slurm-4711.out before line" in note) == ("file-missing", True)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    stub(tmp_path, "scontrol", "exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return tmp_path


def sacct(folder: Path, state: str, began: float, ended: float | None = 0.0) -> None:
    end = "Unknown" if ended is None else f"{NOW - ended:.0f}"
    stub(
        folder,
        "sacct",
        prints(f"4711|{state}|1:0|01:00:00|00:00:05|{NOW - began:.0f}|{end}|/work\n"),
    )


@pytest.mark.parametrize(
    ("state", "times", "text", "cause"),
    slow_after(
        3,
        [
            ("TIMEOUT", (60.0, 0.0), "step 1\n", "time-limit"),
            ("OUT_OF_MEMORY", (60.0, 0.0), "step 1\n", "host-out-of-memory"),
            ("NODE_FAIL", (60.0, 0.0), "step 1\n", "node-failure"),
            ("BOOT_FAIL", (60.0, 0.0), "step 1\n", "node-failure"),
            ("DEADLINE", (60.0, 0.0), "step 1\n", "time-limit"),
            ("PREEMPTED", (60.0, 0.0), "step 1\n", "preempted"),
            ("CANCELLED by 1000", (60.0, 0.0), "step 1\n", "cancelled"),
            ("FAILED", (60.0, 0.0), WELL, "unknown"),
            ("TIMEOUT", (60.0, 0.0), STALE, "file-missing"),
            ("COMPLETED", (60.0, 0.0), "step 1\n", None),
            # Another cluster's job of the same number, before and after.
            ("TIMEOUT", (9 * DAY, 8 * DAY), WELL, None),
            ("TIMEOUT", (-900.0, -1800.0), WELL, None),
            ("RUNNING", (60.0, None), WELL, "unknown"),
        ],
    ),
)
def test_slurms_state_counts_if_it_is_of_the_job(
    state: str, times: tuple[float, float | None], text: str, cause: str | None, slurm: Path
) -> None:
    sacct(slurm, state, *times)
    log(slurm, "slurm-4711.out", text)
    found = triage(slurm, "4711")
    said = f"Slurm: job 4711 ended as {state.split()[0]}, exit code 1:0"
    assert (found["cause"], found["text"] == said) == (
        cause,
        cause not in (None, "file-missing") and state != "RUNNING",
    )
    assert found["notes"] == (["job 4711 still runs"] if state == "RUNNING" else [])


def test_slurm_knows_when_the_last_start_began(slurm: Path) -> None:
    sacct(slurm, "COMPLETED", 600.0)
    text = (
        STALE
        + REQUEUED.format(datetime.fromtimestamp(NOW - 700).isoformat(timespec="seconds"))
        + "start 1\nok\n"
    )
    log(slurm, "slurm-4711.out", text)
    # A node that the second start does not have.
    log(slurm, "logs/4711.0/node02.rank1.log", STALE, 1200.0)
    found = triage(slurm, "4711")
    assert (found["cause"], found["start"], found["files"]) == (None, 1, ["slurm-4711.out"])
    assert found["notes"][0].endswith("slurm-4711.out before line 8")


def test_a_job_is_found_where_slurm_says_it_ran(slurm: Path) -> None:
    """A task of an array too, whose folder has the number of its own."""
    work = slurm / "a work"
    shown = (
        "JobId=4714 ArrayJobId=4711 ArrayTaskId=3 JobState=FAILED ExitCode=1:0 StartTime={}"
        " EndTime={} "
    )
    shown += "WorkDir={} StdErr=/x StdIn=/dev/null StdOut={} Power=\n"
    stub(slurm, "scontrol", prints(shown.format(int(NOW) - 60, int(NOW), work, work / "job.txt")))
    rank = "logs/4714.0/node01.rank0.log"
    output = "slurm-4711_3.out"
    for name, files in (("job.txt", ["job.txt"]), (rank, [rank]), (output, [rank, output])):
        log(work, name, STALE, 5.0 if name == rank else 0.0)
        log(work, "logs/4715.0/node01.rank0.log", MEMORY, 9.0)
        found = triage(slurm, "4711_3")
        assert (found["cause"], found["files"]) == (
            "file-missing",
            [f"{work}/{name}" for name in files],
        )
    assert triage(work)["files"] == [output, rank]
