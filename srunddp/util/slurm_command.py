"""Ask one of Slurm's commands: in plain English, with nothing to read from a terminal, and within a limit of time."""

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence

WITHIN = 5.0
# Times in seconds since the epoch; messages that can be matched.
_FORMAT = {"SLURM_TIME_FORMAT": "%s", "TZ": "UTC", "LC_ALL": "C"}


def run(
    command: Sequence[str],
    environ: Mapping[str, str] | None = None,
    *,
    timeout: float | None = WITHIN,
    input: str | None = None,
    as_is: bool = False,
    start_new_session: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a command and wait for it.

    Args:
        environ: for the command; this process's, unless given.
        timeout: seconds, after which the command is killed; None for no limit.
        input: for its standard input, which is empty unless given.
        as_is: leave ``environ`` as it is, for a command that hands it on to a job.
        start_new_session: so that a signal to this process's group is not for the command.

    Raises:
        OSError: the command does not exist.
        subprocess.TimeoutExpired: it took longer.
    """
    return subprocess.run(
        command,
        env={**(os.environ if environ is None else environ), **({} if as_is else _FORMAT)},
        input=input or "",
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=timeout,
        start_new_session=start_new_session,
    )


def outside(environ: Mapping[str, str], *kept: str) -> dict[str, str]:
    """Without what the job that this process may be in would hand on, but for what finds Slurm and these."""
    kept = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT", *kept)
    return {name: value for name, value in environ.items() if name in kept or not name.startswith("SLURM_")}


def output(
    *command: str, environ: Mapping[str, str] | None = None, timeout: float = WITHIN, any_status: bool = False
) -> str:
    """What a command prints; empty if it does not exist or takes longer, and if it fails unless ``any_status`` is set.

    With ``any_status`` its errors follow.
    """
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        done = run(command, environ, timeout=timeout)
        if any_status:
            return done.stdout + done.stderr
        return "" if done.returncode else done.stdout
    return ""
