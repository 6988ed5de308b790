"""Makes up any number of Slurm host lists, and expands them by the real ``scontrol show
hostnames``, all in one process of scontrol.
"""

from __future__ import annotations

import random
import string
import subprocess
from collections.abc import Iterator, Mapping

_PROMPT = "scontrol: "
_FIRST = string.ascii_letters
_INNER = string.ascii_letters + string.digits + "-._"
_LAST = string.ascii_letters + "-._"


def host_lists(draw: random.Random, number: int) -> Iterator[str]:
    """Yield lists of up to ten items: plain names, and names with brackets once or twice.

    No item ends with a suffix after a bracket, because scontrol does not know one. No item has
    three brackets, because scontrol reverses the brackets of such an item.
    """
    for _ in range(number):
        yield ",".join(_item(draw) for _ in range(draw.choice((1, 1, 2, 3, 10))))


def _item(draw: random.Random) -> str:
    if draw.random() < 0.3:
        return _name(draw, _INNER)
    return "".join(
        _name(draw, draw.choice((_LAST, _INNER))) + _ranges(draw)
        for _ in range(draw.choice((1, 1, 1, 2)))
    )


def _name(draw: random.Random, last: str) -> str:
    inner = "".join(draw.choices(_INNER, k=draw.randrange(7)))
    return draw.choice(_FIRST) + inner + draw.choice(last)


def _ranges(draw: random.Random) -> str:
    return f"[{','.join(_range(draw) for _ in range(draw.choice((1, 1, 2, 4))))}]"


def _range(draw: random.Random) -> str:
    low = draw.choice(
        (
            draw.randrange(12),
            draw.randrange(90, 110),
            draw.randrange(100_000),
            draw.randrange(10**9),
        )
    )
    high = low + draw.randrange(13)
    width = draw.randrange(1, 7)
    if draw.random() < 0.4:
        return f"{low:0{width}d}"
    return f"{low:0{width}d}-{high:0{draw.choice((1, width))}d}"


def by_scontrol(lists: list[str], variables: Mapping[str, str]) -> list[list[str]]:
    """Return the names to which scontrol expands each list."""
    # scontrol repeats each command in its output. The width of the terminal keeps it from breaking
    # long lines.
    variables = {**variables, "TERM": "vt100", "COLUMNS": "100000", "LINES": "24"}
    asked = "".join(f"show hostnames {text}\n" for text in lists)
    done = subprocess.run(
        ["scontrol"],
        input=asked,
        env=variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    answers = [answer.split("\n") for answer in done.stdout.split(_PROMPT)[1:-1]]
    assert [answer[0] for answer in answers] == [f"show hostnames {text}" for text in lists]
    return [[name for name in answer[1:] if name] for answer in answers]
