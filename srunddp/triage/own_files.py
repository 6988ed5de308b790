"""Reads the files that srunddp itself writes about a run. What they say is certain: which rank
failed and why, how each rank ended, and which ranks there were. Lines of logs only add to this.
"""

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from srunddp.triage.event import Event
from srunddp.triage.logs import LONGEST_RESULT, Log
from srunddp.triage.rank_labels import MOST_RANKS
from srunddp.triage.reports import add_note, failed_check, of_cause
from srunddp.triage.signatures import Kind
from srunddp.triage.tracebacks import PythonException, Tracebacks
from srunddp.util.sample_files import MARKS

_RESULT = {"exit_code", "restarts"}
_END = "end"  # the mark that a supervisor writes last, with the exit code
PROCESS = "process"  # the first mark, with the time at which the kernel started the supervisor


class OwnFile(Enum):
    """The kinds of srunddp's files. Each value is a pattern that matches the file's path.

    Attributes:
        FAILURE: The root cause of a run that failed.
        PREFLIGHT: What ``srunddp check`` found before a run.
        RUN: The ranks of a run with ``--monitor``, and their nodes.
        MARKS: Events of one rank with ``--monitor``, such as its end.
        RESULT: The exit code of a run with ``--result``. The user has named the file, so it is
            recognised by its content.
    """

    FAILURE = re.compile(r"(?:.*/)?failure(?:\.\w+)?\.json")
    PREFLIGHT = re.compile(r"(?:.*/)?preflight(?:\.\w+)?\.json")
    RUN = re.compile(r".*/monitor\.[\d.]+/run\.json")
    MARKS = re.compile(
        r".*/monitor\.[\d.]+/(?P<node>[^/]+)\.rank(?P<rank>\d{1,7})\.marks\.csv", re.ASCII
    )
    RESULT = re.compile(r"(?!)")  # matches nothing


@dataclass
class OwnWords:
    """The facts in srunddp's files about the newest start of one run.

    Attributes:
        events: The failures that the files report, failed checks before the run included.
        nodes: The node of each rank that a file names, by the rank.
        ends: The exit code of each rank whose file of marks has one, by the rank.
        begun: The ranks with a file of marks, whether they have ended or not.
        world_size: The number of ranks; 0 if unknown.
        exit_code: The exit code of the run; None if unknown.
    """

    events: list[Event] = field(default_factory=list)
    nodes: dict[int, str] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    world_size: int = 0
    exit_code: int | None = None

    @property
    def has_failed(self) -> bool:
        """Whether a file reports a failure of the run. A failed check before the run does not
        count.
        """
        return any(each.cause != "check-failed" for each in self.events)

    @property
    def ended_well(self) -> bool:
        """Whether the files say that the run, or else each of its ranks, ended with exit code 0,
        and report no failure of the run.
        """
        if self.has_failed:
            return False
        if self.exit_code is not None:
            return self.exit_code == 0
        everybody = set(range(self.world_size)) | self.begun
        return bool(everybody) and all(self.ends.get(rank) == 0 for rank in everybody)

    @property
    def why(self) -> str:
        """How the run ended, in words; empty if no file reports a bad end."""
        if self.exit_code:
            return f"srunddp ended with exit code {self.exit_code}"
        failed = [rank for rank, code in sorted(self.ends.items()) if code]
        if failed:
            return f"rank {failed[0]} ended with exit code {self.ends[failed[0]]}"
        left = sorted(self.begun - set(self.ends))
        if left:
            return f"rank {left[0]} has not written its end"
        return ""


def kind_of(log: Log) -> OwnFile | None:
    """Return the kind of a file by its path or its content; None if srunddp has not written it."""
    for kind in OwnFile:
        if kind.value.fullmatch(str(log.path.absolute())):
            return kind
    if log.size <= LONGEST_RESULT and _result(log) is not None:
        return OwnFile.RESULT
    return None


def run_of(kind: OwnFile, log: Log) -> Path:
    """Return the folder of the run that a file is about: ``JOB.STEP`` in ``--log-dir``."""
    if kind in (OwnFile.RUN, OwnFile.MARKS):
        return log.path.parent.parent
    return log.path.parent


def read(kind: OwnFile, log: Log, file: int, own: OwnWords) -> None:
    """Add the facts in a file to ``own``.

    Args:
        kind: The kind of the file.
        log: The file.
        file: The position of the file in the list of logs.
        own: The facts in the files that were read before; it is changed.

    Raises:
        ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError: srunddp
            did not write the file, or the file is cut off.
    """
    match kind:
        case OwnFile.FAILURE:
            _read_failure(_json(log), file, own)
        case OwnFile.PREFLIGHT:
            findings = _json(log)["findings"]
            own.events += [_of_finding(each, file) for each in findings if each["level"] == "FAIL"]
        case OwnFile.RUN:
            _read_run(_json(log), own)
        case OwnFile.MARKS:
            _read_marks(log, own)
        case OwnFile.RESULT:
            own.exit_code = _result(log)


def _json(log: Log) -> Any:
    return json.loads(log.whole())


def _read_failure(record: dict[str, Any], file: int, own: OwnWords) -> None:
    cause = str(record["cause"])
    rank = None if record["rank"] is None else int(record["rank"])
    node = str(record["node"])
    event = Event("unknown", Kind.PRIMARY, False, file, 1, cause, rank, node)
    of_cause(cause, f"srunddp: rank {rank} on {node} failed: {cause}", event)
    for note in record.get("notes", []):
        add_note(event, str(note))
    event.raised = _exception(str(record.get("traceback", "")))
    nodes = {int(victim["rank"]): str(victim.get("node", "")) for victim in record["victims"]}
    if rank is not None:
        nodes |= {int(each): node for each in record.get("ranks", [rank])}
    # The world has at least all ranks up to the highest one named.
    own.world_size = max(own.world_size, max(nodes, default=-1) + 1)
    own.nodes |= nodes
    own.events.append(event)


def _exception(traceback: str) -> PythonException | None:
    tracebacks = Tracebacks()
    for number, line in enumerate(traceback.splitlines(), 1):
        tracebacks.feed(number, line)
    return tracebacks.done[-1] if tracebacks.done else None


def _read_run(record: dict[str, Any], own: OwnWords) -> None:
    nodes = {int(rank): str(node) for rank, node in record["ranks"].items()}
    size = int(record["world_size"])
    if size > MOST_RANKS:
        raise ValueError("more ranks than any job has")
    own.nodes |= nodes
    own.world_size = max(own.world_size, size)


def _read_marks(log: Log, own: OwnWords) -> None:
    match = OwnFile.MARKS.value.fullmatch(str(log.path.absolute()))
    header = next(log.lines(), (0, ""))[1]
    if not match or header.split(",")[: len(MARKS.names)] != list(MARKS.names):
        raise ValueError("no marks")
    rank = int(match["rank"])
    own.begun.add(rank)
    own.nodes.setdefault(rank, match["node"])
    for mark in marks_of(log):
        if mark.name == _END:
            own.ends[rank] = int(float(mark.value))


@dataclass(frozen=True)
class Mark:
    """A row of a file of marks.

    Attributes:
        time: When it happened, in seconds since the epoch.
        name: What happened, such as ``end``.
        value: A value that belongs to the event, such as an exit code.
    """

    time: float
    name: str
    value: str


def marks_of(log: Log) -> Iterable[Mark]:
    """Yield the complete rows of a file of marks, without its header; nothing for another file."""
    if not OwnFile.MARKS.value.fullmatch(str(log.path.absolute())):
        return
    for _, line in log.lines():
        row = line.split(",")
        with suppress(ValueError):  # the header, or a damaged line
            if len(row) >= len(MARKS.names):
                yield Mark(float(row[0]), row[1], row[2])


def _result(log: Log) -> int | None:
    try:
        record = _json(log)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or set(record) != _RESULT:
        return None
    code = record["exit_code"]
    return code if isinstance(code, int) else None


def _of_finding(found: dict[str, Any], file: int) -> Event:
    reason = f"{found['found']}; expected {found['expected']} -> {found['hint']}"
    text = f"FAIL {found['check']}: {reason}"
    ranks = found["ranks"]
    nodes = found["nodes"]
    rank = ranks[0] if len(ranks) == 1 else None
    node = nodes[0] if len(nodes) == 1 else None
    return failed_check(file, 1, text, rank, node, reason=reason)
