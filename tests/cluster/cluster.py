"""Starts and ends the cluster for tests, and has a small command line to try things by hand.

::

    python -m tests.cluster.cluster up                  start it and leave it up
    python -m tests.cluster.cluster on MACHINE CMD...   run a command on a node, or on `login`
    python -m tests.cluster.cluster down                end it and remove every trace
    python -m tests.cluster.cluster hold SETTINGS       start it, and end it at the end of the input
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from . import network, slurm, sockets
from .network import tool_environment
from .nodes import INSTANCE, LOGIN, NODES, PREFIX, machine, node
from .requirements import requirements
from .slurm import Settings

__all__ = ["Cluster", "ClusterError", "CommandError", "Settings", "beside", "requirements"]

# The file names the folder whose configuration is then trusted, so it is in a folder that only root
# can write to.
STATE_FILE = Path(f"/run/{PREFIX}cluster")
_WORK_FOLDERS = Path("/var/tmp")
_WORK_PREFIX = f"{PREFIX}cluster-"
# Seconds that nothing takes unless it is broken, not even on a busy machine.
_UP_SECONDS = 240.0
_END_SECONDS = 120.0
ROOT = Path(__file__).resolve().parent.parent.parent


class ClusterError(RuntimeError):
    """The cluster cannot be started or is not up."""


class CommandError(ClusterError):
    """A command on the cluster failed; the message has its output."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.done = done
        super().__init__(f"ended with {done.returncode}: {done.args}\n{done.stdout}\n{done.stderr}")


@contextlib.contextmanager
def beside(settings: Settings, number: int) -> Iterator["Cluster"]:
    """Start a second cluster beside the cluster that is up, in a separate process. It is ended at
    the end of the block.

    Args:
        settings: The settings of the second cluster.
        number: A number from 1 to 99, different for each cluster that is up at the same time.

    Raises:
        ClusterError: The cluster did not start.
    """
    command = [sys.executable, "-m", "tests.cluster.cluster", "hold", json.dumps(asdict(settings))]
    environment = {**os.environ, "SRUNDDP_TEST_CLUSTER": str(100 * INSTANCE + number)}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=environment, cwd=ROOT, stdin=pipe, stdout=pipe, text=True
    ) as holder:
        assert holder.stdout
        try:
            if not (folder := holder.stdout.readline().strip()):
                raise ClusterError("the cluster beside the first did not start; see standard error")
            yield Cluster(settings, Path(folder))
        finally:
            holder.communicate(timeout=180)


class Cluster:
    """Six Slurm nodes and a login node. As a context manager, the cluster is up inside the block.

    Args:
        settings: The settings with which the cluster is started; None for the usual ones.
        folder: The working folder of a cluster that is up already; None for the folder of this
            process's cluster.
    """

    def __init__(self, settings: Settings | None = None, folder: Path | None = None) -> None:
        self.settings = settings or Settings()
        self._folder = folder
        self._lock: IO[str] | None = None
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.down()

    @property
    def folder(self) -> Path:
        """The working folder. Its folder `etc` has slurm.conf, and `log` has the daemons' logs."""
        if self._folder is None:
            try:
                self._folder = Path(STATE_FILE.read_text().strip() or "missing").resolve(
                    strict=True
                )
            except OSError:
                raise ClusterError("the cluster is not up") from None
        return self._folder

    @property
    def shared(self) -> Path:
        """A folder that all nodes see, for files that must not go to a node's own /tmp."""
        return self.folder / "shared"

    @property
    def munge_socket(self) -> Path:
        """The socket of the munged that all nodes trust."""
        return slurm.munge_socket(self.folder)

    def up(self) -> None:
        """Start the cluster, and return when all nodes are idle.

        Raises:
            ClusterError: This machine cannot run the cluster, or the cluster does not start.
        """
        if problem := requirements(accounting=self.settings.accounting):
            raise ClusterError(problem)
        self._take_lock()
        try:
            _clear_away()
            self._start()
            self._wait_idle()
        except BaseException:
            self.down()
            raise

    def reconfigure(self, settings: Settings) -> None:
        """Change the settings of the running Slurm. They may differ only in `resv_ports` and
        `lines`, and no job step may be running.
        """
        slurm.write_main_config(self.folder, settings)
        self.run("scontrol", "reconfigure")
        self.settings = settings

    def lose(self, name: str) -> None:
        """Unplug a node's cables, and then kill all processes on the node; `mend` undoes this."""
        network.set_links(node(name), "down")
        network.end_processes([node(name).namespace])

    def mend(self, *names: str) -> None:
        """Kill what still runs on some nodes, plug in their cables and start their slurmd again.
        Return when all nodes are idle.
        """
        for lost in map(node, names):
            network.end_processes([lost.namespace])
            network.set_links(lost, "up")
            self._daemons.append(
                slurm.start_slurmd(self.folder, lost, slurm.pmix_mounts(self.folder))
            )
            # Slurm takes a while to notice by itself that the node is back. Setting it DOWN also
            # ends a job that was left on the node.
            for state in ("DOWN", "RESUME"):
                self.run(
                    "scontrol",
                    "update",
                    f"nodename={lost.name}",
                    f"state={state}",
                    "reason=test",
                    check=False,
                )
        ended = [daemon for daemon in self._daemons if daemon.poll() is not None]
        self._daemons = [daemon for daemon in self._daemons if daemon not in ended]
        self._wait_idle()

    def down(self) -> None:
        """End every process of the cluster, and remove its namespaces, files and folders."""
        _clear_away()
        for daemon in self._daemons:
            daemon.wait()
        STATE_FILE.unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.close()
        self._daemons = []
        self._folder = None
        self._lock = None

    def popen(
        self,
        *argv: str,
        on: str = LOGIN.name,
        env: Mapping[str, str] | None = None,
        stdin: int | IO[str] = subprocess.DEVNULL,
        stdout: int | IO[str] = subprocess.PIPE,
        stderr: int | IO[str] = subprocess.PIPE,
    ) -> subprocess.Popen[str]:
        """Start `argv` on a machine. The process that is returned is the command itself, not a
        wrapper.

        The process leads a process group, so that `os.killpg` reaches what a shell in `argv`
        starts.
        """
        return subprocess.Popen(
            _enter(self.folder, on, argv),
            env=_environment(self.folder, env),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )

    def run(
        self,
        *argv: str,
        on: str = LOGIN.name,
        env: Mapping[str, str] | None = None,
        timeout: float = 60.0,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run `argv` on a machine, by default the login node, and wait until it has ended.

        A command that takes longer than `timeout` seconds is killed, and subprocess.TimeoutExpired
        is raised. A job that the command has started may go on until `cancel_all`.

        Args:
            argv: The command.
            on: The name of the machine.
            env: Variables that are added to the environment.
            timeout: Seconds after which the command is killed.
            check: Whether a failure of the command raises a CommandError.
        """
        with self.popen(*argv, on=on, env=env) as process:
            done = _finish(process, argv, timeout)
        if check and done.returncode:
            raise CommandError(done)
        return done

    def on(
        self,
        name: str,
        *argv: str,
        env: Mapping[str, str] | None = None,
        timeout: float = 60.0,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run `argv` in the namespaces of a compute node, without Slurm. The other arguments are
        those of `run`.
        """
        return self.run(*argv, on=node(name).name, env=env, timeout=timeout, check=check)

    def sockets(self, name: str) -> list[sockets.Socket]:
        """Return the established and listening TCP sockets of a machine, with the processes that
        hold them open.
        """
        return sockets.parse(self.run(*sockets.LIST_COMMAND, on=name).stdout)

    def cancel_all(self, timeout: float = _END_SECONDS) -> None:
        """Cancel every job, and wait until the queue is empty, so that the next test finds free
        nodes.

        Raises:
            ClusterError: A job has not ended after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while jobs := self.run(
            "squeue", "--all", "--noheader", "--format=%A %T"
        ).stdout.splitlines():
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"jobs that do not end: {jobs}\n{slurm.log_tails(self.folder, 30)}"
                )
            if live := [job.split()[0] for job in jobs if not job.endswith("COMPLETING")]:
                # A job may have ended since squeue listed it.
                self.run("scancel", *live, check=False)
            time.sleep(0.1)

    def await_all_nodes(self, timeout: float = _END_SECONDS) -> None:
        """Wait until every node can take jobs. A node cannot, for example, after a job step that
        Slurm could not end: Slurm sets the node DRAINED.

        Raises:
            ClusterError: A node still takes no job after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while self._idle_nodes() < len(NODES):
            if time.monotonic() > deadline:
                states = self.run("sinfo", "--Node", "--long").stdout
                raise ClusterError(
                    f"nodes that take no job:\n{states}\n{slurm.log_tails(self.folder, 30)}"
                )
            time.sleep(0.1)

    def await_completing(self, timeout: float = _END_SECONDS) -> None:
        """Wait until no job is COMPLETING, for `timeout` seconds at most. Slurm does not give the
        nodes of such a job to the next job.
        """
        deadline = time.monotonic() + timeout
        while (
            self.run("squeue", "--all", "--noheader", "--states=COMPLETING").stdout
            and time.monotonic() < deadline
        ):
            time.sleep(0.1)

    def _take_lock(self) -> None:
        """Lock the cluster for this process, so that no other process ends it. The lock is free
        again when this process ends or is killed.

        Raises:
            ClusterError: Another process has the lock.
        """
        lock = STATE_FILE.open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ClusterError("another process has the cluster up on this machine") from None
        self._lock = lock

    def _start(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix=_WORK_PREFIX, dir=_WORK_FOLDERS))
        STATE_FILE.write_text(f"{folder}\n")
        self._folder = folder
        folder.chmod(0o755)
        slurm.write_config(folder, self.settings)
        network.build(open_management=self.settings.open_management)
        slurm.start(folder, self.settings, self._daemons)

    def _wait_idle(self) -> None:
        deadline = time.monotonic() + _UP_SECONDS
        while not (slurm.is_started(self.folder) and self._idle_nodes() == len(NODES)):
            dead = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            if dead or time.monotonic() > deadline:
                problem = f"ended: {dead}" if dead else f"nodes not idle after {_UP_SECONDS:.0f} s"
                raise ClusterError(
                    f"the cluster did not come up, {problem}\n{slurm.log_tails(self.folder)}"
                )
            time.sleep(0.1)

    def _idle_nodes(self) -> int:
        done = self.run("sinfo", "--noheader", "--states=idle", "--format=%D", check=False)
        return int(done.stdout) if done.stdout.strip().isdigit() else 0


def _clear_away() -> None:
    """Remove the cluster with this number, even if the run that started it was killed."""
    network.demolish()
    for folder in _WORK_FOLDERS.glob(_WORK_PREFIX + "*"):
        # Any user may create a folder with such a name here. The folders of the cluster belong to
        # root.
        if folder.lstat().st_uid == 0 and not folder.is_symlink():
            shutil.rmtree(folder)


def _enter(folder: Path, name: str, argv: Sequence[str]) -> list[str]:
    """Return a command line that joins the namespaces of a machine's Slurm daemon and then becomes
    `argv`.

    Raises:
        ClusterError: The machine has no Slurm daemon.
    """
    try:
        pid = slurm.pid(folder, machine(name))
    except OSError:
        raise ClusterError(f"no Slurm daemon on {name}") from None
    # A process that joins a mount namespace is then in its root folder, so give the working folder
    # again.
    options = ["--net", "--uts", "--mount", f"--wdns={Path.cwd()}"]
    return ["nsenter", f"--target={pid}", *options, "--", *argv]


def _environment(folder: Path, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment with this cluster's configuration and `env`, and without
    the variables of any other Slurm.

    SHELL is set, because salloc's interactive step runs it: a login always sets it, but a test
    runner may not.
    """
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PMI"))
    }
    path = tool_environment()["PATH"]
    return {
        **kept,
        "PATH": path,
        "SHELL": "/bin/bash",
        "SLURM_CONF": str(slurm.config_file(folder)),
        **(env or {}),
    }


def _finish(
    process: subprocess.Popen[str], argv: Sequence[str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Wait until a process that leads a process group has ended. After `timeout` seconds, kill the
    group and raise subprocess.TimeoutExpired.
    """
    try:
        output, errors = process.communicate(timeout=timeout)
    except BaseException as error:
        # Kill the whole group, because communicate() would wait for a child that keeps the pipes
        # open.
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        error.add_note(f"{argv}\n{output}\n{errors}")
        raise
    return subprocess.CompletedProcess(list(argv), process.returncode, output, errors)


def main(*words: str) -> None:
    match words:
        case ["up"]:
            cluster = Cluster()
            cluster.up()
            print(f"{len(NODES)} nodes idle, SLURM_CONF={slurm.config_file(cluster.folder)}")
        case ["down"]:
            Cluster().down()
        case ["hold", settings]:
            with Cluster(Settings(**json.loads(settings))) as held:
                print(held.folder, flush=True)
                sys.stdin.read()
        case ["on", name, _, *_]:
            # The command replaces this process, so that it alone uses the terminal and gets the
            # terminal's signals.
            line = _enter(Cluster().folder, name, words[2:])
            os.execvpe(line[0], line, _environment(Cluster().folder))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(*sys.argv[1:])
