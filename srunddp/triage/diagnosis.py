"""What ``srunddp triage`` says of a run."""

from dataclasses import dataclass, field
from enum import StrEnum

from srunddp.triage.event import Event


class Certainty(StrEnum):
    """How far a diagnosis can be relied on."""

    CERTAIN = "certain"
    LIKELY = "likely"
    UNKNOWN = "unknown"


@dataclass
class Diagnosis:
    """What failed first.

    Attributes:
        cause: an id of the table; None where nothing failed.
        certainty: of the cause.
        first: what it was told by, if anything.
        followed: what came of it.
        set_aside: what a rule says that it is no failure by itself.
        rank: who failed first; None where nothing tells.
        node: where that rank ran.
        world_size: how many ranks there should be, as far as lines tell.
        seen: ranks that spoke.
        silent: ranks that were expected and did not.
        why: in words, where no line tells it.
        victim: ``first`` only tells of somebody else's end.
    """

    cause: str | None
    certainty: Certainty
    first: Event | None = None
    followed: list[Event] = field(default_factory=list)
    set_aside: list[Event] = field(default_factory=list)
    rank: int | None = None
    node: str | None = None
    world_size: int | None = None
    seen: list[int] = field(default_factory=list)
    silent: list[int] = field(default_factory=list)
    why: str = ""
    victim: bool = False
