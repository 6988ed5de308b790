"""Whose a line is: the labels that launchers put before lines, file names, and what lines say of
rank and world.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from srunddp.triage.signatures import says, table

MOST_RANKS = 1_000_000

# Labels that cannot be anything else.
# "[1,3]<stderr>:" of Open MPI, in version 5 "[prterun-node01-77@1,3]<stdout>:"; "[rank3]:" of
# torch; "[default3]:" of torchrun.
_PLAIN = re.compile(
    r"\[(?:[\w.@-]+@)?\d+,(?P<mpi>\d{1,7})\](?:<\w+>:?|:)\s?|"
    r"\[rank(?P<torch>\d{1,7})\]:?\s?|"
    r"\[(?:default|[a-z]\w*?_?)(?P<elastic>\d{1,5})\]:\s?"
)
# Labels that may be something else: they count where many lines of a file have them.
_DOUBTFUL = {
    # srun --label
    "label": re.compile(r" {0,6}(?P<rank>\d{1,7}): "),
    # mpiexec -prepend-rank
    "hydra": re.compile(r"\[(?P<rank>\d{1,7})\] "),
    # srunddp --prefix: "node02:3: ", and not "train.py:12: ".
    "prefix": re.compile(
        r"(?P<node>[A-Za-z][\w.-]*)(?<!\.py)(?<!\.cpp)(?<!\.sh):(?P<rank>\d{1,7}): "
    ),
    # pdsh: "node02: ". Many other words stand before a colon, so that four lines of five need it.
    "host": re.compile(r"(?!srun|slurmstepd|line|epoch)(?P<node>[A-Za-z][\w.-]*\d[\w.-]*): "),
}
# What slurmstepd puts before its own lines since Slurm 25.05, in each LogTimeFormat but clock and
# thread_id; before that, "slurmstepd-node01: ".
_STEPD = re.compile(
    r"\[(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,6})?(?:Z|[+-]\d\d:?\d\d)?"
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d)\] (?=(?:error|fatal): )"
)
# Of progress, which ends no line.
_BEHIND_A_BAR = re.compile(r"\[rank\d+\]: Traceback \(most recent")
_IN_NAME = re.compile(r"(?:rank|task|proc|process)[._-]?(\d{1,7})(?!\d)", re.IGNORECASE)
_FOLDER = re.compile(r"(?:attempt_\d+/|^|/)(\d{1,7})/(?:stdout|stderr|output)(?:\.\w+)?$")
_AGENT = re.compile(r".*(?=attempt_\d+/\d)")
_NO_RANK = re.compile(
    r"(?:node|host|gpu|epoch|part|run|attempt|restart|job|#_)[._-]?$", re.IGNORECASE
)
_NODE_IN_NAME = re.compile(r"^([A-Za-z][\w-]*?\d*)\.rank\d+\.log$")

_OF_RANKS = ("rank", "world", "ntasks", "clients", "process", "task ", "worker ")
_MOST_SHAPES = 1000
_ONE_ATTEMPT = 3  # steps within which the last of several processes begins


@dataclass
class RankLabels:
    """Which of the doubtful labels a file has, from its first lines."""

    kind: str = ""
    local: bool = False  # torchrun's, which are of each node, were there

    @classmethod
    def sniff(cls, lines: Sequence[str]) -> RankLabels:
        for kind, pattern in _DOUBTFUL.items():
            found = [
                match[match.lastindex or 0] for line in lines if (match := pattern.match(line))
            ]
            many = len(found) >= 3 and len(found) * 5 >= len(lines) * (1 if kind != "host" else 4)
            # A numbered listing counts on; ranks come again.
            if many and (len(found) <= 12 or len(set(found)) * 2 <= len(found)):
                return cls(kind)
        return cls()

    def strip(self, text: str) -> tuple[str, int | None, str | None]:
        """Take the labels off a line.

        Returns:
            The line without them; its rank and its node, each None where no label tells it.
        """
        rank: int | None = None
        node: str | None = None
        if self.kind and (match := _DOUBTFUL[self.kind].match(text)):
            found = match.groupdict()
            rank = int(found["rank"]) if "rank" in found else None
            node = found.get("node")
            text = text[match.end() :]
        if "Traceback (" in text and (header := _BEHIND_A_BAR.search(text)):
            text = text[header.start() :]
        # torchrun's label, of a local rank, may stand before torch's own, of the rank: the latter
        # counts.
        while text.startswith("[") and (match := _PLAIN.match(text)):
            said = match["mpi"] or match["torch"] or match["elastic"]
            if rank is None or match["torch"]:
                rank = int(said)
            self.local |= bool(match["elastic"])
            text = text[match.end() :]
        return named_stepd(text), rank, node


def named_stepd(text: str) -> str:
    """The line with slurmstepd's name before it, as every version of Slurm had it until 25.05;
    another one as it is.
    """
    if not text.startswith("["):
        return text
    match = _STEPD.match(text)
    if not match:
        return text
    time = match[1].replace(" ", "_")  # which tells the order, and is no part of the message
    return f"slurmstepd[{time}]: {text[match.end() :]}"


def ranks_of_names(names: Sequence[str]) -> dict[str, int]:
    """Find the ranks that file names tell.

    They do so as ``node01.rank3.log``, torchrun's ``attempt_0/3/``, or ``out.0`` beside ``out.1``.
    """
    numbers = {name: _IN_NAME.findall(name) or _FOLDER.findall(name) for name in names}
    found = {name: int(each[-1]) for name, each in numbers.items() if each}
    # The folder of each of torchrun's agents, one for each node, before attempt_0/3/.
    agents = {match.group() for name in names if (match := _AGENT.match(name))}
    if len(agents) > 1:  # several agents' local ranks
        return {name: rank for name, rank in found.items() if not _AGENT.match(name)}
    return found | _of_families([name for name in names if name not in found])


def _of_families(names: Sequence[str]) -> dict[str, int]:
    """Files that differ by one number alone, which counts from 0."""
    families: dict[tuple[str, str], dict[str, int]] = {}
    for name in names:
        for match in re.finditer(r"(?<!\d)(?:0|[1-9]\d{0,6})(?!\d)", PurePath(name).name):
            before = PurePath(name).name[: match.start()]
            after = PurePath(name).name[match.end() :]
            # t-node01-0.out and t-node02-2.out are one family: other numbers before may differ.
            families.setdefault((re.sub(r"\d+", "#", before), after), {})[name] = int(match[0])
    found: dict[str, int] = {}
    for (before, _), members in families.items():
        counts = sorted(set(members.values()))
        # From 0, each once, and with fewer gaps than members: some ranks may have no file, but most
        # have.
        whole = (
            len(members) > 1
            and len(counts) == len(members)
            and counts[0] == 0
            and counts[-1] < 2 * len(counts)
        )
        if whole and not _NO_RANK.search(before):
            found.update(members)
    return found


def node_of_name(name: str) -> str | None:
    """Read the node in a file name of ``--log-dir``; None where the name has another form."""
    match = _NODE_IN_NAME.match(PurePath(name).name)
    return match[1] if match else None


def stated_rank(text: str) -> int | None:
    """Read the rank that a line says it is of, within its text; None where it says none."""
    match = says("stated-rank", text[:300])
    return int(match[match.lastindex or 1]) if match else None


def spread(text: str) -> list[int]:
    """Read the numbers of ``0-3,5`` or ``[0-3,5]``; at most 100,000 of them."""
    numbers: list[int] = []
    for part in text.strip("[]").split(","):
        ends = re.fullmatch(r"\s*(\d{1,7})(?:-(\d{1,7}))?\s*", part)
        if ends and int(ends[2] or ends[1]) - int(ends[1]) < 100_000:
            numbers += range(int(ends[1]), int(ends[2] or ends[1]) + 1)
    return numbers[:100_000]


@dataclass
class ObservedRanks:
    """Who spoke, and how many were meant to.

    Attributes:
        seen: ranks with a line, or a file, of their own.
        nodes: where ranks ran, as far as lines tell.
        stated: the largest size of the world that a line tells.
        ones: how many processes said in the same words that they are alone.
    """

    seen: set[int] = field(default_factory=set)
    nodes: dict[int, str] = field(default_factory=dict)
    stated: int = 0
    ones: int = 0
    _alone: dict[tuple[object, str], tuple[int, list[int | None]]] = field(default_factory=dict)

    def add_rank(self, rank: int | None, node: str | None = None) -> None:
        """Add a rank that has a line of its own, and where it ran; for None do nothing."""
        # Any text may have a number behind "rank"; later there is a loop over all of them.
        if rank is not None and rank < MOST_RANKS:
            self.seen.add(rank)
            if node:
                self.nodes.setdefault(rank, node)

    def add_line(self, text: str, job: object, rank: int | None, steps: int) -> None:
        """Read what a line says of ranks and of the size of the world.

        Args:
            text: of the line.
            job: tells apart files of unlike jobs.
            rank: whose line it is, by its label or its file.
            steps: how many the file has told of before.
        """
        lower = text.lower()
        if not any(map(lower.__contains__, _OF_RANKS)):
            return
        found = [
            match.groupdict()
            for pattern in table().patterns["world"]
            if (match := pattern.search(text))
        ]
        for said in found:
            self.add_rank(int(said["rank"]) if said.get("rank") else None)
            self.add_world_size(int(said["size"]))
        # Who says so at each step is still one process.
        if any(said["size"] == "1" for said in found) and not says("at-work", text):
            self._add_alone((job, re.sub(r"\d+", "0", text)), rank, steps)

    def _add_alone(self, said: tuple[object, str], rank: int | None, steps: int) -> None:
        """One more that is alone; what is said after many steps is of another attempt."""
        if said not in self._alone and len(self._alone) >= _MOST_SHAPES:
            return
        since, ranks = self._alone.get(said, (steps, []))
        if steps - since > _ONE_ATTEMPT:
            since = steps
            ranks = []
        ranks.append(rank)
        self._alone[said] = (since, ranks)
        self.ones = max(self.ones, len(set(ranks) - {None}) or len(ranks))

    def add_world_size(self, size: int) -> None:
        """Add a size of the world that a line tells."""
        self.stated = max(self.stated, size if size <= MOST_RANKS else 0)

    @property
    def world_size(self) -> int | None:
        """What lines tell; or else all who spoke, if they are 0 to N."""
        highest = max(self.seen, default=-1)
        if self.stated > max(highest, 0):
            return self.stated
        if highest >= 1 and len(self.seen) == highest + 1:
            return highest + 1
        return None


def the_only_other(ranks: Collection[int | None], observed: ObservedRanks) -> int | None:
    """Find the one rank of the world, else of those that spoke, that is not among some ranks.

    Args:
        ranks: whom another's end has reached; None stands for a line without a rank.
        observed: who spoke, and how many there should be.

    Returns:
        None where no line names its rank, or where the others are none or several.
    """
    known = {rank for rank in ranks if rank is not None}
    if not known:
        return None
    others = (set(range(observed.world_size or 0)) or observed.seen) - known
    return min(others) if len(others) == 1 else None
