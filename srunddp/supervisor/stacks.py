"""The Python stacks of a worker, which faulthandler writes on a signal without the GIL; and which
rank, by its stack, blocks the others.

The worker writes into shared memory that the supervisor reads. So no pipe can be full and no file
of the user is needed, and what faulthandler writes at a crash is still there when the worker has
ended.
"""

import contextlib
import faulthandler
import os
import re
import signal
import time
from collections.abc import Mapping

from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.supervisor.signals import handles, signal_main_thread
from srunddp.util.hostlist import group_by_key
from srunddp.util.kernel_file import memory_file

# The signal that asks for stacks. Neither Python, torch, NCCL nor MPI uses it.
ASK = signal.SIGRTMAX - 3
_LONGEST = 12000
_OURS = 'srunddp/run/main_module.py", line'


class StackDump:
    """Shared memory into which the worker's faulthandler writes. Made before the fork.

    Attributes:
        descriptor: The descriptor of the memory, which is a file without a name.
    """

    def __init__(self, descriptor: int | None = None, limits: Limits = DEFAULT_LIMITS) -> None:
        self.descriptor = memory_file() if descriptor is None else descriptor
        self._read = 0
        self._limits = limits
        # The worker ignores the signal before arm(), and again when Python has shut down and the
        # exit handlers of C run.
        signal.signal(ASK, signal.SIG_IGN)

    def arm(self) -> None:
        """Write the stacks of all threads here at a crash, and that of the main thread when the
        signal comes. Called in the worker.

        If the user has switched faulthandler on (PYTHONFAULTHANDLER), the stacks of a crash still
        go to standard error. In processes that the worker forks, the signal has its default effect.
        """
        if not faulthandler.is_enabled():
            faulthandler.enable(self.descriptor)
        # The stack of the thread that takes the signal alone: of all threads faulthandler writes
        # the newest 100, and the main thread is the oldest.
        faulthandler.register(ASK, self.descriptor, all_threads=False)
        os.register_at_fork(after_in_child=_disarm)

    def read(self) -> str:
        """Return what has been written since the last call. Called in the supervisor."""
        return _of_the_script(self._unread())

    def _unread(self) -> bytes:
        piece = os.pread(self.descriptor, 1 << 18, self._read)
        self._read += len(piece)
        return piece

    def request(self, worker: int) -> str:
        """Ask the worker for the stack of its main thread and return it; empty if it gives none in
        time, as when the thread blocks signals. Called in the supervisor.

        Args:
            worker: The worker's process id.
        """
        self._unread()
        # A program that the script has executed in its process has no handler, and would be killed.
        if handles(worker, ASK):
            with contextlib.suppress(ProcessLookupError):
                signal_main_thread(worker, ASK)
        # faulthandler writes a line in several pieces. Wait until the text ends with a complete
        # line and nothing more comes.
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
    """Return the text of a dump without the frames of srunddp that have called the script."""
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
_HEADING = re.compile(
    r"^(?:Stack|Current thread [^\n]*) \(most recent call first\):$", re.MULTILINE
)
# Functions that say nothing about where a rank is: decorators, and torch's calls of a module.
_WRAPPERS = ("wrapper", "inner", "_wrapped_call_impl", "_call_impl", "decorate_context", "<lambda>")
_WAITING = (
    "torch/distributed/",
    "torch/autograd/graph.py",
    "torch/cuda/",
    "torch/nn/parallel/distributed.py",
)
_SAVING = ("torch/serialization.py", "safetensors/", "numpy/lib/")


def _disarm() -> None:
    # In a forked child: its stack would be taken for the worker's.
    faulthandler.unregister(ASK)
    signal.signal(ASK, signal.SIG_DFL)


def main_stack(text: str) -> Stack:
    """Return the stack of the thread that took the signal, or that has crashed; empty for none.

    Before the stack of a crash faulthandler calls it the current thread, and an empty line ends it.
    """
    headings = list(_HEADING.finditer(text))
    if not headings:
        return ()
    stack, _, _ = text[headings[-1].end() :].partition("\n\n")
    return tuple(_FRAME.finditer(stack))


def top_frame(stack: Stack) -> str:
    """Return the innermost frame that is no wrapper, as ``function (file.py:12)``."""
    for frame in (*(each for each in stack if each["function"] not in _WRAPPERS), *stack):
        return f"{frame['function']} ({os.path.basename(frame['file'])}:{frame['line']})"
    return "no stack"


def format_stack(stack: Stack) -> str:
    """Return a stack as Python prints it, with the outermost frame first; empty for none."""
    lines = [
        frame.expand(r'  File "\g<file>", line \g<line>, in \g<function>')
        for frame in reversed(stack)
    ]
    if stack:
        return "\n".join(["Stack (most recent call last):", *lines])
    return ""


def is_saving(stack: Stack) -> bool:
    """Return whether a rank with this stack writes a file: one of the four innermost frames is in a
    module that does so. It may compute a checksum for seconds before it writes.
    """
    return any(part in frame["file"] for frame in stack[:4] for part in _SAVING)


def is_waiting(stack: Stack) -> bool:
    """Return whether a rank with this stack waits for other ranks or for a GPU: one of the four
    innermost frames is in a module of torch that does so.
    """
    return any(part in frame["file"] for frame in stack[:4] for part in _WAITING)


def groups(texts: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the ranks by the place where they are, with the largest group first.

    Args:
        texts: The dump of each rank.
    """
    found = group_by_key(
        (top_frame(main_stack(text)), rank) for rank, text in sorted(texts.items())
    )
    return dict(sorted(found.items(), key=lambda each: -len(each[1])))


def find_blocking_rank(texts: Mapping[int, str], steps: Mapping[int, int]) -> int:
    """Return the rank that the others most likely wait for.

    Only ranks that were seen elsewhere than in a wait are considered; if there are none, those that
    have given no stack; if there are none of these either, all. Of these, the ranks with the fewest
    steps count; of those, the ones in the smallest group at one place; of those, the lowest rank.

    Args:
        texts: The dump of each rank.
        steps: How many steps each rank has made; 0 for a rank that is missing.
    """
    found = {rank: main_stack(text) for rank, text in sorted(texts.items())}
    elsewhere = [rank for rank, stack in found.items() if stack and not is_waiting(stack)]
    unknown = [rank for rank, stack in found.items() if not stack]
    candidates = elsewhere or unknown or list(found)
    least = min(steps.get(rank, 0) for rank in candidates)
    candidates = [rank for rank in candidates if steps.get(rank, 0) == least]
    sizes = {rank: len(ranks) for ranks in groups(texts).values() for rank in ranks}
    return min(candidates, key=lambda rank: (sizes[rank], rank))
