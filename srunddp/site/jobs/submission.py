"""Giving a script to Slurm."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence

from srunddp.errors import ConfigError, SrunddpError

_WITHIN = 120.0  # a busy controller is slow
_AWAY = re.compile(
    r"unable to contact|communication|timed out|connection|not responding|configuration source", re.IGNORECASE
)


class NoSlurmError(SrunddpError):
    """Slurm is not there, or does not answer (sysexits' EX_UNAVAILABLE)."""

    exit_code = 69


def submit(text: str, environ: Mapping[str, str], folder: str | None = None) -> str:
    """Submit a script; the job's number.

    Raises:
        ConfigError: Slurm refuses it.
        NoSlurmError: Slurm does not answer.
    """
    pipe = subprocess.PIPE
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"],
            env=dict(environ),
            cwd=folder,
            input=text,
            stdout=pipe,
            stderr=pipe,
            text=True,
            timeout=_WITHIN,
        )
    except OSError:
        raise NoSlurmError("no sbatch in PATH", expected="Slurm", cure="submit it on a login node") from None
    except subprocess.TimeoutExpired:
        cure = "see squeue whether the job is there, before you try again"
        raise NoSlurmError(f"sbatch has not answered within {_WITHIN:g} s", expected="a job", cure=cure) from None
    if done.returncode:
        raise refusal(done.stderr)
    return done.stdout.strip().partition(";")[0]


def refusal(said: str) -> SrunddpError:
    """Slurm's words as one message."""
    lines = [re.sub(r"^sbatch: (?:error: |fatal: )?", "", line).strip() for line in said.splitlines()]
    words = "; ".join(line for line in lines if line) or "it said nothing"
    if _AWAY.search(words):
        return NoSlurmError(f"sbatch: {words}", expected="Slurm to answer", cure="try again later, see sinfo")
    return ConfigError(f"sbatch: {words}", expected="a job that Slurm accepts", cure="correct the option it names")


def allocate(allocation: Sequence[str], text: str, environ: Mapping[str, str]) -> None:
    """Become salloc, which runs the script; does not return.

    Raises:
        NoSlurmError: there is no salloc.
    """
    # As an argument and not as standard input, which is the ranks'.
    try:
        os.execvpe(allocation[0], [*allocation, "bash", "-c", text], dict(environ))
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise NoSlurmError(f"salloc: {why}", expected="Slurm", cure="start it on a login node") from None
