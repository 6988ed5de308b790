"""A check's report for people and for programs: one table, the worst first, each failing row with
its hint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from srunddp._version import __version__
from srunddp.bootstrap.rendezvous.messages import Hello
from srunddp.check.finding import FAIL, Check, F, Finding, Observation, Ranks, Severity
from srunddp.check.messages import CollectedFacts
from srunddp.errors import file_errors, one_line
from srunddp.util.atomic_file import replace_file
from srunddp.util.hostlist import fold, fold_ranks, group_by_key


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Merge equal findings of several nodes or ranks into one; the worst first, else in their
    order.
    """
    # The key is the finding without its place: a fault that a thousand nodes share is one row.
    by_text = group_by_key((replace(each, nodes=(), ranks=()), each) for each in findings)
    rows = []
    for text, same in by_text.items():
        nodes = dict.fromkeys(node for each in same for node in each.nodes)
        ranks = {rank for each in same for rank in each.ranks}
        rows.append(replace(text, nodes=tuple(nodes), ranks=tuple(sorted(ranks))))
    return sorted(rows, key=lambda each: each.level)


def lines(report: Report) -> list[str]:
    """Write the table: what is wrong, as :func:`merged` has it, then what each check saw, and those
    that were not made.

    What a terminal would obey is escaped, here as in all text of this module: paths and variables
    may hold it.
    """
    findings = merged(report.findings)
    rows = [(each.level.name, each.check, where(each), said(each)) for each in findings]
    bad = {each.check for each in findings}
    seen = [
        ("" if name in bad else "ok", name, "", one_line(text))
        for name, text in report.summaries.items()
    ]
    # Reversed, "ok" comes before the empty word of checks whose findings stand above.
    rows += sorted(seen, key=lambda row: row[0], reverse=True)
    rows += [("--", name, "", why) for name, why in report.skipped.items()]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    return ["  ".join([*map(str.ljust, row[:3], widths), row[3]]).rstrip() for row in rows]


def where(finding: Finding) -> str:
    """Name the nodes, folded, with the ranks where it is about them; or the way between two."""
    parts = (fold_ranks(finding.ranks, {}), fold(finding.nodes))
    return one_line(finding.between or " on ".join(filter(None, parts)))


def said(finding: Finding) -> str:
    """Write a finding in the words of an error."""
    return one_line(f"{finding.found}; expected {finding.expected} -> {finding.hint}")


def verdict(report: Report, world_size: int, job: str) -> str:
    """Say in one line how many ranks and nodes there are, and how much is wrong.

    Args:
        report: of the check.
        world_size: how many ranks there should be.
        job: its number; empty where there is none.
    """
    nodes = len({hello.node for hello in report.here.values()})
    findings = merged(report.findings)
    counts = []
    for level, word in ((Severity.FAIL, "failure"), (Severity.WARN, "warning")):
        count = len([each for each in findings if each.level is level])
        if count:
            counts.append(f"{count} {word}{'s' if count > 1 else ''}")
    wrong = " and ".join(counts)
    ranks = f"{len(report.here)} of {world_size} ranks on {nodes} node{'s' if nodes > 1 else ''}"
    if world_size == 1 and not job:
        return (
            f"check: this machine alone, {wrong or 'all is well'}; `srun --nodes=N srunddp check`"
            " looks at the nodes"
        )
    return f"check{f' of job {job}' if job else ''}: {ranks}, {wrong or 'all is well'}"


def node_lines(report: Report) -> list[str]:
    """Write a line for each node, with the worst that each check has found there: ``node01
    launch=ok limits=FAIL``.
    """
    found = {
        (node, each.check): each.level.name
        # The worst is first in `merged`, and so the last one here, which the dict keeps.
        for each in reversed(merged(report.findings))
        for node in each.hosts
    }
    nodes = dict.fromkeys(hello.node for hello in report.here.values())
    rows = (
        [node, *(f"{name}={found.get((node, name), 'ok')}" for name in report.summaries)]
        for node in nodes
    )
    return [one_line(" ".join(row)) for row in rows]


def write(report: Report, text: Sequence[str], folder: str, job: str, code: int) -> list[str]:
    """Write ``preflight.JOB.txt`` and ``.json``.

    Args:
        report: of the check.
        text: what was printed.
        folder: for the files.
        job: its number; empty where there is none.
        code: the exit code.

    Returns:
        The files' paths.

    Raises:
        ConfigError: they cannot be written.
    """
    found = f"the report cannot be written to {folder}"
    hint = "name another with --output-dir"
    with file_errors(found, expected="a folder that rank 0 may write to", hint=hint):
        os.makedirs(folder, exist_ok=True)
        paths = [Path(folder) / f"preflight.{job or 'local'}.{kind}" for kind in ("txt", "json")]
        texts = (
            "\n".join([*text, "", *node_lines(report)]),
            json.dumps(as_json(report, job, code), indent=1),
        )
        for path, each in zip(paths, texts, strict=True):
            # A path need not be text.
            replace_file(path, f"{each}\n".encode(errors="backslashreplace"))
    return list(map(str, paths))


def as_json(report: Report, job: str, code: int) -> dict[str, Any]:
    """Return everything, for programs; for the arguments see :func:`write`."""
    return {
        "job": job,
        "exit_code": code,
        "findings": [
            {**asdict(each), "level": each.level.name} for each in merged(report.findings)
        ],
        "summaries": report.summaries,
        "skipped": report.skipped,
        "ranks": [
            {
                "rank": rank,
                "node": here.node,
                "local_rank": here.local_rank,
                "checks": _checks(report.facts.get(rank)),
            }
            for rank, here in report.here.items()
        ],
    }


def _checks(collected: CollectedFacts | None) -> dict[str, Any]:
    """By check what it collected on a rank, or why it did not."""
    if collected is None:
        return {}
    facts = {name: {"facts": each} for name, each in collected.facts.items()}
    return facts | {name: {"failed": why} for name, why in collected.failed.items()}


@dataclass
class Report:
    """What a check has found.

    Attributes:
        here: what each rank that came said of itself.
        facts: what it collected.
        findings: what is wrong.
        summaries: for each check one line on what was seen; both in the checks' order.
        skipped: why a check was not made.
    """

    here: Mapping[int, Hello]
    facts: dict[int, CollectedFacts] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    summaries: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether something would stop the job."""
        return any(finding.level is FAIL for finding in self.findings)

    def add(self, name: str, findings: Iterable[Finding], summary: str = "") -> None:
        """Take in what a check has found, and what it has seen.

        Args:
            name: of the check.
            findings: what is wrong.
            summary: one line on what was seen; empty where it was reported before, or nothing was.
        """
        self.findings += [replace(each, check=name) for each in findings]
        if summary:
            self.summaries[name] = summary

    def take(self, answers: Mapping[int, CollectedFacts]) -> None:
        """Take in what ranks collected, but for those of another srunddp, whose facts mean
        something else.
        """
        for rank, answer in sorted(answers.items()):
            failed = partial(Finding, FAIL, nodes=(self.here[rank].node,), ranks=(rank,))
            if answer.version != __version__:
                found = f"srunddp {answer.version}"
                expected = f"{__version__}, as on rank 0"
                hint = "install one version for all nodes, and start it by its path"
                self.add("launch", [failed(found, expected, hint)])
                continue
            self.facts[rank] = answer
            hint = "see that node's load, its file systems and its driver"
            for name, why in answer.failed.items():
                self.add(name, [failed(why, "an answer", hint)])

    def evaluate(self, checks: Iterable[Check[Any]]) -> None:
        """Have these checks judge what was collected for them."""
        for check in checks:
            # So a check may rely on one rank at least: checks take minima and medians, and compare
            # with the first. Why there are no facts at all is reported by `take` and `lost`.
            if seen := self.seen(check):
                self.add(check.name, check.evaluate(seen), check.summary(seen))

    def seen(self, check: Check[F]) -> Ranks[F]:
        """Return what a check collected on each rank, where it did."""
        seen: Ranks[F] = Ranks()
        for rank, collected in sorted(self.facts.items()):
            values = collected.facts.get(check.name)
            if isinstance(values, dict):
                here = self.here[rank]
                # The fields fit: facts of another version were refused by `take`.
                facts = check.facts(**values)
                seen.append(
                    Observation(rank=rank, local_rank=here.local_rank, node=here.node, facts=facts)
                )
        return seen
