"""Slurm is asked once to start the job again, and whatever scontrol does, the answer is there
within ten seconds.
"""

from __future__ import annotations

from inspect import signature
from pathlib import Path

import pytest

from srunddp.train.preemption.requeue import requeue
from tests.train.conftest import fake_command

JOB = {"SLURM_JOB_ID": "1207"}


def scontrol(folder: Path, body: str) -> dict[str, str]:
    return fake_command(folder, "scontrol", body)


def calls(folder: Path) -> list[str]:
    path = folder / "calls"
    if path.exists():
        return path.read_text().splitlines()
    return []


HANGS = "scontrol did not answer within 0.5 s"
ELEMENT = {"SLURM_ARRAY_JOB_ID": "1200", "SLURM_ARRAY_TASK_ID": "7"}


@pytest.mark.parametrize(
    ("variables", "job"),
    [({}, "1207"), (ELEMENT, "1200_7"), ({"SLURM_RESTART_COUNT": "2"}, "1207")],
)
def test_a_job_is_requeued_by_one_call(tmp_path: Path, variables: dict[str, str], job: str) -> None:
    """Of an array the one element; up to so many restarts."""
    assert requeue(scontrol(tmp_path, "") | variables, 3) == ""
    assert calls(tmp_path) == [f"requeue {job}"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("echo 'Access denied' >&2; echo ' (1)' >&2; exit 1", "scontrol failed: Access denied (1)"),
        ("exit 3", "scontrol failed: it ended with 3"),
        ("kill -9 $$", "scontrol failed: it ended with -9"),
        ("exec sleep 600", HANGS),
        ("trap '' TERM INT HUP; exec sleep 600", HANGS),
        ("exec 2>&-; exec sleep 600", HANGS),
    ],
)
def test_a_scontrol_that_fails_or_hangs_is_not_called_again(
    tmp_path: Path, body: str, said: str
) -> None:
    """What it said is quoted; one that hangs is ended within ten seconds, where nothing else is
    asked for.
    """
    limit = signature(requeue).parameters["limit"].default
    assert limit < 10
    assert requeue(scontrol(tmp_path, body), 100, limit=0.5 if said is HANGS else limit) == said
    assert len(calls(tmp_path)) == 1


def test_a_signal_to_the_ranks_group_is_not_for_scontrol(tmp_path: Path) -> None:
    body = "read -r _ _ _ _ _ session _ </proc/$$/stat; [ $session = $$ ]"
    assert requeue(scontrol(tmp_path, body), 100) == ""


def test_a_scontrol_that_is_missing_or_cannot_run_is_told(tmp_path: Path) -> None:
    assert requeue(JOB | {"PATH": str(tmp_path)}, 100) == "no scontrol in PATH"
    (tmp_path / "scontrol").write_text("no program")
    (tmp_path / "scontrol").chmod(0o755)
    assert requeue(JOB | {"PATH": str(tmp_path)}, 100).startswith("scontrol cannot be started: ")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"SLURM_JOB_ID": ""}, "no job of Slurm"),
        ({"SLURM_JOB_ID": "1207; reboot"}, "no job of Slurm"),
        ({"SLURM_JOB_ID": "--help"}, "no job of Slurm"),
        ({"SLURM_RESTART_COUNT": "3"}, "it was 3 times before, and preemption.max_requeues is 3"),
        ({"SLURM_RESTART_COUNT": "x"}, "SLURM_RESTART_COUNT is 'x'"),
    ],
)
def test_without_a_job_or_after_many_restarts_slurm_is_not_asked(
    tmp_path: Path, variables: dict[str, str], said: str
) -> None:
    assert requeue(scontrol(tmp_path, "") | variables, 3) == said
    assert calls(tmp_path) == []
