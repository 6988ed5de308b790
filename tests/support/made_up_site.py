"""What ranks might have seen, and what is found in it."""

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
    """Of ranks in their order, on node01 and so on."""
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
    """Two ranks on each node, that all have seen the same but for ``changes``, by rank."""
    return seen(replace(facts, **changes.get(rank, {})) for rank in range(ranks))  # type: ignore[type-var]


def reported(
    findings: Iterable[Finding],
) -> list[tuple[Severity, str, tuple[str, ...], tuple[int, ...]]]:
    """Level, what was found, nodes and ranks of each; and each has all its parts, and no node's
    name in its words.
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
    """This process, as a rank that was started alone or as ``variables`` have it."""
    known = dict(variables or {})
    return CheckContext(
        environment=detect(known),
        script=None if script is None else str(script),
        paths=tuple(named.get("paths", ())),
        packages=tuple(named.get("packages", ())),
        variables=known,
    )


def travelled(check: Check[F], subject: CheckContext) -> F:
    """The facts of this process, as they arrive at rank 0: no other than those that left."""
    facts = check.collect(subject)
    arrived = check.facts(**json.loads(json.dumps(asdict(facts))))  # type: ignore[call-overload]
    assert arrived == facts
    return arrived
