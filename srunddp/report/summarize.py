"""Computes the figures of a run from its readings and marks."""

import math
import time
from dataclasses import replace
from functools import partial

from srunddp.report.csv_files import TimeSeries
from srunddp.report.locate import start_of
from srunddp.report.run import Device, RunData, checkpoints, ending, launches, moves, spans
from srunddp.report.summary import (
    GpuFigures,
    LinkFigures,
    NodeFigures,
    RankFigures,
    Summary,
    Throughput,
    share,
)

# A rank is slow, or waits for data, only if it does so in more than this share of the intervals
# between readings. In fewer intervals it is a single stall, and not a property of the run.
_SLOW = 0.25
_WAITING = 0.1


def summary_of(run: RunData, now: float | None = None) -> Summary:
    """Compute all figures of a run.

    Args:
        run: The content of the run's files.
        now: The Unix time at which to tell whether the run is still running; None for the present.
    """
    begin, end = training(run)
    first = -math.inf if begin is None else begin
    last = math.inf if end is None else end
    end_of_run = ending(run, time.time() if now is None else now)
    ranks = tuple(_rank(run, rank, first, last) for rank in run.ranks)
    return Summary(
        name=run.text("run") or run.folder.parent.name,
        job=run.text("job"),
        step=run.text("step"),
        script=_script(run),
        launcher=run.text("launcher"),
        backend=run.text("backend"),
        nodes=run.nodes,
        world_size=int(run.number("world_size") or len(run.ranks)),
        restarts=int(run.number("restarts") or sum(start_of(run.folder) or ())),
        interval_s=run.number("seconds"),
        started_unix_s=run.start,
        seconds=max([end_of_run.last_s, *(mark.time for mark in run.marked("end").values())]),
        time_limit_s=run.number("time_limit_s"),
        ending=end_of_run,
        first_step_s=begin,
        steps=max((each.steps for each in ranks), default=0),
        readings=_reading_count(run, first),
        epochs=spans(run, "epoch", "epoch_end"),
        evaluations=spans(run, "evaluation", "evaluation_end"),
        checkpoints=checkpoints(run),
        launches=launches(run),
        ranks=ranks,
        per_node=tuple(_node(run, node, first, last) for node in run.nodes),
        gpus=tuple(_gpu(gpu, first, last) for gpu in run.gpus),
        throughput=_throughput(run, ranks, first, last),
        resumed=next(
            (int(mark.value) for mark in run.marks if mark.name == "resumed" and mark.value >= 0),
            None,
        ),
        folder=str(run.folder.parent),
        moves=tuple(moves(run)),
        not_finite=run.not_finite,
        gpu_faults=tuple(run.gpu_faults),
        loader_workers=_loader_workers(run),
        options=run.table("options"),
        settings=run.settings,
        git_commit=run.text("git_commit"),
        versions={name: str(version) for name, version in run.table("versions").items()},
    )


def _script(run: RunData) -> str:
    """Return the script and its arguments; empty if run.json does not have them."""
    words = run.header.get("script")
    if isinstance(words, list):
        return " ".join(map(str, words))
    return ""


def with_baseline(summary: Summary, baseline: Summary) -> Summary:
    """Return the summary with its scaling efficiency: this run's throughput per rank divided by the
    throughput per rank of the baseline.
    """
    ours = share(summary.throughput.per_s, summary.world_size)
    theirs = share(baseline.throughput.per_s, baseline.world_size)
    ranks = f"{baseline.world_size} rank{'s' if baseline.world_size > 1 else ''}"
    found = replace(
        summary.throughput,
        efficiency_share=share(ours, theirs),
        baseline=f"{baseline.name} ({ranks})",
    )
    return replace(summary, throughput=found)


def training(run: RunData) -> tuple[float | None, float | None]:
    """Find when the training began and ended, in seconds since the start of the run.

    Returns:
        The time when every rank had made its first step; and the time at which the last step was
        counted, or at which that step's epoch ended if this was earlier. Both are None if no step
        was made.
    """
    marked = [mark.time for mark in run.marked("step").values()]
    counted = [
        next((time for time, count in each.known("steps") if count > 0), None)
        for each in run.steps.values()
    ]
    begins = marked or [each for each in counted if each is not None]
    if not begins:
        return None, None
    # Take the last rank's first step, because the other ranks wait for it.
    begin = max(begins)
    grown = [
        (stop, start)
        for each in run.steps.values()
        for start, stop, steps in each.steps("steps")
        if steps > 0
    ]
    stop, start = max(grown, default=(begin, begin))
    # Steps are counted at the end of an interval of a few seconds. If an epoch ended within the
    # interval of the last step, the end of the epoch is closer to this step than the end of the
    # interval.
    over = max((mark.time for mark in run.marks if mark.name == "epoch_end"), default=stop)
    return begin, max(begin, over if start <= over < stop else stop)


def _rank(run: RunData, rank: int, first: float, last: float) -> RankFigures:
    steps = run.steps.get(rank, TimeSeries())
    task = run.tasks.get(rank, TimeSeries())
    since = _since(steps, "steps", first, last)
    step_s = share(_since(steps, "step_s", first, last), since)
    own_s = share(_since(steps, "own_s", first, last), since)
    data_s = share(_since(steps, "data_s", first, last), since)
    # A script that does not use Trainer and only calls heartbeat() has steps without times.
    if step_s is None:
        steps_per_second = steps.rate("steps", first, last)
        step_s = 1 / steps_per_second if steps_per_second else None
    waits = dict(steps.ratios("data_s", "steps", first, last))
    own = dict(steps.ratios("own_s", "steps", first, last))
    work = [value - waits.get(time, 0.0) for time, value in own.items()]
    parts = [part for _, part in steps.ratios("data_s", "step_s", first, last)]
    # Subtract one process, the supervisor, because it only waits.
    processes = max(1.0, (task.mean("processes", first, last) or 2.0) - 1.0)
    return RankFigures(
        rank=rank,
        node=run.ranks[rank],
        steps=int(steps.total("steps") or 0),
        step_s=step_s,
        own_s=own_s,
        data_s=data_s,
        steady_s=_steady(own_s, list(own.values()), _SLOW),
        steady_work_s=_steady(None if own_s is None else own_s - (data_s or 0.0), work, _SLOW),
        steady_wait_share=_steady(share(data_s, step_s), parts, _WAITING),
        longest_s=steps.most("longest_step_s"),
        cpu_s=task.total("cpu_s"),
        rss_bytes=task.most("rss_bytes"),
        delay_share=share(task.rate("delay_s", first, last), processes),
    )


def _steady(mean: float | None, values: list[float], above: float) -> float | None:
    """Return the lower of the mean and the value that a share ``above`` of the values exceeds; the
    mean itself if there are no values or the mean is unknown.
    """
    if mean is None or not values:
        return mean
    return min(mean, sorted(values)[int((1 - above) * len(values))])


def _since(samples: TimeSeries, name: str, first: float, last: float) -> float | None:
    """Return how much a counter of a rank grew from the time ``first`` to the time ``last``.

    If no steps were counted between these times, as in a very short run, return the counter's total
    instead.
    """
    if samples.growth("steps", first, last):
        return samples.growth(name, first, last)
    return samples.total(name)


def _node(run: RunData, node: str, first: float, last: float) -> NodeFigures:
    usage = run.usage.get(node, TimeSeries())
    return NodeFigures(
        node=node,
        readings=usage.count,
        cpus=usage.most("cpus"),
        used_cpus=usage.rate("cpu_s", first, last),
        memory_bytes=usage.most("memory_bytes"),
        memory_limit_bytes=usage.most("memory_limit_bytes"),
        read_bytes_per_s=usage.rate("read_bytes"),
        written_bytes_per_s=usage.rate("written_bytes"),
        iowait_cpus=usage.rate("iowait_s", first, last),
        interface=usage.texts.get("interface", ""),
        links=tuple(_link(each, first, last) for each in run.links if each.node == node),
        clock_s=run.shifts.get(node, 0.0),
    )


def _link(link: Device, first: float, last: float) -> LinkFigures:
    received = link.samples.rate("received_bytes", first, last) or 0.0
    sent = link.samples.rate("sent_bytes", first, last) or 0.0
    return LinkFigures(link.key, link.text("kind"), link.text("chosen") == "1", received, sent)


def _gpu(gpu: Device, first: float, last: float) -> GpuFigures:
    samples = gpu.samples
    mean = partial(gpu.samples.mean, begin=first, end=last)
    return GpuFigures(
        node=gpu.node,
        index=gpu.index,
        name=gpu.text("name"),
        uuid=gpu.key,
        readings=sum(first <= time <= last for time in samples.time),
        utilization_percent=mean("utilization_percent"),
        bandwidth_percent=mean("memory_bandwidth_percent"),
        power_w=mean("power_w"),
        energy_j=samples.growth("energy_j"),
        temperature_c=samples.most("temperature_c"),
        memory_bytes=samples.most("memory_bytes"),
        memory_limit_bytes=samples.most("memory_limit_bytes"),
        sm_percent=mean("sm_percent"),
        tensor_percent=mean("tensor_percent"),
        slowed_share=mean("throttled"),
    )


def _loader_workers(run: RunData) -> int | None:
    """Return how many processes of a rank read the training data; the highest number if the ranks
    differ, and None if no rank recorded its number.
    """
    known = [mark.value for mark in run.marked("fit").values() if mark.value >= 0]
    if known:
        return int(max(known))
    return None


def _reading_count(run: RunData, first: float) -> int:
    """Return how many readings were taken since the first step, in the series that has the most."""
    series = [*run.steps.values(), *run.usage.values(), *(gpu.samples for gpu in run.gpus)]
    return max((sum(time >= first for time in each.time) for each in series), default=0)


def _throughput(
    run: RunData, ranks: tuple[RankFigures, ...], first: float, last: float
) -> Throughput:
    samples = max(
        run.steps.values(), key=lambda each: each.total("samples") or 0.0, default=TimeSeries()
    )
    count = samples.total("samples")
    # In a short run, perhaps no whole interval lies between the first and the last step: then take
    # all intervals after the first step.
    rate = samples.rate("samples", first, last) or samples.rate("samples", first)
    return Throughput(count or None, rate if count else None, _own_share(ranks))


def _own_share(ranks: tuple[RankFigures, ...]) -> float | None:
    """Return the share of the step time in which ranks wait neither for data nor for slower ranks;
    None if the times are unknown.
    """
    times = ((each.own_s, each.data_s, each.step_s) for each in ranks)
    known = [
        (own, data, step)
        for own, data, step in times
        if own is not None and data is not None and step
    ]
    if not known:
        return None
    # The slowest rank sets the pace: each rank waits for its own data, and then for the extra time
    # that the slowest rank needs.
    most = max(own for own, _, _ in known)
    return max(0.0, 1.0 - sum((data + most - own) / step for own, data, step in known) / len(known))
