"""Giving a script to Slurm."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence

from srunddp.errors import ConfigError, SrunddpError

_WITHIN = 120.0  # a busy controller is slow
_SITE = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT")
_AWAY = re.compile(
    r"unable to contact|communication|timed out|connection|not responding|configuration source", re.IGNORECASE
)


class NoSlurmError(SrunddpError):
    """Slurm is not there, or does not answer (sysexits' EX_UNAVAILABLE)."""

    exit_code = 69


def submit(text: str, environ: Mapping[str, str], say: Callable[[str], None], folder: str | None = None) -> str:
    """Submit a script; the job's number.

    Args:
        say: takes what sbatch says besides.

    Raises:
        ConfigError: Slurm refuses it.
        NoSlurmError: Slurm does not answer.
    """
    pipe = subprocess.PIPE
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"],
            env=_outside(environ),
            cwd=folder,
            input=text.encode(),
            stdout=pipe,
            stderr=pipe,
            timeout=_WITHIN,
        )
    except OSError as error:
        why = "no sbatch in PATH" if isinstance(error, FileNotFoundError) else f"sbatch: {error.strerror}"
        raise NoSlurmError(why, expected="Slurm", hint="submit it on a login node") from None
    except subprocess.TimeoutExpired:
        hint = "see squeue whether the job is there, before you try again"
        raise NoSlurmError(f"sbatch has not answered within {_WITHIN:g} s", expected="a job", hint=hint) from None
    said, number = done.stderr.decode(errors="replace"), done.stdout.decode(errors="replace").split("\n")
    numbers = [match[1] for line in number if (match := re.fullmatch(r"(\d+)(?:;.*)?", line.strip()))]
    if done.returncode or not numbers:
        raise refusal(said)
    for line in _lines(said):
        say(f"sbatch: {line}")
    return numbers[-1]


def _outside(environ: Mapping[str, str]) -> dict[str, str]:
    """Without what the job that this shell may be in would hand on to another one."""
    return {name: value for name, value in environ.items() if name in _SITE or not name.startswith("SLURM_")}


def _lines(said: str) -> list[str]:
    lines = [re.sub(r"^sbatch: (?:error: |fatal: )?", "", line).strip() for line in said.splitlines()]
    return [line for line in lines if line]


def refusal(said: str) -> SrunddpError:
    """Slurm's words as one message."""
    words = "; ".join(_lines(said)) or "it said nothing"
    if _AWAY.search(words):
        return NoSlurmError(f"sbatch: {words}", expected="Slurm to answer", hint="try again later, see sinfo")
    return ConfigError(f"sbatch: {words}", expected="a job that Slurm accepts", hint="correct the option it names")


def allocate(allocation: Sequence[str], text: str, environ: Mapping[str, str]) -> None:
    """Become salloc, which runs the script; does not return.

    Raises:
        NoSlurmError: there is no salloc.
    """
    # As an argument and not as standard input, which is the ranks'.
    try:
        os.execvpe(allocation[0], [*allocation, "bash", "-c", text], _outside(environ))
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise NoSlurmError(f"salloc: {why}", expected="Slurm", hint="start it on a login node") from None
