"""Who spoke, and of how many: what lines say of ranks and of the size of their world."""

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from srunddp.triage.rank_labels import MOST_RANKS

_WORLD = [
    re.compile(r"^srunddp: (\d+) ranks? on \d+ nodes?, launcher"),
    re.compile(r"^(?:\[RANK \d+\] )?WORLD_SIZE\s?[=:]\s?(\d+)|\bWORLD_SIZE\s?[=:]\s?'?(\d+)"),
    re.compile(
        r"(?<!local )(?<!parallel )(?:\b|\bdist_)world[ _-]?size(?: \.{3,80} |\W{1,4}(?:is |of )?)(\d+)", re.IGNORECASE
    ),
    re.compile(r"\b[Rr](?:ank|ANK)[ :=#]{0,2}\d+ ?(?:/|of|out of) ?(\d+)\b"),
    re.compile(r"\bGLOBAL_RANK: \d+, MEMBER: \d+/(\d+)|Starting with (\d+) processes"),
    re.compile(r"\d+/(\d+) clients joined|^srunddp: error: \d+ of (\d+) ranks did not come"),
    re.compile(r"\brank \d+ nranks (\d+)|distributed init \(rank \d+, world (\d+)\)"),
    re.compile(r"\b(?:SLURM_NTASKS|SLURM_NPROCS|SLURM_STEP_NUM_TASKS|OMPI_COMM_WORLD_SIZE)\s?[=:]\s?(\d+)"),
    re.compile(r"\b(?:srun|mpirun|mpiexec)\b.{0,200}? (?:-n|-np|--ntasks)[ =]?(\d+)\b"),
    re.compile(r"\b(?:[Pp]rocess|PE|[Tt]ask|[Ww]orker)[ :=#]{0,2}\d+ (?:of|out of) (\d+)\b"),
    re.compile(r"\b[Nn]um(?:ber of |[ _])(?:processes|ranks)\W{1,3}(\d+)|\bn_?(?:ranks|procs)\W{1,3}(\d+)"),
    re.compile(r"\bDistributed: .{0,40}?(\d+) (?:processes|ranks)|\b[Tt]otal (?:ranks|processes)\W{1,3}(\d+)"),
    re.compile(r"\([Gg]lobal: \d+, local:? \d+\), total (\d+)"),
]
_NODES = re.compile(
    r"(?:--nodes|--nnodes|--num[-_]nodes|\s-N)[ =]?(\d{1,5})(?![\d:-])|nnodes=(\d{1,5}), num_local_procs"
)
_EACH = re.compile(
    r"(?:--ntasks-per-node|--nproc[-_]per[-_]node|--num[-_]gpus|--npernode)[ =](\d{1,4})\b|num_local_procs=(\d{1,4})\b"
)
_TASKS = re.compile(r"#SBATCH (?:--ntasks|-n)[ =]?(\d{1,6})\b")
_ANY_NODES = re.compile(r"--n?nodes|--num[-_]nodes")
_PER_NODE = re.compile(r"\bSLURM_(?:STEP_)?TASKS_PER_NODE[=:] ?'?((?:\d+(?:\(x\d+\))?,?)+)")
_DEEPSPEED = re.compile(r"WORLD INFO DICT: \{(.*)\}")
_STARTERS = ("torchrun", "torch.distributed", "deepspeed", "num_local_procs")
_SHAPES = (*_STARTERS, "#SBATCH", "srun ", "TASKS_PER_NODE", "WORLD INFO")
_AT_WORK = re.compile(r"step|epoch|iter|loss|batch|it/s|\d %|\d%", re.IGNORECASE)
_WORDS = (
    "ank", "orld", "RANK", "WORLD", "SLURM_N", "nproc", "ask ", "PE ", "max_nodes", "clients", "rocess", "run ",
    "global: ", *_SHAPES,
)  # fmt: skip
_MOST_SHAPES = 1000
_ONE_ATTEMPT = 3  # steps within which the last of several processes begins
_SPOKE = re.compile(
    r"\b[Rr](?:ank|ANK)[ :=#]{0,2}(\d{1,7}) ?(?:/|of|out of) ?\d+\b|\bGLOBAL_RANK: (\d+), MEMBER|"
    r"^[Pp]rocess (\d{1,7}) of \d+\b|^\[RANK (\d+)\]"
)
_ELASTIC = re.compile(r"^\s*(max_nodes|nproc_per_node)\s+: (\d{1,5})$")
_SLURM_TASK = re.compile(r"\bnnodes=(\d+).{0,80}nproc_per_node=(\d+)")
_BY_OPTIONS = 20  # of srun and headers, which may start what starts the ranks


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
        if stream.rank is not None:
            self.ranks.add(stream.rank)


def _requested_size(text: str, header: dict[str, int]) -> tuple[int, bool]:
    """World size by the nodes and the ranks on each that a line asks for, 0 if none; whether ranks are what it starts.

    Args:
        header: what the #SBATCH lines before it asked for; this line's is added.
    """
    if match := _PER_NODE.search(text):
        parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", match[1])
        return sum(int(each) * int(times or 1) for each, times in parts), False
    if match := _DEEPSPEED.search(text):
        return sum(len(re.findall(r"\d+", each)) for each in re.findall(r"\[([^\]]*)\]", match[1])), True
    own = next((word for word in _STARTERS if word in text), "")
    if own and own != _STARTERS[-1]:  # srun's options before it are of what it starts
        text = text[text.index(own) :]
    nodes, each = _number(_NODES, text), _number(_EACH, text)
    if own:
        return (each * (nodes or (0 if _ANY_NODES.search(text) else 1))), True
    if "#SBATCH" in text:
        found = {"nodes": nodes, "each": each, "tasks": _number(_TASKS, text)}
        header |= {name: value for name, value in found.items() if value}
        nodes, each = header.get("nodes", 1), header.get("each", 0)
        if "tasks" in header:
            return header["tasks"], False
    # One task on each node mostly starts the ranks itself.
    return (nodes * each if each > 1 else 0), False


def _number(pattern: re.Pattern[str], text: str) -> int:
    match = pattern.search(text)
    return int(next(filter(None, match.groups()), 0)) if match else 0


@dataclass
class ObservedRanks:
    """Who spoke, and how many were meant to.

    Attributes:
        seen: ranks with a line, or a file, of their own.
        nodes: of ranks.
        worlds: how often each size of the world was told, by the pattern that told it.
    """

    seen: set[int] = field(default_factory=set)
    worlds: dict[int, Counter[int]] = field(default_factory=dict)
    _singletons: dict[tuple[object, str], SingletonRanks] = field(default_factory=dict)
    nodes: dict[int, str] = field(default_factory=dict)
    _header: dict[str, int] = field(default_factory=dict)
    elastic: dict[str, int] = field(default_factory=dict)  # what torchrun says of its agents

    def add_line(self, text: str, rank: int | None, node: str | None, stream: LineOrigin) -> None:
        """A line, and whose it is."""
        if rank is not None and rank < MOST_RANKS:
            self.seen.add(rank)
            if node:
                self.nodes.setdefault(rank, node)
        if any(word in text for word in _WORDS):
            self._read(text, stream)

    def _read(self, text: str, stream: LineOrigin) -> None:
        if (match := _SPOKE.search(text)) and (said := int(next(filter(None, match.groups())))) < MOST_RANKS:
            self.seen.add(said)
        if match := _SLURM_TASK.search(text):
            self.add_world_size(5, int(match[1]) * int(match[2]))
        if any(word in text for word in _SHAPES):
            size, own = _requested_size(text, self._header)
            self.add_world_size(5 if own else _BY_OPTIONS, size)
        if match := _ELASTIC.search(text):
            self.elastic[match[1]] = int(match[2])
            if len(self.elastic) == 2:
                self.add_world_size(5, self.elastic["max_nodes"] * self.elastic["nproc_per_node"])
        for order, pattern in enumerate(_WORLD):
            if match := pattern.search(text):
                size = int(next(filter(None, match.groups())))
                self.add_world_size(order, size)
                # Who says so at each step is still one process.
                if size == 1 and len(self._singletons) < _MOST_SHAPES and not _AT_WORK.search(text):
                    key = stream.job, re.sub(r"\d+", "0", text)
                    self._singletons.setdefault(key, SingletonRanks(stream.steps)).add(stream)

    def add_world_size(self, order: int, size: int) -> None:
        """A size of the world, and by which of the patterns it was told."""
        if 0 < size <= MOST_RANKS:
            self.worlds.setdefault(order, Counter())[size] += 1

    @property
    def ones(self) -> int:
        """How many processes said in the same words that they are alone."""
        return max((len(alone.ranks) or alone.count for alone in self._singletons.values()), default=0)

    @property
    def world_size(self) -> int | None:
        """What lines tell, the largest of the most trusted kind; or else all who spoke, if they are 0 to N."""
        highest = max(self.seen, default=-1)
        if self.worlds and highest < (stated := max(self.worlds[min(self.worlds)])):
            return stated
        return highest + 1 if highest >= 1 and len(self.seen) == highest + 1 else None
