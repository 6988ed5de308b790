"""A job step with one task on each node, which answers requests: srun's side of :mod:`srunddp.stage.node_agent`."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import select
import subprocess
import time
from collections.abc import Mapping
from types import TracebackType
from typing import IO, Any, Self

from srunddp import errors
from srunddp.stage import archive, node_agent, removal, unpack
from srunddp.stage.slurm import Job, StagingError, last_line, srun, start
from srunddp.util import filesystem
from srunddp.util.hostlist import fold
from srunddp.util.memory import memory_file

_SENT = (errors, filesystem, removal, archive, unpack, node_agent)
READ = """
import json, sys, types
for name, source in json.loads(sys.stdin.buffer.readline()):
    sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), sys.modules[name].__dict__)
node.main()
""".replace("node.main", f"sys.modules[{node_agent.__name__!r}].main")
_LAST = 10.0  # seconds for the nodes to remove what they have
_START = 'if [ -x "$1" ]; then exec "$1" -I -c "$2"; else exec python3 -I -c "$2"; fi'


class RemoteStep:
    """One task on each node of the job.

    Args:
        job: on all of whose nodes it is.
        python: the interpreter for the nodes; where a node has none there, its ``python3`` is taken.
        timeout: seconds that a node may take for an answer.

    Raises:
        StagingError: srun cannot be started.
    """

    def __init__(self, job: Job, python: str, timeout: float) -> None:
        self.job = job
        self._timeout = timeout
        self._nodes: set[str] = set()
        self._unread = b""
        # Not the caller's standard error, which may be a pipe that somebody reads to its end.
        self._errors = memory_file()
        words = [*srun(job.number, job.nnodes), "/bin/sh", "-c", _START, "sh", python, READ]
        self._process = start(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors)
        self._write(sources())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the step be, which lives until the job ends or a clean; after an error the nodes remove all they have."""
        if error is not None:
            with contextlib.suppress(StagingError):
                self._send({"do": "leave"})
        self._close()
        if error is not None:
            self._end(_LAST)

    def _end(self, seconds: float) -> None:
        """Wait for srun's end, and bring it about if need be."""
        for end in (self._process.terminate, self._process.kill):
            try:
                self._process.wait(seconds)
                return
            except subprocess.TimeoutExpired:
                end()
        self._process.wait()

    def _close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def wait(self) -> None:
        """Until all tasks have ended: after a clean nothing keeps them."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._end(self._timeout)

    def ask(self, **request: Any) -> dict[str, dict[str, Any]]:
        """What each node answers, by its name.

        Raises:
            StagingError: a node answers with an error, or not in time; srun has ended.
        """
        self._send(request)
        answers: dict[str, dict[str, Any]] = {}
        end = time.monotonic() + self._timeout
        while len(answers) < self.job.nnodes:
            answer = self._answer(self._line(end, answers))
            answers[answer["node"]] = answer
        self._nodes = set(answers)
        for name in sorted(answers):
            if "error" in answers[name]:
                found, expected, hint = answers[name]["error"]
                raise StagingError(f"{name}: {found}", expected=expected, hint=hint)
        return answers

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = json.loads(line)
            answer["node"]
        except (ValueError, KeyError):
            hint = "report this as an error of srunddp"
            raise StagingError(f"the answer {line[:80]!r}", expected="a line of a node", hint=hint) from None
        return answer

    def _send(self, request: dict[str, Any]) -> None:
        self._write({"folder": self.job.folder, **request})

    def _write(self, message: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def _line(self, end: float, answers: Mapping[str, Any]) -> bytes:
        """The next line that is an answer; a node's own messages, such as a login script's, are none."""
        output: IO[bytes] | None = self._process.stdout
        assert output is not None
        while True:
            line, newline, rest = self._unread.partition(b"\n")
            if newline:
                self._unread = rest
                if line.startswith(b"{"):
                    return line
                continue
            if not select.select([output], [], [], max(0.0, end - time.monotonic()))[0]:
                silent = fold(self._nodes - {*answers}) or "some nodes"
                hint = "look at these nodes; raise --timeout"
                raise StagingError(f"no answer from {silent} within {self._timeout:g} s", expected="one", hint=hint)
            read = os.read(output.fileno(), 1 << 16)
            if not read:
                raise self._ended()
            self._unread += read

    def _ended(self) -> StagingError:
        self._end(_LAST)
        said = os.pread(self._errors, 1 << 16, 0)
        return StagingError(
            f"srun has ended with {self._process.returncode}: {last_line(said)}",
            expected=f"a task on each of {self.job.nnodes} nodes",
            hint="see what it says; each node needs /bin/sh, and Python 3.11",
        )


def sources() -> list[tuple[str, str]]:
    """The modules that a node gets, by name, in the order in which they need each other."""
    return [(module.__name__, inspect.getsource(module)) for module in _SENT]
