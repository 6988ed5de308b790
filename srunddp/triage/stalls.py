"""Finds the rank that the others wait for, by the stacks that srunddp prints on SIGURG."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from srunddp.triage.diagnosis import Certainty, Diagnosis
from srunddp.triage.event import MANY_LINES, Event
from srunddp.triage.signatures import Kind, says
from srunddp.util.hostlist import ranges
from srunddp.util.python_stack import (
    Stack,
    dump_of_printed,
    find_blocking_rank,
    groups,
    is_waiting,
    main_stack,
    top_frame,
)

_HEADING = "Stack (most recent call last):"


@dataclass
class PrintedStack:
    """The stack that a rank printed on SIGURG.

    Attributes:
        event: The event of the line that names the rank and the place where it is.
        lines: The lines with the stack's frames, the outermost first; empty if the rank gave none.
    """

    event: Event
    lines: list[str] = field(default_factory=list)


class StackReader:
    """Reads the stacks in one stream of lines."""

    def __init__(self) -> None:
        self._open: PrintedStack | None = None

    def feed(self, file: int, number: int, text: str) -> PrintedStack | None:
        """Read a line.

        Args:
            file: The position of its log in the list of logs.
            number: The number of the line.
            text: The line without its label.

        Returns:
            The stack that the line begins or belongs to; None if the line is part of no stack.
        """
        match = text.startswith("srunddp: rank ") and says("own-stack", text)
        if match:
            event = Event("rank-stalled", Kind.HINT, False, file, number, text)
            event.rank = int(match[1])
            event.node = match[2]
            event.ours = True
            self._open = PrintedStack(event)
        # Ignore blanks at the beginning: where a label is removed, one of them may be missing.
        elif self._open and text.lstrip().startswith('File "'):
            self._open.lines.append(text)
        elif text != _HEADING:
            self._open = None
        return self._open


def stalled(stacks: Mapping[int, PrintedStack], world_size: int) -> Diagnosis | None:
    """Make the diagnosis of a stall by the stacks of the ranks. It names the rank that the others
    wait for, or the places at which the ranks wait if they all wait, but not at the same place.

    Args:
        stacks: The last stack of each rank, by the rank.
        world_size: The number of ranks; 0 if unknown.

    Returns:
        None if the stacks show no stall: there are none, the run went on afterwards, all ranks are
            at the same place, or several ranks have given no stack.
    """
    if not stacks or any(_went_on(each.event) for each in stacks.values()):
        return None
    texts = {rank: "" for rank in range(world_size)}
    texts |= {rank: dump_of_printed(each.lines) for rank, each in stacks.items()}
    places = {rank: main_stack(text) for rank, text in texts.items()}
    rank = find_blocking_rank(texts, {})
    if is_waiting(places[rank]) and not _is_the_fewest(rank, texts):
        return _apart(texts)
    if not _stands_out(rank, places):
        return None
    at = top_frame(places[rank])
    others = [each for each, place in places.items() if place and top_frame(place) != at]
    if not others:
        return None
    where = ", ".join(sorted({top_frame(places[each]) for each in others}))
    if len(others) == 1:
        why = f"rank {others[0]} is in {where}"
    else:
        why = f"ranks {ranges(others)} are in {where}"
    # The rank may have given no stack, and so has no line: then the line of another rank is shown.
    told = stacks[rank] if rank in stacks else stacks[others[0]]
    found = Diagnosis("rank-stalled", Certainty.LIKELY, told.event, rank=rank, why=why)
    found.victim = rank not in stacks
    if rank in stacks:
        found.node = told.event.node
    return found


def _is_the_fewest(rank: int, texts: Mapping[int, str]) -> bool:
    """Tell whether fewer ranks are at the place of a rank than at any other place.

    Args:
        rank: The rank.
        texts: The stack of each rank as text, by the rank; empty for a rank that gave none.
    """
    sizes = {where: len(ranks) for where, ranks in groups(texts).items()}
    own = sizes.pop(top_frame(main_stack(texts[rank])))
    return bool(sizes) and own < min(sizes.values())


def _apart(texts: Mapping[int, str]) -> Diagnosis | None:
    """Make the diagnosis that all ranks wait, but not at the same place, and that no rank can be
    named.

    Returns:
        None if all ranks are at the same place.
    """
    places = groups(texts)
    if len(places) == 1:
        return None
    where = [
        f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)} in {place}"
        for place, ranks in places.items()
    ]
    why = f"all ranks wait, at different places: {', '.join(where)}"
    return Diagnosis("rank-stalled", Certainty.LIKELY, why=why)


def _went_on(look: Event) -> bool:
    """Tell whether, after a rank printed its stack, any rank made a step or the ranks wrote many
    lines.
    """
    return look.overall > 0 or look.lines >= MANY_LINES


def _stands_out(rank: int, places: Mapping[int, Stack]) -> bool:
    """Tell whether a rank has given a stack, or is the only rank without a stack.

    If several ranks have no stack, perhaps only some of the ranks got SIGURG.
    """
    if places[rank]:
        return True
    return sum(not place for place in places.values()) == 1
