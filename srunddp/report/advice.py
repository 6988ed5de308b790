"""The notes: what to change next. Each is a rule with its threshold; what another note explains is
none of its own.
"""

from __future__ import annotations

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

GPU_IDLE = 15.0  # percent of the time in which a kernel ran, as jobstats has it
DATA_WAIT = 0.10  # of the step time
CPUS_USED = 0.95  # of the CPUs of the job on a node
CPU_WAIT = 0.20  # of the time, by the main threads
OTHER_LINK = 5.0  # times what the chosen one carries
OTHER_LINK_RATE = 2.0**20  # bytes per second
# Of what goes one way goes the other way at least: what answers a file server is less.
_BALANCED = 0.1
SLOWED = 0.05  # of the samples
# Below these a run is too short for notes: its first steps and samples are unlike the others.
FEWEST_SAMPLES = 5
FEWEST_STEPS = 10
_MOSTLY = 0.5  # of the time
_BY_DATA = 0.5  # of what a slow rank has more than the others
# Of what was requested of Slurm.
TIME_USED = 0.40  # of the limit, as jobstats has it
TIME_SAVED = 1800.0  # seconds
MEMORY_USED = 0.50  # of the limit
MEMORY_UNUSED = 4 * 2.0**30  # bytes


@dataclass(frozen=True)
class Advice:
    """One finding.

    Attributes:
        rule: its name.
        found, threshold: the figure with what it is of, and the limit that it passes, or nothing.
        hint: the next thing to change.
        cost: the share of the step time that is lost by it, where that is known.
        severity: ``failed``, ``lost`` for time that is lost, or ``unused`` for what was requested
            and not used.
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
        A loss that is no finite number first, as the steps after it may be in vain. Then the notes
        that cost most; of the others causes before consequences, and unused requests last.
    """
    diverged = tuple(filter(None, [_not_finite(summary)]))
    if too_short(summary):
        return diverged
    busy = _oversubscribed(summary)
    stragglers = find_stragglers(summary)
    slowed = [
        each
        for each in summary.gpus
        if each.samples >= FEWEST_SAMPLES and (each.slowed_share or 0.0) > SLOWED
    ]
    # Ranks on these nodes are slow because of the CPUs or the heat: a note on the ranks as well
    # would send the reader after a second cause.
    explained = {each.node for each in busy} | {each.node for each in slowed}
    are_explained = explained.issuperset(stragglers.nodes)
    # The loader's workers wait for the same CPUs: more of them, as that note would advise, make it
    # worse.
    waiting = None if busy else _data_wait(summary, stragglers)
    found = [
        _cpu(summary, busy),
        # Where the slow ranks have no note of their own, this one says what they cost.
        _throttled(slowed, stragglers if are_explained else Stragglers()),
        None if are_explained else _slow_rank(summary, stragglers),
        waiting,
        _gpu(summary, explained=bool(waiting or busy or stragglers.ranks)),
        _interface(summary),
        _time_limit(summary),
        _memory(summary),
    ]
    # sorted() is stable: notes without a cost keep the order of the list above.
    return diverged + tuple(sorted(filter(None, found), key=lambda note: -(note.cost or 0.0)))


def too_short(summary: Summary) -> str:
    """Say why nothing is concluded from so short a run; empty where there is enough."""
    if summary.steps and summary.steps < FEWEST_STEPS:
        return (
            f"{format.count(summary.steps, 'step')} only: below {FEWEST_STEPS} nothing is concluded"
        )
    if summary.samples < FEWEST_SAMPLES:
        return (
            f"{format.count(summary.samples, 'sample')} only: below {FEWEST_SAMPLES} nothing is"
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


def _oversubscribed(summary: Summary) -> list[NodeFigures]:
    """The nodes on which the job uses all its CPUs, and has to wait for them."""
    delays = group_by_key((each.node, each.delay_share) for each in summary.ranks)
    waiting = {
        node for node, values in delays.items() if (median_or_none(values) or 0.0) > CPU_WAIT
    }
    # CPUs that are all used are a good sign unless the processes have to wait for them.
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
    """With what the slow ranks on these nodes cost, which are no note of their own."""
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
        f" samples{heat}{f'; {_excess(stragglers)}' if slow else ''}",
        f"above {format.percent(SLOWED)}",
        "tell the site, and leave the node out until then: srunddp sbatch --exclude="
        f"{format.nodes(each.node for each in slowed)}",
        stragglers.share if slow else None,
    )


def devices(gpus: list[GpuFigures]) -> str:
    """Name GPUs in a few words: ``GPU 2 on node01``, or of more than two their number."""
    if len(gpus) > 2:
        return f"{len(gpus)} GPUs on {format.nodes(dict.fromkeys(each.node for each in gpus))}"
    return ", ".join(f"GPU {one_line(each.index)} on {format.nodes([each.node])}" for each in gpus)


def _slow_rank(summary: Summary, stragglers: Stragglers) -> Advice:
    node = format.nodes(stragglers.nodes)
    them = "their" if len(stragglers.ranks) > 1 else "its"
    by_data = stragglers.by_data > _BY_DATA
    if by_data:
        why = f"{them} wait for data"
    else:
        why = f"{them} own work, not the wait for data"
    hint = (
        f"look at the storage as {node} sees it, and at what {them} part of the data has that"
        " others have not"
    )
    if not by_data:
        alone = "see what rank 0 alone does in each step, such as writing in a callback; "
        if len(summary.nodes) > 1:
            leave = f", and leave it out: --exclude={node}"
        else:
            leave = ""
        hint = f"{alone if stragglers.ranks == (0,) else ''}see what else runs on {node}{leave}"
    return Advice(
        "slow rank",
        f"{_excess(stragglers)}; it is {why}",
        f"above {format.percent(DATA_WAIT)}",
        hint,
        stragglers.share,
    )


def _excess(stragglers: Stragglers) -> str:
    several = len(stragglers.ranks) > 1
    who = f"rank{'s' * several} {ranges(stragglers.ranks)} on {format.nodes(stragglers.nodes)}"
    return (
        f"{who}: {format.duration(stragglers.excess)} more of {'their' if several else 'its'} own"
        f" in each step than the others, {format.percent(stragglers.share)} of the step time"
    )


def _data_wait(summary: Summary, stragglers: Stragglers) -> Advice | None:
    others = [each for each in summary.ranks if each.rank not in stragglers.ranks]
    figure = _usual([share(each.data_s, each.step_s) for each in others])
    if min(figure, _usual([each.steady_wait_share for each in others])) <= DATA_WAIT:
        return None
    found = f"{format.percent(figure)} of the step time is waiting for data"
    hint = (
        "more --dataloader.num_workers, with as many --cpus-per-task; else data on faster storage"
    )
    return Advice("data wait", found, f"above {format.percent(DATA_WAIT)}", hint, figure)


def _usual(shares: list[float | None]) -> float:
    """The mean or the median, whichever is more."""
    known = [each for each in shares if each is not None]
    return max(median_or_none(shares) or 0.0, fmean(known)) if known else 0.0


def _gpu(summary: Summary, *, explained: bool) -> Advice | None:
    if summary.first_step_s is None:
        return None
    known = [
        each
        for each in summary.gpus
        if each.utilization_percent is not None and each.samples >= FEWEST_SAMPLES
    ]
    idle = [each for each in known if (each.utilization_percent or 0.0) < GPU_IDLE]
    if not idle or (explained and len(idle) == len(known)):
        return None
    mean = fmean(each.utilization_percent or 0.0 for each in idle)
    # The part of the time that the steps of the median rank fill. The rest is evaluations,
    # checkpoints and the end of the run.
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
    return Advice("gpu idle", found, f"below {GPU_IDLE:.0f} %", hint)


def _interface(summary: Summary) -> Advice | None:
    # On one node the ranks talk over NVLink, shared memory or loopback: whatever the network
    # carries is other traffic.
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
    """The link that carries the training instead of the chosen one."""
    # Without the samples of the chosen link there is nothing to compare with.
    if not any(each.chosen for each in node.links):
        return None
    worst = max(
        # NCCL uses the chosen interface to set up, and sends the data over RDMA where it can.
        (each for each in node.links if not each.chosen and each.kind != "rdma"),
        key=_both_ways,
        default=None,
    )
    # With the factor alone any background traffic would count where the chosen link carries
    # nothing.
    limit = max(OTHER_LINK_RATE, OTHER_LINK * carried(node))
    if worst and _both_ways(worst) > limit:
        return worst
    return None


def _both_ways(link: LinkFigures) -> float:
    """What goes both ways: an all-reduce sends as much as it receives, and reading data from a
    server does not.
    """
    less, more = sorted([link.received_bytes_per_s, link.sent_bytes_per_s])
    return 2 * less if less >= _BALANCED * more else 0.0


def carried(node: NodeFigures) -> float:
    """Add up the bytes per second of the training on a node: of the chosen link, and of RDMA."""
    links = [each for each in node.links if each.chosen or each.kind == "rdma"]
    return sum(each.received_bytes_per_s + each.sent_bytes_per_s for each in links)


def _time_limit(summary: Summary) -> Advice | None:
    """More time than the whole run took."""
    limit = summary.time_limit_s
    used = max(summary.seconds, summary.job_s or 0.0)
    # The rest of a run that went on from a checkpoint is no measure for the whole, nor one step of
    # a job of several.
    part_of_it = bool(summary.restarts) or summary.resumed is not None
    # Where Slurm could not be asked, a later step tells that the job has done more than this run.
    part_of_it |= summary.job_s is None and summary.step not in ("", "0")
    if (
        not limit
        or not summary.ending.finished
        or part_of_it
        or limit - used < TIME_SAVED
        or used >= TIME_USED * limit
    ):
        return None
    # Half as much again as was used, rounded up to ten minutes.
    minutes = max(10, -(-int(used * 1.5) // 600) * 10)
    found = (
        f"{format.duration(used)} of {format.duration(limit)} used, {format.percent(used / limit)}"
    )
    hint = f"--time={minutes // 60}:{minutes % 60:02}:00: jobs with a shorter limit start earlier"
    return Advice(
        "time limit", found, f"below {format.percent(TIME_USED)}", hint, severity="unused"
    )


def _memory(summary: Summary) -> Advice | None:
    """More memory on a node than was used on any."""
    known = [each for each in summary.per_node if each.memory_bytes and each.memory_limit_bytes]
    # What was killed for its memory may have needed all of it, between two samples.
    if not known or not summary.steps or not summary.ending.finished:
        return None
    worst = max(known, key=lambda each: each.memory_bytes or 0.0)
    peak = worst.memory_bytes or 0.0
    limit = worst.memory_limit_bytes or 0.0
    if peak >= MEMORY_USED * limit or limit - peak < MEMORY_UNUSED:
        return None
    where = format.nodes([worst.node])
    # A quarter more than was used, rounded up to a GiB.
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
        ranks: those; none for no outlier. nodes: theirs.
        excess: seconds in each step by which the slowest is above the others.
        share: of the step time.
        by_data: the share of it that is waiting for data.
    """

    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    excess: float = 0.0
    share: float = 0.0
    by_data: float = 0.0


def find_stragglers(summary: Summary) -> Stragglers:
    """Find ranks whose own time per step is far above the others'.

    Far is more than ``DATA_WAIT`` of the step time above the median. The ranks count where they are
    few: a quarter of all, or not more than half and all on one node. Where all wait for data, that
    wait is left out of the comparison, as it varies.
    """
    all_wait = (summary.data_share or 0.0) > DATA_WAIT
    work = {each.rank: each.steady_work_s if all_wait else each.steady_s for each in summary.ranks}
    own = {rank: value for rank, value in work.items() if value is not None}
    if len(own) < 2 or not summary.step_s:
        return Stragglers()
    # Of an even number this is the lower of the two in the middle: of two ranks the slower one is
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
    # Above 0, as slow ranks are above the usual time: it may be divided by.
    excess = own[worst] - usual
    return Stragglers(
        tuple(slow), nodes, excess, share(excess, summary.step_s) or 0.0, more_data / excess
    )
