"""The sections of the report page that have charts: what of a run is drawn, and what of it is
missing.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from srunddp.errors import one_line
from srunddp.report import format
from srunddp.report.advice import DATA_WAIT, SLOWED, find_stragglers
from srunddp.report.csv_files import TimeSeries
from srunddp.report.run import NAMES, RunData
from srunddp.report.summary import Summary
from srunddp.report.svg import Chart, Points, TimeAxis
from srunddp.util.hostlist import fold_ranks, group_by_key

_MIB = 2.0**-20
_GIB = 2.0**-30
# So many have a line each in a chart; of more there is one band.
_MOST_LINES = 8
_MOST_NODES = 4
_MOST_FIGURES = 12  # charts of what the training logged
# Outliers that a title names; where they are more than a quarter none stands out.
_MOST_NAMED = 4
_FEW = 0.25
# A GPU stands out that is so far from the median.
_LESS_USED = 10.0  # per cent
_HOTTER = 10.0  # °C
_WAITING_CPUS = 0.1  # of a node, on average
_ON_GPUS = (  # title, unit, column and factor
    ("GPU utilization", "%", "utilization_percent", 1.0),
    ("GPU memory", "GiB", "memory_bytes", _GIB),
    ("Memory bandwidth", "%", "memory_bandwidth_percent", 1.0),
    ("SM activity", "%", "sm_percent", 1.0),
    ("Tensor core activity", "%", "tensor_percent", 1.0),
    ("Power", "W", "power_w", 1.0),
    ("Temperature", "°C", "temperature_c", 1.0),
    ("SM clock", "MHz", "sm_clock_mhz", 1.0),  # where one is throttled
)


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
    epochs = [
        (each.begin_s, "" if each.number is None else str(each.number)) for each in summary.epochs
    ]
    axis = TimeAxis(max(summary.seconds, 1.0), max(summary.interval_s or 5.0, 1e-3) * group, epochs)
    return [
        _time_line(run, summary, axis),
        *([_training(run, axis)] if run.metrics else []),
        _gpus(run, summary, axis),
        _nodes(run, summary, axis),
        _steps(run, summary, axis),
        _launch(summary),
    ]


def _section(title: str, charts: Mapping[str, str]) -> Section:
    empty = [name for name, html in charts.items() if not html]
    return Section(
        title, "".join(charts.values()), f"Not known: {', '.join(empty)}." if empty else ""
    )


def _rates(samples: TimeSeries, name: str) -> list[tuple[float, float]]:
    """Of a counter, per second, in the middle of each interval."""
    return [((begin + end) / 2, grown / (end - begin)) for begin, end, grown in samples.steps(name)]


def _summed(series: Iterable[Points]) -> list[tuple[float, float]]:
    """The sum of series that have the same times; what one of them lacks is left out."""
    every = [known for known in map(dict, series) if known]
    if every:
        times = set.intersection(*map(set, every))
    else:
        times = set()
    return [(time, sum(each[time] for each in every)) for time in times]


def _time_line(run: RunData, summary: Summary, axis: TimeAxis) -> Section:
    counted = max(
        run.steps.values(), key=lambda each: each.total("samples") or 0.0, default=TimeSeries()
    )
    rates = _rates(counted, "samples")
    if summary.ending.codes:
        # Without what follows the end of the steps, and but for a few without its interval, which
        # is not their rate.
        last = max((at for at, (_, value) in enumerate(rates) if value > 0), default=0)
        rates = rates[: last if last > 2 else last + 1]
    charts = {"throughput": Chart("Throughput", axis, "samples/s").panel([("all ranks", rates)])}
    for title, unit, by, most, part, of in (
        ("Step time", "ms", 1e3, 0.0, "step_s", "steps"),
        ("Waiting for data", "% of the step time", 1e2, 1e2 * DATA_WAIT, "data_s", "step_s"),
    ):
        ratios = ((f"rank {rank}", each.ratios(part, of)) for rank, each in run.steps.items())
        charts[title.lower()] = Chart(title, axis, unit, by, most).panel(ratios, 1, "ranks")
    stood = [
        ("evaluation", (each.begin_s, each.end_s or summary.seconds))
        for each in summary.evaluations
    ]
    saved = group_by_key(
        (mark.rank, mark) for mark in run.marks if mark.name == "checkpoint" and mark.value >= 0
    )
    # All ranks save.
    longest = max(saved.values(), key=lambda marks: sum(mark.value for mark in marks), default=[])
    stood += [("checkpoint", (mark.time - mark.value, mark.time)) for mark in longest]
    rows = group_by_key((name, (name, span)) for name, span in stood)
    pauses = Chart("Evaluations and checkpoints", axis).bars(rows, ("evaluation", "checkpoint"))
    return _section("Time line", charts | ({"pauses": pauses} if pauses else {}))


def _training(run: RunData, axis: TimeAxis) -> Section:
    """What the training logged: ``loss`` and ``val/loss`` in one chart."""
    kinds = group_by_key((name.rpartition("/")[2], name) for name in run.metrics)
    charts = {}
    for kind, names in [*kinds.items()][:_MOST_FIGURES]:
        first = run.not_finite
        if first and first.name in names:
            note = f"; {first.value} first at {format.clock(first.at_s)}"
        else:
            note = ""
        chart = Chart(kind[:1].upper() + kind[1:], axis, from_zero=False, joined=True, note=note)
        charts[kind] = chart.panel(
            ((name, run.metrics[name]) for name in names[:_MOST_LINES]), _MOST_LINES
        )
    more = sum(len(names[_MOST_LINES if kind in charts else 0 :]) for kind, names in kinds.items())
    return Section(
        "Training",
        "".join(charts.values()),
        f"Not drawn: {more} more of metrics.jsonl." if more else "",
    )


def _gpus(run: RunData, summary: Summary, axis: TimeAxis) -> Section:
    if not run.gpus:
        return Section("GPUs", "", "No GPU was sampled.")
    throttled = any((each.slowed_share or 0.0) > SLOWED for each in summary.gpus)
    charts = {}
    for title, unit, name, by in _ON_GPUS[: None if throttled else -1]:
        if name == "memory_bytes":
            limit = by * max(each.memory_limit_bytes or 0.0 for each in summary.gpus)
        else:
            limit = 0.0
        chart = Chart(title, axis, unit, by, 100.0 if unit == "%" else 0.0, unit != "°C", limit)
        lines = (
            (f"{each.node} GPU {each.index or each.key}", each.samples.spread(name))
            for each in run.gpus
        )
        charts[title] = chart.panel(lines, _MOST_LINES, "GPUs")
    return _section(
        "GPUs", charts | (_by_gpu(run, summary, axis) if len(run.gpus) > _MOST_LINES else {})
    )


def _by_gpu(run: RunData, summary: Summary, axis: TimeAxis) -> dict[str, str]:
    """Heat maps. GPUs that stand out from the others are marked, and named in the title."""
    names = [f"{each.node}:{each.index or each.key}" for each in run.gpus]
    least = _outliers(names, [each.utilization_percent for each in summary.gpus], -_LESS_USED)
    hottest = _outliers(names, [each.temperature_c for each in summary.gpus], _HOTTER)
    found = {}
    for title, unit, name, limits, what, outliers in (
        ("Utilization by GPU", "%", "utilization_percent", (100.0, 0.0), "least", least),
        ("Highest temperature by GPU", "°C", "temperature_c", (30.0, 90.0), "hottest", hottest),
    ):
        highest = what == "hottest"
        series = (
            each.samples.spread(name) if highest else each.samples.known(name) for each in run.gpus
        )
        rows = zip(names, series, strict=True)
        if len(outliers) > _MOST_NAMED:
            more = f" and {len(outliers) - _MOST_NAMED} more"
        else:
            more = ""
        if outliers:
            note = f"; {what}: {', '.join(outliers[:_MOST_NAMED])}{more}"
        else:
            note = ""
        found[title] = Chart(title, axis, unit, note=note).heat_map(
            rows, outliers, limits, highest=highest
        )
    return found


def _outliers(names: Sequence[str], values: Sequence[float | None], by: float) -> list[str]:
    """Whose value is above the median by so much, or below it where that is negative; the farthest
    first.
    """
    known = {name: value for name, value in zip(names, values, strict=True) if value is not None}
    usual = median(known.values()) if known else 0.0
    far = {name: (value - usual) / by for name, value in known.items() if (value - usual) / by > 1}
    if len(far) <= _FEW * len(known):
        return sorted(far, key=lambda name: -far[name])
    return []


def _nodes(run: RunData, summary: Summary, axis: TimeAxis) -> Section:
    usage = [(node, run.usage[node]) for node in run.nodes if node in run.usage]
    cpus = max((each.cpus or 0.0 for each in summary.per_node), default=0.0)
    memory = _GIB * max((each.memory_limit_bytes or 0.0 for each in summary.per_node), default=0.0)
    carrying = [
        each for each in run.links if each.text("chosen") == "1" or each.text("kind") == "rdma"
    ]
    links = group_by_key((each.node, each.samples) for each in carrying)

    def rates(*names: str) -> Iterator[tuple[str, Points]]:
        return ((node, _summed(_rates(each, name) for name in names)) for node, each in usage)

    network = (
        (
            node,
            _summed(
                _rates(each, way) for each in series for way in ("received_bytes", "sent_bytes")
            ),
        )
        for node, series in links.items()
    )
    gauges = ((node, each.spread("memory_bytes")) for node, each in usage)
    waits = any((each.iowait_cpus or 0.0) > _WAITING_CPUS for each in summary.per_node)
    wanted: list[tuple[Chart, Iterable[tuple[str, Points]]]] = [
        (Chart("CPUs in use", axis, limit=cpus), rates("cpu_s")),
        *([(Chart("CPUs waiting for storage", axis), rates("iowait_s"))] if waits else []),
        (Chart("Memory of the job", axis, "GiB", _GIB, limit=memory), gauges),
        (Chart("Network, received and sent", axis, "MiB/s", _MIB), network),
        (
            Chart("Storage, read and written", axis, "MiB/s", _MIB),
            rates("read_bytes", "written_bytes"),
        ),
    ]
    return _section(
        "Nodes", {chart.title: chart.panel(lines, _MOST_NODES, "nodes") for chart, lines in wanted}
    )


def _steps(run: RunData, summary: Summary, axis: TimeAxis) -> Section:
    """The time of each rank's own in a step; where that is not known, the step time."""
    own = any(each.own_s is not None for each in summary.ranks)
    if own:
        title = "Own time per step, all but the backward pass"
        part = "own_s"
    else:
        title = "Step time"
        part = "step_s"
    rows = ((str(rank), each.ratios(part, "steps")) for rank, each in run.steps.items())
    slow = find_stragglers(summary).ranks
    if slow:
        note = f"; slow: {one_line(fold_ranks(slow, summary.layout))}"
    else:
        note = ""
    html = Chart(title, axis, "ms", 1e3, note=note).heat_map(rows, [str(rank) for rank in slow])
    if summary.steps:
        why = "Steps were counted, but not timed"
    else:
        why = "No steps were counted"
    return Section(
        "Step time by rank", html, "" if html else f"{why}, so that there is no chart of them."
    )


def _launch(summary: Summary) -> Section:
    rows = {str(rank): [*phases.items()] for rank, phases in summary.launches.items()}
    end = max(
        (end for phases in summary.launches.values() for _, end in phases.values()), default=1.0
    )
    html = Chart("Launch phases by rank", TimeAxis(max(end, 1e-3))).bars(rows, NAMES)
    return Section("Launch", html, "" if html else "No phases of the start were marked.")
