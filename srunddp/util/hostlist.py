"""Node names and numbers by group, and in few words as Slurm has them; nothing is imported for it when a rank fails."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def fold(names: Iterable[str]) -> str:
    """``login,node[01-04,07]``: names that differ in the last number before the first dot are one item.

    :func:`srunddp.bootstrap.environment.slurm.expand` is the way back.
    """
    numbers: dict[tuple[str, str], list[str]] = {}
    for name in sorted(set(names)):
        host, dot, domain = name.partition(".")
        found = re.fullmatch(r"(.*?)([0-9]+)([^0-9]*)", host, re.DOTALL)
        before, number, after = found.groups() if found else (host, "", "")
        numbers.setdefault((before, after + dot + domain), []).append(number)
    items = []
    for (before, after), each in numbers.items():
        items.append(f"{before}{each[0]}{after}" if len(each) == 1 else f"{before}[{_ranges(each)}]{after}")
    return ",".join(items)


def ranges(numbers: Iterable[int]) -> str:
    """``0-3,5``."""
    return _ranges(map(str, set(numbers)))


def _ranges(numbers: Iterable[str]) -> str:
    runs: list[tuple[str, str]] = []
    for number in sorted(numbers, key=lambda digits: (int(digits or 0), len(digits))):
        low, high = runs[-1] if runs else ("", "")
        if high and number == f"{int(high) + 1:0{len(low)}d}":
            runs[-1] = (low, number)
        else:
            runs.append((number, number))
    return ",".join(low if low == high else f"{low}-{high}" for low, high in runs)


def group_by_key(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """The second of each pair, by the first."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def fold_ranks(ranks: Iterable[int], layout: Mapping[int, str]) -> str:
    """``ranks 4-5 on node03`` for ranks 4 and 5, folded; without nodes where the layout is not known."""
    parts = []
    for node, theirs in group_by_key((layout.get(rank, ""), rank) for rank in ranks).items():
        where = f" on {node}" if node else ""
        parts.append(f"rank{'s' if len(theirs) > 1 else ''} {ranges(theirs)}{where}")
    return ", ".join(parts)
