"""The sections of the report page that have charts: what of a run is drawn, and what of it is missing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from srunddp.errors import one_line
from srunddp.report.advice import DATA_WAIT, find_stragglers
from srunddp.report.columns import Points, Span, TimeAxis
from srunddp.report.csv_files import TimeSeries
from srunddp.report.run import NAMES, RunData
from srunddp.report.summary import Summary
from srunddp.report.svg import Chart
from srunddp.util.hostlist import fold_ranks, group_by_key

_MIB, _GIB = 2.0**-20, 2.0**-30
_MOST_GPUS, _MOST_NODES = 8, 4  # with a line each; of more there is one band
_MOST_FIGURES = 12  # charts of what the training logged
_MOST_NAMED, _FEW = 4, 0.25  # outliers that a title names; where they are more than a quarter none stands out
_LESS_USED, _HOTTER = 10.0, 10.0  # per cent and °C: a GPU stands out that is so far from the median
_WAITING_CPUS = 0.1
_ON_GPUS = (  # title, unit, column and factor
    ("GPU utilization", "%", "utilization_percent", 1.0),
    ("GPU memory", "GiB", "memory_bytes", _GIB),
    ("Memory bandwidth", "%", "memory_bandwidth_percent", 1.0),
    ("SM activity", "%", "sm_percent", 1.0),
    ("Tensor core activity", "%", "tensor_percent", 1.0),
    ("Power", "W", "power_w", 1.0),
    ("Temperature", "°C", "temperature_c", 1.0),
)
_Lines = Mapping[str, Points]


@dataclass(frozen=True)
class Section:
    """A part of the page: its charts as HTML, and a sentence about what could not be drawn."""

    title: str
    html: str
    missing: str = ""


def sections(run: RunData, summary: Summary) -> list[Section]:
    """All of them, in the order of the page."""
    # A long series was thinned: a column of the axis holds whole groups of its samples.
    group = max((-(-each.count // len(each.time)) for each in run.series), default=1)
    epochs = [(each.begin, "" if each.number is None else str(each.number)) for each in summary.epochs]
    axis = TimeAxis(max(summary.seconds, 1.0), max(summary.interval_s or 5.0, 1e-3) * group, epochs)
    return [
        _time_line(run, summary, axis),
        _training(run, axis),
        _gpus(run, summary, axis),
        _nodes(run, summary, axis),
        _steps(run, summary, axis),
        _launch(summary),
    ]


def _section(title: str, charts: Mapping[str, str], none: str = "") -> Section:
    """A section with its charts; those that are empty are named, or ``none`` is said where all are."""
    missing = [name for name, html in charts.items() if not html]
    said = f"Not known: {', '.join(missing)}." if missing else ""
    return Section(title, "".join(charts.values()), none if none and len(missing) == len(charts) else said)


def _chart(chart: Chart, lines: _Lines, most: int, what: str) -> str:
    """A line for each of a few series; of more than ``most`` one band."""
    known = {name: points for name, points in ((name, list(points)) for name, points in lines.items()) if points}
    if len(known) > most:
        chart.add(f"median of {len(known)} {what} (range)", chart.axis.ranges(known.values()))
    else:
        for name, points in known.items():
            chart.add(name, chart.axis.ranges([points]))
    return chart.html()


def _scaled(points: Points, by: float) -> list[tuple[float, float]]:
    return [(time, value * by) for time, value in points]


def _rates(samples: TimeSeries, name: str, by: float = 1.0) -> list[tuple[float, float]]:
    """Of a counter, per second, in the middle of each interval."""
    return [((begin + end) / 2, grown / (end - begin) * by) for begin, end, grown in samples.steps(name)]


def _time_line(run: RunData, summary: Summary, axis: TimeAxis) -> Section:
    counted = max(run.steps.values(), key=lambda each: each.total("samples") or 0.0, default=TimeSeries())
    rates = _rates(counted, "samples")
    steps, waits = (
        {str(rank): _scaled(each.ratios(part, whole), by) for rank, each in run.steps.items()}
        for part, whole, by in (("step_s", "steps", 1e3), ("data_s", "step_s", 100.0))
    )
    charts = {
        "throughput": _chart(
            Chart("Throughput", axis, "samples/s"),
            {"all ranks": _whole(rates) if summary.ending.codes else rates},
            1,
            "",
        ),
        "step time": _chart(Chart("Step time", axis, "ms"), steps, 0, "ranks"),
        "waiting for data": _chart(
            Chart("Waiting for data", axis, "% of the step time", most=100 * DATA_WAIT), waits, 0, "ranks"
        ),
    }
    pauses = Chart("Evaluations and checkpoints", axis).bars(_pauses(run, summary, axis), ("evaluation", "checkpoint"))
    return _section("Time line", charts | ({"pauses": pauses} if pauses else {}))


def _whole(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Without what follows its end, and but for a few also without the interval of it, which is not its rate."""
    last = max((at for at, (_, value) in enumerate(points) if value > 0), default=0)
    return points[: last if last > 2 else last + 1]


def _pauses(run: RunData, summary: Summary, axis: TimeAxis) -> dict[str, list[tuple[str, Span]]]:
    """When training stood still, by the label of the row."""
    marks = [mark for mark in run.marks if mark.name == "checkpoint" and mark.value >= 0]
    found = {
        "evaluation": [(each.begin, summary.seconds if each.end is None else each.end) for each in summary.evaluations],
        "checkpoint": [(mark.time - mark.value, mark.time) for mark in marks],
    }
    # What is shorter than the page is fine is to be seen all the same.
    least = axis.end / 400
    return {
        name: [(name, (begin, max(end, begin + least))) for begin, end in spans]
        for name, spans in found.items()
        if spans
    }


def _training(run: RunData, axis: TimeAxis) -> Section:
    """What the training logged: ``loss`` and ``val/loss`` in one chart."""
    by_kind = group_by_key((name.rpartition("/")[2], (name, points)) for name, points in run.metrics.items())
    charts = {}
    for kind, figures in list(by_kind.items())[:_MOST_FIGURES]:
        chart = Chart(kind.capitalize(), axis, from_zero=False)
        for name, points in figures[:_MOST_GPUS]:
            chart.add(name, axis.ranges([[pair for pair in points if math.isfinite(pair[1])]]), joined=True)
        charts[kind] = chart.html()
    return _section("Training", charts, "" if charts else "No figures of srunddp.Trainer were found.")


def _gpus(run: RunData, summary: Summary, axis: TimeAxis) -> Section:
    if not run.gpus:
        return Section("GPUs", "", "No GPU was sampled.")
    lines = {f"{each.node} GPU {each.text('index') or each.key}": each.samples for each in run.gpus}
    charts = {}
    for title, unit, name, by in _ON_GPUS:
        chart = Chart(title, axis, unit, most=100.0 if unit == "%" else 0.0, from_zero=unit != "°C")
        if name == "memory_bytes":
            chart.limit = by * max((each.memory_limit_bytes or 0.0 for each in summary.gpus), default=0.0)
        known = {label: _scaled(samples.spread(name), by) for label, samples in lines.items()}
        charts[title] = _chart(chart, known, _MOST_GPUS, "GPUs")
    if len(lines) > _MOST_GPUS:
        charts |= _heat_by_gpu(run, summary, axis)
    return _section("GPUs", charts)


def _heat_by_gpu(run: RunData, summary: Summary, axis: TimeAxis) -> dict[str, str]:
    """Use and temperature of each GPU; those that stand out from the median GPU are marked, and named in the title."""
    names = [f"{each.node}:{each.text('index') or each.key}" for each in run.gpus]
    used, hot = (
        dict(zip(names, (getattr(each, of) for each in summary.gpus), strict=True))
        for of in ("utilization", "temperature_c")
    )
    found = {}
    for title, unit, name, limits, apart in (
        ("Utilization by GPU", "%", "utilization_percent", (100.0, 0.0), _apart(used, -_LESS_USED)),
        ("Temperature by GPU", "°C", "temperature_c", (30.0, 90.0), _apart(hot, _HOTTER)),
    ):
        rows = {label: axis.medians(gpu.samples.known(name)) for label, gpu in zip(names, run.gpus, strict=True)}
        found[title] = Chart(f"{title}{_named(apart)}", axis, unit).heat_map(rows, apart, limits)
    return found


def _apart(values: Mapping[str, float | None], by: float) -> list[str]:
    """Whose value is above the median by so much, or below it where that is negative, the farthest first."""
    known = {name: value for name, value in values.items() if value is not None}
    usual = median(known.values()) if known else 0.0
    far = {name: (value - usual) / by for name, value in known.items()}
    found = sorted((name for name in far if far[name] > 1), key=lambda name: -far[name])
    return found if len(found) <= _FEW * len(known) else []


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"; apart from the others: {', '.join(names[:_MOST_NAMED])}{more}" if names else ""


def _nodes(run: RunData, summary: Summary, axis: TimeAxis) -> Section:
    usage = {node: run.usage[node] for node in run.nodes if node in run.usage}
    cpus, memory = (
        max((getattr(each, name) or 0.0 for each in summary.per_node), default=0.0)
        for name in ("cpus", "memory_limit_bytes")
    )
    storage = {
        node: _summed(_rates(each, name, _MIB) for name in ("read_bytes", "written_bytes"))
        for node, each in usage.items()
    }
    found: list[tuple[str, str, float, _Lines]] = [
        ("CPUs in use", "CPUs", cpus, {node: _rates(each, "cpu_s") for node, each in usage.items()}),
        (
            "Memory of the job",
            "GiB",
            memory * _GIB,
            {n: _scaled(e.spread("memory_bytes"), _GIB) for n, e in usage.items()},
        ),
        ("Network, received and sent", "MiB/s", 0.0, _network(run)),
        ("Storage, read and written", "MiB/s", 0.0, storage),
    ]
    # Where a CPU at least waited for a tenth of the time.
    if any((each.iowait or 0.0) > _WAITING_CPUS for each in summary.per_node):
        waiting = {node: _rates(each, "iowait_s") for node, each in usage.items()}
        found.insert(1, ("CPUs waiting for storage", "CPUs", 0.0, waiting))
    charts = {
        title: _chart(Chart(title, axis, unit, limit=limit), lines, _MOST_NODES, "nodes")
        for title, unit, limit, lines in found
    }
    return _section("Nodes", charts, "No node was sampled.")


def _network(run: RunData) -> _Lines:
    """Of each node what the chosen interface and RDMA carry."""
    carrying = [each for each in run.links if each.text("chosen") == "1" or each.text("kind") == "rdma"]
    ways = ("received_bytes", "sent_bytes")
    by_node = group_by_key((each.node, _rates(each.samples, way, _MIB)) for each in carrying for way in ways)
    return {node: _summed(series) for node, series in by_node.items()}


def _summed(series: Iterable[Points]) -> list[tuple[float, float]]:
    """The sum of series that have the same times; what one of them lacks is left out."""
    every = [dict(each) for each in series]
    times = set.intersection(*(set(each) for each in every if each)) if any(every) else set()
    return [(time, sum(each[time] for each in every if each)) for time in sorted(times)]


def _steps(run: RunData, summary: Summary, axis: TimeAxis) -> Section:
    """The time of each rank's own in a step; where that is not known, the step time."""
    own = any(each.own_s is not None for each in summary.ranks)
    part = "own_s" if own else "step_s"
    rows = {str(rank): [1e3 * value for value in axis.ratios(each, part, "steps")] for rank, each in run.steps.items()}
    slow = find_stragglers(summary).ranks
    title = "Own time per step, all but the backward pass" if own else "Step time"
    named = f"; slow: {one_line(fold_ranks(slow, summary.layout))}" if slow else ""
    html = Chart(f"{title}{named}", axis, "ms").heat_map(rows, [str(rank) for rank in slow])
    why = "Steps were counted, but not timed" if summary.steps else "No steps were counted"
    return Section("Step time by rank", html, "" if html else f"{why}, so that there is no chart of them.")


def _launch(summary: Summary) -> Section:
    rows = {str(rank): [*phases.items()] for rank, phases in summary.launches.items()}
    end = max((end for phases in summary.launches.values() for _, end in phases.values()), default=1.0)
    html = Chart("Launch phases by rank", TimeAxis(end)).bars(rows, NAMES)
    return Section("Launch", html, "" if html else "No phases of the start were marked.")
