"""What most ranks have, and who has something else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from srunddp.check.finding import Finding, Observation, Severity
from srunddp.util.hostlist import group_by_key

F = TypeVar("F")
V = TypeVar("V", bound=Hashable)


def minority(
    seen: Sequence[Observation[F]], value: Callable[[Observation[F]], V]
) -> tuple[V, dict[V, list[Observation[F]]]]:
    """What most ranks have, or of equally many the one of the lowest rank; and the others, by what they have.

    Args:
        seen: of one rank at least.
    """
    ranks = group_by_key((value(one), one) for one in sorted(seen, key=lambda one: one.rank))
    usual = Counter({known: len(who) for known, who in ranks.items()}).most_common(1)[0][0]
    del ranks[usual]
    return usual, ranks


def by_node(seen: Iterable[Observation[F]]) -> dict[str, list[Observation[F]]]:
    """The ranks of each node."""
    return group_by_key((one.node, one) for one in seen)


def finding_about(
    who: Sequence[Observation[F]], level: Severity, check: str, message: tuple[str, str, str], *, ranks: bool = True
) -> Finding:
    """A finding about these ranks.

    Args:
        message: what was found, what was expected, the hint.
        ranks: whether to name them; else their nodes alone.
    """
    nodes = tuple(dict.fromkeys(one.node for one in who))
    return Finding(level, check, *message, nodes, tuple(sorted(one.rank for one in who)) if ranks else ())


def on_node(one: Observation[F], level: Severity, check: str, found: str, expected: str, hint: str) -> Finding:
    """A finding about a rank's node."""
    return finding_about([one], level, check, (found, expected, hint), ranks=False)


def shortened(ways: Sequence[Finding], most: int) -> list[Finding]:
    """Findings about ways between nodes, those beyond so many as one."""
    rest = ways[most:]
    if len(rest) < 2:
        return list(ways)
    ends = (end.partition(":")[0] for each in rest for end in each.between.split(" -> "))
    found = f"… and {len(rest)} more ways"
    return [*ways[:most], replace(rest[0], found=found, between="", nodes=tuple(sorted(set(ends))))]


def split_message(message: str) -> tuple[str, str, str]:
    """What was found, what was expected and the hint, of the one line that an error is."""
    message, _, hint = message.partition(" -> ")
    found, _, expected = message.partition("; expected ")
    return found, expected, hint
