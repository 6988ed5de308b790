"""The cluster as tests use it, and a small command line to try things by hand.

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

# Not in a folder that others can write to: it names the folder whose configuration we then trust.
STATE_FILE = Path(f"/run/{PREFIX}cluster")
_WORK_FOLDERS = Path("/var/tmp")
_WORK_PREFIX = f"{PREFIX}cluster-"
# Limits that only what is broken reaches, also on a machine that does much else.
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
    """Another cluster, with settings of its own, beside the one that is up; a process of its own
    holds it.
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
    """Six Slurm nodes and a login node; a context manager that is up inside its block."""

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
        """The working folder: `etc` has slurm.conf, `log` the daemons' logs."""
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
        """A folder that all nodes see, for what must not go to a node's own /tmp."""
        return self.folder / "shared"

    @property
    def munge_socket(self) -> Path:
        """Where the munged listens that all nodes trust."""
        return slurm.munge_socket(self.folder)

    def up(self) -> None:
        """Starts the cluster and returns when all nodes are idle."""
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
        """Lets Slurm go on with settings that differ in `resv_ports` or `lines`; no step may be
        running.
        """
        slurm.write_main_config(self.folder, settings)
        self.run("scontrol", "reconfigure")
        self.settings = settings

    def lose(self, name: str) -> None:
        """Takes a node's cables off, and then kills all that runs there; see `mend`."""
        network.set_links(node(name), "down")
        network.end_processes([node(name).namespace])

    def mend(self, *names: str) -> None:
        """Lets nodes be as new, whatever has happened to them, and returns when they are idle."""
        for lost in map(node, names):
            network.end_processes([lost.namespace])
            network.set_links(lost, "up")
            self._daemons.append(
                slurm.start_slurmd(self.folder, lost, slurm.pmix_mounts(self.folder))
            )
            # Slurm takes a while to notice by itself, and a job may have been left on the node.
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
        """Ends every process of the cluster and removes its namespaces, files and folders."""
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
        """Starts `argv` on a machine; the process that comes back is the command itself, not a
        wrapper.

        It leads a process group, so that `os.killpg` reaches what a shell among `argv` starts.
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
        """Runs `argv` on the login node to its end; `env` is added to the environment.

        A command that outlives `timeout` is killed and subprocess.TimeoutExpired raised; a job that
        it has started may live on until `cancel_all`.
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
        """Runs `argv` in the namespaces of a compute node, beside Slurm."""
        return self.run(*argv, on=node(name).name, env=env, timeout=timeout, check=check)

    def sockets(self, name: str) -> list[sockets.Socket]:
        """The established and listening TCP sockets of a machine, with the processes that hold
        them.
        """
        return sockets.parse(self.run(*sockets.LIST_COMMAND, on=name).stdout)

    def cancel_all(self, timeout: float = _END_SECONDS) -> None:
        """Cancels every job and waits until the queue is empty, so that the next test finds free
        nodes.

        Raises:
            ClusterError: A job does not end.
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
                # A job may end between the listing and this.
                self.run("scancel", *live, check=False)
            time.sleep(0.1)

    def await_all_nodes(self, timeout: float = _END_SECONDS) -> None:
        """Waits until every node takes jobs: a step that Slurm could not end, for one, leaves its
        node DRAINED.

        Raises:
            ClusterError: A node takes none.
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
        """Waits until no job is COMPLETING: Slurm gives the next one other nodes than those."""
        deadline = time.monotonic() + timeout
        while (
            self.run("squeue", "--all", "--noheader", "--states=COMPLETING").stdout
            and time.monotonic() < deadline
        ):
            time.sleep(0.1)

    def _take_lock(self) -> None:
        """Refuses to end a cluster that another living process uses; a killed process holds no
        lock.
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
    """Removes the cluster of any run, also of one that was killed midway."""
    network.demolish()
    for folder in _WORK_FOLDERS.glob(_WORK_PREFIX + "*"):
        # Anybody may create such a name in this folder; root alone creates ours.
        if folder.lstat().st_uid == 0 and not folder.is_symlink():
            shutil.rmtree(folder)


def _enter(folder: Path, name: str, argv: Sequence[str]) -> list[str]:
    """`argv` as a command line that joins the namespaces of a machine's Slurm daemon, as the same
    process.
    """
    try:
        pid = slurm.pid(folder, machine(name))
    except OSError:
        raise ClusterError(f"no Slurm daemon on {name}") from None
    # Joining a mount namespace moves to its root folder, so the working folder is given again.
    options = ["--net", "--uts", "--mount", f"--wdns={Path.cwd()}"]
    return ["nsenter", f"--target={pid}", *options, "--", *argv]


def _environment(folder: Path, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours without what another Slurm may have left in it, with this cluster's configuration and
    `env`.

    A login always has a SHELL, and salloc's interactive step runs it; a test runner need not have
    one.
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
    """Waits for a process that leads a group; after `timeout` seconds kills the group and
    raises.
    """
    try:
        output, errors = process.communicate(timeout=timeout)
    except BaseException as error:
        # The whole group: a child that keeps the pipes open would make us wait for it.
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
            # Instead of this process, so that the command has the terminal and its signals for
            # itself.
            line = _enter(Cluster().folder, name, words[2:])
            os.execvpe(line[0], line, _environment(Cluster().folder))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(*sys.argv[1:])
