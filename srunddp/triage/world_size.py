"""Who spoke, and of how many: what lines say of ranks and of the size of their world."""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from srunddp.triage.rank_labels import MOST_RANKS

# The most trusted first: srunddp, torch and MPI, then what scripts print.
_WORLD = [
    re.compile(r"^srunddp: (\d+) ranks? on \d+ nodes?, launcher"),
    re.compile(r"\bWORLD_SIZE\s?[=:]\s?'?(\d+)"),
    re.compile(
        r"(?<!local )(?<!parallel )(?:\b|\bdist_)world[ _-]?size(?: \.{3,80} |\W{1,4}(?:is |of )?)(\d+)", re.IGNORECASE
    ),
    re.compile(
        r"\bMEMBER: \d+/(\d+)|Starting with (\d+) processes|\d+/(\d+) clients joined|"
        r"^srunddp: error: \d+ of (\d+) ranks did not come|\brank \d+ nranks (\d+)"
    ),
    re.compile(
        r"\b[Rr](?:ank|ANK)[ :=#]{0,2}\d+ ?(?:/|of|out of) ?(\d+)\b|"
        r"\b(?:[Pp]rocess|PE|[Tt]ask|[Ww]orker)[ :=#]{0,2}\d+ (?:of|out of) (\d+)\b|"
        r"\b(?:SLURM_NTASKS|SLURM_STEP_NUM_TASKS|OMPI_COMM_WORLD_SIZE)\s?[=:]\s?(\d+)|"
        r"\b[Nn]um(?:ber of |[ _])(?:processes|ranks)\W{1,3}(\d+)|\b[Tt]otal (?:ranks|processes)\W{1,3}(\d+)|"
        r"\([Gg]lobal: \d+, local:? \d+\), total (\d+)"
    ),
]
_OF_RECORD = len(_WORLD)  # failure.json knows victims alone
_WORDS = ("ank", "orld", "RANK", "WORLD", "SLURM_", "ask ", "PE ", "clients", "rocess", "MEMBER", "lobal: ", "orker ")
_SPOKE = re.compile(
    r"\b[Rr](?:ank|ANK)[ :=#]{0,2}(\d{1,7}) ?(?:/|of|out of) ?\d+\b|\bGLOBAL_RANK: (\d+), MEMBER|"
    r"^[Pp]rocess (\d{1,7}) of \d+\b"
)
_AT_WORK = re.compile(r"step|epoch|iter|loss|batch|it/s|\d ?%", re.IGNORECASE)
_MOST_SHAPES = 1000
_ONE_ATTEMPT = 3  # steps within which the last of several processes begins


class LineOrigin(NamedTuple):
    """Where a line stands: ``job`` tells the files of unlike jobs apart, ``rank`` is that of its label or its file, and
    of so many ``steps`` the file told before it."""

    job: object
    rank: int | None
    steps: int


@dataclass
class SingletonRanks:
    """Those who said in the same words that they are alone, in one attempt to run."""

    since: int
    count: int = 0
    ranks: set[int] = field(default_factory=set)

    def add(self, stream: LineOrigin) -> None:
        """One more; what is said after many steps is of another attempt."""
        if stream.steps - self.since > _ONE_ATTEMPT:
            self.since, self.count = stream.steps, 0
        self.count += 1
        self.ranks |= {stream.rank} - {None}


@dataclass
class ObservedRanks:
    """Who spoke, and how many were meant to.

    Attributes:
        seen: ranks with a line, or a file, of their own.
        nodes: of ranks.
        worlds: the largest size of the world that each of the patterns told.
    """

    seen: set[int] = field(default_factory=set)
    nodes: dict[int, str] = field(default_factory=dict)
    worlds: dict[int, int] = field(default_factory=dict)
    _singletons: dict[tuple[object, str], SingletonRanks] = field(default_factory=dict)

    def add_line(self, text: str, rank: int | None, node: str | None, stream: LineOrigin) -> None:
        """A line, and whose it is."""
        if rank is not None and rank < MOST_RANKS:
            self.seen.add(rank)
            if node:
                self.nodes.setdefault(rank, node)
        if any(word in text for word in _WORDS):
            self._read(text, stream)

    def _read(self, text: str, stream: LineOrigin) -> None:
        if (match := _SPOKE.search(text)) and (said := int(match[match.lastindex or 1])) < MOST_RANKS:
            self.seen.add(said)
        for order, pattern in enumerate(_WORLD):
            if match := pattern.search(text):
                size = int(match[match.lastindex or 1])
                self.add_world_size(size, order)
                # Who says so at each step is still one process.
                if size == 1 and len(self._singletons) < _MOST_SHAPES and not _AT_WORK.search(text):
                    key = stream.job, re.sub(r"\d+", "0", text)
                    self._singletons.setdefault(key, SingletonRanks(stream.steps)).add(stream)

    def add_world_size(self, size: int, order: int = _OF_RECORD) -> None:
        """A size of the world, and by which of the patterns it was told."""
        if 0 < size <= MOST_RANKS:
            self.worlds[order] = max(size, self.worlds.get(order, 0))

    @property
    def ones(self) -> int:
        """How many processes said in the same words that they are alone."""
        return max((len(alone.ranks) or alone.count for alone in self._singletons.values()), default=0)

    @property
    def world_size(self) -> int | None:
        """What lines tell, the most trusted kind; or else all who spoke, if they are 0 to N."""
        highest = max(self.seen, default=-1)
        if self.worlds and highest < (stated := self.worlds[min(self.worlds)]):
            return stated
        return highest + 1 if highest >= 1 and len(self.seen) == highest + 1 else None
