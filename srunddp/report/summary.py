"""Defines the figures of a run, from which notes, text and page are made. None means unknown.

The names of the fields are the keys of ``--json``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

_LEAST = 1e-9  # no measured figure is smaller; dividing by less would give a ratio without meaning


@dataclass(frozen=True)
class RunEnd:
    """How the run ended.

    Attributes:
        codes: The exit code of each rank that recorded one.
        missing: The ranks that recorded no exit code.
        running: Whether the run still runs: ranks are missing, and the newest sample is recent.
        last_s: Seconds from the start to the newest line in any file.
        cause: The cause in failure.json; empty if there is none.
    """

    codes: dict[int, int]
    missing: tuple[int, ...]
    running: bool
    last_s: float
    cause: str

    @property
    def finished(self) -> bool:
        """Whether all ranks ended with 0."""
        return not self.missing and bool(self.codes) and not any(self.codes.values())


@dataclass(frozen=True)
class Span:
    """An epoch, an evaluation or the like; ``end_s`` is None if its end was not recorded."""

    number: int | None
    begin_s: float
    end_s: float | None


@dataclass(frozen=True)
class RankFigures:
    """The figures of one rank, from its first step on.

    Attributes:
        steps: The number of steps.
        step_s: Mean seconds per step, including waits. If steps are only counted, pauses are
            included.
        own_s: Mean seconds per step without the backward pass, in which a rank waits for others.
        data_s: Mean seconds per step of waiting for data, a part of ``own_s``.
        steady_s: ``own_s``, or the time that a quarter of the intervals exceeds, whichever is less:
            a single long stall does not make a slow rank.
        steady_work_s: As ``steady_s``, but of ``own_s`` without ``data_s``.
        steady_wait_share: The share of the step time spent waiting for data, or the share that a
            tenth of the intervals exceeds, whichever is less.
        longest_s: Seconds of the longest step.
        cpu_s: CPU seconds of the rank's processes since they began.
        rss_bytes: The highest resident set size of all the rank's processes together.
        delay_share: The share of the time in which the main threads of the rank's processes waited
            for a CPU.
    """

    rank: int
    node: str
    steps: int
    step_s: float | None
    own_s: float | None
    data_s: float | None
    steady_s: float | None
    steady_work_s: float | None
    steady_wait_share: float | None
    longest_s: float | None
    cpu_s: float | None
    rss_bytes: float | None
    delay_share: float | None


@dataclass(frozen=True)
class LinkFigures:
    """Traffic of one link, from the first step to the last."""

    name: str
    kind: str
    chosen: bool
    received_bytes_per_s: float
    sent_bytes_per_s: float


@dataclass(frozen=True)
class NodeFigures:
    """The figures of one node.

    Attributes:
        readings: How many samples of the node there are; 0 if the node wrote none.
        cpus: The CPUs that the job may use.
        used_cpus: The CPUs used on average from the first step on.
        memory_bytes: The highest use of memory.
        memory_limit_bytes: The job's memory limit.
        read_bytes_per_s: Bytes per second that were read from storage.
        written_bytes_per_s: Bytes per second that were written to storage.
        iowait_cpus: The CPUs that waited for storage on average.
        interface: The network interface that the run uses.
        links: The traffic of each link.
        clock_s: Seconds by which the node's clock was ahead of that of rank 0's node.
    """

    node: str
    readings: int
    cpus: float | None
    used_cpus: float | None
    memory_bytes: float | None
    memory_limit_bytes: float | None
    read_bytes_per_s: float | None
    written_bytes_per_s: float | None
    iowait_cpus: float | None
    interface: str
    links: tuple[LinkFigures, ...]
    clock_s: float


@dataclass(frozen=True)
class GpuFigures:
    """The figures of one GPU: means from the first step to the last, but the highest values of
    memory and temperature.

    Attributes:
        readings: The number of readings behind the means.
        energy_j: Energy over all readings of the run.
        slowed_share: The share of readings in which heat or the power brake kept the clock down.
    """

    node: str
    index: str
    name: str
    uuid: str
    readings: int
    utilization_percent: float | None
    bandwidth_percent: float | None
    power_w: float | None
    energy_j: float | None
    temperature_c: float | None
    memory_bytes: float | None
    memory_limit_bytes: float | None
    sm_percent: float | None
    tensor_percent: float | None
    slowed_share: float | None


@dataclass(frozen=True)
class GpuFaultFigures:
    """A fault of a GPU.

    Attributes:
        index, uuid: NVML's names of the GPU or the MIG instance.
        fault: A short description.
        kind: Where the fault is: ``hardware``, ``program`` or ``other``.
        xid: The number of NVIDIA's Xid; None if the fault is no Xid.
        at_s: When the fault was noticed, in seconds since the start.
    """

    node: str
    index: str
    uuid: str
    fault: str
    kind: str
    xid: int | None
    at_s: float


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run.

    Attributes:
        count: The number of checkpoints.
        stood_s: Seconds for which the training paused to write checkpoints.
        background_s: Seconds of writing while the training went on.
    """

    count: int
    stood_s: float
    background_s: float


@dataclass(frozen=True)
class NotFinite:
    """The first loss that is not finite; ``value`` is ``nan``, ``inf`` or ``-inf``."""

    name: str
    value: str
    at_s: float
    step: int | None


@dataclass(frozen=True)
class Throughput:
    """The throughput of all ranks together.

    Attributes:
        samples: The number of training samples that were processed.
        per_s: Samples per second, on average from the first step to the last.
        own_share: The share of the step time that is neither waiting for data nor for slower ranks.
        efficiency_share: The throughput per rank divided by that of the baseline.
        baseline: The name of the baseline and its number of ranks.
    """

    samples: float | None
    per_s: float | None
    own_share: float | None
    efficiency_share: float | None = None
    baseline: str = ""


@dataclass(frozen=True)
class Summary:
    """The figures of the whole run. Times are in seconds since the start.

    Attributes:
        readings: How many readings the monitor took since the first step.
        launches: Beginning and end of each launch phase, by rank and phase.
        folder: The run's folder, which also holds its logs unless they have a folder of their own.
        moves: Sentences on lost nodes and on where their ranks went.
        loader_workers: How many processes of a rank read the training data; 0 if the rank itself
            reads it; None if unknown.
        options: The options of ``srunddp run``, by the names of their parameters.
        settings: The settings of ``Trainer``, in their groups.
        git_commit: The commit of the script's folder; empty if git does not manage the folder.
        versions: The versions of the installed packages that matter, and of Python.
        job_s: How long the job has lasted with all its steps; None if Slurm was not asked.
    """

    name: str
    job: str
    step: str
    script: str
    launcher: str
    backend: str
    nodes: tuple[str, ...]
    world_size: int
    restarts: int
    interval_s: float | None
    started_unix_s: float
    seconds: float
    time_limit_s: float | None
    ending: RunEnd
    first_step_s: float | None
    steps: int
    readings: int
    epochs: tuple[Span, ...]
    evaluations: tuple[Span, ...]
    checkpoints: Checkpoints
    launches: Mapping[int, Mapping[str, tuple[float, float]]]
    ranks: tuple[RankFigures, ...]
    per_node: tuple[NodeFigures, ...]
    gpus: tuple[GpuFigures, ...]
    throughput: Throughput
    resumed: int | None
    folder: str
    moves: tuple[str, ...] = ()
    not_finite: NotFinite | None = None
    loader_workers: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    git_commit: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    job_s: float | None = None
    gpu_faults: tuple[GpuFaultFigures, ...] = ()

    @property
    def layout(self) -> dict[int, str]:
        """The node of each rank."""
        return {each.rank: each.node for each in self.ranks}

    @property
    def step_s(self) -> float | None:
        """The mean step time of the median rank, in seconds."""
        return median_or_none([each.step_s for each in self.ranks])

    @property
    def data_share(self) -> float | None:
        """The share of the step time that is waiting for data, on average over the ranks.

        Card, note, legend and JSON all show this figure.
        """
        known = [part for part in self.data_shares if part is not None]
        if known:
            return fmean(known)
        return None

    @property
    def data_shares(self) -> list[float | None]:
        """The share of its step time that each rank waits for data."""
        return [share(each.data_s, each.step_s) for each in self.ranks]

    @property
    def slowest_rank(self) -> int | None:
        """The rank with the highest own time per step; None unless several ranks have a
        known time.
        """
        known = {each.rank: each.own_s for each in self.ranks if each.own_s is not None}
        if len(known) > 1:
            return max(known, key=lambda rank: known[rank])
        return None

    @property
    def energy_j(self) -> float | None:
        """The energy of all GPUs for which it is known, in joules."""
        known = [each.energy_j for each in self.gpus if each.energy_j is not None]
        return sum(known) if known else None


def median_or_none(values: list[float | None]) -> float | None:
    """Return the median of the known values, the lower middle one if their number is even."""
    # The mean of the two middle values would be a time that no rank has had.
    known = sorted(value for value in values if value is not None)
    return known[(len(known) - 1) // 2] if known else None


def share(part: float | None, whole: float | None) -> float | None:
    """Divide one figure by another; None if either is unknown or the divisor is practically 0."""
    if part is not None and whole is not None and whole > _LEAST:
        return part / whole
    return None
