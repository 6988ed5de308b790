"""Runs a job script under bash, with programs that only record how they were called."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

# Records each call in two files. As the real programs do, `stage push` prints the program for the
# nodes, and `conda shell.bash` prints a shell function.
_PROGRAM = """#!/bin/bash
name=${0##*/}
call=$CALLS/$EPOCHREALTIME-$$
cat /proc/$$/environ >"$call.environ"
printf '%s\\0' "$name" "$@" >"$call.words"
[ "${1-} ${2-}" != "stage push" ] || echo /staged/srunddp
[ "$name ${1-}" != "conda shell.bash" ] || echo 'conda() { command conda "$@"; }'
code=CODE_$name
exit "${!code:-0}"
"""
_PROGRAMS = ("srun", "srunddp", "module", "conda", "salloc", "sleep")


@dataclass(frozen=True)
class Called:
    """What a job script has done.

    Attributes:
        code: The script's exit code.
        errors: What the script wrote to standard error.
        calls: The words and the environment variables of each call of a program, in order.
    """

    code: int
    errors: str
    calls: list[tuple[list[str], dict[str, str]]]

    def of(self, name: str) -> list[list[str]]:
        return [words[1:] for words, _ in self.calls if words[0] == name]

    def training(self) -> list[str]:
        """Return the words of the srun that trains, which is the last call of srun with ``run``."""
        return [words for words, _ in self.calls if words[0] == "srun" and "run" in words][-1]


def carry_out(text: str, folder: Path, **variables: str) -> Called:
    """Run a job script as in a job of one node.

    Args:
        text: The script.
        folder: An empty folder for the script, its working directory and the records.
        variables: Further environment variables. With ``CODE_srun=1`` each call of srun ends with
            exit code 1, and so for the other programs.
    """
    programs = folder / "programs"
    work = folder / "work"
    calls = folder / "calls"
    for each in (programs, work, calls):
        each.mkdir()
    for name in _PROGRAMS:
        (programs / name).write_text(_PROGRAM)
        (programs / name).chmod(0o755)
    path = folder / "job.sh"
    path.write_text(text)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_CPUS_PER_TASK": "2"}
    environ = {"PATH": f"{programs}:/usr/bin:/bin", "CALLS": str(calls), **slurm, **variables}
    done = subprocess.run(
        ["bash", str(path)],
        cwd=work,
        env=environ,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=30,
    )
    return Called(
        done.returncode,
        done.stderr.decode(),
        [_call(each) for each in sorted(calls.glob("*.words"))],
    )


def _call(path: Path) -> tuple[list[str], dict[str, str]]:
    environ = _texts(path.with_suffix(".environ"))
    return _texts(path), dict(pair.split("=", 1) for pair in environ)


def _texts(path: Path) -> list[str]:
    return path.read_bytes().decode().split("\0")[:-1]
