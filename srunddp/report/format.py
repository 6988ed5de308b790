"""Figures as people read them, alone and in tables."""

import datetime
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from srunddp.errors import one_line
from srunddp.report.summary import median_or_none
from srunddp.util.hostlist import fold

UNKNOWN = "?"
_FEW = 4  # rows of a table that is not folded
_MOST = 8  # rows at most that stand out
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_number(value: float) -> str:
    """Write a number with about three digits that count: 0.0123, 1.23, 12.3, 123, 12345."""
    size = abs(value)
    # The limits are where rounding would add a digit: 99.96 is 100, and not 100.0.
    if size >= 99.95 or size == 0:
        return f"{value:.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 0.9995 else f"{value:.3g}"


def number(value: float | None) -> str:
    """Write a number to be read alone, without zeros at its end: ``1.2``, ``64``, ``12,345``."""
    # Read again and written with "g", 1.20 becomes 1.2.
    return UNKNOWN if value is None else f"{float(format_number(value)):,.15g}"


def duration(seconds: float | None) -> str:
    """Write seconds: ``0.12 s``, ``12.3 s``, ``4 min 5 s``, ``1 h 2 min``, ``2 d 3 h``."""
    if seconds is None:
        return UNKNOWN
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 1:
        return f"{format_number(seconds * 1e3)} ms" if seconds else "0 s"
    if seconds < 99.95:
        return f"{seconds:.3g} s"
    for size, name, small, less in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        # Rounded to the smaller unit first: 3,599.9 s is 1 h, and not 59 min 60 s.
        whole, rest = divmod(round(seconds / small), size // small)
        if whole:
            if rest:
                return f"{whole} {name} {rest} {less}"
            return f"{whole} {name}"
    return f"{seconds:.0f} s"


def clock(seconds: float) -> str:
    """Write seconds since the start: ``4:05``, ``1:02:03``."""
    hours, rest = divmod(max(0, int(seconds)), 3600)
    if hours:
        return f"{hours}:{rest // 60:02}:{rest % 60:02}"
    return f"{rest // 60}:{rest % 60:02}"


def size(count: float | None) -> str:
    """Write a number of bytes: ``1.23 GiB``."""
    if count is None:
        return UNKNOWN
    for unit in _BYTES:
        # Not 1024, so that there are never four digits: 1,010 KiB is 0.986 MiB.
        if abs(count) < 1000 or unit == _BYTES[-1]:
            break
        count /= 1024
    return f"{count:.0f} B" if unit == "B" else f"{format_number(count)} {unit}"


def rate(count: float | None) -> str:
    """Write a number of bytes per second: ``1.23 MiB/s``."""
    return UNKNOWN if count is None else f"{size(count)}/s"


def percent(part: float | None) -> str:
    """Write a share of one: 0.12 is ``12 %``."""
    if part is None:
        return UNKNOWN
    value = part * 100
    if value >= 10 or value == 0:
        return f"{value:.0f} %"
    return f"{value:.1f} %"


def moment(unix: float) -> str:
    """Write Unix time as a date and time of this machine's time zone."""
    try:
        return datetime.datetime.fromtimestamp(unix).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
    # A damaged file may name any time.
    except (OverflowError, OSError, ValueError):
        return UNKNOWN


def count(number: int, noun: str) -> str:
    """Write a number with its noun: ``1 rank``, ``2 ranks``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def nodes(names: Iterable[str]) -> str:
    """Write names of nodes folded, as Slurm does: ``node[01-04]``."""
    return one_line(fold(names))


class Cell(NamedTuple):
    """A cell of a table.

    Attributes:
        words: as it is shown.
        value: the same as a number, where it is a figure.
        apart: by how much the value must differ from the median of the column for its row to stand
            out.
    """

    words: str
    value: float | None = None
    apart: float = math.inf


Row = dict[str, Cell]  # by the name of the column


def cell(value: float | None, shown: Callable[[float], str], apart: float = math.inf) -> Cell:
    """Make the cell of a figure.

    Args:
        value: the figure; None where it is not known.
        shown: writes it.
        apart: see :class:`Cell`.
    """
    return Cell(UNKNOWN if value is None else shown(value), value, apart)


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """Write a table, its header first, without columns of which nothing is known."""
    names = [name for name in rows[0] if any(row[name].words != UNKNOWN for row in rows)]
    return [names, *([row[name].words for name in names] for row in rows)]


def folded(noun: str, rows: Sequence[Row]) -> tuple[str, list[list[str]]]:
    """Fold a table to what differs between its rows, and to few rows.

    Args:
        noun: What a row is about, for the title.
        rows: At least one.

    Returns:
        A title, which names what is the same in all rows; and the rows with their header, empty
        where they have no figures.
    """
    # A single row has nothing in common with others, and keeps its columns.
    same = [name for name in rows[0] if len({row[name].words for row in rows}) == 1 < len(rows)]
    alike = ", ".join(
        f"{name} {rows[0][name].words}" for name in same if rows[0][name].words != UNKNOWN
    )
    other = [{name: row[name] for name in row if name not in same} for row in _outliers(rows)]
    figures = any(row[name].value is not None for row in rows for name in other[0])
    return f"{count(len(rows), noun)}{f', each: {alike}' if alike else ''}", cells(
        other
    ) if figures else []


def _outliers(rows: Sequence[Row]) -> Sequence[Row]:
    """Of many rows those that stand out, and one for all others, with the least and the most of
    each figure.
    """
    if len(rows) <= _FEW:
        return rows
    usual = {name: median_or_none([row[name].value for row in rows]) or 0.0 for name in rows[0]}

    def distance(row: Row) -> float:
        known = (
            (name, each.value, each.apart) for name, each in row.items() if each.value is not None
        )
        return max((abs(value - usual[name]) / apart for name, value, apart in known), default=0.0)

    by_distance = sorted(rows, key=distance, reverse=True)
    apart = [row for row in by_distance[:_MOST] if distance(row) > 1]
    others = by_distance[len(apart) :]
    alike = {name: _span([row[name] for row in others]) for name in rows[0]}
    return [
        *apart,
        alike
        | {next(iter(alike)): Cell(f"{len(others)} others" if apart else f"all {len(others)}")},
    ]


def _span(found: Sequence[Cell]) -> Cell:
    """``90–92 %``: from the least to the most; what is no figure is folded as names of nodes
    are.
    """
    known = [each for each in found if each.value is not None]
    if not known:
        return Cell(nodes(each.words for each in found))
    least = min(known, key=lambda each: each.value or 0.0)
    most = max(known, key=lambda each: each.value or 0.0)
    if least.words == most.words:
        return least
    # "90 %" and "92 %" become "90–92 %". A duration such as "4 min 5 s" has more words, and both
    # ends are written whole.
    (figure, *unit) = least.words.split()
    (_, *other) = most.words.split()
    if unit == other and len(unit) < 2:
        return least._replace(words=f"{figure}–{most.words}")
    return least._replace(words=f"{least.words} to {most.words}")
