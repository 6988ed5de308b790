"""Makes up what the ranks of a check have seen, and shortens what the check finds in it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from srunddp.bootstrap.environment.detect import detect
from srunddp.check.finding import Check, CheckContext, Finding, Observation, Ranks, Severity

F = TypeVar("F")

LOCAL_RANK_1 = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def seen(facts: Iterable[F], per_node: int = 2) -> Ranks[F]:
    """Return the facts as observations of ranks.

    Args:
        facts: The facts of each rank, in the order of the ranks.
        per_node: The number of ranks on each of the nodes node01, node02 and so on.
    """
    return Ranks(
        Observation(
            rank=rank,
            local_rank=rank % per_node,
            node=f"node{rank // per_node + 1:02d}",
            facts=known,
        )
        for rank, known in enumerate(facts)
    )


def changed(facts: F, changes: dict[int, dict[str, Any]], ranks: int = 12) -> Ranks[F]:
    """Return the same facts for all ranks, two on each node, except for ``changes``.

    Args:
        facts: The facts that all ranks share.
        changes: By rank, the fields that differ.
        ranks: The number of ranks.
    """
    return seen(replace(facts, **changes.get(rank, {})) for rank in range(ranks))  # type: ignore[type-var]


def reported(
    findings: Iterable[Finding],
) -> list[tuple[Severity, str, tuple[str, ...], tuple[int, ...]]]:
    """Return level, words, nodes and ranks of each finding. Check that each finding is complete,
    and that its words contain none of its nodes' names.
    """
    findings = list(findings)
    for one in findings:
        assert one.found
        assert one.expected
        assert one.hint
        assert one.nodes
        assert not any(node in one.found + one.expected for node in one.nodes)
    return [(one.level, one.found, one.nodes, one.ranks) for one in findings]


def subject(
    variables: dict[str, str] | None = None, script: Path | None = None, **named: Sequence[str]
) -> CheckContext:
    """Return this process as the subject of a check.

    Args:
        variables: The environment variables, which say what rank the process is; None for a process
            that was started alone.
        script: The script to check; None for none.
        named: ``paths`` and ``packages`` to check.
    """
    known = dict(variables or {})
    return CheckContext(
        environment=detect(known),
        script=None if script is None else str(script),
        paths=tuple(named.get("paths", ())),
        packages=tuple(named.get("packages", ())),
        variables=known,
    )


def travelled(check: Check[F], subject: CheckContext) -> F:
    """Collect the facts of this process, and return them as they arrive at rank 0. Check that they
    have not changed on the way.
    """
    facts = check.collect(subject)
    arrived = check.facts(**json.loads(json.dumps(asdict(facts))))  # type: ignore[call-overload]
    assert arrived == facts
    return arrived
