"""Who spoke, and of how many: what lines say of ranks and of the size of their world."""

import re
from dataclasses import dataclass, field

from srunddp.triage.rank_labels import MOST_RANKS

# The most trusted first: srunddp, torch and MPI, then what scripts print.
_WORLD = [
    re.compile(r"^srunddp: (\d+) ranks? on \d+ nodes?, launcher|\bWORLD_SIZE\s?[=:]\s?'?(\d+)"),
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


@dataclass
class ObservedRanks:
    """Who spoke, and how many were meant to.

    Attributes:
        seen: ranks with a line, or a file, of their own; nodes: of ranks.
        worlds: the largest size of the world that each of the patterns told.
        ones: how many processes said in the same words that they are alone.
    """

    seen: set[int] = field(default_factory=set)
    nodes: dict[int, str] = field(default_factory=dict)
    worlds: dict[int, int] = field(default_factory=dict)
    ones: int = 0
    _alone: dict[tuple[object, str], tuple[int, list[int | None]]] = field(default_factory=dict)

    def add_rank(self, rank: int | None, node: str | None = None) -> None:
        """A rank that has a line of its own."""
        if rank is not None and rank < MOST_RANKS:
            self.seen.add(rank)
            if node:
                self.nodes.setdefault(rank, node)

    def add_line(self, text: str, job: object, rank: int | None, steps: int) -> None:
        """What a line says of ranks.

        Args:
            job: tells the files of unlike jobs apart; rank: of its label or its file; steps: told before it.
        """
        if not any(word in text for word in _WORDS):
            return
        if match := _SPOKE.search(text):
            self.add_rank(int(match[match.lastindex or 1]))
        for order, pattern in enumerate(_WORLD):
            if match := pattern.search(text):
                size = int(match[match.lastindex or 1])
                self.add_world_size(size, order)
                if size == 1 and not _AT_WORK.search(text):  # who says so at each step is still one process
                    self._add_alone((job, re.sub(r"\d+", "0", text)), rank, steps)

    def _add_alone(self, said: tuple[object, str], rank: int | None, steps: int) -> None:
        """One more that is alone; what is said after many steps is of another attempt."""
        if said in self._alone or len(self._alone) < _MOST_SHAPES:
            since, ranks = self._alone.get(said, (steps, []))
            self._alone[said] = since, ranks = (since, ranks) if steps - since <= _ONE_ATTEMPT else (steps, [])
            ranks.append(rank)
            self.ones = max(self.ones, len(set(ranks) - {None}) or len(ranks))

    def add_world_size(self, size: int, order: int = _OF_RECORD) -> None:
        """A size of the world, and by which of the patterns it was told."""
        if 0 < size <= MOST_RANKS:
            self.worlds[order] = max(size, self.worlds.get(order, 0))

    @property
    def world_size(self) -> int | None:
        """What lines tell, the most trusted kind; or else all who spoke, if they are 0 to N."""
        highest = max(self.seen, default=-1)
        if self.worlds and highest < (stated := self.worlds[min(self.worlds)]):
            return stated
        return highest + 1 if highest >= 1 and len(self.seen) == highest + 1 else None
