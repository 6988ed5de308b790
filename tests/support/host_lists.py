"""Any number of Slurm host lists, and what the real ``scontrol show hostnames`` makes of them, all
in one process.
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
    """Lists of up to ten items: names, and one or two ranges after a name each.

    scontrol knows no suffix after a bracket, and turns the brackets of a name with three around.
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
    """The names of each list."""
    # It repeats each command; to a terminal without end, so that no line is broken.
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
