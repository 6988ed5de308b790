"""Defines the result of ``srunddp triage``."""

from dataclasses import dataclass, field
from enum import StrEnum

from srunddp.triage.event import Event


class Certainty(StrEnum):
    """How reliable a diagnosis is.

    Attributes:
        CERTAIN: The source of the first failure can be certain, and nothing contradicts it.
        LIKELY: A cause is found, but something else may have failed first.
        UNKNOWN: The logs do not show the cause.
    """

    CERTAIN = "certain"
    LIKELY = "likely"
    UNKNOWN = "unknown"


@dataclass
class Diagnosis:
    """The diagnosis of a job: what failed first.

    Attributes:
        cause: An id from signatures.yaml; None if nothing failed.
        certainty: How reliable the cause is.
        first: The event that shows the failure; None if there is none.
        own: The event by which srunddp itself has reported the failure; None if there is none.
        followed: Events that the failure has caused.
        set_aside: Events that are no failure by themselves, according to a rule.
        rank: The rank that failed first; None if unknown.
        node: The node of the failed rank, or the node that failed; None if unknown.
        world_size: How many ranks there should be; None if unknown.
        seen: The ranks with output.
        silent: The expected ranks without output.
        why: The reason in words; empty if the line of ``first`` says enough.
        frame: The last place in the script's code, for example ``train.py:15 in load``; empty if
            no traceback shows it.
        victim: Whether ``first`` only shows that a peer noticed the end of the failed rank.
    """

    cause: str | None
    certainty: Certainty
    first: Event | None = None
    own: Event | None = None
    followed: list[Event] = field(default_factory=list)
    set_aside: list[Event] = field(default_factory=list)
    rank: int | None = None
    node: str | None = None
    world_size: int | None = None
    seen: list[int] = field(default_factory=list)
    silent: list[int] = field(default_factory=list)
    why: str = ""
    frame: str = ""
    victim: bool = False
