"""What a run comes to: figures alone, of which the notes, the text and the page are made. None is
not known.

The names of the fields are the keys of ``--json``.
"""

from collections.abc import Mapping
from dataclasses import dataclass

_LEAST = 1e-9  # nothing that is measured is less, and what is divided by less has no end


@dataclass(frozen=True)
class RunEnd:
    """How the run ended.

    Attributes:
        codes: the exit code of each rank whose end was recorded.
        missing: the ranks whose end was not recorded.
        running: not all have ended, and the newest sample is from just now.
        last_s: seconds from the start to the newest line of any file.
        cause: of failure.json, where there is one.
    """

    codes: dict[int, int]
    missing: tuple[int, ...]
    running: bool
    last_s: float
    cause: str

    @property
    def finished(self) -> bool:
        """All ranks ended with 0."""
        return not self.missing and bool(self.codes) and not any(self.codes.values())


@dataclass(frozen=True)
class Span:
    """Something that lasted: an epoch, an evaluation, a checkpoint. ``end_s`` is None where that
    was not recorded.
    """

    number: int | None
    begin_s: float
    end_s: float | None


@dataclass(frozen=True)
class RankFigures:
    """Of one rank, from its first step on.

    Attributes:
        steps: all of them.
        step_s, own_s, data_s: a step's time on average, with waits, and with pauses too where only
            steps are counted; without the backward pass, in which a rank waits for the others; of
            it, waiting for data.
        steady_s, steady_work_s: as ``own_s``, and as that without ``data_s``; but what a quarter of
            the intervals is above, where that is less: one long stall makes no slow rank.
        steady_wait_share: the share of the step time that is waiting for data, but what a tenth of
            the intervals is above, where that is less.
        longest_s: of the steps.
        cpu_s: of its processes, since they began.
        rss_bytes: the highest of their resident set.
        delay_share: share of the time for which its processes' main threads waited for a CPU.
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
    """Traffic of one link from the first step on."""

    name: str
    kind: str
    chosen: bool
    received_bytes_per_s: float
    sent_bytes_per_s: float


@dataclass(frozen=True)
class NodeFigures:
    """Of one node.

    Attributes:
        samples: how many there are.
        cpus: that the job may use.
        used_cpus: how many it did on average, from the first step on.
        memory_bytes: the highest.
        memory_limit_bytes: the job's.
        read_bytes_per_s, written_bytes_per_s: of storage.
        iowait_cpus: waited for storage on average.
        interface: the chosen one.
        clock_s: seconds by which its clock was ahead of rank 0's node.
    """

    node: str
    samples: int
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
    """Of one GPU, on average from the first step on; memory and temperature the highest.

    Attributes:
        samples: how many those are.
        energy_j: over all samples.
        slowed_share: share of samples in which heat or the power brake kept its clock down.
    """

    node: str
    index: str
    name: str
    uuid: str
    samples: int
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
class Checkpoints:
    """``stood_s``: seconds for which training stood still; ``background_s``: of writing while it
    went on.
    """

    count: int
    stood_s: float
    background_s: float


@dataclass(frozen=True)
class NotFinite:
    """A loss that is no number, the first one; ``value`` is ``nan``, ``inf`` or ``-inf``."""

    name: str
    value: str
    at_s: float
    step: int | None


@dataclass(frozen=True)
class Throughput:
    """Samples of all ranks.

    Attributes:
        per_s: on average from the first step to the last.
        own_share: of the step time, what is neither waiting for data nor for slower ranks.
        efficiency_share: throughput per rank, over that of the baseline.
        baseline: which that is.
    """

    samples: float | None
    per_s: float | None
    own_share: float | None
    efficiency_share: float | None = None
    baseline: str = ""


@dataclass(frozen=True)
class Summary:
    """The whole run. Times are seconds since the start.

    Attributes:
        launches: begin and end of the phases of each rank's start, by rank and by name.
        folder: of the run, where its logs are unless they have another.
        moves: sentences on nodes that were lost, and on which others their ranks went on.
        job_s: for so long the job has lasted, with all its steps, where Slurm was asked.
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
    samples: int
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
    job_s: float | None = None

    @property
    def layout(self) -> dict[int, str]:
        """The node of each rank."""
        return {each.rank: each.node for each in self.ranks}

    @property
    def step_s(self) -> float | None:
        """A step's time, of the median rank."""
        return median_or_none([each.step_s for each in self.ranks])

    @property
    def data_share(self) -> float | None:
        """Of the step time, waiting for data: of the median rank."""
        return median_or_none([share(each.data_s, each.step_s) for each in self.ranks])

    @property
    def slowest_rank(self) -> int | None:
        """The rank with the most of its own in a step, where that is known of several."""
        known = {each.rank: each.own_s for each in self.ranks if each.own_s is not None}
        if len(known) > 1:
            return max(known, key=lambda rank: known[rank])
        return None

    @property
    def energy_j(self) -> float | None:
        """Of all GPUs of which it is known."""
        known = [each.energy_j for each in self.gpus if each.energy_j is not None]
        return sum(known) if known else None


def median_or_none(values: list[float | None]) -> float | None:
    """Return the median of the values that are known; of an even number the lower of two."""
    # Not the mean of the two in the middle, which would be a time that no rank has had.
    known = sorted(value for value in values if value is not None)
    return known[(len(known) - 1) // 2] if known else None


def share(part: float | None, whole: float | None) -> float | None:
    """Divide one figure by another; None where either is unknown, or there is nothing to share."""
    if part is not None and whole is not None and whole > _LEAST:
        return part / whole
    return None
