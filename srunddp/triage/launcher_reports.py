"""What launchers say of how ranks ended: srun, torchrun and its likes, both mpirun, Lightning, DeepSpeed."""

import re
import signal
from dataclasses import dataclass, field

from srunddp.triage.rank_labels import spread

_SIGNALS = {signal.strsignal(number): number for number in (4, 5, 6, 7, 8, 9, 11, 15)}
_SRUN = re.compile(r"srun: error: ([\w.\[\],-]+): tasks? ([\d,\[\]-]+): (.+)")
_EXITED = re.compile(r"Exited with (?:exit )?code (\d+)")
_NOTICED = re.compile(r"process rank (\d+) with PID \d+ on node (\S+) exited on(?: signal (\d+))?")
_DETECTED = re.compile(r"detected that one or more processes exited with non-zero status")
_NAME = re.compile(r"Process name: \[.*,\s?(\d+)\]")
_CODE = re.compile(r"^\s+Exit code:\s+(\d+)|^=\s+EXIT CODE: (\d+)")
_RUNNING = re.compile(r"^=\s+PID \d+ RUNNING AT (\S+)")
_SIGNALLED = re.compile(r"^\s*signal (\d+) \(|EXIT STRING: .*\(signal (\d+)\)|^=\s+KILLED BY SIGNAL: (\d+)")
_HYDRA = re.compile(r"exit status of rank (\d+): (?:return code (\d+)|killed by signal (\d+))")
_ABORT = re.compile(r"MPI_ABORT was invoked on rank (\d+)|MPI_Abort\(.*\) (?:on|- process) (\d+)")
_LIGHTNING = re.compile(r"\[rank: (\d+)\] Child process with PID \d+ terminated with code (-?\d+)")
_ELASTIC = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: \d+\)")
_FAILURES = re.compile(r"(\d+): ProcessFailure\(local_rank=(\d+)")
_BOX = re.compile(r"^\s*(host|rank|exitcode)\s+: (\S+)(?: \(local_rank: (\d+)\))?")
_SCRIPT = re.compile(
    r"^(?!srunddp: |.*failed: )[^(]{0,60}\b(?:exit(?:ed)?[ _](?:with )?(?:code|status)|rc|return code)"
    r"\s?[:= ]\s?(\d{1,3})\W{0,4}$"
)
_RETURN = re.compile(r"exits with return code = (-?\d+)")
_ENDING = re.compile(
    r"Terminating (?:job step|StepId)|Job step aborted|Force Terminated|Sending process \d+ closing signal|"
    r"Killing subprocess|CANCELLED AT|sending Ctrl-C|got signal: 15"
)


@dataclass
class Report:
    """How a rank ended, as its launcher says.

    Attributes:
        number, text: the line; ranks, node: whose, as far as it is told; local: its local rank alone.
        code: its exit code; minus the signal's number where a signal ended it.
        root: the launcher says itself that this was the first.
        ended: after the launcher began to end ranks, or another rank had ended by itself.
        survived: the ranks were started again, and went on.
    """

    number: int
    text: str
    code: int
    ranks: list[int] = field(default_factory=list)
    node: str | None = None
    root: bool = False
    local: int | None = None
    ended: bool = False
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
        return self.code == 0 or (self.ended and not self.root and self.signal in (1, 2, 9, 15))


@dataclass
class Reports:
    """The reports in one file."""

    found: list[Report] = field(default_factory=list)
    _ending: bool = False  # the launcher ends ranks itself
    _box: dict[str, str] = field(default_factory=dict)
    _root: bool = False
    _name: int | None = None
    _node: str | None = None
    _cut: bool = False
    _detected: tuple[int, str] | None = None

    def feed(self, number: int, text: str) -> None:
        """Read a line."""
        self._ending |= bool(_ENDING.search(text))
        self._root |= "Root Cause (first observed failure)" in text
        before = len(self.found)
        self._srun(number, text) or self._mpi(number, text) or self._elastic(number, text)
        for report in self.found[before:]:
            earlier = any(each.signal not in (1, 2, 15) and each.code for each in self.found[:before])
            report.ended = self._ending or (earlier and report.signal in (1, 2, 15))

    def _add(self, number: int, text: str, code: int, *ranks: int, node: str | None = None) -> Report:
        self.found.append(Report(number, text, code, list(ranks), node))
        return self.found[-1]

    def _srun(self, number: int, text: str) -> bool:
        if match := _SRUN.search(text):
            exited = _EXITED.search(match[3])
            by_signal = (-number for word, number in _SIGNALS.items() if match[3].startswith(word or "?"))
            code = int(exited[1]) if exited else next(by_signal, 1)
            self._add(number, text, code, *spread(match[2]), node=match[1])
        return bool(match)

    def _mpi(self, number: int, text: str) -> bool:
        if match := _NOTICED.search(text):
            self._cut = match[3] is None
            self._add(number, text, -int(match[3] or 0) or 1, int(match[1]), node=match[2])
        elif (match := _SIGNALLED.search(text)) and self.found and (self._cut or self._node):
            self.found[-1].code, self._cut = -_number(match), False
        elif _DETECTED.search(text):
            self._detected = number, text
        elif match := _NAME.search(text):
            self._name = int(match[1])
        elif match := _RUNNING.match(text):
            self._node = match[1]
        elif match := _CODE.match(text):
            # Hydra gives the status of wait(2) where a signal ended it.
            code = -_number(match) if match[2] and _number(match) in (6, 7, 9, 11, 15) else _number(match)
            ranks = [] if self._name is None else [self._name]
            self._add(*(self._detected or (number, text)), code, *ranks, node=self._node)
        elif match := _HYDRA.search(text):
            self._add(number, text, int(match[2]) if match[2] else -int(match[3]), int(match[1]))
        elif match := _ABORT.search(text):
            self._add(number, text, 1, _number(match))
        else:
            return False
        return True

    def _elastic(self, number: int, text: str) -> bool:
        if match := _ELASTIC.search(text):
            report = self._add(number, text, int(match[1]))
            report.local, report.root = int(match[2]), True
        elif match := _FAILURES.search(text):
            self._place(**{local: int(rank) for rank, local in _FAILURES.findall(text)})
        elif match := _LIGHTNING.search(text):
            self._add(number, text, int(match[2]), int(match[1]))
        elif match := _BOX.match(text):
            self._box[match[1]] = match[2]
            if match[3] and self._root and match[2].isdecimal():
                self._place(self._box.get("host"), **{match[3]: int(match[2])})
            if match[1] == "exitcode" and re.fullmatch(r"-?\d+", match[2]):
                self._boxed(number, text)
        elif (match := _RETURN.search(text)) or ((match := _SCRIPT.match(text)) and match[1] != "0"):
            self._add(number, text, int(match[1]))
        else:
            return False
        return True

    def _place(self, node: str | None = None, **ranks: int) -> None:
        """Give its rank to what is known by a local rank alone."""
        for report in self.found:
            if report.local is not None and not report.ranks and str(report.local) in ranks:
                report.ranks, report.node = [ranks[str(report.local)]], node

    def _boxed(self, number: int, text: str) -> None:
        rank = self._box.get("rank", "")
        ranks = [int(rank)] if rank.isdecimal() else []
        report = self._add(number, text, int(self._box["exitcode"]), *ranks, node=self._box.get("host"))
        report.root, self._box, self._root = self._root, {}, False

    def first(self) -> Report | None:
        """The one that the launcher calls first, or the first of all that it did not end itself."""
        own = [report for report in self.found if not report.is_victim and not report.survived]
        named = [report for report in own if report.root and report.ranks]
        return next(iter(named or [each for each in own if each.ranks] or own), None)


def _number(match: re.Match[str]) -> int:
    return int(match[match.lastindex or 1])
