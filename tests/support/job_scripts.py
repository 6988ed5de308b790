"""Runs a job script under bash, with programs that only write down what they were called with."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

# Each call in two files; `stage push` prints what the nodes are to run, and `conda` the hook of its
# shell.
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
    """What a script did: its exit code, and each program's words and environment, by program."""

    code: int
    errors: str
    calls: list[tuple[list[str], dict[str, str]]]

    def of(self, name: str) -> list[list[str]]:
        return [words[1:] for words, _ in self.calls if words[0] == name]

    def training(self) -> list[str]:
        """The words of the srun that trains, which is the last."""
        return [words for words, _ in self.calls if words[0] == "srun" and "run" in words][-1]


def carry_out(text: str, folder: Path, **variables: str) -> Called:
    """Run the script in a new folder, as in a job of one node; CODE_srun=1 lets srun fail."""
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
