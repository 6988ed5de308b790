"""One thing that a log says of an end."""

from __future__ import annotations

from dataclasses import dataclass

from srunddp.observe.triage.tracebacks import Raised


@dataclass
class Event:
    """One thing that was said of an end.

    Attributes:
        cause: an id of the table; kind: as there; sure: whether it can only mean that.
        file: its place among the logs; number: of the line; text: without label.
        time: of the line, and since: of the last line before it that told one.
        late: reported at the end, whenever it was; generic: an exception, without a sign of its own.
        weak: only warned of, quoted, handled or survived: it can explain another failure, but is none.
        progress: how many further steps the same stream told of afterwards.
    """

    cause: str
    kind: str
    sure: bool
    file: int
    number: int
    text: str
    rank: int | None = None
    node: str | None = None
    time: float | None = None
    since: float | None = None
    late: bool = False
    generic: bool = False
    raised: Raised | None = None
    ours: bool = False
    weak: bool = False
    progress: int = 0
