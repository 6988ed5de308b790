"""The root cause: the failure that ends the run. It is reported once, with its traceback and the
ranks that end with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

from srunddp.errors import one_line
from srunddp.supervisor.failure import (
    Failure,
    FailureCategory,
    FailureKind,
    GpuFault,
    GpuFaultKind,
)
from srunddp.supervisor.failure_files import FILE_EXISTS, start_writer
from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.supervisor.worker_process import wait_for_child
from srunddp.util.console import write_amid_output
from srunddp.util.hostlist import fold, fold_ranks
from srunddp.util.quick_dataclass import dataclass

LOST = 69  # exit code for a lost node: EX_UNAVAILABLE of sysexits.h, as for a RendezvousError
STALLED = 124  # exit code for a stall, the same as timeout(1)'s

_NODES_NAMED = 16
_GPU_FAULTS_NAMED = 16


class Ending(Enum):
    """How a run ends; the value is the word that stands before the cause in the report."""

    FAILED = "failed"  # a rank has failed
    LOST = "lost"  # a node does not answer, or its launcher has ended
    STOPPED = "stopped"  # all ranks have agreed to stop, or the launcher has asked for it


@dataclass(frozen=True)
class RootCause:
    """Why the run ends.

    Attributes:
        ranks: The culprits: one rank, or all ranks of a lost node; empty if no rank is at fault.
        node: The node of the culprits; or the nodes that do not reach each other, as Slurm folds
            names; or empty.
        cause: The reason in one line.
        exit_code: The exit code of every rank of the run.
        ending: How the run ends.
        traceback: The culprit's traceback or stack, or empty.
        time: The time of the failure by its node's clock, or empty.
        victims: The other failures that are known.
        notes: Lines to print below the traceback.
        shown: Whether the user has already seen the error.
        category: What the failure means for another start.
        failed_import: For an import error, its class and the module, see
            :class:`~srunddp.supervisor.failure.ScriptError`; otherwise empty.
        follows: Whether the culprit's node is not suspected, because the culprit is only the first
            rank whose failure has reached rank 0, or has left too early.
        without_way: The nodes whose ranks have to move to spare nodes, so that the remaining nodes
            can reach each other.
        gpu_faults: The faults of GPUs, on the culprit's node or on others.
    """

    ranks: tuple[int, ...]
    node: str
    cause: str
    exit_code: int
    ending: Ending = Ending.FAILED
    traceback: str = ""
    time: str = ""
    victims: tuple[Failure, ...] = ()
    notes: tuple[str, ...] = ()
    shown: bool = False
    category: FailureCategory = FailureCategory.OTHER
    failed_import: str = ""
    follows: bool = False
    without_way: tuple[str, ...] = ()
    gpu_faults: tuple[GpuFault, ...] = ()

    @property
    def suspect(self) -> str:
        """The node that may be the reason; empty if there is no such node, or it cannot be told."""
        if self.without_way:
            return self.without_way[0]
        if self.node in self.faulty_nodes:
            return self.node
        # With such a fault, the failure would have happened on any node.
        if self._has_gpu_fault(GpuFaultKind.PROGRAM):
            return ""
        return self.node if self.ranks and not self.follows else ""

    @property
    def faulty_nodes(self) -> tuple[str, ...]:
        """The nodes with a GPU whose hardware has failed, the culprit's first."""
        hardware = GpuFaultKind.HARDWARE.value
        nodes = {fault.node for fault in self.gpu_faults if fault.kind == hardware}
        return tuple(sorted(nodes, key=lambda node: (node != self.node, node)))

    def _has_gpu_fault(self, kind: GpuFaultKind) -> bool:
        return any(
            fault.kind == kind.value and fault.node == self.node for fault in self.gpu_faults
        )

    def with_gpu_faults(self, faults: Sequence[GpuFault]) -> RootCause:
        """Return the root cause with the faults of GPUs.

        A GPU on another node whose hardware has failed becomes the cause if the culprit's failure
        only shows that its peer was gone or late, if no rank is at fault, or if the exit code is
        that of a stall.

        Args:
            faults: The faults, with their nodes.
        """
        found = replace(self, gpu_faults=(*self.gpu_faults, *faults))
        faulty = found.faulty_nodes
        doubtful = self.follows or not self.ranks or self.exit_code == STALLED
        if not faulty or self.node == faulty[0] or not doubtful or self.ending is not Ending.FAILED:
            return found
        first = next(
            fault
            for fault in found.gpu_faults
            if fault.node == faulty[0] and fault.kind == GpuFaultKind.HARDWARE.value
        )
        who = fold_ranks(self.ranks, dict.fromkeys(self.ranks, self.node))
        then = f"then {who} failed: {self.cause}" if who else self.cause
        return replace(
            found, ranks=(), node=faulty[0], cause=f"{first}; {then}", shown=False, follows=False
        )

    @classmethod
    def of(cls, failure: Failure) -> RootCause:
        """Return the root cause if one rank's failure is the root cause."""
        if failure.weight >= FailureKind.STOPPED:
            ending = Ending.STOPPED
        else:
            ending = Ending.FAILED
        return cls(
            ranks=(failure.rank,),
            node=failure.node,
            cause=failure.cause,
            exit_code=failure.exit_code,
            ending=ending,
            traceback=failure.traceback,
            time=failure.time,
            shown=failure.shown,
            category=failure.category,
            failed_import=failure.failed_import,
        )


def find_root_cause(failures: Sequence[Failure], left: Mapping[int, str]) -> RootCause:
    """Return the likeliest root cause.

    If the likeliest failure is secondary and the script of another rank was over before the first
    failure, the rank that has ended too early is the root cause, because the others miss it.

    Args:
        failures: At least one, in the order in which rank 0 received them.
        left: The node of each rank whose script was over, without an error, before the first
            failure.
    """
    # Among failures of equal weight the first counts. If all ranks have agreed to stop, the lowest
    # rank counts instead, so that the report does not depend on the order.
    stopped = FailureKind.STOPPED
    failure = min(
        _candidates(failures),
        key=lambda each: (each.weight, each.rank if each.weight is stopped else 0),
    )
    others = tuple(replace(each, traceback="") for each in failures if each is not failure)
    # If there are similar failures on other nodes, it is chance which came first, so the node of
    # the first failure is not suspected. Similar failures on its own node do not matter.
    alike = any(each.weight is failure.weight and each.node != failure.node for each in others)
    follows = failure.weight is FailureKind.SECONDARY or (
        failure.weight in (FailureKind.ABORTED, FailureKind.NETWORK) and alike
    )
    if failure.weight is not FailureKind.SECONDARY or not left:
        return replace(RootCause.of(failure), victims=others, follows=follows)
    # The other ranks miss a rank that left too early.
    rank = min(left)
    cause = (
        f"it left with exit code 0 while others still worked; then rank {failure.rank} on"
        f" {failure.node} failed: {failure.cause}"
    )
    victims = (replace(failure, traceback=""), *others)
    return replace(
        RootCause.of(failure),
        ranks=(rank,),
        node=left[rank],
        cause=cause,
        victims=victims,
        shown=False,
        follows=True,
    )


# The launcher's signal reaches the nodes of a job one after the other, and when the first ranks
# end, their peers fail. So if a rank has ended by the signal, only failures of these kinds may be
# the root cause. Fewer kinds count among failures that arrived after the first such end.
_CAUSES_BEFORE_SIGNAL = {*FailureKind} - {FailureKind.SECONDARY}
_CAUSES_AFTER_SIGNAL = {FailureKind.PRIMARY, FailureKind.STOPPED, FailureKind.SIGNALLED}


def _candidates(failures: Sequence[Failure]) -> Sequence[Failure]:
    """Return the failures that may be the root cause."""
    kinds = [each.weight for each in failures]
    if FailureKind.SIGNALLED not in kinds:
        return failures
    first = kinds.index(FailureKind.SIGNALLED)
    before = [each for each in failures[:first] if each.weight in _CAUSES_BEFORE_SIGNAL]
    return before + [each for each in failures[first:] if each.weight in _CAUSES_AFTER_SIGNAL]


def render(found: RootCause, others: Mapping[int, str]) -> str:
    """Return the report of a root cause, for people.

    ``srunddp triage`` reads these lines too, see ``triage/signatures.yaml``.

    Args:
        found: The root cause.
        others: The node of each rank that ends with the run; culprits are not listed twice.
    """
    who = fold_ranks(found.ranks, dict.fromkeys(found.ranks, found.node))
    if found.ending is Ending.STOPPED or not found.ranks:
        subject = ""
    else:
        subject = f"{who} {found.ending.value}: "
    # A cause may contain anything that a script has put into an exception.
    lines = [one_line(f"srunddp: {subject}{found.cause} (exit code {found.exit_code})")]
    if found.traceback:
        lines.append(found.traceback.rstrip("\n"))
    lines += [one_line(f"srunddp: {note}") for note in found.notes]
    lines += _gpu_lines(found)
    taken = [rank for rank in others if rank not in found.ranks]
    if taken and found.ending is not Ending.STOPPED:
        lines.append(f"srunddp: ended with it: {folded(taken, others)}")
    return "\n".join(lines) + "\n"


def _gpu_lines(found: RootCause) -> list[str]:
    """Return a line for each fault of a GPU; if there are many, only for the first ones."""
    lines = [one_line(f"srunddp: {fault}") for fault in found.gpu_faults[:_GPU_FAULTS_NAMED]]
    if more := len(found.gpu_faults) - len(lines):
        lines.append(f"srunddp: and {more} more faults of GPUs")
    return lines


def folded(ranks: Sequence[int], nodes: Mapping[int, str]) -> str:
    """Return a text such as ``ranks 0-2 on node01``. For more than 16 nodes it says only how many
    ranks and nodes there are.

    Args:
        ranks: The ranks to name.
        nodes: The node of each rank.
    """
    where = {nodes[rank] for rank in ranks}
    if len(where) <= _NODES_NAMED:
        return fold_ranks(ranks, nodes)
    return f"{len(ranks)} ranks on {len(where)} nodes"


def report(found: RootCause, others: Mapping[int, str]) -> None:
    """Print the report to standard error. If the user has already seen the error, print only the
    lines about GPUs; see :func:`render`.
    """
    if not found.shown:
        write_amid_output(render(found, others))
    elif found.gpu_faults:
        write_amid_output("\n".join(_gpu_lines(found)) + "\n")


def write(found: RootCause, others: Mapping[int, str], folder: Path | None) -> int | None:
    """Start to write ``failure.json``.

    Returns:
        The writer's process id; None if there is no folder for logs, or no process could be
            started, see :func:`start_writer`.
    """
    if folder is None:
        return None
    return start_writer(
        folder / "failure.json", json.dumps(record(found, others), indent=2) + "\n", new=True
    )


def of_cut(
    found: RootCause,
    failures: Sequence[Failure],
    nodes: Sequence[str],
    cut: str,
    without_way: Sequence[str],
) -> RootCause:
    """Return the root cause of a run in which nodes do not reach each other.

    Args:
        found: The root cause if the network is not considered: a failure that likely follows from
            another, or a stall.
        failures: All failures.
        nodes: The nodes that do not reach each other.
        cut: The text that says which of them do not reach which others.
        without_way: The nodes to give up.
    """
    who = fold_ranks(found.ranks, dict.fromkeys(found.ranks, found.node))
    then = f"then {who} failed: {found.cause}" if who else found.cause
    return replace(
        found,
        ranks=(),
        node=fold(nodes),
        cause=f"{cut}; {then}",
        exit_code=LOST,
        victims=tuple(replace(each, traceback="") for each in failures),
        shown=False,
        follows=False,
        without_way=tuple(without_way),
    )


def report_as_deputy(
    found: RootCause, folder: Path | None, limits: Limits = DEFAULT_LIMITS
) -> None:
    """Write ``failure.json`` and print the report in place of rank 0, which is gone. If the file
    already exists, another deputy has reported, and nothing is printed.
    """
    writer = write(found, {}, folder)
    if writer is None or wait_for_child(writer, limits.deputy_files_written_within) != FILE_EXISTS:
        report(found, {})


def record(found: RootCause, others: Mapping[int, str]) -> dict[str, Any]:
    """Return the contents of ``failure.json``. In it, ``rank`` is None if no rank is at fault, and
    the cause of a victim is empty if rank 0 knows of no failure of that rank.
    """
    causes = {each.rank: each.cause for each in found.victims}
    nodes = {each.rank: each.node for each in found.victims} | dict(others)
    victims = [
        {"rank": rank, "node": node, "cause": causes.get(rank, "")}
        for rank, node in sorted(nodes.items())
        if rank not in found.ranks
    ]
    names = ("ranks", "node", "time", "exit_code", "cause", "traceback", "notes")
    return {
        "rank": found.ranks[0] if found.ranks else None,
        **{name: getattr(found, name) for name in names},
        "gpu_faults": [vars(fault) for fault in found.gpu_faults],
        "victims": victims,
    }
