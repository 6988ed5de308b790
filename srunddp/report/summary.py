"""Defines the figures of a run, which the report's notes, text and HTML page show. A figure that is
None is unknown.

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
        running: Whether the run is still running: ranks are missing, and the newest reading or mark
            is recent.
        last_s: Seconds from the start to the newest reading or mark in any file.
        cause: The cause in failure.json, preceded by the rank and its node if one rank is at fault;
            empty if the file is missing or is about another start.
    """

    codes: dict[int, int]
    missing: tuple[int, ...]
    running: bool
    last_s: float
    cause: str

    @property
    def finished(self) -> bool:
        """Whether all ranks have recorded exit code 0."""
        return not self.missing and bool(self.codes) and not any(self.codes.values())


@dataclass(frozen=True)
class Span:
    """An epoch or an evaluation.

    Attributes:
        number: The number of the epoch; None if its mark has no number.
        begin_s: When it began, in seconds since the start.
        end_s: When it ended, in seconds since the start; None if the end was not recorded.
    """

    number: int | None
    begin_s: float
    end_s: float | None


@dataclass(frozen=True)
class RankFigures:
    """The figures of one rank. Means are taken from the time when all ranks had made their first
    step to the last step.

    Attributes:
        rank: The number of the rank.
        node: The name of its node.
        steps: How many steps the rank made.
        step_s: Mean seconds per step, including waits. If the script only calls ``heartbeat()``,
            steps are counted but not timed; this is then the time from one step to the next, with
            all pauses between steps.
        own_s: Mean seconds per step without the backward pass, in which a rank waits for others.
        data_s: Mean seconds per step of waiting for data, a part of ``own_s``.
        steady_s: The lower of ``own_s`` and the time per step that is exceeded in a quarter of the
            intervals between readings. Unlike ``own_s``, it stays low after a single long stall.
        steady_work_s: As ``steady_s``, but for ``own_s`` without ``data_s``.
        steady_wait_share: The lower of two shares of the step time: the mean share spent waiting
            for data, and the share that is exceeded in a tenth of the intervals between readings.
        longest_s: Seconds of the longest step.
        cpu_s: CPU seconds that the rank's processes have used since they began.
        rss_bytes: The highest resident set size of all the rank's processes together.
        delay_share: The share of the time for which the main thread of a process of the rank waited
            for a CPU, on average over all its processes but the supervisor.
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
    """The mean traffic of the whole node over one link, from the first step to the last.

    Attributes:
        name: The name of the network interface, or of the InfiniBand or RoCE port.
        kind: ``net`` for a network interface; ``rdma`` for an InfiniBand or RoCE port.
        chosen: Whether it is the run's network interface, or a port of this interface's device.
        received_bytes_per_s: Bytes received per second; 0 if unknown.
        sent_bytes_per_s: Bytes sent per second; 0 if unknown.
    """

    name: str
    kind: str
    chosen: bool
    received_bytes_per_s: float
    sent_bytes_per_s: float


@dataclass(frozen=True)
class NodeFigures:
    """The figures of one node.

    Attributes:
        node: The name of the node.
        readings: How many readings of the node there are; 0 if its sampler wrote none.
        cpus: The number of CPUs that the job may use on the node.
        used_cpus: The mean number of CPUs in use by the job, from the first step to the last.
        memory_bytes: The highest amount of memory that the job used on the node.
        memory_limit_bytes: The job's memory limit on the node.
        read_bytes_per_s: Mean bytes per second that were read from storage, over the whole run.
        written_bytes_per_s: Mean bytes per second that were written to storage, over the whole run.
        iowait_cpus: The mean number of the node's CPUs that waited for storage, from the first step
            to the last.
        interface: The network interface that the run uses; empty if unknown.
        links: The traffic of each link.
        clock_s: Seconds by which the node's clock was ahead of the clock of rank 0's node; 0 if the
            difference is too small to matter.
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
    """The figures of one GPU. The values in percent and the power are means from the first step to
    the last. Memory and temperature are the highest values of the whole run.

    Attributes:
        readings: How many readings there are from the first step to the last.
        energy_j: The energy in joules that the GPU used from the first reading of the run to the
            last.
        slowed_share: The share of these readings in which heat or the power brake kept the clock
            down.
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
        count: How many checkpoints were written.
        stood_s: Seconds for which the training paused to write them, on the rank that paused
            longest.
        background_s: Seconds for which checkpoints were written while the training went on, on the
            rank that wrote longest.
    """

    count: int
    stood_s: float
    background_s: float


@dataclass(frozen=True)
class NotFinite:
    """The first loss in metrics.jsonl that is not finite.

    Attributes:
        name: The name of the loss, with the prefix ``val/`` if it is from an evaluation.
        value: ``nan``, ``inf`` or ``-inf``.
        at_s: When it was logged, in seconds since the start.
        step: The step for which it was logged; None if the line names no step.
    """

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
        own_share: The share of the step time in which ranks wait neither for data nor for slower
            ranks.
        efficiency_share: This run's throughput per rank divided by the throughput per rank of the
            run named with ``--baseline``; None without one.
        baseline: The name and the number of ranks of the run named with ``--baseline``; empty
            without one.
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
        interval_s: Seconds between two readings.
        seconds: How long the run lasted, or has lasted so far.
        first_step_s: When all ranks had made their first step; None if no step was made.
        steps: How many steps were made, by the rank that counted the most.
        readings: How many readings were taken since the first step, of the rank, node or GPU that
            has the most.
        launches: For each rank, when each phase of its launch began and ended.
        resumed: The step of the checkpoint that the run loaded; None if it loaded none.
        folder: The run's folder, which also holds its logs unless they have a folder of their own.
        moves: Sentences on lost nodes and on where their ranks went.
        loader_workers: How many processes of a rank read the training data; 0 if the rank itself
            reads it; None if unknown.
        options: The options of ``srunddp run``, by the names of their parameters.
        settings: The settings of ``Trainer``, in their groups.
        git_commit: The commit of the script's folder; empty if git does not manage the folder.
        versions: The versions of the installed packages that matter, and of Python.
        job_s: For how many seconds the Slurm job has been running, with all its job steps; None if
            unknown, or if Slurm was not asked.
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
        """The share of the step time in which a rank waits for data, on average over the ranks;
        None if it is unknown for all ranks.

        The tile, the note, the legend of the chart and ``--json`` all show this value.
        """
        known = [part for part in self.data_shares if part is not None]
        if known:
            return fmean(known)
        return None

    @property
    def data_shares(self) -> list[float | None]:
        """For each rank in :attr:`ranks`, the share of its step time in which it waits for data;
        None if unknown.
        """
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
        """The energy in joules of all GPUs whose energy is known; None if there is none."""
        known = [each.energy_j for each in self.gpus if each.energy_j is not None]
        return sum(known) if known else None


def median_or_none(values: list[float | None]) -> float | None:
    """Return the median of the known values; None if there are none. If their number is even, it is
    the lower of the two middle values.
    """
    # The mean of the two middle values would be a time that no rank has had.
    known = sorted(value for value in values if value is not None)
    return known[(len(known) - 1) // 2] if known else None


def share(part: float | None, whole: float | None) -> float | None:
    """Divide one figure by another; None if either is unknown or the divisor is practically 0."""
    if part is not None and whole is not None and whole > _LEAST:
        return part / whole
    return None
