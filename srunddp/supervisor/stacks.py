"""Where a rank is: its Python stacks, which faulthandler writes on a signal without the GIL; and
who blocks the others.

The worker writes into memory that the supervisor reads, so that neither a full pipe nor a user's
file is in the way, and what a crash leaves is there after the process has gone.
"""

import contextlib
import faulthandler
import os
import re
import signal
import time
from collections.abc import Mapping

from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.util.hostlist import group_by_key
from srunddp.util.kernel_file import memory_file

# Neither Python, torch, NCCL nor MPI uses it.
ASK = signal.SIGRTMAX - 3
_LONGEST = 12000
_OURS = 'srunddp/run/script.py", line'


class StackDump:
    """Memory into which faulthandler writes, with the descriptor of a file in it; made before the
    fork.
    """

    def __init__(self, descriptor: int | None = None, limits: Limits = DEFAULT_LIMITS) -> None:
        self.descriptor = memory_file() if descriptor is None else descriptor
        self._read = 0
        self._limits = limits
        # What it is in the worker before arm(), and again when Python itself has ended, and C's
        # exit handlers run.
        signal.signal(ASK, signal.SIG_IGN)

    def arm(self) -> None:
        """In the worker: from now on a crash, and the signal, leave their stacks here.

        A handler that the user has switched on (PYTHONFAULTHANDLER) stays, and writes to standard
        error. In what Python forks here, the signal does what it does in plain Python.
        """
        if not faulthandler.is_enabled():
            faulthandler.enable(self.descriptor)
        faulthandler.register(ASK, self.descriptor, all_threads=True)
        os.register_at_fork(after_in_child=_disarm)

    def read(self) -> str:
        """In the supervisor: what has been written since the last reading."""
        return _of_the_script(self._unread())

    def _unread(self) -> bytes:
        piece = os.pread(self.descriptor, 1 << 18, self._read)
        self._read += len(piece)
        return piece

    def request(self, worker: int) -> str:
        """In the supervisor: the worker's stacks now; empty where it gives none in time."""
        self._unread()
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, ASK)
        # faulthandler writes a line in many pieces, of which a look may see some: nothing can be
        # told of a line before all of it is there.
        dumped = b""
        end = time.monotonic() + self._limits.stacks_within
        while time.monotonic() < end:
            time.sleep(self._limits.stacks_look)
            more = self._unread()
            if dumped.endswith(b"\n") and not more:
                break
            dumped += more
        return _of_the_script(dumped)[:_LONGEST]


def _of_the_script(dumped: bytes) -> str:
    """The text of a dump without the frames above the script."""
    kept: list[str] = []
    ours = False
    for line in dumped.decode(errors="replace").strip().splitlines():
        ours = line.startswith("  File ") and (ours or _OURS in line)
        if not ours:
            kept.append(line)
    return "\n".join(kept)


Stack = tuple[re.Match[str], ...]  # the lines of a stack, the innermost frame first
_FRAME = re.compile(
    r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE
)
# They say nothing about where a rank is: decorators, and what calls a module.
_WRAPPERS = ("wrapper", "inner", "_wrapped_call_impl", "_call_impl", "decorate_context", "<lambda>")
_WAITING = (
    "torch/distributed/",
    "torch/autograd/graph.py",
    "torch/cuda/",
    "torch/nn/parallel/distributed.py",
)


def _disarm() -> None:
    # Its stack would be taken for the worker's.
    faulthandler.unregister(ASK)
    signal.signal(ASK, signal.SIG_DFL)


def main_stack(text: str) -> Stack:
    """The stack of the thread that took the signal; it is marked as current, and an empty line ends
    it.
    """
    _, current, stack = text.rpartition("Current thread")
    if current:
        return tuple(_FRAME.finditer(stack.partition("\n\n")[0]))
    return ()


def top_frame(stack: Stack) -> str:
    """The frame that says the most, in words."""
    for frame in (*(each for each in stack if each["function"] not in _WRAPPERS), *stack):
        return f"{frame['function']} ({os.path.basename(frame['file'])}:{frame['line']})"
    return "no stack"


def format_stack(stack: Stack) -> str:
    """A stack as Python prints it, the outermost frame first; empty for none."""
    lines = [
        frame.expand(r'  File "\g<file>", line \g<line>, in \g<function>')
        for frame in reversed(stack)
    ]
    if stack:
        return "\n".join(["Stack (most recent call last):", *lines])
    return ""


def is_waiting(stack: Stack) -> bool:
    """Whether this rank waits for others: its innermost frames are torch's for collectives, or for
    a GPU.
    """
    return any(part in frame["file"] for frame in stack[:4] for part in _WAITING)


def groups(texts: Mapping[int, str]) -> dict[str, list[int]]:
    """The ranks by the place where they are, the largest group first."""
    found = group_by_key(
        (top_frame(main_stack(text)), rank) for rank, text in sorted(texts.items())
    )
    return dict(sorted(found.items(), key=lambda each: -len(each[1])))


def find_blocking_rank(texts: Mapping[int, str], steps: Mapping[int, int]) -> int:
    """The rank that the others wait for: of those that do not wait for others themselves; else of
    those a step behind; else of the smallest group. Of several, the lowest.
    """
    candidates = [rank for rank in texts if not is_waiting(main_stack(texts[rank]))]
    if not candidates or len(candidates) == len(texts):
        candidates = sorted(texts)
    least = min(steps.get(rank, 0) for rank in candidates)
    candidates = [rank for rank in candidates if steps.get(rank, 0) == least]
    sizes = {rank: len(ranks) for ranks in groups(texts).values() for rank in ranks}
    return min(candidates, key=lambda rank: (sizes[rank], rank))
