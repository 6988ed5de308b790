"""The environments of other processes, as ``env`` or ``env -0`` prints them, or ``/proc/PID/environ`` has them."""

import re
from collections.abc import Iterable
from pathlib import Path

from srunddp.errors import ConfigError, file_errors
from srunddp.util.hostlist import group_by_key

# A shell's exported functions have odd names; all else that does not begin so belongs to the value before it.
_BEGINS = re.compile(r"[A-Za-z_][\w.%()-]*=")
_LABEL = re.compile(r"( *\d+): (.*)")


def read(path: str) -> list[dict[str, str]]:
    """The environments in a file, in its order; each is a rank's where several wrote there.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    expected, hint = "what env or env -0 printed", "srun --label env > FILE"
    with file_errors(f"--env: {path}", expected=expected, hint=hint):
        content = Path(path).read_bytes()
    # As os.environ has what is not UTF-8.
    if environments := parse(content.decode(errors="surrogateescape")):
        return environments
    raise ConfigError(f"--env: {path}: no line with a variable", expected=expected, hint=hint)


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
