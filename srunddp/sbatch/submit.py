"""Giving a script to Slurm: to look at, or to run as a job."""

import re
import subprocess
from collections.abc import Callable, Mapping, Sequence

from srunddp.errors import ConfigError, SrunddpError, UnavailableError
from srunddp.util.slurm_command import outside, run

_TEST_WITHIN = 10.0
_SUBMIT_WITHIN = 120.0  # a busy controller is slow
# Slurm's words where the fault is not the script's: "Unable to contact slurm controller (connect
# failure)", "Socket timed out on send/recv operation", "Zero Bytes were transmitted or received",
# "Could not establish a configuration source", "Protocol authentication error".
_AWAY = re.compile(
    r"unable to (contact|resolve)|timed out|connection|not responding|configuration"
    r" source|communication|zero bytes"
    r"|authentication|munge",
    re.IGNORECASE,
)
# --parsable prints `4711`, or `4711;CLUSTER` where there are several clusters.
_NUMBER = re.compile(r"^(\d+)(?:;.*)?$", re.MULTILINE)
# By a part of Slurm's words; of several the first.
_HINTS = {
    "account": "sacctmgr show associations user=$USER lists your accounts",
    "partition": "sinfo -s lists the partitions",
    "time limit": "sinfo -s lists the limit of each partition",
    "unrecognized option": (
        "correct the spelling, or see sbatch --help for the options of this Slurm"
    ),
    "node configuration": "sinfo -o '%P %D %c %m %G' lists CPUs, memory and GPUs of the nodes",
}


def check(text: str, options: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Have Slurm validate a script, or salloc's options, without a job.

    Args:
        text: the script.
        options: of salloc; none for a script of sbatch.
        environ: the variables that sbatch gets.

    Returns:
        Notes to print.

    Raises:
        ConfigError: Slurm refuses.
    """
    # salloc has no --test-only, so sbatch validates its options. SALLOC_X means to salloc what
    # SBATCH_X means to sbatch.
    if options:  # salloc has variables of its own
        environ = {
            name.replace("SALLOC_", "SBATCH_"): environ[name]
            for name in environ
            if "SBATCH_" not in name
        }
    try:
        _sbatch(["--test-only", *options], text, environ, _TEST_WITHIN)
    except UnavailableError as error:
        return [f"{error.found}: Slurm has not validated this job"]
    return []


def submit(
    text: str,
    environ: Mapping[str, str],
    note: Callable[[list[str]], None],
    *,
    wait: bool = False,
    within: float = _SUBMIT_WITHIN,
) -> tuple[str, int]:
    """Submit a script.

    Args:
        text: the script.
        environ: the variables that sbatch gets.
        note: takes what else sbatch prints.
        wait: whether sbatch waits for the job's end, for which there is no limit.
        within: seconds that sbatch has where it does not wait.

    Returns:
        The job's number, and the exit code of sbatch, which is the job's if it waits for its end.

    Raises:
        ConfigError: Slurm refuses the script.
        UnavailableError: Slurm does not answer.
    """
    done = _sbatch(["--parsable"], text, environ, None if wait else within)
    # A site's sbatch may also print a greeting; the cluster's name follows where there are several.
    numbers = _NUMBER.findall(done.stdout)
    if not numbers:
        raise _refusal(done.stderr)
    note([f"sbatch: {line}" for line in _lines(done.stderr)])
    return str(numbers[-1]), done.returncode


def _sbatch(
    options: Sequence[str], text: str, environ: Mapping[str, str], limit: float | None
) -> subprocess.CompletedProcess[str]:
    """Run sbatch, which is to accept the script."""
    try:
        done = run(["sbatch", *options], outside(environ), timeout=limit, input=text, as_is=True)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            why = "no sbatch in PATH"
        else:
            why = f"sbatch: {error.strerror}"
        raise UnavailableError(why, expected="Slurm", hint="submit it on a login node") from None
    except subprocess.TimeoutExpired:
        raise UnavailableError(
            f"sbatch has not answered within {limit:g} s",
            expected="a job",
            hint="look in squeue for the job before you try again",
        ) from None
    # With --wait sbatch ends with the job's code. If there is a number, the script was accepted.
    if done.returncode and not _NUMBER.search(done.stdout):
        raise _refusal(done.stderr)
    return done


def _lines(said: str) -> list[str]:
    lines = [
        re.sub(r"^sbatch: (?:error: |fatal: )?", "", line).strip() for line in said.splitlines()
    ]
    return [line for line in lines if line]


def _refusal(said: str) -> SrunddpError:
    """Make one message of Slurm's words."""
    words = "; ".join(_lines(said)) or "no message"
    if _AWAY.search(words):
        return UnavailableError(
            f"sbatch: {words}", expected="Slurm to answer", hint="try again later, see sinfo"
        )
    hint = next(
        (hint for part, hint in _HINTS.items() if part in words.lower()),
        "correct the option it names",
    )
    return ConfigError(f"sbatch: {words}", expected="a job that Slurm accepts", hint=hint)
