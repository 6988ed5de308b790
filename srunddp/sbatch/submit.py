"""Passes a job script to Slurm: for validation, or to run it as a job."""

import re
import subprocess
from collections.abc import Callable, Mapping, Sequence

from srunddp.errors import ConfigError, SrunddpError, UnavailableError
from srunddp.util.slurm_command import outside, run

_TEST_WITHIN = 10.0  # seconds; if Slurm takes longer to validate a job, the job is not validated
_SUBMIT_WITHIN = 120.0  # seconds; a busy controller is slow
# Matches Slurm's messages for failures that are not the script's fault: "Unable to contact slurm
# controller (connect failure)", "Socket timed out on send/recv operation", "Zero Bytes were
# transmitted or received", "Could not establish a configuration source", "Protocol authentication
# error".
_AWAY = re.compile(
    r"unable to (contact|resolve)|timed out|connection|not responding|configuration"
    r" source|communication|zero bytes"
    r"|authentication|munge",
    re.IGNORECASE,
)
# Matches what sbatch --parsable prints: `4711`, or `4711;CLUSTER` if there are several clusters.
_NUMBER = re.compile(r"^(\d+)(?:;.*)?$", re.MULTILINE)
# Hints by a part of Slurm's message; the first part that matches counts.
_HINTS = {
    "not available now": "sinfo -s lists the partitions",
    "account": "sacctmgr show associations user=$USER lists your accounts",
    "partition": "sinfo -s lists the partitions",
    "time limit": "sinfo -s lists the limit of each partition",
    "unrecognized option": (
        "correct the spelling, or see sbatch --help for the options of this Slurm"
    ),
    "node configuration": ("sinfo -o '%P %D %c %m %G' lists CPUs, memory and GPUs of the nodes"),
}


def check(text: str, options: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Have Slurm validate a job script or salloc's options, without making a job.

    Args:
        text: The job script.
        options: The words of salloc's command line; empty for a script of sbatch.
        environ: The environment variables for sbatch.

    Returns:
        Notes for the user: one if Slurm did not answer, and so validated nothing.

    Raises:
        ConfigError: Slurm refuses the job.
    """
    # salloc has no --test-only, so sbatch validates salloc's options. Give sbatch the variables of
    # salloc under sbatch's names, without its own variables SBATCH_X, which salloc does not read.
    if options:
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
    """Submit a job script.

    Args:
        text: The job script.
        environ: The environment variables for sbatch.
        note: A function that shows the user lines: those that sbatch prints in addition to the
            job's number.
        wait: Whether sbatch waits for the end of the job. If so, there is no time limit.
        within: How many seconds sbatch may take, if it does not wait.

    Returns:
        The job's number, and the exit code of sbatch. With ``wait`` it is the job's exit code.

    Raises:
        ConfigError: Slurm refuses the script.
        UnavailableError: There is no sbatch, or Slurm does not answer.
    """
    done = _sbatch(["--parsable"], text, environ, None if wait else within)
    # Search the output for the number, because a site's sbatch may also print a greeting.
    numbers = _NUMBER.findall(done.stdout)
    if not numbers:
        raise _refusal(done.stderr)
    note([f"sbatch: {line}" for line in _lines(done.stderr)])
    return str(numbers[-1]), done.returncode


def _sbatch(
    options: Sequence[str], text: str, environ: Mapping[str, str], limit: float | None
) -> subprocess.CompletedProcess[str]:
    """Run sbatch on a script.

    Args:
        options: Options of sbatch.
        text: The script, which sbatch reads from standard input.
        environ: The environment variables for sbatch.
        limit: How many seconds sbatch may take; None for no limit.

    Raises:
        ConfigError: Slurm refuses the script.
        UnavailableError: There is no sbatch, or Slurm does not answer.
    """
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
    # An exit code alone is no refusal, because with --wait sbatch ends with the job's exit code. If
    # sbatch has printed a number, it has accepted the script.
    if done.returncode and not _NUMBER.search(done.stdout):
        raise _refusal(done.stderr)
    return done


def _lines(said: str) -> list[str]:
    lines = [
        re.sub(r"^sbatch: (?:error: |fatal: )?", "", line).strip() for line in said.splitlines()
    ]
    return [line for line in lines if line]


def _refusal(said: str) -> SrunddpError:
    """Make an error with Slurm's message and a hint.

    Args:
        said: What sbatch has written to standard error.

    Returns:
        An UnavailableError if the message says that Slurm does not answer, else a ConfigError.
    """
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
