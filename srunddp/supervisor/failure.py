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

# The longest text in bytes of JSON: a letter may take several, and the message must fit.
_LONGEST = 24000
_LONGEST_CAUSE = 500
_WRONG_COMMAND_LINE = 2  # the exit code of argparse and click for it


class FailureKind(IntEnum):
    """How likely a failure is the root cause: the lower the number, the likelier."""

    PRIMARY = 0
    ABORTED = 1  # SIGABRT: a C++ library gave up, for a reason of its own or because a peer is lost
    NETWORK = 2  # Python's ConnectionError: from the script's own work, or because a peer is lost
    SECONDARY = 3  # an error of a collective or of the store, such as a lost peer causes
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
    """What a worker knows of the error that has ended its script.

    Attributes:
        cause: The error in one line.
        traceback: The traceback as Python prints it, or empty.
        weight: How likely the error is the root cause.
        category: What the error means for another start.
        failed_import: Of an import error, its class and the module, or the cause if it names no
            module. Two import errors with the same text here are the same, whatever paths of their
            nodes they name. Else empty.
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
        time: When it failed by its node's clock, in ISO 8601. It is for people only: failures are
            never ordered by it.
        shown: Whether the user has already seen the error.
        category: What the failure means for another start.
        failed_import: As in :class:`ScriptError`.
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
        PROGRAM: Most likely the program's own, which would happen on any GPU.
        HARDWARE: The GPU is of no use before it was reset or repaired.
        OTHER: It does not tell whether the GPU can be used.
    """

    PROGRAM = "program"
    HARDWARE = "hardware"
    OTHER = "other"


@dataclass(frozen=True)
class GpuFault:
    """What NVML has said of a GPU that is not healthy.

    Attributes:
        index: The GPU's number as ``nvidia-smi`` shows it in the job.
        uuid: The UUID of the GPU, or of the MIG instance; empty if it is not known.
        what: The fault in a few words.
        kind: The value of a :class:`GpuFaultKind`.
        xid: The number of the Xid; 0 if it is none.
        node: The GPU's node; empty in what this node says of itself.
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
        """Return one line, as the failure summary has it."""
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
    """Describe an exception that has ended the script."""
    text = "".join(traceback.format_exception(type(error), error, trace))
    lines = "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()
    # A message may have several lines, and notes below it. For a syntax error Python prints the
    # message last, below the line of source.
    cause = lines[-1 if isinstance(error, SyntaxError) else 0]
    failed_import = ""
    if isinstance(error, ImportError):
        # ctypes, C extensions and packages that check their own requirements leave the name out.
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

    A final error counts also where the script has raised another one for it, or while it handled
    it.
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

    If the script calls ``sys.exit`` while it handles another error, or from one, that error is the
    cause and gives the weight: Hydra, Fire and click print an error and call ``sys.exit``, and so
    do the handlers of many scripts. Its traceback is left out where the exit code says that the
    command line was wrong, as that of argparse and click. With ``from None`` the script has hidden
    the error, which then gives the weight alone.

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
    return error.__cause__ or error.__context__


def _is_exit_of_click(error: BaseException) -> bool:
    """Whether an error is click's own way to ``sys.exit``, such as ``ctx.exit(3)`` of a command."""
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
    """Return the cause of a failure for which the launcher's signal is the reason."""
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


# How the errors begin that torch raises as plain RuntimeErrors when a peer is gone or late: Gloo's,
# NCCL's, and those of a store in a file (``init_method="file://..."``).
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
    """Return the highest weight, which is the least likely cause, among an exception, its causes
    and its contexts.
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
    """Judge an error by its class, or by who raised it and how its text begins.

    Words elsewhere in the text tell nothing: the time limit of a data loader and a file's name with
    "nccl" in it are this rank's own. Frames of torch tell nothing either: ``work.wait()`` of a lost
    peer has none, and a wrong shape or an unused parameter has some.
    """
    if isinstance(error, ConnectionError):
        return FailureKind.NETWORK
    if any(kind.__name__ == "DistError" for kind in type(error).__mro__):
        return FailureKind.SECONDARY
    if type(error) is RuntimeError and _MARK.match(str(error)) and not _is_raised_by_python(error):
        return FailureKind.SECONDARY
    return FailureKind.PRIMARY


def _is_raised_by_python(error: BaseException) -> bool:
    """Whether a ``raise`` statement raised it: C++ raises it in a call."""
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next:
        trace = trace.tb_next
    instruction = trace.tb_frame.f_code.co_code[trace.tb_lasti]
    return opcode.opname[instruction] in _RAISES
