"""Slurm's commands are asked in one way: as far as they answer in time, and not in the user's
locale.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from srunddp.util import slurm_command
from tests.support.starting import write


@pytest.fixture
def commands(tmp_path: Path) -> dict[str, str]:
    """An environment with a folder of commands in PATH."""
    return {"PATH": f"{tmp_path}:/usr/bin:/bin", "LC_ALL": "de_DE.UTF-8", "SINFO_FORMAT": "%N"}


def add(folder: Path, name: str, body: str) -> None:
    write(folder / name, f"#!/bin/sh\n{body}\n").chmod(0o755)


def test_the_answer_does_not_depend_on_the_users_locale(
    tmp_path: Path, commands: dict[str, str]
) -> None:
    add(tmp_path, "sinfo", 'echo "$LC_ALL $SLURM_TIME_FORMAT $TZ $SINFO_FORMAT"; cat')
    assert slurm_command.output("sinfo", environ=commands) == "C %s UTC %N\n"


def test_a_command_that_fails_or_is_none_says_nothing(
    tmp_path: Path, commands: dict[str, str]
) -> None:
    add(tmp_path, "scontrol", "echo part; echo broken >&2; exit 1")
    assert slurm_command.output("scontrol", environ=commands) == ""
    assert slurm_command.output("scontrol", environ=commands, any_status=True) == "part\nbroken\n"
    assert slurm_command.output("no-such-command", environ=commands) == ""


def test_a_command_that_hangs_is_given_up(tmp_path: Path, commands: dict[str, str]) -> None:
    add(tmp_path, "sacct", "exec sleep 600")
    began = time.monotonic()
    assert slurm_command.output("sacct", environ=commands, timeout=0.5) == ""
    assert time.monotonic() - began < 60
