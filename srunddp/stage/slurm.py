"""Runs a job step with one task on each node of the Slurm job for which folders are staged, and
sends archives to these nodes.

The tasks of the job step run :mod:`srunddp.stage.node_agent`, which answers requests.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from srunddp import errors
from srunddp.errors import ConfigError, UnavailableError
from srunddp.stage import archive, node_agent, offline, paths
from srunddp.stage import messages as stage_messages
from srunddp.stage.messages import Answer, CannotDo, Leave, StageMessage
from srunddp.util import atomic_file, filesystem, json_lines, slurm_command
from srunddp.util import messages as util_messages
from srunddp.util.hostlist import fold
from srunddp.util.kernel_file import children_of, memory_file

A = TypeVar("A", bound=Answer)

_LAST = 10.0  # seconds for the nodes to remove their copies after an error
# A shell script that runs a node's Python: the interpreter in its first argument if the node has
# it, else python3. -I keeps the working directory and PYTHONPATH of the login node out of sys.path.
_START = 'if [ -x "$1" ]; then exec "$1" -I -c "$2"; else exec python3 -I -c "$2"; fi'
# A shell script for a job step that runs until its standard input is closed. It prints the number
# of the job step, which sbcast needs.
_WAITING = 'echo "sdd-step $SLURM_STEP_ID"; exec cat >/dev/null'
_STEP = re.compile(rb"sdd-step ([0-9]+)\n")
# The modules whose source is sent to the nodes, in an order in which each comes after the modules
# that it imports.
_SENT = (
    errors,
    json_lines,
    util_messages,
    filesystem,
    atomic_file,
    offline,
    paths,
    stage_messages,
    archive,
    node_agent,
)
# A Python program that reads the modules on a node. It puts each module into sys.modules before it
# executes it, because dataclasses look it up there. It puts no packages there, so a module that is
# sent must import by full names, as in `from srunddp.errors import ConfigError`: this finds the
# module without its package.
READ = f"""
import json, sys, types
modules, folder = json.loads(sys.stdin.buffer.readline())
for name, source in modules:
    sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), sys.modules[name].__dict__)
sys.modules[{node_agent.__name__!r}].main(folder)
"""


@dataclass(frozen=True)
class Job:
    """The Slurm job for whose nodes folders are staged.

    Attributes:
        number: Slurm's job id.
        nnodes: The number of the job's nodes.
        folder: The path of the job's folder, the same on all nodes; each node has a separate one on
            a local disk.
    """

    number: str
    nnodes: int
    folder: str

    @classmethod
    def of(cls, environ: Mapping[str, str], base: str) -> Job:
        """Return the job that this process runs in, or that salloc has allocated to its shell.

        Args:
            environ: The environment with Slurm's variables.
            base: A folder that each node has for itself; the job's folder is made in it.

        Raises:
            ConfigError: There is no job, or it is a heterogeneous job, whose components have
                separate nodes.
        """
        number = environ.get("SLURM_JOB_ID", "")
        nnodes = environ.get("SLURM_JOB_NUM_NODES", "")
        if not (re.fullmatch(r"[0-9]{1,12}", number) and re.fullmatch(r"[0-9]{1,6}", nnodes)):
            raise ConfigError(
                "this is not a Slurm job: SLURM_JOB_ID and SLURM_JOB_NUM_NODES do not name one",
                expected="a batch script, or a shell under salloc",
                hint="call srunddp stage there",
            )
        if "SLURM_HET_SIZE" in environ:
            raise ConfigError(
                "this is a heterogeneous job",
                expected="a job with one component",
                hint="submit one job with nodes of one kind",
            )
        return cls(
            number, int(nnodes), os.path.join(os.path.abspath(base), f"sdd-{os.getuid()}-{number}")
        )

    def srun(
        self, command: Sequence[str], nodes: Sequence[str] = (), **streams: Any
    ) -> subprocess.Popen[bytes]:
        """Start a job step with one task on each node of the job, or on each of the given nodes. It
        runs beside the job's other steps, and Ctrl-C in a terminal does not reach it.

        Args:
            command: The command of each task.
            nodes: The names of the nodes; empty for all nodes of the job.
            streams: Standard input, output and error, as for Popen.

        Returns:
            The process of srun.

        Raises:
            UnavailableError: srun cannot be started.
        """
        count = len(nodes) or self.nnodes
        layout = [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"]
        if nodes:
            layout.append(f"--nodelist={','.join(nodes)}")
        # --overlap: this job step shares the CPUs of the job step that trains. --mpi=none: the
        # tasks need no PMI. --chdir=/: not every node has the working directory.
        manner = ["--overlap", "--kill-on-bad-exit=1", "--mpi=none", "--export=ALL", "--chdir=/"]
        words = ["srun", f"--jobid={self.number}", *manner, *layout, *command]
        with _there("srun"):
            return subprocess.Popen(words, env=_environment(), start_new_session=True, **streams)


def _environment() -> dict[str, str]:
    """Return the variables of this process for Slurm's commands. Of the variables that Slurm sets,
    only those that name the job are kept, because the others describe the layout of the training.
    """
    found = slurm_command.outside(os.environ, "SLURM_JOB_ID", "SLURM_JOBID")
    return {
        name: value for name, value in found.items() if not name.startswith(("SRUN_", "SBATCH_"))
    }


@contextlib.contextmanager
def _there(command: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UnavailableError(
            f"{command}: {error.strerror}",
            expected="Slurm's commands",
            hint="see whether it is in PATH",
        ) from None


def _last_line(output: str) -> str:
    """Return the last line of a command's output, without the command's name. The last line is the
    most specific one.
    """
    lines = [line for line in output.splitlines() if line.strip()]
    if lines:
        return lines[-1].partition("error: ")[2] or lines[-1]
    return "no message"


def first_line(folder: str) -> bytes:
    """Return the line that :data:`READ` reads first on a node: as JSON, the names and sources of
    the modules, and the job's folder.
    """
    modules = [(module.__name__, inspect.getsource(module)) for module in _SENT]
    return json.dumps([modules, folder]).encode() + b"\n"


class RemoteStep:
    """A job step with one task on each node of the job. The tasks answer requests.

    Args:
        job: The job whose nodes get a task.
        python: The path of the interpreter on the nodes; a node that lacks it uses its ``python3``.
        timeout: The seconds that a node may take for an answer.

    Raises:
        UnavailableError: srun cannot be started.
    """

    def __init__(self, job: Job, python: str, timeout: float) -> None:
        self.job = job
        self._timeout = timeout
        self._nodes: set[str] = set()
        self._unread = b""
        # Do not give srun the standard error of this process. It may be a pipe whose reader waits
        # until the last process has closed it, and srun runs longer than this process.
        self._errors = memory_file()
        pipe = subprocess.PIPE
        command = ("/bin/sh", "-c", _START, "sh", python, READ)
        self._process = job.srun(command, stdin=pipe, stdout=pipe, stderr=self._errors)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input = self._process.stdin
        self._output = self._process.stdout
        self._write(first_line(job.folder))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the streams. After an error, make the nodes remove what was staged, and end the job
        step. Otherwise the job step goes on until the job ends or `stage clean` is called.
        """
        if kind:
            with contextlib.suppress(UnavailableError):
                self._write(Leave().encode())
        for stream in (self._input, self._output):
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        if kind:
            self._end(_LAST)
            return
        # Slurm kills srun when the batch script ends. srun's child process would then have the job
        # step killed before the nodes can remove their copies, so kill the child now.
        for child in children_of(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)

    def _end(self, seconds: float) -> None:
        """Wait for srun to end. Terminate it after ``seconds``, and kill it if it has not ended
        ``seconds`` later.
        """
        for end in (self._process.terminate, self._process.kill):
            try:
                self._process.wait(seconds)
                return
            except subprocess.TimeoutExpired:
                end()
        self._process.wait()

    def ask(self, request: StageMessage, wanted: type[A]) -> dict[str, A]:
        """Send all nodes the same request, and wait for all answers.

        Args:
            request: The request that all nodes get.
            wanted: The type of the answers.

        Returns:
            The answers, by the names of the nodes.

        Raises:
            UnavailableError: A node answers with an error or too late, or srun has ended.
        """
        self._write(request.encode())
        answers: dict[str, A] = {}
        errors: dict[str, CannotDo] = {}
        end = time.monotonic() + self._timeout
        while len(answers) + len(errors) < self.job.nnodes:
            answer = StageMessage.decode(self._line(end, {*answers, *errors}))
            if isinstance(answer, CannotDo):
                errors[answer.node] = answer
            elif isinstance(answer, wanted):
                answers[answer.node] = answer
            # Skip other lines, such as the messages of a login script, which are no answers.
        self._nodes = {*answers, *errors}
        for name, error in sorted(errors.items()):
            raise UnavailableError(
                f"{name}: {error.found}", expected=error.expected, hint=error.hint
            )
        return answers

    def _write(self, line: bytes) -> None:
        try:
            self._input.write(line)
            self._input.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def _line(self, end: float, answered: set[str]) -> bytes:
        """Return the next line that a node prints.

        Args:
            end: When to give up, as a time of ``time.monotonic()``.
            answered: The names of the nodes that have answered the request; the error names the
                other nodes.

        Raises:
            UnavailableError: No line comes by ``end``, or srun has ended.
        """
        while b"\n" not in self._unread:
            if not select.select([self._output], [], [], max(0.0, end - time.monotonic()))[0]:
                silent = fold(self._nodes - answered) or "some nodes"
                raise UnavailableError(
                    f"no answer from {silent} within {self._timeout:g} s",
                    expected="one",
                    hint="look at these nodes; raise --timeout",
                )
            # Read from the descriptor, without a buffer: select() does not know of data that is
            # already in a buffer.
            read = os.read(self._output.fileno(), 1 << 16)
            if not read:
                raise self._ended()
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _ended(self) -> UnavailableError:
        self._end(_LAST)
        # srun shares the open file, whose position is after the text that srun has written. pread()
        # reads from the beginning.
        said = os.pread(self._errors, 1 << 16, 0).decode(errors="replace")
        found = f"srun has ended with {self._process.returncode}: {_last_line(said)}"
        hint = "see srun's message; each node needs /bin/sh and Python 3.11"
        return UnavailableError(
            found, expected=f"a task on each of {self.job.nnodes} nodes", hint=hint
        )


def send(job: Job, archive: str, nodes: Sequence[str], timeout: float) -> None:
    """Copy a file into the job's folder on some nodes, where it keeps its name.

    sbcast sends a file to all nodes of a job or of a job step. So a job step that only waits runs
    on the given nodes meanwhile.

    Args:
        job: The job that has the nodes.
        archive: The path of the file.
        nodes: The names of the nodes that need the file.
        timeout: The seconds that the copying may take.

    Raises:
        UnavailableError: A node could not take the file; the message is sbcast's.
    """
    pipe = subprocess.PIPE
    step = job.srun(
        ("/bin/sh", "-c", _WAITING), nodes, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
    )
    # The job step may have to wait for resources, and reading its number has no time limit of its
    # own.
    limit = threading.Timer(timeout, step.kill)
    limit.start()
    try:
        # When the block is left, it closes the standard input of the job step, which ends its
        # `cat`.
        with step:
            number = _step_number(step.stdout or ())
            if number:
                target = os.path.join(job.folder, os.path.basename(archive))
                # --force: a push that was killed may have left an archive with this name.
                words = ("--force", f"--jobid={job.number}.{number}", archive, target)
                problem = _sbcast(timeout, "--compress", *words)
                if "ompress" in problem:  # Slurm was built without lz4
                    problem = _sbcast(timeout, *words)
            else:
                problem = "no step on these nodes"
    finally:
        limit.cancel()
    if problem:
        raise UnavailableError(
            f"sbcast: {problem}",
            expected="a copy on each node",
            hint="see what is wrong on these nodes",
        )


def _step_number(lines: Iterable[bytes]) -> str:
    """Return the number that the waiting job step prints, perhaps after messages of the site; empty
    if the job step ends without printing its number.
    """
    for line in lines:
        if found := _STEP.fullmatch(line):
            return found[1].decode()
    return ""


def _sbcast(timeout: float, *words: str) -> str:
    """Run sbcast, and return why it has failed, in one line; empty if it has succeeded."""
    try:
        with _there("sbcast"):
            done = slurm_command.run(["sbcast", *words], _environment(), timeout=timeout)
    except subprocess.TimeoutExpired:
        return f"not done within {timeout:g} s"
    if done.returncode:
        return _last_line(done.stderr)
    return ""
