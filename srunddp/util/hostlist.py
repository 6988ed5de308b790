"""Node names and numbers by group, and in few words as Slurm has them; nothing is imported for it
when a rank fails.
"""

import itertools
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import TypeVar

from srunddp.errors import ConfigError, Scope

LONGEST_LIST = 65536  # names: a typing error such as node[1-99999999] must not fill the memory
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def fold(names: Iterable[str]) -> str:
    """Write names in few words: ``login,node[01-04,07]``.

    Names that differ in the last number before the first dot are one item. :func:`expand` is the
    way back.
    """
    numbers: dict[tuple[str, str], list[str]] = {}
    for name in sorted(set(names)):
        host, dot, domain = name.partition(".")
        before = host
        number = ""
        after = ""
        # Not \d, which matches the digits of other scripts too; expand() would not read those back.
        if found := re.fullmatch(r"(.*?)([0-9]+)([^0-9]*)", host, re.DOTALL):
            before, number, after = found.groups()
        numbers.setdefault((before, after + dot + domain), []).append(number)
    items = []
    for (before, after), each in numbers.items():
        folded = each[0] if len(each) == 1 else f"[{_ranges(each)}]"
        items.append(before + folded + after)
    return ",".join(items)


def ranges(numbers: Iterable[int]) -> str:
    """Write numbers in few words: ``0-3,5``."""
    return _ranges(map(str, set(numbers)))


def numbers_of(ranges: str) -> set[int]:
    """Read numbers as :func:`ranges` writes them; the kernel writes lists of CPUs so, and none as
    an empty text.
    """
    if not ranges:
        return set()
    return set(map(int, expand(f"[{ranges}]")))


def _ranges(numbers: Iterable[str]) -> str:
    """``01-04,07`` of numbers as they are written; 7 and 07 are two."""
    runs: list[tuple[str, str]] = []
    # By value, and 7 before 07: with equal values the shorter first.
    for number in sorted(numbers, key=lambda digits: (int(digits or 0), len(digits))):
        if runs and _follows(number, *runs[-1]):
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ",".join(low if low == high else f"{low}-{high}" for low, high in runs)


def _follows(number: str, low: str, high: str) -> bool:
    """Whether a number comes next in a run, with as many digits at least as its first."""
    # expand() pads to the digits of a range's first number, so that 9 and 10 are [9-10], but 09 and
    # 10 are [09-10].
    return high != "" and number == f"{int(high) + 1:0{len(low)}d}"


def group_by_key(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Collect the second of each pair by the first, both in the order in which they come."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def fold_ranks(ranks: Iterable[int], layout: Mapping[int, str]) -> str:
    """Name ranks with their nodes: ``ranks 4-5 on node03``.

    Args:
        ranks: to name.
        layout: the node of each rank; of one that it does not have none is named.
    """
    by_node = group_by_key((layout.get(rank, ""), rank) for rank in ranks)
    parts = []
    for node, theirs in by_node.items():
        noun = "ranks" if len(theirs) > 1 else "rank"
        where = f" on {node}" if node else ""
        parts.append(f"{noun} {ranges(theirs)}{where}")
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
        # Each item up to a comma outside brackets; the added comma ends the last one.
        for item in re.findall(r"((?:[^\[\],]|\[[^\[\]]*\])*),", host_list + ","):
            names.extend(itertools.islice(_expand_item(item, host_list, where), LONGEST_LIST + 1))
            if len(names) > LONGEST_LIST:
                raise _bad_list(host_list, f"more than {LONGEST_LIST} names", where)
    return names


def _expand_item(item: str, host_list: str, where: str) -> Iterator[str]:
    # rack[1-2]n[03,7] gives rack, 1-2, n, "03,7" and an empty text: what was in brackets is at the
    # odd places.
    pieces = re.split(r"\[([^\]]*)\]", item)
    if not item or any(not re.fullmatch(r"[\w.:*?-]*", text) for text in pieces[::2]):
        raise _bad_list(host_list, f"{item!r}", where)
    choices = [
        _expand_ranges(piece, host_list, where) if index % 2 else [piece]
        for index, piece in enumerate(pieces)
    ]
    # The last bracket changes fastest, as Slurm has it. Lazily: several brackets may multiply to
    # more names than fit in memory, and the caller stops taking them.
    yield from map("".join, itertools.product(*choices))


def _expand_ranges(ranges: str, host_list: str, where: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        # Bounded, as int() raises a ValueError for more than 4,300 digits.
        match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", part)
        if not match:
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
    return ConfigError(
        f"host list {shortened(host_list)!r} has {what}",
        expected="names and ranges like node[01-04,7],login",
        hint="write it as `scontrol show hostlist` does",
        where=where,
        scope=Scope.NODE,
    )


def shortened(text: str) -> str:
    """Cut a text that may be very long, for a message."""
    return text if len(text) <= 80 else text[:77] + "..."
