"""The root cause: which failure came first. It is reported once, with its traceback and the ranks
that end with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from srunddp.supervisor.failure import Failure, FailureCategory, FailureKind
from srunddp.supervisor.failure_files import FILE_EXISTS, start_writer
from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.supervisor.worker_process import wait_for_child
from srunddp.util.console import write_stderr
from srunddp.util.hostlist import fold_ranks

LOST = 69  # sysexits' EX_UNAVAILABLE, as of a RendezvousError
STALLED = 124  # as of timeout(1)

_NODES_NAMED = 16


class Ending(Enum):
    """How a run ends; the value is the word before the cause."""

    FAILED = "failed"  # a rank has
    LOST = "lost"  # a node does not answer, or its launcher has ended
    STOPPED = "stopped"  # all have agreed to, or the launcher has asked for it


@dataclass(frozen=True)
class RootCause:
    """Why the run ends.

    Attributes:
        ranks: the culprits: one, or all of a lost node; node: theirs.
        ending: what has come to an end, and how.
        cause, traceback, time: of the failure.
        exit_code: of every srunddp of the run.
        victims: what else is known to have failed.
        notes: lines that follow the traceback.
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

    @classmethod
    def of(cls, failure: Failure) -> RootCause:
        """Of one rank's failure."""
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
        )


def find_root_cause(failures: Sequence[Failure], left: Mapping[int, str]) -> RootCause:
    """The root cause of these failures, in the order in which rank 0 received them; there is at
    least one.

    ``left`` are the nodes of the ranks whose script was over, without an error, before the first
    failure.
    """
    # Of equals the first. All that agreed to stop have been waited for: rank 0 speaks.
    stopped = FailureKind.STOPPED
    failure = min(
        _candidates(failures),
        key=lambda each: (each.weight, each.rank if each.weight is stopped else 0),
    )
    others = tuple(replace(each, traceback="") for each in failures if each is not failure)
    if failure.weight is not FailureKind.SECONDARY or not left:
        return replace(RootCause.of(failure), victims=others)
    # What the others miss is the rank that left too early.
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
    )


# A signal of the launcher's reaches the nodes of a job one after the other: its first rank's peers
# fail for that. What may still be the cause is then of another kind, by whether it was heard of
# before the signal or after it.
_CAUSES_BEFORE_SIGNAL = {*FailureKind} - {FailureKind.SECONDARY}
_CAUSES_AFTER_SIGNAL = {FailureKind.PRIMARY, FailureKind.STOPPED, FailureKind.SIGNALLED}


def _candidates(failures: Sequence[Failure]) -> Sequence[Failure]:
    """Those that may be the cause."""
    kinds = [each.weight for each in failures]
    if FailureKind.SIGNALLED not in kinds:
        return failures
    first = kinds.index(FailureKind.SIGNALLED)
    before = [each for each in failures[:first] if each.weight in _CAUSES_BEFORE_SIGNAL]
    return before + [each for each in failures[first:] if each.weight in _CAUSES_AFTER_SIGNAL]


def render(found: RootCause, others: Mapping[int, str]) -> str:
    """The root cause as people read it; ``others`` are the nodes of the ranks that end with it.

    ``srunddp triage`` reads these lines, too: see ``triage/signatures.yaml``.
    """
    who = fold_ranks(found.ranks, dict.fromkeys(found.ranks, found.node))
    if found.ending is Ending.STOPPED:
        subject = ""
    else:
        subject = f"{who} {found.ending.value}: "
    lines = [f"srunddp: {subject}{found.cause} (exit code {found.exit_code})"]
    if found.traceback:
        lines.append(found.traceback.rstrip("\n"))
    lines += [f"srunddp: {note}" for note in found.notes]
    taken = [rank for rank in others if rank not in found.ranks]
    if taken and found.ending is not Ending.STOPPED:
        lines.append(f"srunddp: ended with it: {folded(taken, others)}")
    return "\n".join(lines) + "\n"


def folded(ranks: Sequence[int], nodes: Mapping[int, str]) -> str:
    """``ranks 0-2 on node01, …``, or how many they are where they are on too many nodes to be
    listed.
    """
    where = {nodes[rank] for rank in ranks}
    if len(where) <= _NODES_NAMED:
        return fold_ranks(ranks, nodes)
    return f"{len(ranks)} ranks on {len(where)} nodes"


def report(found: RootCause, others: Mapping[int, str]) -> None:
    """Say it once on standard error; see :func:`render`."""
    if not found.shown:
        write_stderr(render(found, others))


def write(found: RootCause, others: Mapping[int, str], folder: Path | None) -> int | None:
    """Start to write ``failure.json`` where there is a folder for logs; see
    :func:`start_writer`.
    """
    if folder is None:
        return None
    return start_writer(
        folder / "failure.json", json.dumps(record(found, others), indent=2) + "\n", new=True
    )


def report_as_deputy(
    found: RootCause, folder: Path | None, limits: Limits = DEFAULT_LIMITS
) -> None:
    """The same for rank 0, who is gone; where the file is there already, another has done so."""
    writer = write(found, {}, folder)
    if writer is None or wait_for_child(writer, limits.deputy_files_written_within) != FILE_EXISTS:
        report(found, {})


def record(found: RootCause, others: Mapping[int, str]) -> dict[str, Any]:
    """What ``failure.json`` holds; of a victim the cause, where it had one of its own before the
    end of the run.
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
        "rank": found.ranks[0],
        **{name: getattr(found, name) for name in names},
        "victims": victims,
    }
