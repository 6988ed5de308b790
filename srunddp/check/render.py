"""Writes the report of a check: for people a table, in which failures come first and each problem
has a hint, and for programs JSON.
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
    """Merge findings that differ only in their nodes and ranks into one finding. Return failures
    first, then warnings, each in the given order.
    """
    # The key is the finding without its nodes and ranks, so a fault that a thousand nodes share is
    # one row.
    by_text = group_by_key((replace(each, nodes=(), ranks=()), each) for each in findings)
    rows = []
    for text, same in by_text.items():
        nodes = dict.fromkeys(node for each in same for node in each.nodes)
        ranks = {rank for each in same for rank in each.ranks}
        rows.append(replace(text, nodes=tuple(nodes), ranks=tuple(sorted(ranks))))
    return sorted(rows, key=lambda each: each.level)


def lines(report: Report) -> list[str]:
    """Return the rows of the table: the findings in the order of :func:`merged`, then one row on
    what each check saw, then the checks that were skipped and why.

    Paths and variables may contain control characters, which a terminal would obey; they are
    escaped in findings and in what the checks saw.
    """
    findings = merged(report.findings)
    rows = [(each.level.name, each.check, where(each), said(each)) for each in findings]
    bad = {each.check for each in findings}
    seen = [
        ("" if name in bad else "ok", name, "", one_line(text))
        for name, text in report.summaries.items()
    ]
    # Sort "ok" before "": what a check without findings saw comes first, and then what a check with
    # findings saw, which is not ok.
    rows += sorted(seen, key=lambda row: row[0], reverse=True)
    rows += [("--", name, "", why) for name, why in report.skipped.items()]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    return ["  ".join([*map(str.ljust, row[:3], widths), row[3]]).rstrip() for row in rows]


def where(finding: Finding) -> str:
    """Return where the problem is: the finding's ranks and nodes, folded like ``node[01-04]``, or
    the way between two nodes, as ``node01 -> node02``.
    """
    parts = (fold_ranks(finding.ranks, {}), fold(finding.nodes))
    return one_line(finding.between or " on ".join(filter(None, parts)))


def said(finding: Finding) -> str:
    """Return a finding in one line: what was found, what was expected, and a hint, in the form of
    srunddp's errors.
    """
    return one_line(f"{finding.found}; expected {finding.expected} -> {finding.hint}")


def verdict(report: Report, world_size: int, job: str) -> str:
    """Return one line on how many ranks have connected, from how many nodes, and how many failures
    and warnings there are.

    Args:
        report: The check's report.
        world_size: How many ranks should have connected.
        job: The number of the Slurm job; empty outside a job.
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
    """Return one line for each node, with the worst result of each check there, such as
    ``node01 launch=ok limits=FAIL``.
    """
    found = {
        (node, each.check): each.level.name
        # `merged` puts failures first. Reverse the order, because for equal keys the dict keeps the
        # last value, which is then the worst.
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
    """Write ``preflight.JOB.txt`` and ``preflight.JOB.json``, with ``local`` for JOB outside a job.

    Args:
        report: The check's report.
        text: The lines that were printed.
        folder: The folder for the two files; it is created if it is missing.
        job: The number of the Slurm job; empty outside a job.
        code: The exit code of the check.

    Returns:
        The files' paths.

    Raises:
        ConfigError: The folder or the files cannot be written.
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
            # The report may contain a path that is not valid UTF-8.
            replace_file(path, f"{each}\n".encode(errors="backslashreplace"))
    return list(map(str, paths))


def as_json(report: Report, job: str, code: int) -> dict[str, Any]:
    """Return the whole report as JSON values.

    Args:
        report: The check's report.
        job: The number of the Slurm job; empty outside a job.
        code: The exit code of the check.
    """
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
    """Return, by the name of the check, the facts that a rank collected or why it could not; empty
    if the rank sent none.
    """
    if collected is None:
        return {}
    facts = {name: {"facts": each} for name, each in collected.facts.items()}
    return facts | {name: {"failed": why} for name, why in collected.failed.items()}


@dataclass
class Report:
    """The findings of a check, and what they are based on.

    Attributes:
        here: The hello of each rank that has connected, by rank.
        facts: What each rank collected, by rank. Ranks that did not answer, or that have a
            different version of srunddp, are left out.
        findings: The problems, in the order in which they were found.
        summaries: One line on what each check saw, by its name, in the order of the table.
        skipped: For each check that was not made, the reason.
    """

    here: Mapping[int, Hello]
    facts: dict[int, CollectedFacts] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    summaries: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether at least one finding would stop the job."""
        return any(finding.level is FAIL for finding in self.findings)

    def add(self, name: str, findings: Iterable[Finding], summary: str = "") -> None:
        """Add the findings of one check, and its summary.

        Args:
            name: The name of the check.
            findings: The problems that the check found.
            summary: One line on what the check saw; if empty, none is added.
        """
        self.findings += [replace(each, check=name) for each in findings]
        if summary:
            self.summaries[name] = summary

    def take(self, answers: Mapping[int, CollectedFacts]) -> None:
        """Add the facts that ranks collected, and a failure for each check whose facts a rank could
        not collect.

        Facts from a different version of srunddp may have a different meaning. They are left out,
        and the different version is reported as a failure.
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
        """Have each check judge the facts that were collected for it."""
        for check in checks:
            # Call a check only if at least one rank has facts for it, because checks take minima
            # and medians, and compare with the first rank. `take` and `lost` report missing facts.
            if seen := self.seen(check):
                self.add(check.name, check.evaluate(seen), check.summary(seen))

    def seen(self, check: Check[F]) -> Ranks[F]:
        """Return the facts that ranks collected for a check, in the order of the ranks."""
        seen: Ranks[F] = Ranks()
        for rank, collected in sorted(self.facts.items()):
            values = collected.facts.get(check.name)
            if isinstance(values, dict):
                here = self.here[rank]
                # The fields fit, because `take` has refused the facts of other versions.
                facts = check.facts(**values)
                seen.append(
                    Observation(rank=rank, local_rank=here.local_rank, node=here.node, facts=facts)
                )
        return seen
