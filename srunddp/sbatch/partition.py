"""What Slurm says of its partitions, and whether a job is within their limits."""

from __future__ import annotations

import difflib
import math
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from srunddp.errors import ConfigError
from srunddp.sbatch.formats import megabytes, seconds
from srunddp.sbatch.spec import SlurmJob, gpu_types

SCONTROL = ("scontrol", "--all", "--oneliner", "show", "partition")
# Without --exact it shows the least of what differs.
SINFO = ("sinfo", "--all", "--exact", "--noheader", "--format=%R|%D|%c|%m|%G")
_WITHIN = 5.0
_NO_LIMIT = ("UNLIMITED", "NONE", "INFINITE", "")

Run = Callable[[Sequence[str], Mapping[str, str]], str]


@dataclass(frozen=True)
class NodeKind:
    """Nodes of a partition that are alike.

    Attributes:
        count: how many; cpus, memory: of each, in MB, infinite where that is not known; gpus: of each, by type.
    """

    count: int
    cpus: float
    memory: float
    gpus: Mapping[str, int]


@dataclass(frozen=True)
class Partition:
    """A partition, as scontrol and sinfo show it.

    Attributes:
        default: jobs that name none go there.
        state: UP, or why no job starts.
        max_time, default_time: as Slurm writes it; empty for none.
        max_nodes: for one job; infinite for no limit.
        default_memory: in words; empty for none.
        kinds: of its nodes; empty where sinfo does not tell.
    """

    name: str
    default: bool
    state: str
    max_time: str
    default_time: str
    max_nodes: float
    default_memory: str
    kinds: tuple[NodeKind, ...] = ()


def ask(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """What a command prints, within 5 s; nothing where it is not there, fails, or takes longer."""
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        null, pipe = subprocess.DEVNULL, subprocess.PIPE
        return subprocess.run(
            command, env=dict(environ), stdin=null, stdout=pipe, stderr=null, text=True, timeout=_WITHIN, check=True
        ).stdout
    return ""


def partitions(environ: Mapping[str, str], run: Run = ask) -> tuple[Partition, ...]:
    """Of the cluster; empty where there is no Slurm."""
    shown = parse_partitions(run(SCONTROL, environ))
    kinds = parse_nodes(run(SINFO, environ)) if shown else {}
    return tuple(replace(each, kinds=tuple(kinds.get(each.name, ()))) for each in shown)


def parse_partitions(shown: str) -> list[Partition]:
    """Of what ``scontrol --oneliner show partition`` prints."""
    lines = (dict(re.findall(r"(\w+)=(\S*)", line)) for line in shown.splitlines())
    return [_partition(line) for line in lines if line.get("PartitionName")]


def _partition(line: Mapping[str, str]) -> Partition:
    nodes = line.get("MaxNodes", "")
    memory = next((f"{name}={line[name]}" for name in ("DefMemPerCPU", "DefMemPerGPU", "DefMemPerNode")
                   if line.get(name, "") not in _NO_LIMIT), "")  # fmt: skip
    return Partition(
        line["PartitionName"],
        line.get("Default") == "YES",
        line.get("State", "UP"),
        _limit(line.get("MaxTime", "")),
        _limit(line.get("DefaultTime", "")),
        int(nodes) if nodes.isdecimal() else math.inf,
        memory,
    )


def _limit(text: str) -> str:
    return "" if text in _NO_LIMIT else text


def parse_nodes(shown: str) -> dict[str, list[NodeKind]]:
    """By partition, of what sinfo prints: name, count, CPUs, memory and GRES; a ``+`` stands behind a least value."""
    found: dict[str, list[NodeKind]] = {}
    for line in shown.splitlines():
        if match := re.fullmatch(r"([^|]+)\|(\d+)\|(\d+\+?)\|(\d+\+?)\|(.*)", line.strip()):
            gpus = gpu_types(None, re.sub(r"\(.*?\)", "", match[5]))
            cpus, memory = (math.inf if text.endswith("+") else float(text) for text in match.group(3, 4))
            found.setdefault(match[1], []).append(NodeKind(int(match[2]), cpus, memory, gpus))
    return found


def wished(job: SlurmJob, environ: Mapping[str, str], *, interactive: bool) -> SlurmJob:
    """The job with the partition that the shell's variables give it: for sbatch they win over the script's lines."""
    exported = environ.get("SALLOC_PARTITION" if interactive else "SBATCH_PARTITION")
    if not exported or (interactive and job.partition):
        return job
    return replace(job, partition=exported)


def chosen(job: SlurmJob, known: Sequence[Partition]) -> list[Partition]:
    """Those that the job may run in.

    Raises:
        ConfigError: one that it names is not there.
    """
    if not job.partition:
        return [each for each in known if each.default]
    by_name = {each.name: each for each in known}
    for name in job.partition.split(","):
        if name not in by_name:
            near = difflib.get_close_matches(name, by_name, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else "correct it"
            raise ConfigError(f"--partition {name!r}", expected=f"one of {', '.join(sorted(by_name))}", hint=hint)
    return [by_name[name] for name in job.partition.split(",")]


def check_limits(job: SlurmJob, candidates: Sequence[Partition]) -> None:
    """See whether one of these partitions takes the job.

    Raises:
        ConfigError: none does, and why the first does not.
    """
    wrong = [next(_excess(job, each), None) for each in candidates]
    if wrong and all(wrong) and (first := wrong[0]):
        raise first


def _excess(job: SlurmJob, partition: Partition) -> Iterator[ConfigError]:
    name = f"partition {partition.name}"
    if partition.state not in ("UP", "DOWN"):  # jobs may wait in one that is down
        yield ConfigError(f"{name} is {partition.state}", expected="one that is up", hint="name another partition")
    # A QOS may have limits of its own that count instead.
    if not job.qos and job.time and seconds(job.time) > seconds(partition.max_time or "UNLIMITED"):
        hint = f"say --time={partition.max_time}, and let --requeue go on from there"
        yield ConfigError(f"--time {job.time}", expected=f"at most {partition.max_time} in {name}", hint=hint)
    if not job.qos and job.nodes > partition.max_nodes:
        expected = f"at most {partition.max_nodes} for a job in {name}"
        yield ConfigError(f"--nodes {job.nodes}", expected=expected, hint="take fewer, or another partition")
    if partition.kinds:
        yield from _unfit(job, partition)


def _unfit(job: SlurmJob, partition: Partition) -> Iterator[ConfigError]:
    """What no node of the partition has, or too few."""
    kinds, name = partition.kinds, f"partition {partition.name}"
    cpus, most = job.tasks * (job.cpus_per_task or 1), max(kind.cpus for kind in kinds)
    if cpus > most:
        found = f"--cpus-per-task {job.cpus_per_task or 1} for {job.tasks} on each node is {cpus} CPUs"
        hint = f"say --cpus-per-task={max(1, int(most // job.tasks))}"
        yield ConfigError(found, expected=f"at most {most:.0f} on a node of {name}", hint=hint)
    if not any(_has_gpus(job, kind) for kind in kinds):
        have = ", ".join(sorted({_gpus_in_words(kind.gpus) for kind in kinds}))
        wanted = f"--gpus-per-node {job.gpus_per_node}" if job.gpus_per_node else f"--gres {job.gres}"
        yield ConfigError(
            wanted, expected=f"what a node of {name} has: {have}", hint="take fewer, or another partition"
        )
    memory = max(kind.memory for kind in kinds)
    if job.mem and megabytes(job.mem) > memory:
        hint = f"say --mem={memory:.0f}M at most, or 0 for all of it"
        yield ConfigError(f"--mem {job.mem}", expected=f"at most {memory:.0f}M on a node of {name}", hint=hint)
    fitting = sum(kind.count for kind in kinds if _has_all(job, kind))
    if fitting < job.nodes:
        found = f"--nodes {job.nodes}, but {fitting} of {name} have what is asked of each"
        yield ConfigError(found, expected=f"{job.nodes} or more", hint="take fewer, or another partition")


def _has_all(job: SlurmJob, kind: NodeKind) -> bool:
    has_cpus = kind.cpus >= job.tasks * (job.cpus_per_task or 1)
    return has_cpus and kind.memory >= megabytes(job.mem or "0") and _has_gpus(job, kind)


def _has_gpus(job: SlurmJob, kind: NodeKind) -> bool:
    wanted, every = gpu_types(job.gpus_per_node, job.gres), sum(kind.gpus.values())
    return job.gpus <= every and all(count <= kind.gpus.get(name, 0) for name, count in wanted.items() if name)


def _gpus_in_words(gpus: Mapping[str, int]) -> str:
    return " and ".join(f"{count} {name}".strip() for name, count in gpus.items()) or "none"


def defaults(job: SlurmJob, candidates: Sequence[Partition]) -> Iterator[str]:
    """What is not said, and so the site decides."""
    first = candidates[0] if candidates else None
    if not job.partition:
        yield "no --partition: the site's default" + (f", {first.name}" if first else "")
    if not job.time:
        limit = (first.default_time or first.max_time or "no limit") if first else ""
        yield "no --time: the partition's default" + (f", {limit}" if limit else "")
    if not job.mem:
        yield "no --mem: the site's default" + (f", {first.default_memory}" if first and first.default_memory else "")
    if not job.cpus_per_task:
        yield "no --cpus-per-task: the site's default, often one CPU for a rank and its loader workers"
