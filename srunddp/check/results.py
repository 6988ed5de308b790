"""What a check has found, so far."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from srunddp._version import __version__
from srunddp.bootstrap.rendezvous.protocol import Hello
from srunddp.check.finding import Check, F, Finding, Level, Seen

_CURE = "see that node's load, its file systems and its driver"


@dataclass
class Report:
    """What a check has found.

    Attributes:
        here: what each rank that came said of itself; facts: what it collected, by check.
        findings: what is wrong; summaries: for each check one line on what was seen; both in the checks' order.
        skipped: why a check was not made.
    """

    here: Mapping[int, Hello]
    facts: dict[int, dict[str, Any]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    summaries: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether something would stop the job."""
        return any(finding.level is Level.FAIL for finding in self.findings)

    def add(self, name: str, findings: Iterable[Finding], summary: str) -> None:
        """Take in what one check has found."""
        self.findings += findings
        self.summaries[name] = summary

    def take(self, told: Mapping[int, Mapping[str, Any]]) -> None:
        """Take in what ranks collected, but for those of another srunddp, whose facts mean something else."""
        for rank, answer in sorted(told.items()):
            node = self.here[rank].node
            if answer["version"] != __version__:
                cure = "install one version for all nodes, and start it by its path"
                found = f"srunddp {answer['version']}"
                wrong = Finding(Level.FAIL, "launch", found, f"{__version__}, as on rank 0", cure, (node,), (rank,))
                self.findings.append(wrong)
                continue
            self.facts[rank] = answer["checks"]
            for name, of_check in answer["checks"].items():
                if "failed" in of_check:
                    wrong = Finding(Level.FAIL, name, of_check["failed"], "an answer", _CURE, (node,), (rank,))
                    self.findings.append(wrong)

    def judge(self, checks: Iterable[Check[Any]]) -> None:
        """Have these checks judge what was collected for them."""
        for check in checks:
            if seen := self.seen(check):
                self.add(check.name, check.judge(seen), check.summary(seen))

    def seen(self, check: Check[F]) -> Sequence[Seen[F]]:
        """What a check collected on each rank, where it did."""
        return [
            Seen(rank, self.here[rank].local_rank, self.here[rank].node, check.facts(**told[check.name]["facts"]))
            for rank, told in sorted(self.facts.items())
            if "facts" in told.get(check.name, {})
        ]
