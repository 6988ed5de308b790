"""Ranks that do not come: how they are named, and said again and again."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from srunddp.util.hostlist import grouped, ranges

SAY_EVERY = 30.0


def named(ranks: Iterable[int], layout: Mapping[int, str]) -> str:
    """``ranks 4-5 on node03`` for ranks 4 and 5, folded; without nodes where the layout is not known."""
    parts = []
    for node, theirs in grouped((layout.get(rank, ""), rank) for rank in ranks).items():
        where = f" on {node}" if node else ""
        parts.append(f"rank{'s' if len(theirs) > 1 else ''} {ranges(theirs)}{where}")
    return ", ".join(parts)


@contextlib.contextmanager
def saying(say: Callable[[str], None], line: str, every: float) -> Iterator[None]:
    """Say the line again and again while something blocks; ``{}`` in it is the time so far in seconds."""
    over, began = threading.Event(), time.monotonic()

    def repeat() -> None:
        while not over.wait(every):
            say(line.format(f"{time.monotonic() - began:.0f}"))

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
