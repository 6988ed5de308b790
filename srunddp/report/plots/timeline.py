"""Pictures over time: the time line with the throughput, the GPUs, the nodes."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from srunddp.report import format
from srunddp.report.csv_files import TimeSeries
from srunddp.report.plots import style
from srunddp.report.plots.style import COLOURS, Line, Points, TimeAxis, gauge, mean_of, rates, summed, whole
from srunddp.report.run import RunData
from srunddp.report.summary import Summary

_MIB = 1 / 2**20
_GIB = 1 / 2**30


@dataclass(frozen=True)
class DrawnFigure:
    """A picture, or None; what it shows; and sentences about what it does not."""

    figure: Figure | None
    alt: str
    missing: tuple[str, ...] = ()


# Of a panel the title, the lines, without which it is left out, and what draws it.
_Panel = tuple[str, Sequence[Line], Callable[[Axes], None]]


def timeline(run: RunData, summary: Summary, axis: TimeAxis) -> DrawnFigure:
    """Epochs, evaluations and checkpoints, and samples per second."""
    bars = _bars(run, summary)
    counted = max(run.steps.values(), key=lambda each: each.total("samples") or 0.0, default=None)
    points: Points = rates(counted, "samples") if counted else []
    points = whole(points) if summary.ending.codes else points
    heights = [*([0.35 * len(bars) + 0.3] if bars else []), *([2.0] if points else [])]
    missing = [] if points else ["The samples of the steps are not known, so that there is no throughput."]
    missing += [] if bars else ["No epochs, evaluations or checkpoints were marked."]
    if not heights:
        return DrawnFigure(None, "", tuple(missing))
    figure, axes = style.figure(heights)
    if bars:
        _draw_bars(axes[0], bars, axis)
    if points:
        _draw_throughput(axes[-1], points, summary, axis, alone=not bars)
    style.time_axis(axes, axis)
    what = [*bars, *(["samples per second"] if points else [])]
    return DrawnFigure(figure, f"{', '.join(what)} over time.".capitalize(), tuple(missing))


def _bars(run: RunData, summary: Summary) -> dict[str, list[tuple[float, float]]]:
    """What stands in each row: begin and length."""
    end = summary.seconds
    found = {
        name: [(span.begin, (end if span.end is None else span.end) - span.begin) for span in spans]
        for name, spans in (("epochs", summary.epochs), ("evaluations", summary.evaluations))
    }
    stood = [mark for mark in run.marks if mark.name == "checkpoint" and mark.value >= 0]
    found["checkpoints"] = [(mark.time - mark.value, mark.value) for mark in stood]
    return {name: spans for name, spans in found.items() if spans}


def _draw_bars(panel: Axes, bars: dict[str, list[tuple[float, float]]], axis: TimeAxis) -> None:
    for row, (_, spans) in enumerate(bars.items()):
        # What is shorter than the picture is fine is to be seen all the same.
        shown = [(axis.at(begin), axis.at(max(length, axis.end / 400))) for begin, length in spans]
        edge = {"edgecolor": "white", "linewidth": 0.6} if len(spans) < 100 else {"linewidth": 0}
        panel.broken_barh(shown, (row - 0.35, 0.7), facecolors=COLOURS[row], **edge)
    panel.set_yticks(range(len(bars)), list(bars))
    panel.set_ylim(len(bars) - 0.5, -0.5)
    panel.grid(visible=False)
    panel.set_title("Epochs, evaluations and checkpoints" if len(bars) > 2 else " and ".join(bars).capitalize(), pad=16)


def _draw_throughput(panel: Axes, points: Points, summary: Summary, axis: TimeAxis, *, alone: bool) -> None:
    style.draw_line(panel, ("all ranks", points), axis, COLOURS[0])
    if summary.throughput.per_s is not None:
        panel.axhline(summary.throughput.per_s, color=COLOURS[1], linewidth=1.0, linestyle="--", label="mean")
    style.from_zero(panel, "samples/s")
    panel.set_title("Throughput", pad=16 if alone and summary.epochs else 6)
    style.legend(panel)


def gpus(run: RunData, summary: Summary, axis: TimeAxis) -> DrawnFigure:
    """The three panels of the Vega guide."""
    if not run.gpus:
        return DrawnFigure(None, "", ("No GPU was sampled.",))
    used, heat, bandwidth, power = (
        _lines([(f"{gpu.node} GPU {gpu.text('index')}", gauge(gpu.samples, name)) for gpu in run.gpus])
        for name in ("utilization_percent", "temperature_c", "memory_bandwidth_percent", "power_w")
    )

    def temperature(panel: Axes) -> None:
        style.draw(panel, heat, axis, "GPUs")
        panel.set_ylabel("temperature (°C)")

    wanted: list[_Panel] = [
        ("GPU utilization", used, lambda panel: _plain(panel, used, axis, "GPU utilization (%)", "GPUs", 105)),
        ("Memory bandwidth and power", bandwidth or power, lambda panel: _both(panel, bandwidth, power, axis)),
        ("Temperature", heat, temperature),
    ]
    return _panels(wanted, axis, f"of {format.count(len(run.gpus), 'GPU')}")


def _lines(series: Iterable[Line]) -> list[Line]:
    return [(label, points) for label, points in series if points]


def _panels(wanted: Sequence[_Panel], axis: TimeAxis, of: str) -> DrawnFigure:
    """Those that have data, below each other."""
    shown = [(title, draw) for title, lines, draw in wanted if lines]
    missing = tuple(f"{title}: no data." for title, lines, _ in wanted if not lines)
    if not shown:
        return DrawnFigure(None, "", missing)
    figure, axes = style.figure([1.75] * len(shown))
    for at, (panel, (title, draw)) in enumerate(zip(axes, shown, strict=True)):
        draw(panel)
        panel.set_title(title, pad=16 if at == 0 and axis.epochs else 6)
    style.time_axis(axes, axis)
    return DrawnFigure(figure, f"{', '.join(title for title, _ in shown)} over time, {of}.", missing)


def _plain(
    panel: Axes, lines: Sequence[Line], axis: TimeAxis, label: str, what: str, most: float | None = None
) -> None:
    style.draw(panel, lines, axis, what)
    style.from_zero(panel, label, most)


def _both(panel: Axes, bandwidth: Sequence[Line], power: Sequence[Line], axis: TimeAxis) -> None:
    """Two axes: of many GPUs a band each, so that the two can be told apart."""
    panels: list[Axes] = []
    for lines, colour, label, most in (
        (bandwidth, COLOURS[0], "memory bandwidth (%)", 105.0),
        (power, COLOURS[1], "power (W)", None),
    ):
        if lines:
            own = panel.twinx() if panels else panel
            own.grid(visible=not panels)
            style.draw_band(own, lines, axis, colour, label.split(" (")[0])
            style.from_zero(own, label, most)
            own.yaxis.label.set_color(colour)
            own.spines["right"].set_visible(bool(panels))
            panels.append(own)
    style.legend(*panels)


def nodes(run: RunData, summary: Summary, axis: TimeAxis) -> DrawnFigure:
    """CPU, memory, network, storage and data wait of each node."""
    waiting = _usage(run, lambda each: rates(each, "iowait_s"))
    # A panel of its own where a CPU at least waited for a tenth of the time.
    matters = any(sum(value for _, value in points) > 0.1 * len(points) for _, points in waiting)
    storage = _usage(run, lambda each: summed(rates(each, name, _MIB) for name in ("read_bytes", "written_bytes")))
    found = [
        ("CPUs in use", _usage(run, lambda each: rates(each, "cpu_s")), "CPUs"),
        *([("CPU waiting for storage", waiting, "CPUs")] if matters else []),
        ("Memory of the job", _usage(run, lambda each: gauge(each, "memory_bytes", _GIB)), "memory (GiB)"),
        ("Network: received plus sent, by the chosen interface and by RDMA", _network(run), "rate (MiB/s)"),
        ("Storage: read plus written", storage, "rate (MiB/s)"),
        ("Waiting for data", _waits(run, axis), "of the step time (%)"),
    ]
    wanted = [
        (title, lines, partial(_plain, lines=lines, axis=axis, label=label, what="nodes"))
        for title, lines, label in found
    ]
    return _panels(wanted, axis, f"of {format.count(len(run.nodes), 'node')}")


def _usage(run: RunData, points: Callable[[TimeSeries], list[tuple[float, float]]]) -> list[Line]:
    return _lines((node, points(run.usage[node])) for node in run.nodes if node in run.usage)


def _network(run: RunData) -> list[Line]:
    ways: dict[str, list[Points]] = {node: [] for node in run.nodes}
    for link in run.links:
        if link.text("chosen") == "1" or link.text("kind") == "rdma":
            ways[link.node] += [rates(link.samples, way, _MIB) for way in ("received_bytes", "sent_bytes")]
    return _lines((node, summed(series)) for node, series in ways.items())


def _waits(run: RunData, axis: TimeAxis) -> list[Line]:
    """Of each node the mean of its ranks."""
    series: dict[str, list[Points]] = {node: [] for node in run.nodes}
    for rank, samples in run.steps.items():
        series[run.ranks[rank]].append([(time, 100 * part) for time, part in samples.ratios("data_s", "step_s")])
    return _lines((node, mean_of(own, axis)) for node, own in series.items())
