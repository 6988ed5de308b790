"""How commands get onto the cluster's machines and back."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import slurm
from .network import tool_environment
from .nodes import machine


class ClusterError(RuntimeError):
    """The cluster cannot be started or is not up."""


class CommandError(ClusterError):
    """A command on the cluster failed; the message has its output."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.done = done
        super().__init__(f"ended with {done.returncode}: {done.args}\n{done.stdout}\n{done.stderr}")


def enter(folder: Path, name: str, argv: Sequence[str]) -> list[str]:
    """`argv` as a command line that joins the namespaces of a machine's Slurm daemon, as the same process."""
    try:
        pid = slurm.pid(folder, machine(name))
    except OSError:
        raise ClusterError(f"no Slurm daemon on {name}") from None
    # Joining a mount namespace moves to its root folder, so the working folder is given again.
    options = ["--net", "--uts", "--mount", f"--wdns={Path.cwd()}"]
    return ["nsenter", f"--target={pid}", *options, "--", *argv]


def environment(folder: Path, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours without what another Slurm may have left in it, with this cluster's configuration and `env`.

    A login always has a SHELL, and salloc's interactive step runs it; a test runner need not have one.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PMI"))}
    path = tool_environment()["PATH"]
    return {**kept, "PATH": path, "SHELL": "/bin/bash", "SLURM_CONF": str(slurm.config_file(folder)), **(env or {})}


def finish(process: subprocess.Popen[str], argv: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Waits for a process that leads a group; after `timeout` seconds kills the group and raises."""
    try:
        output, errors = process.communicate(timeout=timeout)
    except BaseException as error:
        # The whole group: a child that keeps the pipes open would make us wait for it.
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        error.add_note(f"{argv}\n{output}\n{errors}")
        raise
    return subprocess.CompletedProcess(list(argv), process.returncode, output, errors)
