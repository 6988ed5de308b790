"""What launchers say of how ranks ended: srun, torchrun and its likes, both mpirun, Lightning, DeepSpeed."""

import re
import signal
from dataclasses import dataclass, field

from srunddp.triage.rank_labels import spread

_SIGNALS = {signal.strsignal(number): number for number in (4, 5, 6, 7, 8, 9, 11, 15)}
_ASKED = (1, 2, 15)  # signals by which launchers and people end a rank
_CRASHED = (4, 6, 7, 9, 11, 15)
# A line that tells of an end.
_ENDS = [
    re.compile(r"srun: error: (?P<node>[\w.\[\],-]+): tasks? (?P<ranks>[\d,\[\]-]+): (?P<how>.+)"),
    re.compile(r"process rank (?P<ranks>\d+) with PID \d+ on node (?P<node>\S+) exited on(?: signal (?P<signal>\d+))?"),
    re.compile(r"detected that one or more processes exited with non-zero status"),
    re.compile(r"^=\s+PID \d+ RUNNING AT (?P<node>\S+)"),
    re.compile(r"exit status of rank (?P<ranks>\d+): (?:return code (?P<code>\d+)|killed by signal (?P<signal>\d+))"),
    re.compile(r"(?:MPI_ABORT was invoked on rank|MPI_Abort\(.*\) (?:on|- process)) (?P<ranks>\d+)"),
    re.compile(r"\[rank: (?P<ranks>\d+)\] Child process with PID \d+ terminated with code (?P<code>-?\d+)"),
    re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local>\d+) \(pid: \d+\)"),
    re.compile(r"^\s*rank\s+: (?P<ranks>\d+) \(local_rank: (?P<local>\d+)\)"),
    re.compile(r"exits with return code = (?P<code>-?[1-9]\d*)"),
    re.compile(
        r"^(?!srunddp: |.*failed: )[^(]{0,60}\b(?:exit(?:ed)?[ _](?:with )?(?:code|status)|rc|return code)"
        r"\s?[:= ]\s?(?P<code>[1-9]\d{0,2})\W{0,4}$"
    ),
]
# What lines after it add.
_MORE = re.compile(
    r"^\s*signal (?P<signal>\d+) \(|EXIT STRING: .*\(signal (?P<by>\d+)\)|^=\s+KILLED BY SIGNAL: (?P<killed>\d+)|"
    r"Process name: \[.*,\s?(?P<rank>\d+)\]|^(?:\s+Exit code:|\s*exitcode\s+:|=\s+EXIT CODE:)\s+(?P<code>-?\d+)"
)
_FAILURES = re.compile(r"(\d+): ProcessFailure\(local_rank=(\d+)")
_HOST = re.compile(r"^\s*host\s+: (\S+)")
_EXITED = re.compile(r"Exited with (?:exit )?code (\d+)")
_WORDS = ("rank", "code", "srun: error: ", "exit", "EXIT", "signal", "SIGNAL", "status", "PID ", "Process name", "rc")
_ENDING = re.compile(
    r"Terminating (?:job step|StepId)|Job step aborted|Force Terminated|Sending process \d+ closing signal|"
    r"Killing subprocess|CANCELLED AT|sending Ctrl-C|got signal: 15"
)


@dataclass
class Report:
    """How a rank ended, as its launcher says.

    Attributes:
        number, text: the line; ranks, node: whose, as far as it is told; local: its local rank.
        code: its exit code; minus the signal's number where a signal ended it.
        root: the launcher says itself that this was the first.
        ended: after the launcher began to end ranks, or another rank had ended by itself.
    """

    number: int
    text: str
    code: int
    ranks: list[int] = field(default_factory=list)
    node: str | None = None
    local: str | None = None
    root: bool = False
    ended: bool = False

    @property
    def signal(self) -> int:
        """That ended it, or 0; a shell turns signal 9 into the exit code 137."""
        return -self.code if self.code < 0 else max(self.code - 128, 0) if self.code - 128 in _CRASHED else 0

    @property
    def is_victim(self) -> bool:
        """Ended by the launcher itself, or not at all."""
        return self.code == 0 or (self.ended and not self.root and self.signal in (*_ASKED, 9))


@dataclass
class Reports:
    """The reports in one file."""

    found: list[Report] = field(default_factory=list)
    _ending: bool = False  # the launcher ends ranks itself
    _root: bool = False
    _host: str | None = None

    def feed(self, number: int, text: str) -> None:
        """Read a line."""
        self._ending |= bool(_ENDING.search(text))
        self._root |= "Root Cause (first observed failure)" in text
        if match := _HOST.match(text):
            self._host = match[1]
        if not any(word in text for word in _WORDS):
            return
        for rank, local in _FAILURES.findall(text):
            self._place(local, int(rank), None)
        if match := next(filter(None, (pattern.search(text) for pattern in _ENDS)), None):
            self._add(number, text, match.groupdict())
        elif self.found and (match := _MORE.search(text)):
            self._complete(self.found[-1], text, match.groupdict())

    def _add(self, number: int, text: str, fields: dict[str, str | None]) -> None:
        report = Report(
            number, text, int(fields.get("code") or 1), spread(fields.get("ranks") or ""), fields.get("node")
        )
        report.local = fields.get("local")
        how, by_signal = fields.get("how") or "", fields.get("signal")
        if exited := _EXITED.search(how):
            report.code = int(exited[1])
        elif by_signal or (word := next((word for word in _SIGNALS if word and how.startswith(word)), None)):
            report.code = -int(by_signal) if by_signal else -_SIGNALS[word]
        if report.local and report.ranks:  # torchrun's table, whose last is the first failure
            report.node, report.root = self._host, self._root
            if self._root:
                self._place(report.local, report.ranks[0], self._host)
            self._root = False
        report.root |= bool(report.local and not report.ranks)
        report.ended = self._ending or any(each.code and each.signal not in _ASKED for each in self.found)
        self.found.append(report)

    def _complete(self, report: Report, text: str, more: dict[str, str | None]) -> None:
        code = int(more["code"] or 0)
        by_signal = more["signal"] or more["by"] or more["killed"] or (text[:1] == "=" and code in _CRASHED and code)
        report.code = -int(by_signal) if by_signal else code if more["code"] else report.code
        report.ranks = [int(more["rank"])] if more["rank"] else report.ranks

    def _place(self, local: str, rank: int, node: str | None) -> None:
        """Give its rank to what is known by a local rank alone."""
        for report in self.found:
            if report.local == local and not report.ranks:
                report.ranks, report.node = [rank], node
