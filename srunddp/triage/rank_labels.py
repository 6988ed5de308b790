"""Finds out which rank a line belongs to: by labels that launchers put before lines, by file names,
and by the text of lines about ranks and the world.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from srunddp.triage.signatures import says, table

# A larger number after "rank" is not a job's rank, but for example the number of a request. Memory
# and time of triage grow with the ranks.
MOST_RANKS = 1 << 17

# Labels that cannot be anything else: "[1,3]<stderr>:" of Open MPI (in version 5
# "[prterun-node01-77@1,3]<stdout>:"), "[rank3]:" of torch, "[default3]:" of torchrun.
_PLAIN = re.compile(
    r"\[(?:[\w.@-]+@)?\d+,(?P<mpi>\d{1,7})\](?:<\w+>:?|:)\s?|"
    r"\[rank(?P<torch>\d{1,7})\]:?\s?|"
    r"\[(?:default|[a-z]\w*?_?)(?P<elastic>\d{1,5})\]:\s?"
)
# Labels that may also be something else: they count only if many lines of a file have them.
_DOUBTFUL = {
    # srun --label: "3: "
    "label": re.compile(r" {0,6}(?P<rank>\d{1,7}): "),
    # mpiexec -prepend-rank: "[3] "
    "hydra": re.compile(r"\[(?P<rank>\d{1,7})\] "),
    # srunddp --prefix: "node02:3: ", but not "train.py:12: ".
    "prefix": re.compile(
        r"(?P<node>[A-Za-z][\w.-]*)(?<!\.py)(?<!\.cpp)(?<!\.sh):(?P<rank>\d{1,7}): "
    ),
    # pdsh: "node02: ". Other words stand before a colon too, so at least four of five lines must
    # have the label.
    "host": re.compile(r"(?!srun|slurmstepd|line|epoch)(?P<node>[A-Za-z][\w.-]*\d[\w.-]*): "),
}
# The time that slurmstepd puts before its own lines since Slurm 25.05, in each LogTimeFormat except
# clock and thread_id. Earlier versions put "slurmstepd-node01: " in this place.
_STEPD = re.compile(
    r"\[(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,6})?(?:Z|[+-]\d\d:?\d\d)?"
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d)\] (?=(?:error|fatal): )"
)
# A progress bar does not end its line, so a traceback or srunddp's summary may begin in the middle
# of one.
_BEHIND_A_BAR = re.compile(
    r"\[rank\d+\]: Traceback \(most recent|(?<=\])srunddp: (?=ranks? \d|no step|stopped )"
)
_IN_NAME = re.compile(r"(?:rank|task|proc|process)[._-]?(\d{1,7})(?!\d)", re.IGNORECASE)
_FOLDER = re.compile(r"(?:attempt_\d+/|^|/)(\d{1,7})/(?:stdout|stderr|output)(?:\.\w+)?$")
_AGENT = re.compile(r".*(?=attempt_\d+/\d)")
_NO_RANK = re.compile(
    r"(?:node|host|gpu|epoch|part|run|attempt|restart|job|#_)[._-]?$", re.IGNORECASE
)
_NODE_IN_NAME = re.compile(r"^([A-Za-z][\w-]*?\d*)\.rank\d+\.log$")

_OF_RANKS = ("rank", "world", "ntasks", "clients", "process", "task ", "worker ")
_SNIFFED = 400  # lines at the beginning of a file from which its labels are recognised
_MOST_SHAPES = 1000
_ONE_ATTEMPT = 3  # steps reported at most before the last of several processes has begun


@dataclass
class RankLabels:
    """The label that precedes a file's lines, recognised from its first lines.

    Attributes:
        kind: The kind of the label, a key of ``_DOUBTFUL``; empty if lines have no such label.
        local: Whether a line had torchrun's label, which contains a local rank.
    """

    kind: str = ""
    local: bool = False

    @classmethod
    def of_beginning(
        cls, lines: Iterator[tuple[int, str]]
    ) -> tuple[RankLabels, list[tuple[int, str]]]:
        """Recognise the label of a file.

        A label such as ``3: `` can only be recognised by many lines, but must be known before the
        first line is read.

        Args:
            lines: The file's numbered lines.

        Returns:
            The label, and the lines that were taken from ``lines``.
        """
        begin = list(itertools.islice(lines, _SNIFFED))
        return cls.sniff([text for _, text in begin]), begin

    @classmethod
    def sniff(cls, lines: Sequence[str]) -> RankLabels:
        """Recognise the label of a file by the texts of its first lines."""
        for kind, pattern in _DOUBTFUL.items():
            found = [
                match[match.lastindex or 0] for line in lines if (match := pattern.match(line))
            ]
            many = len(found) >= 3 and len(found) * 5 >= len(lines) * (1 if kind != "host" else 4)
            # In many lines the same ranks occur again and again. Numbers that occur only once are
            # no ranks: they count the items of a list.
            if many and (len(found) <= 12 or len(set(found)) * 2 <= len(found)):
                return cls(kind)
        return cls()

    def strip(self, text: str) -> tuple[str, int | None, str | None]:
        """Remove the labels from a line.

        Returns:
            The rest of the line, its rank and its node. Rank and node are None if no label gives
            them.
        """
        rank: int | None = None
        node: str | None = None
        if self.kind and (match := _DOUBTFUL[self.kind].match(text)):
            found = match.groupdict()
            rank = int(found["rank"]) if "rank" in found else None
            node = found.get("node")
            text = text[match.end() :]
        is_broken = "Traceback (" in text or "]srunddp: " in text
        if is_broken and (header := _BEHIND_A_BAR.search(text)):
            text = text[header.start() :]
        # torchrun's label with a local rank may stand before torch's label with the rank. Then
        # torch's label counts.
        while text.startswith("[") and (match := _PLAIN.match(text)):
            said = match["mpi"] or match["torch"] or match["elastic"]
            if rank is None or match["torch"]:
                rank = int(said)
            self.local |= bool(match["elastic"])
            text = text[match.end() :]
        if rank is not None and rank >= MOST_RANKS:
            rank = None
        return named_stepd(text), rank, node


def named_stepd(text: str) -> str:
    """Return the line with slurmstepd's name before it, as every version of Slurm before 25.05
    wrote it; return any other line unchanged.
    """
    if not text.startswith("["):
        return text
    match = _STEPD.match(text)
    if not match:
        return text
    time = match[1].replace(" ", "_")  # kept for the order of lines; it is no part of the message
    return f"slurmstepd[{time}]: {text[match.end() :]}"


def ranks_of_names(names: Sequence[str]) -> dict[str, int]:
    """Find the ranks that file names contain.

    Names have a rank in forms such as ``node01.rank3.log``, torchrun's ``attempt_0/3/``, and
    ``out.0`` beside ``out.1``.

    Returns:
        The rank of each name that contains one.
    """
    numbers = {name: _IN_NAME.findall(name) or _FOLDER.findall(name) for name in names}
    found = {name: int(each[-1]) for name, each in numbers.items() if each}
    # Each torchrun agent, and so each node, has a folder of its own above attempt_0/3/.
    agents = {match.group() for name in names if (match := _AGENT.match(name))}
    if len(agents) > 1:  # the numbers are local ranks of several agents
        return {name: rank for name, rank in found.items() if not _AGENT.match(name)}
    return found | _of_families([name for name in names if name not in found])


def _of_families(names: Sequence[str]) -> dict[str, int]:
    """Find ranks in names that differ only in one number, which counts from 0."""
    families: dict[tuple[str, str], dict[str, int]] = {}
    for name in names:
        for match in re.finditer(r"(?<!\d)(?:0|[1-9]\d{0,6})(?!\d)", PurePath(name).name):
            before = PurePath(name).name[: match.start()]
            after = PurePath(name).name[match.end() :]
            # Numbers before the rank may differ: t-node01-0.out and t-node02-2.out are one family.
            families.setdefault((re.sub(r"\d+", "#", before), after), {})[name] = int(match[0])
    found: dict[str, int] = {}
    for (before, _), members in families.items():
        counts = sorted(set(members.values()))
        # The numbers start at 0, are all different, and fewer are missing than present: some ranks
        # may have no file, but most have one.
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
    """Return the node in the name of a --log-dir file (NODE.rankN.log); None for any other name."""
    match = _NODE_IN_NAME.match(PurePath(name).name)
    return match[1] if match else None


def stated_rank(text: str) -> int | None:
    """Return the rank that the text of a line claims for itself; None if there is none."""
    match = says("stated-rank", text[:300])
    return int(match[match.lastindex or 1]) if match else None


def spread(text: str) -> list[int]:
    """Return the numbers in a list such as ``0-3,5`` or ``[0-3,5]``, at most the first 100,000.
    Parts of the list that are no numbers are left out.
    """
    numbers: list[int] = []
    for part in text.strip("[]").split(","):
        ends = re.fullmatch(r"\s*(\d{1,7})(?:-(\d{1,7}))?\s*", part)
        if ends and int(ends[2] or ends[1]) - int(ends[1]) < 100_000:
            numbers += range(int(ends[1]), int(ends[2] or ends[1]) + 1)
    return numbers[:100_000]


@dataclass
class ObservedRanks:
    """The ranks that have output, and how many there should be.

    Attributes:
        seen: The ranks that wrote a line.
        of_files: The ranks with a file of their own, even if it is empty.
        nodes: The node of each rank, as far as lines or file names give it.
        stated: The largest world size that a line states or a file name implies; 0 if there is
            none.
        ones: How many processes state, in the same words, that they are the only rank.
    """

    seen: set[int] = field(default_factory=set)
    of_files: set[int] = field(default_factory=set)
    nodes: dict[int, str] = field(default_factory=dict)
    stated: int = 0
    ones: int = 0
    _alone: dict[tuple[object, str], tuple[int, list[int | None]]] = field(default_factory=dict)

    def add_rank(self, rank: int | None, node: str | None = None) -> None:
        """Note that a rank has output, and on which node; None is ignored."""
        if rank is not None and rank < MOST_RANKS:
            self.seen.add(rank)
            if node:
                self.nodes.setdefault(rank, node)

    def add_file(self, rank: int, node: str | None) -> None:
        """Note that a rank has a file of its own, so that the world has at least the ranks up to
        this one.

        Args:
            rank: The rank.
            node: The node in the file's name; None if there is none.
        """
        if rank < MOST_RANKS:
            self.of_files.add(rank)
            if node:
                self.nodes.setdefault(rank, node)
        if rank > 0:
            self.add_world_size(rank + 1)

    def add_line(self, text: str, job: object, rank: int | None, steps: int) -> None:
        """Read what a line states about ranks and the world size.

        Args:
            text: The line.
            job: A key that differs between the files of different jobs.
            rank: The line's rank according to its label or file; None if unknown.
            steps: How many steps the file has reported so far.
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
        # Ignore lines about progress: a process that states the world size again at each step is
        # still one process.
        if any(said["size"] == "1" for said in found) and not says("at-work", text):
            self._add_alone((job, re.sub(r"\d+", "0", text)), rank, steps)

    def _add_alone(self, said: tuple[object, str], rank: int | None, steps: int) -> None:
        """Count one more process which says that it is the only rank.

        If the file has reported more than a few steps since the first such line, the processes are
        those of a new attempt, and the count begins again.

        Args:
            said: The job and the words, which are the same for all processes of one attempt.
            rank: The rank of the line; None if unknown.
            steps: How many steps the file has reported so far.
        """
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
        """Note a world size. The largest counts; values above :data:`MOST_RANKS` are ignored."""
        self.stated = max(self.stated, size if size <= MOST_RANKS else 0)

    @property
    def world_size(self) -> int | None:
        """The stated world size; else the number of ranks with output, if there are several and
        they are 0 to N-1; else None.
        """
        highest = max(self.seen, default=-1)
        if self.stated > max(highest, 0):
            return self.stated
        if highest >= 1 and len(self.seen) == highest + 1:
            return highest + 1
        return None


def the_only_other(ranks: Collection[int | None], observed: ObservedRanks) -> int | None:
    """Find the one rank that is missing from a set of ranks.

    It is sought among the ranks of the world, or, if the world size is unknown, among the ranks
    with output.

    Args:
        ranks: The ranks that noticed the end of another rank, or wait for it. None stands for a
            line whose rank is unknown, and is ignored.
        observed: The ranks with output, and how many there should be.

    Returns:
        The missing rank; None if ``ranks`` has no known rank, or if not exactly one is missing.
    """
    known = {rank for rank in ranks if rank is not None}
    if not known:
        return None
    others = (set(range(observed.world_size or 0)) or observed.seen) - known
    return min(others) if len(others) == 1 else None
