"""Figures as people read them."""

import datetime
from collections.abc import Iterable

from srunddp.errors import one_line
from srunddp.util.hostlist import fold

UNKNOWN = "?"
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_number(value: float) -> str:
    """A number with about three digits that count: 0.0123, 1.23, 12.3, 123, 12345."""
    size = abs(value)
    if size >= 99.95 or size == 0:
        return f"{value:.0f}"
    return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}" if size >= 0.9995 else f"{value:.3g}"


def number(value: float) -> str:
    """The same to be read alone: ``1.2``, ``64``, ``12,345``."""
    return f"{float(format_number(value)):,.15g}"


def duration(seconds: float | None) -> str:
    """``0.12 s``, ``12.3 s``, ``4 min 5 s``, ``1 h 2 min``, ``2 d 3 h``."""
    if seconds is None:
        return UNKNOWN
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 1:
        return f"{format_number(seconds * 1e3)} ms" if seconds else "0 s"
    if seconds < 99.95:
        return f"{seconds:.3g} s"
    for size, name, small, less in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        whole, rest = divmod(round(seconds / small), size // small)
        if whole:
            return f"{whole} {name} {rest} {less}" if rest else f"{whole} {name}"
    return f"{seconds:.0f} s"


def clock(seconds: float) -> str:
    """``4:05``, ``1:02:03``, since the start."""
    hours, rest = divmod(max(0, int(seconds)), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def size(count: float | None) -> str:
    """Bytes: ``1.23 GiB``."""
    if count is None:
        return UNKNOWN
    for unit in _BYTES:
        if abs(count) < 1000 or unit == _BYTES[-1]:
            break
        count /= 1024
    return f"{count:.0f} B" if unit == "B" else f"{format_number(count)} {unit}"


def rate(count: float | None) -> str:
    """Bytes per second."""
    return UNKNOWN if count is None else f"{size(count)}/s"


def percent(part: float | None) -> str:
    """Of a share of one."""
    if part is None:
        return UNKNOWN
    value = part * 100
    return f"{value:.0f} %" if value >= 10 or value == 0 else f"{value:.1f} %"


def energy(joules: float | None) -> str:
    """``12.3 kJ``, and in kWh from 0.1 kWh on."""
    if joules is None:
        return UNKNOWN
    by, unit = (1, "J") if joules < 1e3 else (1e3, "kJ") if joules < 3.6e5 else (3.6e6, "kWh")
    return f"{format_number(joules / by)} {unit}"


def moment(unix: float) -> str:
    """A point of time, by this machine's time zone."""
    try:
        return datetime.datetime.fromtimestamp(unix).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
    except (OverflowError, OSError, ValueError):
        return UNKNOWN


def count(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def nodes(names: Iterable[str]) -> str:
    """Folded, as Slurm writes them."""
    return one_line(fold(names))
