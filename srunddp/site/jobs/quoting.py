"""Texts as the shell, an ``#SBATCH`` line, and Slurm's file name patterns read them: as themselves."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable


def word(text: str) -> str:
    """For the shell."""
    return shlex.quote(text)


def directive(option: str, value: object = None) -> str:
    """A line that sbatch reads: its parser knows quotes, ``#``, and a backslash before any letter."""
    if value is None:
        return f"#SBATCH --{option}"
    text = str(value)
    if not re.fullmatch(r"[\w%+,./:=@*\[\]-]*", text, re.ASCII):
        text = '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'
    return f"#SBATCH --{option}={text}"


def pattern(path: str) -> str:
    """A path without a backslash, for options in which Slurm replaces ``%j`` and the like."""
    return path.replace("%", "%%")


def continued(lines: Iterable[str]) -> list[str]:
    """One command on several lines."""
    first, *more = lines
    parts = [first, *(f"  {line}" for line in more)]
    return [*(f"{part} \\" for part in parts[:-1]), parts[-1]]
