"""The times that lines tell, in seconds since the beginning of a year that many of them leave out."""

from __future__ import annotations

import re
from datetime import datetime

_ISO = re.compile(r"\b(\d{4})[-/](\d\d)[-/](\d\d)[T_ ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
_GLOG = re.compile(r"\b[IWEFD](\d\d?)(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{1,9})")
_SYSLOG = re.compile(r"\b(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) +(\d{1,2}) (\d\d):(\d\d):(\d\d)\b")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_WITHIN = 160  # characters from the line's beginning


def time_of(text: str) -> float | None:
    """When the line was written, as far as it says so; clocks of nodes and their zones are taken to agree."""
    head = text[:_WITHIN]
    if ":" not in head:
        return None
    if match := _ISO.search(head):
        _, month, day, *clock = match.groups()
    elif match := _GLOG.search(head):
        month, day, *clock = match.groups()
    elif match := _SYSLOG.search(head):
        month, (day, *clock) = str(_MONTHS.index(match[1]) + 1), [*match.groups()[1:], None]
    else:
        return None
    try:
        then = datetime(2024, int(month), int(day), int(clock[0]), int(clock[1]), int(clock[2]))
    except ValueError:
        return None
    return (then - datetime(2024, 1, 1)).total_seconds() + float(f"0.{clock[3] or 0}")
