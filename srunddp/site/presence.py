"""Ranks that did not come to a check, or did not stay."""

from __future__ import annotations

from srunddp.bootstrap import channels
from srunddp.bootstrap.environment import Environment
from srunddp.bootstrap.ifaces import entry_or_default
from srunddp.bootstrap.interface import addresses_of
from srunddp.errors import SrunddpError
from srunddp.site.checks.launch import NAME
from srunddp.site.comparison import parts
from srunddp.site.finding import Finding, Level, Subject
from srunddp.site.hub import Hub


def absent(hub: Hub, subject: Subject, timeout: float) -> list[Finding]:
    """The ranks that did not come, with who was refused meanwhile; and what is wrong with those that did."""
    environment, entries = subject.environment, subject.loaded.entries
    layout = environment.step.layout() if environment.step else {}
    missing: dict[str, list[int]] = {}
    for rank in sorted(set(range(environment.world_size)) - hub.here.keys()):
        missing.setdefault(layout.get(rank, ""), []).append(rank)
    cure = "see its own lines, and whether srun started srunddp there"
    findings = []
    for node, ranks in missing.items():
        name = channels.known_as(entry_or_default(entries, node), node)
        known = addresses_of(name) & set(hub.unanswered) if node and hub.unanswered else set()
        came = "; its packets come here, our answers do not reach it" if known else ""
        found, nodes = f"no word within {timeout:g} s{came}", (node,) if node else ()
        findings.append(Finding(Level.FAIL, NAME, found, "all ranks", cure, nodes, tuple(ranks)))
    if missing:
        findings += [Finding(Level.WARN, NAME, *parts(line)) for line in hub.refused]
    cure = "start all ranks with one srun, and one srunddp per task"
    return findings + [Finding(Level.FAIL, NAME, each, "each rank once", cure) for each in hub.objections]


def lost(hub: Hub) -> list[Finding]:
    """The ranks that came, and then could not answer or were lost."""
    cure = "see what ended it there, or that node's load and file systems"
    return [
        Finding(Level.FAIL, NAME, f"during the check: {why}", "answers", cure, (hub.here[rank].node,), (rank,))
        for rank, why in sorted(hub.trouble.items())
    ]


def apart(environment: Environment, error: SrunddpError) -> list[Finding]:
    """Why this rank did not come together with the others."""
    here = (environment.node,), (environment.rank,)
    return [Finding(Level.FAIL, NAME, error.found, error.expected, error.cure, *here)]
