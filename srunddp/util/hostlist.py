"""Node names and numbers by group, and in few words as Slurm has them; nothing is imported for it
when a rank fails.
"""

import itertools
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import TypeVar

from srunddp.errors import ConfigError, Scope

LONGEST_LIST = 65536
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def fold(names: Iterable[str]) -> str:
    """``login,node[01-04,07]``: names that differ in the last number before the first dot are one
    item.

    :func:`expand` is the way back.
    """
    numbers: dict[tuple[str, str], list[str]] = {}
    for name in sorted(set(names)):
        host, dot, domain = name.partition(".")
        found = re.fullmatch(r"(.*?)([0-9]+)([^0-9]*)", host, re.DOTALL)
        before, number, after = found.groups() if found else (host, "", "")
        numbers.setdefault((before, after + dot + domain), []).append(number)
    folded = (
        (b, each[0] if len(each) == 1 else f"[{_ranges(each)}]", a)
        for (b, a), each in numbers.items()
    )
    return ",".join(map("".join, folded))


def ranges(numbers: Iterable[int]) -> str:
    """``0-3,5``."""
    return _ranges(map(str, set(numbers)))


def numbers_of(ranges: str) -> set[int]:
    """The way back from :func:`ranges`; the kernel writes lists of CPUs so, and none as an empty
    text.
    """
    if ranges:
        return set(map(int, expand(f"[{ranges}]")))
    return set()


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
    """``ranks 4-5 on node03`` for ranks 4 and 5, folded; without nodes where the layout is not
    known.
    """
    parts = []
    for node, theirs in group_by_key((layout.get(rank, ""), rank) for rank in ranks).items():
        if node:
            where = f" on {node}"
        else:
            where = ""
        parts.append(f"rank{'s' if len(theirs) > 1 else ''} {ranges(theirs)}{where}")
    return ", ".join(parts)


def expand(host_list: str, *, where: str = "") -> list[str]:
    """Expand a Slurm host list in Slurm's own order: ``rack[1-2]n[03,7]`` gives four names.

    Args:
        host_list: names with bracketed ranges, separated by commas; ``*`` and ``?`` stay as they
            are.
        where: what the list was read from, for the message.

    Raises:
        ConfigError: brackets that do not match, a range that is none, or more than 65,536 names.
    """
    names: list[str] = []
    if not re.fullmatch(r"(?:[^\[\]]|\[[^\[\]]*\])*", host_list):
        raise _bad_list(host_list, "brackets that do not match", where)
    if host_list:
        for item in re.findall(r"((?:[^\[\],]|\[[^\[\]]*\])*),", host_list + ","):
            names.extend(itertools.islice(_expand_item(item, host_list, where), LONGEST_LIST + 1))
            if len(names) > LONGEST_LIST:
                raise _bad_list(host_list, f"more than {LONGEST_LIST} names", where)
    return names


def _expand_item(item: str, host_list: str, where: str) -> Iterator[str]:
    pieces = re.split(r"\[([^\]]*)\]", item)
    if not item or any(not re.fullmatch(r"[\w.:*?-]*", text) for text in pieces[::2]):
        raise _bad_list(host_list, f"{item!r}", where)
    choices = [
        _expand_ranges(piece, host_list, where) if index % 2 else [piece]
        for index, piece in enumerate(pieces)
    ]
    yield from map("".join, itertools.product(*choices))


def _expand_ranges(ranges: str, host_list: str, where: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        if not (match := re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", part)):
            raise _bad_list(host_list, f"{part!r} in brackets", where)
        low = match[1]
        high = match[2] or match[1]
        if not 0 <= int(high) - int(low) < LONGEST_LIST:
            raise _bad_list(host_list, f"the range {part}", where)
        numbers.extend(f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1))
        if len(numbers) > LONGEST_LIST:
            raise _bad_list(host_list, f"more than {LONGEST_LIST} names", where)
    return numbers


def _bad_list(host_list: str, what: str, where: str) -> ConfigError:
    found = f"host list {shortened(host_list)!r} has {what}"
    expected = "names and ranges like node[01-04,7],login"
    hint = "write it as `scontrol show hostlist` does"
    return ConfigError(found, expected=expected, hint=hint, where=where, scope=Scope.NODE)


def shortened(text: str) -> str:
    """A text that may be very long, for a message."""
    return text if len(text) <= 80 else text[:77] + "..."
