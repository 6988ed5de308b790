"""Makes the sections of the page that have charts, with a sentence on what could not be drawn."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from srunddp.errors import one_line
from srunddp.report import format
from srunddp.report.advice import DATA_WAIT, SLOWED, find_stragglers
from srunddp.report.axis import Points, Span, TimeAxis
from srunddp.report.charts import Chart, Lines
from srunddp.report.csv_files import TimeSeries
from srunddp.report.figure import Figure
from srunddp.report.run import DEFAULT_INTERVAL, NAMES, RunData
from srunddp.report.summary import Summary
from srunddp.util.hostlist import fold_ranks, group_by_key

_MIB = 2.0**-20
_GIB = 2.0**-30
# If a chart has at most this many series, each has its own line; more series share one band.
_MOST_LINES = 8  # series of GPUs, or of values that the training logged
_MOST_NODES = 4  # series of nodes
_MOST_FIGURES = 12  # the most charts of what the training logged
_MOST_NAMED = 4  # the most outliers that a title names
_FEW = 0.25  # if a larger share of GPUs than this differs, no GPU counts as an outlier
# How far from the median a GPU must be to stand out.
_LESS_USED = 10.0  # per cent
_HOTTER = 10.0  # °C
# The chart of CPUs that wait for storage is drawn if more than this wait on average on a node.
_WAITING_CPUS = 0.1


class _Gauge(NamedTuple):
    """A chart of one value of the GPUs.

    Attributes:
        title: The title of the chart.
        unit: The unit of the values in the chart.
        column: The column of the readings with the values.
        by: The factor that converts the values of the readings to ``unit``.
    """

    title: str
    unit: str
    column: str
    by: float = 1.0


_CLOCK = _Gauge("SM clock", "MHz", "sm_clock_mhz")  # drawn only if a GPU is throttled
_GAUGES = (
    _Gauge("GPU utilization", "%", "utilization_percent"),
    _Gauge("GPU memory", "GiB", "memory_bytes", _GIB),
    _Gauge("Memory bandwidth", "%", "memory_bandwidth_percent"),
    _Gauge("SM activity", "%", "sm_percent"),
    _Gauge("Tensor core activity", "%", "tensor_percent"),
    _Gauge("Power", "W", "power_w"),
    _Gauge("Temperature", "°C", "temperature_c"),
)


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        title: The heading.
        figures: The charts.
        missing: A sentence on what could not be drawn; empty if nothing is missing.
    """

    title: str
    figures: Sequence[Figure]
    missing: str = ""


def sections(run: RunData, summary: Summary) -> list[Section]:
    """Draw all charts of a run, in the order of the page."""
    # Long series were thinned to one point for each group of readings. Make the columns of the axis
    # span whole groups, so that every column has a point.
    group = max((math.ceil(each.count / len(each.time)) for each in run.series), default=1)
    epochs = [
        (each.begin_s, "" if each.number is None else str(each.number)) for each in summary.epochs
    ]
    interval = max(summary.interval_s or DEFAULT_INTERVAL, 1e-3) * group
    axis = TimeAxis(max(summary.seconds, 1.0), interval, epochs)
    found = [_time_line(run, summary, axis)]
    if run.metrics:
        found.append(_training(run, axis))
    found += [
        _gpus(run, summary, axis),
        _nodes(run, summary, axis),
        _steps(run, summary, axis),
        _launch(summary),
    ]
    return found


def _section(title: str, charts: Mapping[str, Figure | None]) -> Section:
    """Make a section from charts by name. A chart that is None could not be drawn; the section says
    the names of these.
    """
    unknown = [name for name, figure in charts.items() if not figure]
    missing = f"Not known: {', '.join(unknown)}." if unknown else ""
    return Section(title, [figure for figure in charts.values() if figure], missing)


def _alone(title: str, figure: Figure | None, missing: str) -> Section:
    """Make a section with one chart, or with a sentence on why there is none."""
    if figure:
        return Section(title, [figure])
    return Section(title, [], missing)


def _rates(samples: TimeSeries, name: str) -> list[tuple[float, float]]:
    """Return a counter's growth per second, at the middle of each interval."""
    return [((begin + end) / 2, grown / (end - begin)) for begin, end, grown in samples.steps(name)]


def _summed(series: Iterable[Points]) -> list[tuple[float, float]]:
    """Add up series with the same times. A series without any value is ignored; a time at which one
    of the other series has no value is left out.
    """
    every = [known for known in map(dict, series) if known]
    if not every:
        return []
    # Without a value of one series, the sum would show a drop that never happened.
    times = set.intersection(*map(set, every))
    return [(time, sum(each[time] for each in every)) for time in times]


def _time_line(run: RunData, summary: Summary, axis: TimeAxis) -> Section:
    step_times = (
        (f"rank {rank}", each.ratios("step_s", "steps")) for rank, each in run.steps.items()
    )
    waits = ((f"rank {rank}", each.ratios("data_s", "step_s")) for rank, each in run.steps.items())
    # The legends show the means of the summary, as the rest of the page does. The medians of the
    # drawn values would be different numbers for the same figure.
    throughput = Chart(
        "Throughput",
        axis,
        "samples/s",
        figure=_on_average(format.number(summary.throughput.per_s)),
    )
    step_time = Chart(
        "Step time",
        axis,
        "ms",
        1e3,
        figure=_on_average(format.duration(summary.step_s), " on the median rank"),
    )
    waiting = Chart(
        "Waiting for data",
        axis,
        "% of the step time",
        1e2,
        1e2 * DATA_WAIT,
        figure=_on_average(format.percent(summary.data_share)),
    )
    charts = {
        "throughput": throughput.panel([("all ranks", _throughput(run, summary))]),
        "step time": step_time.panel(step_times, 1, "ranks"),
        "waiting for data": waiting.panel(waits, 1, "ranks"),
    }
    pauses = Chart("Evaluations and checkpoints", axis).bars(
        _pauses(run, summary), ("evaluation", "checkpoint")
    )
    # A run without a pause is not a run whose pauses are unknown, so do not add None here.
    if pauses:
        charts["pauses"] = pauses
    return _section("Time line", charts)


def _on_average(figure: str, where: str = "") -> str:
    """Return the legend's text for a figure of the summary; empty if the figure is unknown."""
    if figure == format.UNKNOWN:
        return ""
    return f"{figure} on average{where}"


def _throughput(run: RunData, summary: Summary) -> list[tuple[float, float]]:
    """Return the samples per second, from the rank that counted the most samples."""
    counted = max(
        run.steps.values(), key=lambda each: each.total("samples") or 0.0, default=TimeSeries()
    )
    rates = _rates(counted, "samples")
    if not summary.ending.codes:
        return rates
    # The run has ended: leave out the intervals after the last step. If there are more than a few
    # intervals, also leave out the interval of the last step, because the steps fill only a part of
    # it and its rate would be too low.
    last = max((at for at, (_, value) in enumerate(rates) if value > 0), default=0)
    return rates[: last if last > 2 else last + 1]


def _pauses(run: RunData, summary: Summary) -> dict[str, list[tuple[str, Span]]]:
    """Return when the training paused, by ``evaluation`` and ``checkpoint``.

    The pauses for checkpoints are those of the rank that paused longest in total. One rank stands
    for all, because every rank takes part in a checkpoint.
    """
    stood = [
        ("evaluation", (each.begin_s, each.end_s or summary.seconds))
        for each in summary.evaluations
    ]
    saved = group_by_key(
        (mark.rank, mark) for mark in run.marks if mark.name == "checkpoint" and mark.value >= 0
    )
    longest = max(saved.values(), key=lambda marks: sum(mark.value for mark in marks), default=[])
    stood += [("checkpoint", (mark.time - mark.value, mark.time)) for mark in longest]
    return group_by_key((name, (name, span)) for name, span in stood)


def _training(run: RunData, axis: TimeAxis) -> Section:
    """Draw what the training logged; names that end alike (``loss``, ``val/loss``) share a
    chart.
    """
    kinds = group_by_key((name.rpartition("/")[2], name) for name in run.metrics)
    first = run.not_finite
    figures: list[Figure] = []
    left_out = 0
    for number, (kind, names) in enumerate(kinds.items()):
        if number >= _MOST_FIGURES:
            left_out += len(names)
            continue
        left_out += len(names[_MOST_LINES:])
        note = ""
        if first and first.name in names:
            note = f"; {first.value} first at {format.clock(first.at_s)}"
        title = kind[:1].upper() + kind[1:]
        lines = ((name, run.metrics[name]) for name in names[:_MOST_LINES])
        chart = Chart(title, axis, from_zero=False, joined=True, note=note)
        if figure := chart.panel(lines, _MOST_LINES):
            figures.append(figure)
    missing = f"Not drawn: {left_out} more of metrics.jsonl." if left_out else ""
    return Section("Training", figures, missing)


def _gpus(run: RunData, summary: Summary, axis: TimeAxis) -> Section:
    if not run.gpus:
        return Section("GPUs", [], "No GPU was monitored.")
    is_throttled = any((each.slowed_share or 0.0) > SLOWED for each in summary.gpus)
    charts = {}
    for gauge in (*_GAUGES, _CLOCK) if is_throttled else _GAUGES:
        charts[gauge.title] = _gauge(gauge, run, summary, axis)
    if len(run.gpus) > _MOST_LINES:
        charts |= _by_gpu(run, summary, axis)
    return _section("GPUs", charts)


def _gauge(gauge: _Gauge, run: RunData, summary: Summary, axis: TimeAxis) -> Figure | None:
    limit = 0.0
    if gauge.column == "memory_bytes":
        limit = gauge.by * max(each.memory_limit_bytes or 0.0 for each in summary.gpus)
    chart = Chart(
        gauge.title,
        axis,
        gauge.unit,
        gauge.by,
        most=100.0 if gauge.unit == "%" else 0.0,
        # 0 °C means nothing for a GPU: on an axis from 0, differences would be hard to see.
        from_zero=gauge.unit != "°C",
        limit=limit,
    )
    lines = (
        (f"{each.node} GPU {each.index or each.key}", each.samples.spread(gauge.column))
        for each in run.gpus
    )
    return chart.panel(lines, _MOST_LINES, "GPUs")


def _by_gpu(run: RunData, summary: Summary, axis: TimeAxis) -> dict[str, Figure | None]:
    """Draw heat maps of utilization and temperature, with outliers marked and named in the
    title.
    """
    names = [f"{each.node}:{each.index or each.key}" for each in run.gpus]
    least = _outliers(names, [each.utilization_percent for each in summary.gpus], -_LESS_USED)
    hottest = _outliers(names, [each.temperature_c for each in summary.gpus], _HOTTER)
    by_name = list(zip(names, run.gpus, strict=True))
    used = ((name, each.samples.known("utilization_percent")) for name, each in by_name)
    heat = ((name, each.samples.spread("temperature_c")) for name, each in by_name)
    by_use = Chart("Utilization by GPU", axis, "%", note=_named("least", least))
    by_heat = Chart("Highest temperature by GPU", axis, "°C", note=_named("hottest", hottest))
    return {
        by_use.title: by_use.heat_map(used, least, (100.0, 0.0)),
        by_heat.title: by_heat.heat_map(heat, hottest, (30.0, 90.0), highest=True),
    }


def _named(what: str, outliers: Sequence[str]) -> str:
    """Return the part of a title that names the outliers: ``; hottest: node01:2``."""
    if not outliers:
        return ""
    more = len(outliers) - _MOST_NAMED
    others = f" and {more} more" if more > 0 else ""
    return f"; {what}: {', '.join(outliers[:_MOST_NAMED])}{others}"


def _outliers(names: Sequence[str], values: Sequence[float | None], by: float) -> list[str]:
    """Return the names whose value is above the median by more than ``by``; if ``by`` is negative,
    the names whose value is below the median by more than its absolute value.

    The name with the farthest value comes first. If more than a quarter of the values are this far
    from the median, no name is returned.
    """
    known = {name: value for name, value in zip(names, values, strict=True) if value is not None}
    usual = median(known.values()) if known else 0.0
    distances = {name: (value - usual) / by for name, value in known.items()}
    # If ``by`` is negative, values below the median have positive distances: above 1 always means
    # far on the side that was asked for.
    far = [name for name, distance in distances.items() if distance > 1]
    if len(far) > _FEW * len(known):
        return []
    return sorted(far, key=lambda name: -distances[name])


def _nodes(run: RunData, summary: Summary, axis: TimeAxis) -> Section:
    usage = {node: run.usage[node] for node in run.nodes if node in run.usage}
    cpus = max((each.cpus or 0.0 for each in summary.per_node), default=0.0)
    memory = _GIB * max((each.memory_limit_bytes or 0.0 for each in summary.per_node), default=0.0)

    def rates(*columns: str) -> Iterator[tuple[str, Points]]:
        for node, samples in usage.items():
            yield node, _summed(_rates(samples, column) for column in columns)

    charts: dict[str, Figure | None] = {}

    def draw(chart: Chart, lines: Lines) -> None:
        charts[chart.title] = chart.panel(lines, _MOST_NODES, "nodes")

    draw(Chart("CPUs in use", axis, limit=cpus), rates("cpu_s"))
    if any((each.iowait_cpus or 0.0) > _WAITING_CPUS for each in summary.per_node):
        draw(Chart("CPUs waiting for storage", axis), rates("iowait_s"))
    gauges = ((node, each.spread("memory_bytes")) for node, each in usage.items())
    draw(Chart("Memory of the job", axis, "GiB", _GIB, limit=memory), gauges)
    draw(Chart("Network, received and sent", axis, "MiB/s", _MIB), _traffic(run))
    storage = rates("read_bytes", "written_bytes")
    draw(Chart("Storage, read and written", axis, "MiB/s", _MIB), storage)
    return _section("Nodes", charts)


def _traffic(run: RunData) -> Iterator[tuple[str, Points]]:
    """Yield for each node the bytes per second that it received and sent, together, over the chosen
    links and over RDMA.
    """
    carrying = group_by_key(
        (each.node, each.samples)
        for each in run.links
        if each.text("chosen") == "1" or each.text("kind") == "rdma"
    )
    for node, links in carrying.items():
        ways = [_rates(link, way) for link in links for way in ("received_bytes", "sent_bytes")]
        yield node, _summed(ways)


def _steps(run: RunData, summary: Summary, axis: TimeAxis) -> Section:
    """Draw each rank's own time per step; if that is unknown, its step time."""
    if any(each.own_s is not None for each in summary.ranks):
        title = "Own time per step, all but the backward pass"
        part = "own_s"
    else:
        title = "Step time"
        part = "step_s"
    rows = ((str(rank), each.ratios(part, "steps")) for rank, each in run.steps.items())
    slow = find_stragglers(summary).ranks
    note = f"; slow: {one_line(fold_ranks(slow, summary.layout))}" if slow else ""
    figure = Chart(title, axis, "ms", 1e3, note=note).heat_map(rows, [str(rank) for rank in slow])
    why = "Steps were counted, but not timed" if summary.steps else "No steps were counted"
    return _alone("Step time by rank", figure, f"{why}, so that there is no chart of them.")


def _launch(summary: Summary) -> Section:
    rows = {str(rank): list(phases.items()) for rank, phases in summary.launches.items()}
    ends = [end for phases in summary.launches.values() for _, end in phases.values()]
    # Give this chart a separate axis, because the few seconds of a launch would not be visible on
    # the axis of a run of hours.
    axis = TimeAxis(max([*ends, 1e-3]) if ends else 1.0)
    figure = Chart("Launch phases by rank", axis).bars(rows, NAMES)
    return _alone("Launch", figure, "No phases of the start were marked.")
