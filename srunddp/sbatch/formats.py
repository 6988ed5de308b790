"""Slurm's ways to write times, memory and the like."""

from __future__ import annotations

import math
import re

_NAME = r"[A-Za-z_][\w.-]*"
_TYPE = r"\w[\w.-]*"  # such as a100, 2080ti, 3090 or 1g.5gb
_GPUS = rf"(?:{_TYPE}:)?[1-9]\d{{0,3}}"
_GRES = rf"{_NAME}(?::{_TYPE})?(?::\d+[KMGTPkmgtp]?)?"
_AFTER = r"(?:after|afterany|afterburstbuffer|aftercorr|afternotok|afterok|expand)(?::\d+(?:_(?:\d+|\*))?(?:\+\d+)?)+"
_EACH = rf"(?:{_AFTER}|singleton)"
_RANGE = r"\d+(?:-\d+(?::[1-9]\d*)?)?"

# By key: what it looks like, in a pattern and in words, and an example.
FORMATS: dict[str, tuple[str, str, str]] = {
    "time": (
        r"\d+(?::\d+){0,2}|\d+-\d+(?::\d+){0,2}|UNLIMITED|INFINITE|unlimited|infinite",
        "minutes, M:S, H:M:S, D-H, D-H:M, D-H:M:S or UNLIMITED",
        "04:00:00 for four hours",
    ),
    "mem": (r"\d+[KMGTkmgt]?[Bb]?", "a number with K, M, G or T", "64G"),
    "gpus_per_node": (rf"{_GPUS}(?:,{_GPUS})*", "a number, or TYPE:NUMBER", "4 or a100:4"),
    "gres": (rf"{_GRES}(?:,{_GRES})*", "NAME:NUMBER or NAME:TYPE:NUMBER", "gpu:4"),
    "array": (rf"{_RANGE}(?:,{_RANGE})*(?:%[1-9]\d*)?", "numbers and ranges, and at most how many at once", "0-15%4"),
    "dependency": (rf"{_EACH}(?:,{_EACH})*|{_EACH}(?:\?{_EACH})*", "TYPE:JOB or singleton", "afterok:4711"),
    "signal": (r"auto|none|(?:[RB]{1,2}:)?[A-Z0-9+-]+(?:@\d{1,5})?", "SIGNAL@SECONDS, auto or none", "USR2@120"),
    "mpi": (r"(?:\w[\w/]*)?", "a plug-in that srun --mpi=list shows", "pmi2"),
}

_MEGABYTES = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}


def fits(key: str, text: str) -> bool:
    """Whether it looks as Slurm takes it."""
    return re.fullmatch(FORMATS[key][0], text, re.ASCII) is not None


def seconds(time: str) -> float:
    """Of a time limit as the user or Slurm writes it; infinite for none."""
    days, dash, rest = time.rpartition("-")
    if not re.fullmatch(r"[\d:]+", rest):
        return math.inf
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, left = [*parts, 0, 0][:3]
        return int(days) * 86400 + hours * 3600 + minutes * 60 + left
    if len(parts) == 3:
        return parts[0] * 3600 + parts[1] * 60 + parts[2]
    return parts[0] * 60 + (parts[1] if len(parts) == 2 else 0)


def megabytes(mem: str) -> float:
    """Of a size as Slurm writes it."""
    number, unit = re.fullmatch(r"(\d+)([KMGT]?)B?", mem.upper()).groups()  # type: ignore[union-attr]
    return int(number) * _MEGABYTES[unit or "M"]
