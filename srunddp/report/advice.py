"""Makes the notes of a report, which say what to change next. Each note comes from a rule with a
threshold. A problem that another note explains gets no note of its own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import fmean

from srunddp.errors import one_line
from srunddp.report import format
from srunddp.report.summary import (
    GpuFigures,
    LinkFigures,
    NodeFigures,
    Summary,
    median_or_none,
    share,
)
from srunddp.util.hostlist import group_by_key, ranges

GPU_IDLE = 15.0  # percent of the time in which a kernel ran; jobstats has the same limit
DATA_WAIT = 0.10  # as a share of the step time
CPUS_USED = 0.95  # as a share of the job's CPUs on a node
# As a share of the time of the main threads. Too many threads of a rank wait mostly for each other,
# and then its main thread waits for a CPU less than half as long as with too many processes.
CPU_WAIT = 0.10
# Seconds. To pass a batch from a loader worker to its rank takes some tenths of a millisecond. The
# fixed work per batch, whatever its size, takes about as long.
SHORT_STEP = 0.005
ROOM_FOR_A_WORKER = 0.5  # unused CPUs for each rank
OTHER_LINK = 5.0  # how many times the traffic of the chosen link
OTHER_LINK_RATE = 2.0**20  # bytes per second
# Training traffic is about equal in both directions. With less than this share in one direction,
# the traffic is something else, such as reading from a file server.
_BALANCED = 0.1
SLOWED = 0.05  # as a share of the readings
# A run with fewer readings or steps gets no notes, because the first ones are not typical.
FEWEST_READINGS = 5
FEWEST_STEPS = 10
_MOSTLY = 0.5  # of the time; with less in training steps, other phases are to blame
_BY_DATA = 0.5  # as a share of the extra time of a slow rank
# Shares of what was requested from Slurm, and absolute amounts below which nothing is said.
TIME_USED = 0.40  # as a share of the limit; jobstats has the same one
TIME_SAVED = 1800.0  # seconds
MEMORY_USED = 0.50  # as a share of the limit
MEMORY_UNUSED = 4 * 2.0**30  # bytes
# The last words of hints about GPUs whose use has not been shown by a run on a GPU yet.
UNTRIED = " (this note has not been tried on a GPU yet)"


@dataclass(frozen=True)
class Advice:
    """One note.

    Attributes:
        rule: The name of the rule.
        found: The figure, and the ranks, nodes or GPUs that it is about.
        threshold: The limit that the figure passes; may be empty.
        hint: What to change next.
        cost: The share of the step time that is lost; None if unknown.
        severity: ``failed``, ``lost`` for lost time, or ``unused`` for resources that were
            requested but not used.
    """

    rule: str
    found: str
    threshold: str
    hint: str
    cost: float | None = None
    severity: str = "lost"

    def __str__(self) -> str:
        return f"{self.rule}: {self.found}" + (
            f" (threshold: {self.threshold})" if self.threshold else ""
        )


def notes(summary: Summary) -> tuple[Advice, ...]:
    """Apply all rules to a run.

    Returns:
        The notes in order of importance. A loss that is not finite comes first, because all later
        steps may be useless, and then faults of GPUs. The notes with a known cost follow, highest
        first. Then come the others, causes before consequences, and unused requests last.
    """
    diverged = tuple(filter(None, [_not_finite(summary), *_gpu_faults(summary)]))
    if too_short(summary):
        return diverged
    busy = _oversubscribed(summary)
    stragglers = find_stragglers(summary)
    slowed = [
        each
        for each in summary.gpus
        if each.readings >= FEWEST_READINGS and (each.slowed_share or 0.0) > SLOWED
    ]
    # On these nodes the CPUs or the heat explain slow ranks. A note about the ranks would send the
    # reader after a second cause.
    explained = {each.node for each in busy} | {each.node for each in slowed}
    are_explained = explained.issuperset(stragglers.nodes)
    # The data loader's workers wait for the same CPUs. The note on data would advise more workers,
    # which would make things worse.
    waiting = None if busy else _data_wait(summary, stragglers)
    found = [
        _cpu(summary, busy),
        # If there is no note on slow ranks, the note on throttled GPUs says what they cost.
        _throttled(slowed, stragglers if are_explained else Stragglers()),
        None if are_explained else _slow_rank(summary, stragglers),
        waiting,
        _gpu(summary, explained=bool(waiting or busy or stragglers.ranks)),
        _interface(summary),
        _time_limit(summary),
        _memory(summary),
    ]
    # sorted() is stable: notes without a cost keep the order of the list.
    return diverged + tuple(sorted(filter(None, found), key=lambda note: -(note.cost or 0.0)))


def too_short(summary: Summary) -> str:
    """Return why the run is too short to conclude anything; empty if it is long enough."""
    if summary.steps and summary.steps < FEWEST_STEPS:
        return (
            f"{format.count(summary.steps, 'step')} only: below {FEWEST_STEPS} nothing is concluded"
        )
    if summary.readings < FEWEST_READINGS:
        return (
            f"{format.count(summary.readings, 'reading')} only: below {FEWEST_READINGS} nothing is"
            " concluded"
        )
    return ""


def _not_finite(summary: Summary) -> Advice | None:
    if (first := summary.not_finite) is None:
        return None
    if first.step is None:
        step = ""
    else:
        step = f"step {first.step:,}, "
    found = (
        f"{one_line(first.name)} is {first.value}, first at {step}{format.clock(first.at_s)} after"
        " the start"
    )
    hint = "a lower learning rate, --max_grad_norm=1, or --precision=bf16 instead of fp16"
    return Advice("not finite", found, "no finite number", hint)


def _gpu_faults(summary: Summary) -> list[Advice]:
    """Make one note for each GPU with faults. It has all of the GPU's faults, because one often
    explains another.
    """
    faults = group_by_key(((each.node, each.index, each.uuid), each) for each in summary.gpu_faults)
    found = []
    for (node, index, uuid), several in faults.items():
        kinds = {each.kind for each in several}
        said = "; ".join(dict.fromkeys(one_line(each.fault) for each in several))
        if "hardware" in kinds:
            hint = (
                "tell the site, and leave the node out until then: srunddp sbatch"
                f" {format.exclude([node])}"
            )
        elif "program" in kinds:
            hint = "most likely the program's own fault: compute-sanitizer may find where"
        else:
            hint = "tell the site: nvidia-smi -q shows memory errors, retired rows and clocks"
        where = f"GPU {one_line(index)} ({one_line(uuid) or 'UUID unknown'}) of {one_line(node)}"
        first = format.clock(min(each.at_s for each in several))
        found.append(
            Advice(
                "gpu fault",
                f"{where}: {said}, first at {first} after the start",
                "no fault",
                f"{hint}{UNTRIED}",
            )
        )
    return found


def _oversubscribed(summary: Summary) -> list[NodeFigures]:
    """Find the nodes on which the job uses all its CPUs and its processes wait for a CPU."""
    delays = group_by_key((each.node, each.delay_share) for each in summary.ranks)
    waiting = {
        node for node, values in delays.items() if (median_or_none(values) or 0.0) > CPU_WAIT
    }
    # It is good to use all CPUs, unless processes have to wait for them.
    return [each for each in summary.per_node if _used(each) >= CPUS_USED and each.node in waiting]


def _used(node: NodeFigures) -> float:
    return share(node.used_cpus, node.cpus) or 0.0


def _cpu(summary: Summary, busy: list[NodeFigures]) -> Advice | None:
    if not busy:
        return None
    worst = max(busy, key=_used)
    nodes = {each.node for each in busy}
    delay = median_or_none([each.delay_share for each in summary.ranks if each.node in nodes])
    return Advice(
        "cpu oversubscribed",
        f"{format.percent(_used(worst))} of {format.count(int(worst.cpus or 0), 'CPU')} used on"
        f" {format.nodes(nodes)}, and processes wait for a CPU for {format.percent(delay)} of the"
        " time",
        f"above {format.percent(CPUS_USED)} used and {format.percent(CPU_WAIT)} of the time"
        " waiting",
        "more --cpus-per-task, fewer --dataloader.num_workers, or fewer --num_threads",
        delay,
    )


def _throttled(slowed: list[GpuFigures], stragglers: Stragglers) -> Advice | None:
    """Make the note on throttled GPUs. If slow ranks on their nodes get no note of their own, this
    note gives their cost.
    """
    if not slowed:
        return None
    slow = any(each.node in stragglers.nodes for each in slowed)
    worst = max(slowed, key=lambda gpu: gpu.slowed_share or 0.0)
    if worst.temperature_c is not None:
        heat = f", {worst.temperature_c:.0f} °C at most"
    else:
        heat = ""
    return Advice(
        "gpu throttled",
        f"{devices(slowed)} throttled (thermal or power brake) for"
        f" {format.percent(worst.slowed_share)} of the"
        f" readings{heat}{f'; {_excess(stragglers)}' if slow else ''}",
        f"above {format.percent(SLOWED)}",
        "tell the site, and leave the node out until then: srunddp sbatch "
        f"{format.exclude(each.node for each in slowed)}{UNTRIED}",
        stragglers.share if slow else None,
    )


def devices(gpus: list[GpuFigures]) -> str:
    """Name up to two GPUs, as in ``GPU 2 on node01``; of more, say how many on which nodes."""
    if len(gpus) > 2:
        return f"{len(gpus)} GPUs on {format.nodes(dict.fromkeys(each.node for each in gpus))}"
    return ", ".join(f"GPU {one_line(each.index)} on {format.nodes([each.node])}" for each in gpus)


def slow_ranks(summary: Summary) -> str:
    """Describe the ranks that are slower than the others, for the log while the job runs.

    Returns:
        One line with what was measured: how much longer their own part of a step takes, and whether
        that is the wait for data. It names no reason; the notes of the report may do so. Empty if
        there are no such ranks, or if the run is too short to conclude anything.
    """
    if too_short(summary):
        return ""
    stragglers = find_stragglers(summary)
    return _slow_rank(summary, stragglers).found if stragglers.ranks else ""


def _slow_rank(summary: Summary, stragglers: Stragglers) -> Advice:
    node = format.nodes(stragglers.nodes)
    them = "their" if len(stragglers.ranks) > 1 else "its"
    by_data = stragglers.by_data > _BY_DATA
    if by_data:
        why = f"{them} wait for data"
    else:
        why = f"{them} own work, not the wait for data"
    hint = (
        f"see how fast {node} reads from the storage, and how {them} part of the data differs from"
        " that of others"
    )
    if not by_data:
        alone = "see what rank 0 alone does in each step, such as writing in a callback; "
        if len(summary.nodes) > 1:
            leave = f", and leave it out: {format.exclude(stragglers.nodes)}"
        else:
            leave = ""
        hint = f"{alone if stragglers.ranks == (0,) else ''}see what else runs on {node}{leave}"
    return Advice(
        "slow rank",
        f"{_excess(stragglers)}; the extra time is {why}",
        f"above {format.percent(DATA_WAIT)}",
        hint,
        stragglers.share,
    )


def _excess(stragglers: Stragglers) -> str:
    several = len(stragglers.ranks) > 1
    who = f"rank{'s' * several} {ranges(stragglers.ranks)} on {format.nodes(stragglers.nodes)}"
    return (
        f"{who}: {format.duration(stragglers.excess)} longer for {'their' if several else 'its'}"
        f" part of each step than the others, {format.percent(stragglers.share)} of the step time"
    )


def _data_wait(summary: Summary, stragglers: Stragglers) -> Advice | None:
    # Leave out slow ranks, because the note on slow ranks says whether they wait for data.
    others = [each for each in summary.ranks if each.rank not in stragglers.ranks]
    usual = _usual([share(each.data_s, each.step_s) for each in others])
    steady = _usual([each.steady_wait_share for each in others])
    figure = summary.data_share or 0.0
    # Compare the shown share with the threshold too. Otherwise a note could show a share below the
    # threshold.
    if min(figure, usual, steady) <= DATA_WAIT:
        return None
    found = f"{format.percent(figure)} of the step time is waiting for data"
    threshold = f"above {format.percent(DATA_WAIT)}"
    return Advice("data wait", found, threshold, _quicker_data(summary), figure)


def _quicker_data(summary: Summary) -> str:
    """Return the hint for a run whose ranks wait for data.

    What helps depends on the bottleneck of the loader. More workers help as long as there are
    unused CPUs, also if the workers wait for storage. On busy CPUs they would only take turns. If
    steps are very short, passing a batch from a worker to the rank takes longer than making it.
    """
    workers = summary.loader_workers
    if summary.step_s is not None and summary.step_s < SHORT_STEP:
        batch = f"a larger --batch_size: a step of {format.duration(summary.step_s)} is short"
        if workers == 0:
            return f"{batch} for what each batch costs whatever its size"
        return (
            f"{batch} for a batch's way from a loader worker; where the data is in memory,"
            " --dataloader.num_workers=0"
        )
    room = _room_for_workers(summary)
    if room is not None and room < ROOM_FOR_A_WORKER:
        return (
            "more --cpus-per-task, with as many --dataloader.num_workers more, as no CPU is left;"
            " or less work for each sample"
        )
    if workers is None or room is None:
        more = "more --dataloader.num_workers"
    else:
        # Suggest at least two workers, because one worker reads no faster than the rank itself
        # would; it only reads while the rank computes.
        wanted = max(2, workers + max(1, int(room)))
        more = f"--dataloader.num_workers={wanted} (now {workers})"
    return f"{more}; where that does not help, data on faster storage (srunddp stage)"


def _room_for_workers(summary: Summary) -> float | None:
    """Return how many CPUs are unused for each rank, on the node with the fewest; None if
    unknown.
    """
    ranks = Counter(summary.layout.values())
    unused = [
        max(0.0, node.cpus - node.used_cpus) / ranks[node.node]
        for node in summary.per_node
        if node.cpus is not None and node.used_cpus is not None and ranks[node.node]
    ]
    return min(unused, default=None)


def _usual(shares: list[float | None]) -> float:
    """Return the mean or the median of the known shares, whichever is higher; 0 if there
    are none.
    """
    known = [each for each in shares if each is not None]
    return max(median_or_none(shares) or 0.0, fmean(known)) if known else 0.0


def _gpu(summary: Summary, *, explained: bool) -> Advice | None:
    if summary.first_step_s is None:
        return None
    known = [
        each
        for each in summary.gpus
        if each.utilization_percent is not None and each.readings >= FEWEST_READINGS
    ]
    idle = [each for each in known if (each.utilization_percent or 0.0) < GPU_IDLE]
    if not idle or (explained and len(idle) == len(known)):
        return None
    mean = fmean(each.utilization_percent or 0.0 for each in idle)
    # The share of the time that is spent in training steps, by the median rank. The rest goes to
    # evaluations, checkpoints and the end of the run.
    training = (
        share((summary.step_s or 0.0) * summary.steps, summary.seconds - summary.first_step_s)
        or 1.0
    )
    hint = "as many ranks as GPUs, or fewer --gpus-per-node"
    if len(idle) == len(known):
        hint = "a larger --batch_size; where the model is too small for it, fewer --gpus-per-node"
        if training < _MOSTLY:
            part = format.percent(training)
            hint = (
                f"rarer or quicker evaluations and checkpoints: {part} of that time are training"
                " steps"
            )
    found = f"{devices(idle)} used for {mean:.1f} % of the time since the first step"
    return Advice("gpu idle", found, f"below {GPU_IDLE:.0f} %", f"{hint}{UNTRIED}")


def _interface(summary: Summary) -> Advice | None:
    # On one node the ranks talk over NVLink, shared memory or loopback, so the network carries only
    # other traffic.
    if len(summary.nodes) < 2:
        return None
    found = [(node, other) for node in summary.per_node if (other := _wrong_link(node)) is not None]
    if not found:
        return None
    node, other = max(found, key=lambda pair: _both_ways(pair[1]))
    chosen = ", ".join(each.name for each in node.links if each.chosen) or node.interface
    where = format.nodes(each.node for each, _ in found)
    return Advice(
        "wrong interface",
        f"{one_line(other.name)} carries {format.rate(_both_ways(other))} on {where}, and "
        f"{one_line(chosen)}, which was chosen, {format.rate(carried(node))}",
        f"above {OTHER_LINK:.0f} times as much",
        "name the right one in ifaces.conf (srunddp ifaces scan drafts one), and unset"
        " GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME in the script",
    )


def _wrong_link(node: NodeFigures) -> LinkFigures | None:
    """Find the link that seems to carry the training instead of the chosen one."""
    # Without readings of the chosen link there is nothing to compare with.
    if not any(each.chosen for each in node.links):
        return None
    worst = max(
        # Leave out RDMA: NCCL uses the chosen interface for its setup, and RDMA for data if it can.
        (each for each in node.links if not each.chosen and each.kind != "rdma"),
        key=_both_ways,
        default=None,
    )
    # Also require a lowest rate, because with the factor alone any background traffic would be
    # reported if the chosen link carries nothing.
    limit = max(OTHER_LINK_RATE, OTHER_LINK * carried(node))
    if worst and _both_ways(worst) > limit:
        return worst
    return None


def _both_ways(link: LinkFigures) -> float:
    """Return the bytes per second that a link carries equally in both directions.

    An all-reduce sends as much as it receives. Traffic mostly in one direction, such as reading
    from a file server, counts as 0.
    """
    less, more = sorted([link.received_bytes_per_s, link.sent_bytes_per_s])
    return 2 * less if less >= _BALANCED * more else 0.0


def carried(node: NodeFigures) -> float:
    """Sum up the bytes/s of the training on a node: those of the chosen link and of RDMA."""
    links = [each for each in node.links if each.chosen or each.kind == "rdma"]
    return sum(each.received_bytes_per_s + each.sent_bytes_per_s for each in links)


def _time_limit(summary: Summary) -> Advice | None:
    """Make a note if the time limit is far longer than the whole run."""
    limit = summary.time_limit_s
    used = max(summary.seconds, summary.job_s or 0.0)
    # If the run continued from a checkpoint, its time says nothing about the whole training. The
    # same holds for one of several steps of a job.
    part_of_it = bool(summary.restarts) or summary.resumed is not None
    # If Slurm was not asked, a step number above 0 shows that the job has done more than this run.
    part_of_it |= summary.job_s is None and summary.step not in ("", "0")
    if (
        not limit
        or not summary.ending.finished
        or part_of_it
        or limit - used < TIME_SAVED
        or used >= TIME_USED * limit
    ):
        return None
    # Suggest one and a half times the time used, rounded up to ten minutes.
    minutes = max(10, -(-int(used * 1.5) // 600) * 10)
    found = (
        f"{format.duration(used)} of {format.duration(limit)} used, {format.percent(used / limit)}"
    )
    hint = f"--time={minutes // 60}:{minutes % 60:02}:00: jobs with a shorter limit start earlier"
    return Advice(
        "time limit", found, f"below {format.percent(TIME_USED)}", hint, severity="unused"
    )


def _memory(summary: Summary) -> Advice | None:
    """Make a note if the memory request is far above the highest use on any node."""
    known = [each for each in summary.per_node if each.memory_bytes and each.memory_limit_bytes]
    # Judge only finished runs, because a run that was killed for its memory may have needed all of
    # it between two readings.
    if not known or not summary.steps or not summary.ending.finished:
        return None
    worst = max(known, key=lambda each: each.memory_bytes or 0.0)
    peak = worst.memory_bytes or 0.0
    limit = worst.memory_limit_bytes or 0.0
    if peak >= MEMORY_USED * limit or limit - peak < MEMORY_UNUSED:
        return None
    where = format.nodes([worst.node])
    # Suggest a quarter more than was used, rounded up to a GiB.
    hint = f"--mem={max(1, -(-int(peak * 1.25) // 2**30))}G"
    found = (
        f"{format.size(peak)} of {format.size(limit)} used at most, on {where},"
        f" {format.percent(peak / limit)}"
    )
    return Advice(
        "memory unused", found, f"below {format.percent(MEMORY_USED)}", hint, severity="unused"
    )


@dataclass(frozen=True)
class Stragglers:
    """Ranks that are slower than the others.

    Attributes:
        ranks: The slow ranks; empty if there are none.
        nodes: Their nodes.
        excess: Seconds per step that the slowest rank takes longer than the median rank.
        share: The excess as a share of the step time.
        by_data: The share of the excess that was spent waiting for data.
    """

    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    excess: float = 0.0
    share: float = 0.0
    by_data: float = 0.0


def find_stragglers(summary: Summary) -> Stragglers:
    """Find the ranks whose own time per step is far above that of the others.

    Far means above the median by more than ``DATA_WAIT`` of the step time. The slow ranks must be
    few: a single one, at most a quarter of all, or at most half if they are all on one node. If
    the median rank waits for data for more than ``DATA_WAIT`` of the step time, the wait is left
    out of the comparison, because it varies.
    """
    # Use the median, because a single rank that waits for data does not change it.
    all_wait = (median_or_none(summary.data_shares) or 0.0) > DATA_WAIT
    work = {each.rank: each.steady_work_s if all_wait else each.steady_s for each in summary.ranks}
    own = {rank: value for rank, value in work.items() if value is not None}
    if len(own) < 2 or not summary.step_s:
        return Stragglers()
    # For an even number this is the lower of the two middle values: of two ranks, the slower is
    # compared with the faster.
    usual = median_or_none(list(own.values())) or 0.0
    slow = [rank for rank, value in own.items() if value - usual > DATA_WAIT * summary.step_s]
    nodes = tuple(dict.fromkeys(summary.layout[rank] for rank in slow))
    few = len(slow) <= max(1, len(own) // 4) or (len(nodes) == 1 and 2 * len(slow) <= len(own))
    if not slow or not few:
        return Stragglers()
    worst = max(slow, key=lambda rank: own[rank])
    waits = {each.rank: each.data_s for each in summary.ranks if each.data_s is not None}
    of_others = [wait for rank, wait in waits.items() if rank not in slow]
    if all_wait:
        more_data = 0.0
    else:
        more_data = waits.get(worst, 0.0) - (fmean(of_others) if of_others else 0.0)
    # Always above 0, because a slow rank takes longer than usual, so dividing by it is safe.
    excess = own[worst] - usual
    return Stragglers(
        tuple(slow), nodes, excess, share(excess, summary.step_s) or 0.0, more_data / excess
    )
