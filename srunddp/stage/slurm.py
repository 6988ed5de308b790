"""The Slurm job whose nodes are meant, and Slurm's own commands, started for the whole job from within it."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from srunddp.errors import ConfigError, SrunddpError

# What the commands take from a batch script's environment to find the job; the rest would be the training's layout.
_JOB = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS", "SLURM_JOB_ID", "SLURM_JOBID")
_SQUEUE = 20.0


class StagingError(SrunddpError):
    """The nodes cannot be brought what they lack (sysexits' EX_UNAVAILABLE)."""

    exit_code = 69


@dataclass(frozen=True)
class Job:
    """A job with nodes of its own.

    Attributes:
        number: Slurm's; nnodes: how many nodes.
        base: a folder that each node has on a disk of its own; folder: of this job in it.
    """

    number: str
    nnodes: int
    base: str
    folder: str

    @classmethod
    def of(cls, environ: Mapping[str, str], base: str) -> Job:
        """The one that this process is part of, or whose allocation its shell has.

        Raises:
            ConfigError: there is none, or it has several components, each with nodes of its own.
        """
        number, nnodes = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_JOB_NUM_NODES", "")
        if not (re.fullmatch(r"[0-9]{1,12}", number) and re.fullmatch(r"[0-9]{1,6}", nnodes)):
            raise ConfigError(
                "this is no Slurm job: SLURM_JOB_ID and SLURM_JOB_NUM_NODES do not say which",
                expected="a batch script, or a shell below salloc",
                hint="call srunddp stage there",
            )
        if "SLURM_HET_SIZE" in environ:
            hint = "submit one job with nodes of one kind"
            raise ConfigError("this is a heterogeneous job", expected="a job with one component", hint=hint)
        base = os.path.abspath(base)
        return cls(number, int(nnodes), base, os.path.join(base, f"sdd-{os.getuid()}-{number}"))


def srun(job: str, nnodes: int, nodes: Sequence[str] = ()) -> list[str]:
    """The words that start one task on each node beside whatever else runs in the job.

    Args:
        nodes: their names; empty for all of the job's.
    """
    listed = [f"--nodelist={','.join(nodes)}"] if nodes else []
    layout = [f"--nodes={nnodes}", f"--ntasks={nnodes}", "--ntasks-per-node=1", *listed]
    manner = ["--overlap", "--kill-on-bad-exit=1", "--mpi=none", "--export=ALL", "--chdir=/"]
    return ["srun", f"--jobid={job}", *manner, *layout]


def start(words: Sequence[str], **streams: Any) -> subprocess.Popen[bytes]:
    """Start one of Slurm's commands, out of reach of a terminal's Ctrl-C.

    Raises:
        StagingError: it is not there.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SRUN_", "SBATCH_"))}
    kept |= {name: os.environ[name] for name in _JOB if name in os.environ}
    try:
        return subprocess.Popen(words, env=kept, start_new_session=True, **streams)
    except OSError as error:
        raise StagingError(
            f"{words[0]}: {error.strerror}", expected="Slurm's commands", hint="see whether it is in PATH"
        ) from None


def last_line(output: bytes) -> str:
    """What a command said last, which says the most; without its name in front."""
    lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].partition("error: ")[2] or lines[-1] if lines else "it says nothing"


def alive() -> list[str] | None:
    """The numbers of this user's jobs that have nodes; None where Slurm does not say."""
    states = "--states=running,suspended,stopped,configuring,completing,stage_out,signaling,resizing"
    words = ["squeue", f"--user={os.getuid()}", "--noheader", "--format=%A", states]
    try:
        with start(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            try:
                output, _ = process.communicate(timeout=_SQUEUE)
            except subprocess.TimeoutExpired:
                process.kill()
                return None
    except StagingError:
        return None
    return output.decode().split() if process.returncode == 0 else None


_WAITING = 'echo "sdd-step $SLURM_STEP_ID"; exec cat >/dev/null'


def send(job: Job, archive: str, nodes: Sequence[str], timeout: float) -> None:
    """Copy a file into the job's folder on these nodes, under its own name.

    Args:
        timeout: seconds for all of it.

    Raises:
        StagingError: a node could not take it, with sbcast's words.
    """
    words = [*srun(job.number, len(nodes), nodes), "/bin/sh", "-c", _WAITING]
    target = os.path.join(job.folder, os.path.basename(archive))
    step = start(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    limit = threading.Timer(timeout, step.kill)
    limit.start()
    try:
        with step:
            assert step.stdout is not None
            to = f"--jobid={job.number}.{_number(step.stdout)}"
            problem = _sbcast(timeout, "--force", "--compress", to, archive, target)
            if "ompress" in problem:  # Slurm was built without lz4
                problem = _sbcast(timeout, "--force", to, archive, target)
    finally:
        limit.cancel()
    if problem:
        raise StagingError(f"sbcast: {problem}", expected="a copy on each node", hint="see to these nodes")


def _number(output: IO[bytes]) -> str:
    """Of the step that waits; a site's own messages before are none."""
    for line in output:
        if found := re.fullmatch(rb"sdd-step ([0-9]+)\n", line):
            return found[1].decode()
    raise StagingError("srun has ended", expected="a step on the nodes to be staged", hint="see whether they are up")


def _sbcast(timeout: float, *words: str) -> str:
    """What is wrong, in one line; empty if nothing is."""
    with start(["sbcast", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            _, said = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            return f"not done within {timeout:g} s"
    return last_line(said) if process.returncode else ""
