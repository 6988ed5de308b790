"""The environments of other processes, as ``env`` or ``env -0`` prints them, or ``/proc/PID/environ`` has them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from srunddp.errors import ConfigError
from srunddp.util.hostlist import group_by_key

# A shell's exported functions have odd names; all else that does not begin so belongs to the value before it.
_BEGINS = re.compile(r"[A-Za-z_][\w.%()-]*=")
_LABEL = re.compile(r"( *\d+): (.*)")


def read(path: str) -> list[dict[str, str]]:
    """The environments in a file, in its order; each is a rank's where several wrote there.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise _wrong(path, os.strerror(error.errno or 0)) from None
    # As os.environ has what is not UTF-8.
    environments = parse(content.decode(errors="surrogateescape"))
    if not environments:
        raise _wrong(path, "no line with a variable")
    return environments


def _wrong(path: str, found: str) -> ConfigError:
    hint = "srun --label env > FILE"
    return ConfigError(found, expected="what env or env -0 printed", hint=hint, where=f"--env: {path}")


def parse(text: str) -> list[dict[str, str]]:
    """The environments in a text.

    A variable that comes again begins the next one. Where each line has its rank before it, as after
    ``srun --label env``, lines may come in any order.
    """
    if "\0" in text:
        return _split(text.split("\0"))
    lines = text.removesuffix("\n").split("\n")
    labelled = [_LABEL.fullmatch(line) for line in lines]
    if all(labelled):
        by_label = group_by_key((int(found[1]), found[2]) for found in labelled if found)
        return [environment for _, own in sorted(by_label.items()) for environment in _split(_joined(own))]
    return _split(_joined(lines))


def _joined(lines: Iterable[str]) -> list[str]:
    """Lines without a name are a value's further ones."""
    items: list[str] = []
    for line in lines:
        if items and not _BEGINS.match(line):
            items[-1] += f"\n{line}"
        else:
            items.append(line)
    return items


def _split(items: Iterable[str]) -> list[dict[str, str]]:
    environments: list[dict[str, str]] = []
    for item in items:
        name, equals, value = item.partition("=")
        if not equals:
            continue
        if not environments or name in environments[-1]:
            environments.append({})
        environments[-1][name] = value
    return environments
