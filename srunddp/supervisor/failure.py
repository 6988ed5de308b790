"""How one rank failed, and how likely its failure is the cause of the run's end.

When a rank dies, its peers see errors too; those errors are secondary.
"""

from __future__ import annotations

import json
import opcode
import os
import re
import traceback
from datetime import UTC, datetime
from enum import Enum, IntEnum
from types import TracebackType

from srunddp.errors import SrunddpError
from srunddp.supervisor.signals import signal_name
from srunddp.util.cgroup import kills_whole_step
from srunddp.util.quick_dataclass import dataclass

# The longest text of a traceback in a message, in bytes of JSON, in which a character may take
# several bytes; and the longest text of a cause, in characters.
_LONGEST = 24000
_LONGEST_CAUSE = 500
_WRONG_COMMAND_LINE = 2  # the exit code with which argparse and click report a wrong command line


class FailureKind(IntEnum):
    """How likely a failure is the root cause: the lower the number, the likelier."""

    PRIMARY = 0
    ABORTED = 1  # SIGABRT: a C++ library gave up, by a fault of this rank or because a peer is lost
    NETWORK = 2  # Python's ConnectionError: from the script's own work, or because a peer is lost
    SECONDARY = 3  # an error of a collective or of the store, as a lost peer causes it
    STOPPED = 4  # no failure: all ranks have agreed to end
    SIGNALLED = 5  # a failure after the launcher's signal, which ends all ranks


class FailureCategory(Enum):
    """What a failure means for another start of the run."""

    OTHER = "other"
    WRONG_SCRIPT = "wrong script"  # a syntax error: the script would fail again
    IMPORT_FAILED = "import failed"  # the script would fail again, or the node lacks a package
    FINAL = "final"  # another start would do harm, see SrunddpError.final
    OUT_OF_MEMORY = "out of memory"  # the kernel has killed the worker for lack of memory


@dataclass(frozen=True)
class ScriptError:
    """The error that has ended a script, as its worker describes it.

    Attributes:
        cause: The error in one line.
        traceback: The traceback as Python prints it, or empty.
        weight: How likely the error is the root cause.
        category: What the error means for another start.
        failed_import: For an import error, its class and the module, or the cause if the error
            names no module; otherwise empty. Two import errors count as the same if they have the
            same text here, even if their causes name different paths.
    """

    cause: str
    traceback: str
    weight: FailureKind
    category: FailureCategory = FailureCategory.OTHER
    failed_import: str = ""


@dataclass(frozen=True)
class Failure:
    """One rank's failure.

    Attributes:
        rank: The rank that failed.
        node: The node of that rank.
        cause: The reason in one line.
        exit_code: The exit code of the run if this is the root cause.
        weight: How likely this failure is the root cause.
        traceback: The traceback or stack as text, or empty.
        time: When the rank failed, by its node's clock, in ISO 8601. It is for people only:
            failures are never ordered by it.
        shown: Whether the user has already seen the error.
        category: What the failure means for another start.
        failed_import: For an import error, its class and the module, see :class:`ScriptError`;
            otherwise empty.
    """

    rank: int
    node: str
    cause: str
    exit_code: int
    weight: FailureKind = FailureKind.PRIMARY
    traceback: str = ""
    time: str = ""
    shown: bool = False
    category: FailureCategory = FailureCategory.OTHER
    failed_import: str = ""


class GpuFaultKind(Enum):
    """What a fault of a GPU means for its node.

    Attributes:
        PROGRAM: Most likely the program is at fault, and the fault would happen on any GPU.
        HARDWARE: The GPU cannot be used until it has been reset or repaired.
        OTHER: The fault does not tell whether the GPU can be used.
    """

    PROGRAM = "program"
    HARDWARE = "hardware"
    OTHER = "other"


@dataclass(frozen=True)
class GpuFault:
    """A fault of a GPU, as NVML has reported it.

    Attributes:
        index: The GPU's number as ``nvidia-smi`` shows it in the job.
        uuid: The UUID of the GPU, or of the MIG instance; empty if it is not known.
        what: The fault in a few words.
        kind: The value of a :class:`GpuFaultKind`.
        xid: The number of the Xid; 0 if the fault is not an Xid.
        node: The GPU's node; empty if a node reports a fault of its own.
    """

    index: int
    uuid: str
    what: str
    kind: str
    xid: int = 0
    node: str = ""

    def __post_init__(self) -> None:
        """Check the kind.

        Raises:
            ValueError: There is no such kind.
        """
        GpuFaultKind(self.kind)

    def __str__(self) -> str:
        """Return the fault as one line of the failure summary."""
        if self.kind == GpuFaultKind.PROGRAM.value:
            whose = "; most likely the program's own fault, not the GPU's"
        else:
            whose = ""
        return (
            f"GPU {self.index} ({self.uuid or 'UUID unknown'}) of {self.node}: {self.what}{whose}"
        )


def time_of_day() -> str:
    """Return the time by this node's clock, in ISO 8601 with milliseconds, in UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def of_exception(error: BaseException, trace: TracebackType | None) -> ScriptError:
    """Describe an exception that has ended the script.

    Args:
        error: The exception.
        trace: The traceback to print; None for none.
    """
    text = "".join(traceback.format_exception(type(error), error, trace))
    lines = "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()
    # The first line is the error, and below it there may be more lines of its message, and notes.
    # For a syntax error, however, Python prints the source line first and the message last.
    cause = lines[-1 if isinstance(error, SyntaxError) else 0]
    failed_import = ""
    if isinstance(error, ImportError):
        # ``name`` is None in the ImportErrors of ctypes, of C extensions, and of packages that
        # check their own requirements.
        failed_import = f"{type(error).__name__} {error.name or cause}"[:_LONGEST_CAUSE]
    return ScriptError(
        cause=cause[:_LONGEST_CAUSE],
        traceback=shortened(text),
        weight=_weight(error),
        category=category_of(error),
        failed_import=failed_import,
    )


def category_of(error: BaseException) -> FailureCategory:
    """Return what an exception means for another start, by its class.

    A final error also counts if the script has raised another error from it, or while handling it.
    """
    if any(isinstance(each, SrunddpError) and each.final for each in _chain(error)):
        return FailureCategory.FINAL
    if isinstance(error, ImportError):
        return FailureCategory.IMPORT_FAILED
    if isinstance(error, SyntaxError):
        return FailureCategory.WRONG_SCRIPT
    return FailureCategory.OTHER


def of_exit(end: SystemExit, code: int) -> ScriptError:
    """Describe a ``sys.exit`` that has ended the script.

    If the script calls ``sys.exit`` while it handles another error, or raises ``SystemExit`` from
    one, that error is the cause and gives the weight: Hydra, Fire and click print an error and then
    call ``sys.exit``, and so do many scripts. The error's traceback is left out if the exit code is
    the one by which argparse and click report a wrong command line. If the script has hidden the
    error by ``from None``, the ``sys.exit`` is the cause, but the error still gives the weight, the
    category and the failed import.

    Args:
        end: The exception that ``sys.exit`` has raised.
        code: The exit code of the process.
    """
    if isinstance(end.code, str):
        said = f": {end.code}"[:_LONGEST_CAUSE]
    else:
        said = ""
    exit_call = f"sys.exit({1 if said else code}){said}"
    handled = _reason(end)
    if handled is not None and _is_exit_of_click(handled):
        handled = _reason(handled)
    if handled is None:
        return ScriptError(exit_call, "", FailureKind.PRIMARY)
    error = of_exception(handled, handled.__traceback__)
    if end.__suppress_context__ and end.__cause__ is None:
        return ScriptError(exit_call, "", error.weight, error.category, error.failed_import)
    return ScriptError(
        cause=f"{error.cause}; then {exit_call}",
        traceback="" if code == _WRONG_COMMAND_LINE else error.traceback,
        weight=error.weight,
        category=error.category,
        failed_import=error.failed_import,
    )


def _reason(error: BaseException) -> BaseException | None:
    """Return the exception from which an error was raised, or else the one that was being handled
    at that time; None if there is neither.
    """
    return error.__cause__ or error.__context__


def _is_exit_of_click(error: BaseException) -> bool:
    """Return whether an error is an exception by which click exits, as for ``ctx.exit(3)``."""
    kind = type(error)
    return kind.__module__.startswith("click") and kind.__name__ in ("Exit", "Abort")


def of_killed_supervisor(rank: int, node: str) -> Failure:
    """Return the failure of a rank whose supervisor has ended without a message, as another rank
    describes it.

    The worker ends with its supervisor, so no process is left that could say why. If the kernel
    kills the whole job step when memory runs out, lack of memory is the likeliest reason.
    """
    if kills_whole_step(os.environ):
        likely = ", probably out of memory, as OOMKillStep is on"
    else:
        likely = ""
    return Failure(rank, node, f"srunddp itself was killed{likely}", 137)


def by_launcher(number: int) -> str:
    """Return the text that names the launcher's signal as the cause of a failure.

    Args:
        number: The signal.
    """
    return (
        f"the launcher ended the run with {signal_name(number)}, as for scancel or the time limit"
    )


def shortened(text: str) -> str:
    """Return the text, or its beginning and end if it is too long for a message."""
    half = _LONGEST // 2
    whole = text
    while len(json.dumps(text)) > _LONGEST:
        text = f"{whole[:half]}\n[...]\n{whole[-half:]}"
        half = half * 3 // 4
    return text


# The beginnings of the errors that torch raises as plain RuntimeErrors when a peer is gone or late:
# those of Gloo, of NCCL, and of a store in a file (``init_method="file://..."``).
#   [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]
#   [Rank 0]: Ranks 1 failed to pass monitoredBarrier in 2000 ms
#   Rank 1 successfully reached monitoredBarrier, but received errors while waiting for ...
#   NCCL error in: ProcessGroupNCCL.cpp:2251, remote process exited
#   Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:144] ...
#   Wait timeout
_MARK = re.compile(
    r"\[[^]]*\bgloo/[^]]*\.(?:cc|h|hpp):\d+\]|\[Rank \d+\]|NCCL error in: "
    r"|Rank \d+ (?:successfully reached|timed out in) monitoredBarrier"
    r"|Gloo connectFullMesh failed with |Wait timeout$"
)
_RAISES = ("RAISE_VARARGS", "RERAISE")


def _weight(error: BaseException) -> FailureKind:
    """Return how likely an exception is the root cause. Of the weights of the exception, its causes
    and its contexts, the highest counts, which stands for the least likely root cause.
    """
    return max(map(_own_weight, _chain(error)))


def _chain(error: BaseException) -> list[BaseException]:
    """Return an exception, its causes and its contexts."""
    found: dict[int, BaseException] = {}
    following: BaseException | None = error
    while following is not None and id(following) not in found:
        found[id(following)] = following
        following = _reason(following)
    return list(found.values())


def _own_weight(error: BaseException) -> FailureKind:
    """Return the weight of an error, judged by its class, or by whether Python raised it and how
    its text begins.

    Words elsewhere in the text prove nothing: the error of a data loader's timeout, or one that
    quotes a file name with "nccl" in it, has nothing to do with other ranks. Frames of torch in the
    traceback prove nothing either: the error of ``work.wait()`` after the loss of a peer has none,
    and an error about a wrong shape or an unused parameter has some.
    """
    if isinstance(error, ConnectionError):
        return FailureKind.NETWORK
    if any(kind.__name__ == "DistError" for kind in type(error).__mro__):
        return FailureKind.SECONDARY
    if type(error) is RuntimeError and _MARK.match(str(error)) and not _is_raised_by_python(error):
        return FailureKind.SECONDARY
    return FailureKind.PRIMARY


def _is_raised_by_python(error: BaseException) -> bool:
    """Return whether a ``raise`` statement raised the error. If C++ code raised it, the last
    instruction in the traceback is a call, of that code.
    """
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next:
        trace = trace.tb_next
    instruction = trace.tb_frame.f_code.co_code[trace.tb_lasti]
    return opcode.opname[instruction] in _RAISES
