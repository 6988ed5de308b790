"""Writes the tables of states in docs/how-it-works.md: ``python -m tests.support.state_tables``.

Each table lies between two marks, and is made from the table of transitions that the program uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TypeVar

from srunddp.supervisor import decision, rank_table
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "how-it-works.md"
S = TypeVar("S")
E = TypeVar("E")
T = TypeVar("T")
BEGIN = "<!-- {}: begin -->"
END = "<!-- {}: end -->"


def states_of_a_rank() -> str:
    """Return the table of the states of a rank."""
    rows = [(name_of(state), state.value) for state in rank_table.RankState]
    return table(("state of a rank", "meaning"), rows)


def transitions_of_a_rank() -> str:
    """Return the table of the events that change the state of a rank."""
    rows = [
        (", ".join(map(name_of, states)), event.value, name_of(to))
        for (event, to), states in by_outcome(rank_table.TRANSITIONS).items()
    ]
    return table(("from", "event", "to"), rows)


def states_of_the_decision() -> str:
    """Return the table of the states of rank 0's decision, with the longest time of each."""
    rows = []
    for state in decision.DecisionState:
        limit = decision.TIME.get(state)
        lasts = _shown(limit) if limit else ""
        rows.append((name_of(state), state.value, lasts))
    return table(("state of the decision", "meaning", "at most"), rows)


def _shown(limit: Callable[[decision.DecisionTimes], float]) -> str:
    """Return the text of a time limit: the options that it depends on, and the seconds that are
    added to their values.
    """
    without = decision.DecisionTimes(signal_grace=0.0, ends_within=0.0)
    fixed = limit(without)
    parts = [
        option
        for option, times in (
            ("`--signal-grace`", without._replace(signal_grace=1.0)),
            ("`--grace`", without._replace(ends_within=1.0)),
        )
        if limit(times) != fixed
    ]
    if fixed:
        parts.append(f"{fixed:g} s")
    return " and ".join(parts)


def transitions_of_the_decision() -> str:
    """Return the table of the events that change the state of the decision, with what rank 0 does
    then.
    """
    rows = []
    for (event, transition), states in by_outcome(decision.TRANSITIONS).items():
        action = transition.action.value if transition.action else ""
        froms = ", ".join(map(name_of, states))
        rows.append((froms, event.value, name_of(transition.to), action))
    return table(("from", "event", "to", "rank 0 then"), rows)


TABLES: Mapping[str, Callable[[], str]] = {
    "states of a rank": states_of_a_rank,
    "transitions of a rank": transitions_of_a_rank,
    "states of the decision": states_of_the_decision,
    "transitions of the decision": transitions_of_the_decision,
}


def name_of(state: Enum) -> str:
    """Return the name of a state in Markdown."""
    return f"`{state.name}`"


def by_outcome(transitions: Mapping[tuple[S, E], T]) -> dict[tuple[E, T], list[S]]:
    """Group the states in which the same event has the same outcome."""
    outcomes: dict[tuple[E, T], list[S]] = {}
    for (state, event), outcome in transitions.items():
        outcomes.setdefault((event, outcome), []).append(state)
    return outcomes


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in (head, *rows)]
    lines.insert(1, "|" + "---|" * len(head))
    return "\n".join(lines)


def rendered(page: str) -> str:
    """Return the page with the present tables between their marks."""
    for name, made in TABLES.items():
        before, begin, rest = page.partition(BEGIN.format(name))
        _, end, after = rest.partition(END.format(name))
        page = f"{before}{begin}\n\n{made()}\n\n{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
