"""Formats figures for people, alone and in tables."""

import datetime
import math
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from srunddp.errors import one_line
from srunddp.report.summary import median_or_none
from srunddp.util.hostlist import fold

UNKNOWN = "?"
_FEW = 4  # a table with at most this many rows is not folded
_MOST = 8  # the most outliers that a folded table shows
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_number(value: float) -> str:
    """Write a number with about three significant digits: 0.0123, 1.23, 12.3, 123, 12345."""
    size = abs(value)
    # The limits are where rounding would add a digit: 99.96 must give 100, not 100.0.
    if size >= 99.95 or size == 0:
        return f"{value:.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 0.9995 else f"{value:.3g}"


def number(value: float | None) -> str:
    """Write a number without trailing zeros and with separators: ``1.2``, ``64``, ``12,345``."""
    # Parsing the text and writing it with "g" turns 1.20 into 1.2.
    return UNKNOWN if value is None else f"{float(format_number(value)):,.15g}"


def duration(seconds: float | None) -> str:
    """Write a duration with units: ``12.3 s``, ``4 min 5 s``, ``1 h 2 min``, ``2 d 3 h``; None is
    ``?``.
    """
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
        # Round to the smaller unit first: 3,599.9 s must give 1 h, not 59 min 60 s.
        whole, rest = divmod(round(seconds / small), size // small)
        if whole:
            if rest:
                return f"{whole} {name} {rest} {less}"
            return f"{whole} {name}"
    return f"{seconds:.0f} s"


def clock(seconds: float) -> str:
    """Write seconds since the start as a clock does: ``4:05``, ``1:02:03``."""
    hours, rest = divmod(max(0, int(seconds)), 3600)
    if hours:
        return f"{hours}:{rest // 60:02}:{rest % 60:02}"
    return f"{rest // 60}:{rest % 60:02}"


def size(count: float | None) -> str:
    """Write a number of bytes with a binary unit: ``1.23 GiB``; ``?`` for None."""
    if count is None:
        return UNKNOWN
    for unit in _BYTES:
        # The limit is 1000 rather than 1024, so there are never four digits: 1,010 KiB gives 0.986
        # MiB.
        if abs(count) < 1000 or unit == _BYTES[-1]:
            break
        count /= 1024
    return f"{count:.0f} B" if unit == "B" else f"{format_number(count)} {unit}"


def rate(count: float | None) -> str:
    """Write bytes per second with a binary unit: ``1.23 MiB/s``; ``?`` for None."""
    return UNKNOWN if count is None else f"{size(count)}/s"


def percent(part: float | None) -> str:
    """Write a fraction as a percentage: 0.12 gives ``12 %``; ``?`` for None."""
    if part is None:
        return UNKNOWN
    value = part * 100
    if value >= 10 or value == 0:
        return f"{value:.0f} %"
    return f"{value:.1f} %"


def moment(unix: float) -> str:
    """Write a Unix time as date and time in this machine's time zone; ``?`` if out of range."""
    try:
        return datetime.datetime.fromtimestamp(unix).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
    # Catch these errors, because a damaged file may contain any number as its time.
    except (OverflowError, OSError, ValueError):
        return UNKNOWN


def count(number: int, noun: str) -> str:
    """Write a number with its noun, in the plural unless it is 1: ``1 rank``, ``2 ranks``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def nodes(names: Iterable[str]) -> str:
    """Write node names in Slurm's short notation, safe for a terminal: ``node[01-04]``."""
    return one_line(fold(names))


def exclude(names: Iterable[str]) -> str:
    """Write the option that excludes nodes, as one word for a shell.

    The names come from the files of a run, perhaps another user's, so unusual ones are quoted.
    Slurm's notation for node names needs no quotes.
    """
    word = f"--exclude={nodes(names)}"
    return word if re.fullmatch(r"[\w.,=\[\]-]+", word, re.ASCII) else shlex.quote(word)


class Cell(NamedTuple):
    """A cell of a table.

    Attributes:
        words: The text that is shown.
        value: The figure as a number; None if the cell is not a figure.
        apart: If the value differs from the column's median by more than this, the row is an
            outlier.
    """

    words: str
    value: float | None = None
    apart: float = math.inf


Row = dict[str, Cell]  # by the name of the column


def cell(value: float | None, shown: Callable[[float], str], apart: float = math.inf) -> Cell:
    """Make a cell from a figure.

    Args:
        value: The figure; None if unknown, which is shown as ``?``.
        shown: Converts the figure to text.
        apart: The difference from the column's median above which the row is an outlier.
    """
    return Cell(UNKNOWN if value is None else shown(value), value, apart)


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """Convert a table to texts, header first; columns in which nothing is known are left out."""
    names = [name for name in rows[0] if any(row[name].words != UNKNOWN for row in rows)]
    return [names, *([row[name].words for name in names] for row in rows)]


def folded(noun: str, rows: Sequence[Row]) -> tuple[str, list[list[str]]]:
    """Shorten a table: leave out the columns in which all rows are equal, and if there are more
    than four rows, show one row for all that are not outliers.

    Args:
        noun: What a row is about, for the title, such as ``rank``.
        rows: The rows; at least one.

    Returns:
        A title with the values that all rows share, and the remaining table with its header. The
        table is empty if it has no figures.
    """
    # A single row keeps all its columns, because there is no other row to share them with.
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
    """Return the rows that are outliers, at most eight, and one row for all others, which has the
    range of each figure. At most four rows are returned as they are.
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
    """Combine the cells of a column: figures to a range such as ``90–92 %``, names to a folded
    list.
    """
    known = [each for each in found if each.value is not None]
    if not known:
        return Cell(nodes(each.words for each in found))
    least = min(known, key=lambda each: each.value or 0.0)
    most = max(known, key=lambda each: each.value or 0.0)
    if least.words == most.words:
        return least
    # "90 %" and "92 %" become "90–92 %". A duration such as "4 min 5 s" has more than one unit, so
    # the range is written as "4 min 5 s to 6 min".
    (figure, *unit) = least.words.split()
    (_, *other) = most.words.split()
    if unit == other and len(unit) < 2:
        return least._replace(words=f"{figure}–{most.words}")
    return least._replace(words=f"{least.words} to {most.words}")
