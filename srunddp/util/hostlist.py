"""Node names and numbers, grouped and in Slurm's short notation. The functions import nothing when
they are called, because they are also called while a rank fails.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import TypeVar

from srunddp.errors import ConfigError, Scope
from srunddp.util.quick_dataclass import dataclass

LONGEST_LIST = 65536  # names; a typo such as node[1-99999999] must not fill the memory
TOO_MANY = f"more than {LONGEST_LIST} names"
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def fold(names: Iterable[str]) -> str:
    """Write names in Slurm's short notation: ``login,node[01-04,07]``.

    Names that differ only in the last number before the first dot share one item. The names are
    sorted, and each is written once. :func:`expand` is the inverse.
    """
    # A name without a number becomes a separate item, because Slurm has no notation that puts gpu
    # and gpu1 into one item.
    numbers: dict[tuple[str, str, bool], list[str]] = {}
    for name in sorted(set(names)):
        host, dot, domain = name.partition(".")
        before = host
        number = ""
        after = ""
        # [0-9] and not \d, which would also match digits of other alphabets that expand() does not
        # read.
        if found := re.fullmatch(r"(.*?)([0-9]+)([^0-9]*)", host, re.DOTALL):
            before, number, after = found.groups()
        numbers.setdefault((before, after + dot + domain, bool(number)), []).append(number)
    items = []
    for (before, after, _), each in numbers.items():
        folded = each[0] if len(each) == 1 else f"[{_ranges(each)}]"
        items.append(before + folded + after)
    return ",".join(items)


def fold_in_order(names: Iterable[str]) -> str:
    """Write names as :func:`fold` does, but in the given order, for lists in which order matters.
    Only neighbours share an item.
    """
    runs: list[list[str]] = []
    for name in names:
        if runs and _comes_after(name, runs[-1][-1]):
            runs[-1].append(name)
        else:
            runs.append([name])
    return ",".join(map(fold, runs))


def _comes_after(name: str, before: str) -> bool:
    """Tell whether one item of a list can stand for ``before`` and ``name``, in this order."""
    folded = fold([before, name])
    return len(_items(folded, "")) == 1 and expand(folded) == [before, name]


def ranges(numbers: Iterable[int]) -> str:
    """Write numbers as ranges, sorted and each once: ``0-3,5``."""
    return _ranges(map(str, set(numbers)))


def numbers_of(ranges: str) -> set[int]:
    """Return the numbers in a text such as ``0-3,5``, which :func:`ranges` and, for lists of CPUs,
    the kernel write; an empty set for an empty text.
    """
    if not ranges:
        return set()
    return set(map(int, expand(f"[{ranges}]")))


def _ranges(numbers: Iterable[str]) -> str:
    """Write texts of digits as ranges, with their leading zeros: ``01-04,07``. 7 and 07 are
    different.
    """
    runs: list[tuple[str, str]] = []
    # Sort by value; of equal values the shorter comes first, so 7 before 07.
    for number in sorted(numbers, key=lambda digits: (int(digits or 0), len(digits))):
        if runs and _follows(number, *runs[-1]):
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ",".join(low if low == high else f"{low}-{high}" for low, high in runs)


def _follows(number: str, low: str, high: str) -> bool:
    """Tell whether a number continues the run from ``low`` to ``high``."""
    # expand() pads to the width of a range's first number: 9 and 10 fold to [9-10], but 09 and 10
    # to [09-10].
    return high != "" and number == f"{int(high) + 1:0{len(low)}d}"


def group_by_key(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return the second elements of the pairs, grouped by the first. Groups and the elements in
    them have the order of the pairs.
    """
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def fold_ranks(ranks: Iterable[int], layout: Mapping[int, str]) -> str:
    """Name ranks with their nodes: ``ranks 4-5 on node03``.

    Args:
        ranks: The ranks to name.
        layout: The node of each rank. A rank that is missing here is named without a node.
    """
    by_node = group_by_key((layout.get(rank, ""), rank) for rank in ranks)
    parts = []
    for node, theirs in by_node.items():
        noun = "ranks" if len(theirs) > 1 else "rank"
        where = f" on {node}" if node else ""
        parts.append(f"{noun} {ranges(theirs)}{where}")
    return ", ".join(parts)


def expand(host_list: str, *, where: str = "") -> list[str]:
    """Expand a Slurm host list in Slurm's order: ``rack[1-2]n[03,7]`` gives four names.

    Args:
        host_list: Names with bracketed ranges, separated by commas. ``*`` and ``?`` stay as they
            are.
        where: Where the list was read from, for the error message; empty to say nothing of it.

    Raises:
        ConfigError: Unbalanced brackets, an invalid range, or more than 65,536 names.
    """
    return [name for item in _items(host_list, where) for name in item.names()]


def count(host_list: str, *, where: str = "") -> int:
    """Return how many names :func:`expand` would return for a list, without making them."""
    return sum(item.size for item in _items(host_list, where))


def _items(host_list: str, where: str) -> list[_Item]:
    """Split a list into its items. A list of too many names is an error before any of the names is
    made.
    """
    items: list[_Item] = []
    names = 0
    if not re.fullmatch(r"(?:[^\[\]]|\[[^\[\]]*\])*", host_list):
        raise _bad_list(host_list, "brackets that do not match", where)
    if host_list:
        # Split at commas outside brackets; the added comma ends the last item.
        for text in re.findall(r"((?:[^\[\],]|\[[^\[\]]*\])*),", host_list + ","):
            item = _read_item(text, host_list, where)
            names += item.size
            if names > LONGEST_LIST:
                raise _bad_list(host_list, TOO_MANY, where)
            items.append(item)
    return items


def _read_item(item: str, host_list: str, where: str) -> _Item:
    # The split of rack[1-2]n[03,7] gives "rack", "1-2", "n", "03,7" and "": the bracketed texts are
    # at the odd indices.
    pieces = re.split(r"\[([^\]]*)\]", item)
    if not item or any(not re.fullmatch(r"[\w.:*?-]*", text) for text in pieces[::2]):
        raise _bad_list(host_list, f"{shortened(item)!r}", where)
    brackets = [_read_ranges(piece, host_list, where) for piece in pieces[1::2]]
    return _Item(pieces[::2], brackets)


@dataclass(frozen=True)
class _Item:
    """An item of a host list.

    Attributes:
        texts: The texts before, between and after the brackets, some of which may be empty.
        brackets: The ranges in each pair of brackets; one less than ``texts``.
    """

    texts: list[str]
    brackets: list[list[_Range]]

    @property
    def size(self) -> int:
        """The number of names. This is no ``__len__``, because len() fails for a number above
        ``sys.maxsize``.
        """
        return math.prod(sum(map(len, bracket)) for bracket in self.brackets)

    def names(self) -> Iterator[str]:
        """Yield the names; the last bracket varies fastest, as in Slurm."""
        choices = [[self.texts[0]]]
        for bracket, text_after in zip(self.brackets, self.texts[1:], strict=True):
            choices.append([number for each in bracket for number in each])
            choices.append([text_after])
        yield from map("".join, itertools.product(*choices))


@dataclass(frozen=True)
class _Range:
    """The numbers from ``low`` to ``high``, written with at least ``width`` digits."""

    low: int
    high: int
    width: int

    def __len__(self) -> int:
        return self.high - self.low + 1

    def __iter__(self) -> Iterator[str]:
        return (f"{number:0{self.width}d}" for number in range(self.low, self.high + 1))


def _read_ranges(ranges: str, host_list: str, where: str) -> list[_Range]:
    found: list[_Range] = []
    for part in ranges.split(","):
        # Accept at most 18 digits, because int() raises a ValueError for more than 4,300.
        match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", part)
        if not match:
            raise _bad_list(host_list, f"{shortened(part)!r} in brackets", where)
        low = match[1]
        high = match[2] or match[1]
        if int(high) < int(low):
            raise _bad_list(host_list, f"the range {part}, which runs backwards", where)
        if int(high) - int(low) >= LONGEST_LIST:
            raise _bad_list(host_list, f"{TOO_MANY}: {part}", where)
        found.append(_Range(int(low), int(high), len(low)))
    return found


def _bad_list(host_list: str, what: str, where: str) -> ConfigError:
    return ConfigError(
        f"host list {shortened(host_list)!r} has {what}",
        expected="names and ranges like node[01-04,7],login",
        hint="write it as `scontrol show hostlist` does",
        where=where,
        scope=Scope.NODE,
    )


def shortened(text: str) -> str:
    """Cut a text to at most 80 characters, for an error message."""
    return text if len(text) <= 80 else text[:77] + "..."
