"""What launchers say of how ranks ended: srun, torchrun, both mpirun, DeepSpeed."""

import json
import re
from dataclasses import dataclass, field

from srunddp.triage.event import DOUBT, VAGUE, Event
from srunddp.triage.rank_labels import spread
from srunddp.triage.signatures import table

_SIGNALS = {
    "Killed": 9, "Segmentation fault": 11, "Bus error": 7, "Aborted": 6, "Terminated": 15, "Illegal instruction": 4,
    "Floating point exception": 8, "Trace/breakpoint trap": 5,
}  # fmt: skip
_SRUN = re.compile(r"srun: error: ([\w.\[\],-]+): tasks? ([\d,\[\]-]+): (.+)")
_EXITED = re.compile(r"Exited with (?:exit )?code (\d+)")
_NOTICED = re.compile(r"process rank (\d+) with PID \d+ on node (\S+) exited on(?: signal (\d+))?")
_NAME = re.compile(r"Process name: \[+[^\]]*\],\s?(\d+)\]")
_CODE = re.compile(r"^\s+Exit code:\s+(\d+)|^=\s+EXIT CODE: (\d+)")
_RUNNING = re.compile(r"^=\s+PID \d+ RUNNING AT (\S+)")
_SIGNALLED = re.compile(r"^\s*signal (\d+) \(|EXIT STRING: .*\(signal (\d+)\)|^=\s+KILLED BY SIGNAL: (\d+)")
_HYDRA = re.compile(r"exit status of rank (\d+): (?:return code (\d+)|killed by signal (\d+))")
_ABORT = re.compile(r"MPI_ABORT was invoked on rank (\d+)|MPI_Abort\(.*\) (?:on|- process) (\d+)")
_LIGHTNING = re.compile(r"\[rank: (\d+)\] Child process with PID \d+ terminated with code (-?\d+)")
_ELASTIC = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: \d+\)")
_BOX = re.compile(r"^\s*(host|rank|exitcode)\s+: (\S+)")
_SCRIPT = re.compile(
    r"^(?!srunddp: |.*failed: )[^(]{0,60}\b(?:exit(?:ed)?[ _](?:with )?(?:code|status)|rc|return code)"
    r"\s?[:= ]\s?(\d{1,3})\W{0,4}$"
)
_RETURN = re.compile(r"exits with return code = (-?\d+)")
_ENDING = re.compile(
    r"Terminating (?:job step|StepId)|Job step aborted|Force Terminated|Sending process \d+ closing signal|"
    r"Killing subprocess"
)
_ROOT_CAUSE = re.compile(
    r"srunddp: ranks? ([\d,-]+) on (\S+?)(?:, rank.*?)? (failed|lost): (.*?)(?: \(exit code (\d+)\))?$"
)
_ERROR = re.compile(r"srunddp: error: (.*)$")
_ENDED = re.compile(r"srunddp: (the launcher ended the run with SIG|stopped after step \d+ by SIG)")
_NOTE = re.compile(r"srunddp: (?:ended with it|note|passed over|refused )")


@dataclass
class Report:
    """How a rank ended, as its launcher says.

    Attributes:
        number, text: the line; ranks, node: whose, as far as it is told.
        code: its exit code; minus the signal's number where a signal ended it.
        root: the launcher says itself that this was the first.
        survived: the ranks were started again, and went on.
    """

    number: int
    text: str
    code: int
    ranks: list[int] = field(default_factory=list)
    node: str | None = None
    root: bool = False
    survived: bool = False

    @property
    def signal(self) -> int:
        """That ended it, or 0; a shell turns signal 9 into the exit code 137."""
        if self.code < 0:
            return -self.code
        return self.code - 128 if self.code in (132, 134, 135, 136, 137, 139, 143) else 0

    @property
    def is_victim(self) -> bool:
        """Ended by the launcher itself, or not at all."""
        return self.signal in (15, 2, 1) or self.code == 0


@dataclass
class Reports:
    """The reports in one file."""

    found: list[Report] = field(default_factory=list)
    ended_at: int | None = None  # from there on the launcher ends ranks itself
    _box: dict[str, str] = field(default_factory=dict)
    _root: bool = False
    _name: int | None = None
    _node: str | None = None
    _cut: bool = False

    def feed(self, number: int, text: str) -> None:
        """Read a line."""
        if self.ended_at is None and _ENDING.search(text):
            self.ended_at = number
        if "Root Cause (first observed failure)" in text:
            self._root = True
        before = len(self.found)
        self._srun(number, text) or self._mpi(number, text) or self._elastic(number, text)
        for report in self.found[before:]:
            if self.ended_at is not None and number > self.ended_at and report.signal == 9 and not report.root:
                report.code = -15

    def _srun(self, number: int, text: str) -> bool:
        if match := _SRUN.search(text):
            exited = _EXITED.search(match[3])
            by_signal = (-signal for word, signal in _SIGNALS.items() if match[3].startswith(word))
            code = int(exited[1]) if exited else next(by_signal, 1)
            self.found.append(Report(number, text, code, spread(match[2]), match[1]))
        return bool(match)

    def _mpi(self, number: int, text: str) -> bool:
        if match := _NOTICED.search(text):
            self._cut = match[3] is None
            self.found.append(Report(number, text, -int(match[3] or 0) or 1, [int(match[1])], match[2]))
        elif (match := _SIGNALLED.search(text)) and self.found and (self._cut or self._node):
            self.found[-1].code, self._cut = -int(next(filter(None, match.groups()))), False
        elif match := _NAME.search(text):
            self._name = int(match[1])
        elif match := _RUNNING.match(text):
            self._node = match[1]
        elif match := _CODE.match(text):
            code = int(next(filter(None, match.groups()), 0))
            ranks = [] if self._name is None else [self._name]
            # Hydra gives the status of wait(2) where a signal ended it.
            code = -code if match[2] and code in (6, 7, 9, 11, 15) else code
            self.found.append(Report(number, text, code, ranks, self._node))
        elif match := _HYDRA.search(text):
            self.found.append(Report(number, text, int(match[2]) if match[2] else -int(match[3]), [int(match[1])]))
        elif match := _ABORT.search(text):
            self.found.append(Report(number, text, 1, [int(match[1] or match[2])]))
        else:
            return False
        return True

    def _elastic(self, number: int, text: str) -> bool:
        if (match := _ELASTIC.search(text)) or (match := _RETURN.search(text)):
            self.found.append(Report(number, text, int(match[1])))
        elif match := _LIGHTNING.search(text):
            self.found.append(Report(number, text, int(match[2]), [int(match[1])]))
        elif match := _BOX.match(text):
            self._box[match[1]] = match[2]
            if match[1] == "exitcode" and re.fullmatch(r"-?\d+", match[2]):
                rank = self._box.get("rank", "")
                ranks = [int(rank)] if rank.isdecimal() else []
                self.found.append(Report(number, text, int(match[2]), ranks, self._box.get("host"), self._root))
                self._box, self._root = {}, False
        elif (match := _SCRIPT.match(text)) and match[1] != "0":
            self.found.append(Report(number, text, int(match[1])))
        else:
            return False
        return True

    def first(self) -> Report | None:
        """The one that the launcher calls first, or the first of all that it did not end itself."""
        own = [report for report in self.found if not report.is_victim and not report.survived]
        named = [report for report in own if report.root and report.ranks]
        return next(iter(named or [each for each in own if each.ranks] or own), None)


def ours(number: int, text: str, file: int) -> Event | None:
    """srunddp's own line, where it speaks of an end."""
    if match := _ROOT_CAUSE.match(text):
        event = _event_of_cause(match[4] if match[3] == "failed" else text, file, number)
        event.rank, event.node, event.text = int(re.split(r"[,-]", match[1])[0]), match[2], text
        return event
    if _ENDED.match(text):
        return Event("cancelled", "ending", False, file, number, text, ours=True)
    if match := _ERROR.match(text):
        event = _event_of_cause(match[1], file, number)
        event.cause = "unknown" if event.generic else event.cause
        event.text, event.kind = text, "primary"
        event.sure &= event.cause != "unknown"
        if found := re.match(r"rank (\d+) on (\S+)", match[1]):
            event.rank, event.node = int(found[1]), found[2]
        return event
    if _NOTE.match(text):
        return Event("unknown", "noise", False, file, number, text)
    return None


def _event_of_cause(cause: str, file: int, number: int) -> Event:
    """The event of a diagnosis's cause: who it was is certain, and why as far as the words tell."""
    sign = table().read(cause) or table().read(f"srunddp: rank 0 on node failed: {cause}")
    event = Event("script-error", "primary", True, file, number, cause, ours=True, generic=True)
    if sign and sign.kind == "ending":
        event.cause, event.kind, event.sure = sign.id, "ending", False
    elif sign and sign.kind == "secondary":
        event.cause, event.kind, event.sure = "unknown", "symptom", False
    elif sign and sign.id != "script-error":
        event.cause, event.generic = sign.id, False
        event.sure = sign.sure or (sign.id == "rank-killed" and "killed" in cause)
    elif match := re.match(r"([\w.]+)(?:: |$)", cause):
        event.sure = match[1].rpartition(".")[2] not in VAGUE and not DOUBT.search(cause)
    elif not re.match(r"sys\.exit|the process ended", cause):
        event.cause, event.sure, event.generic = "unknown", False, False
    return event


def of_record(text: str, file: int) -> tuple[Event, int]:
    """``failure.json`` of ``--log-dir``: its diagnosis, and how many ranks there were at least.

    Raises:
        ValueError, TypeError, KeyError: it is none of srunddp's.
    """
    record = json.loads(text)
    cause, rank, node = str(record["cause"]), int(record["rank"]), str(record["node"])
    event = _event_of_cause(cause, file, 1)
    event.rank, event.node, event.text = rank, node, cause
    return event, max([rank, *(int(victim["rank"]) for victim in record["victims"])]) + 1
