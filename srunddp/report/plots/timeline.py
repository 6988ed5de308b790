"""Pictures over time: the time line with the throughput, the GPUs, the nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from srunddp.report import format
from srunddp.report.plots import style
from srunddp.report.plots.style import COLOURS, Line, TimeAxis, band, gauge, grid, mean_of, rates, summed, whole
from srunddp.report.run import Gpu, RunData
from srunddp.report.summary import Summary

_MIB = 1 / 2**20
_GIB = 1 / 2**30


@dataclass(frozen=True)
class DrawnFigure:
    """A picture, or None; what it shows; and sentences about what it does not."""

    figure: Figure | None
    alt: str
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Panel:
    """A panel of a picture: what it is drawn from, and how."""

    title: str
    lines: Sequence[Line]
    label: str
    most: float | None = None


def timeline(run: RunData, summary: Summary, axis: TimeAxis) -> DrawnFigure:
    """Epochs, evaluations and checkpoints, and samples per second."""
    bars = _bars(run, summary)
    counted = max(run.steps.values(), key=lambda each: each.total("samples") or 0.0, default=None)
    points: Sequence[tuple[float, float]] = rates(counted, "samples") if counted else []
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


def _draw_throughput(
    panel: Axes, points: Sequence[tuple[float, float]], summary: Summary, axis: TimeAxis, *, alone: bool
) -> None:
    panel.plot([axis.at(time) for time, _ in points], [value for _, value in points], color=COLOURS[0], linewidth=1.2,
               label="all ranks", marker="o" if len(points) < 3 else None)  # fmt: skip
    if summary.throughput.per_s is not None:
        panel.axhline(summary.throughput.per_s, color=COLOURS[1], linewidth=1.0, linestyle="--", label="mean")
    style.from_zero(panel, "samples/s")
    panel.set_title("Throughput", pad=16 if alone and summary.epochs else 6)
    style.legend(panel)


def gpus(run: RunData, summary: Summary, axis: TimeAxis) -> DrawnFigure:
    """The three panels of the Vega guide."""
    if not run.gpus:
        return DrawnFigure(None, "", ("No GPU was sampled.",))
    every = [_gpu_lines(run.gpus, name) for name in ("utilization_percent", "temperature_c")]
    used, heat = every
    bandwidth, power = (_gpu_lines(run.gpus, name) for name in ("memory_bandwidth_percent", "power_w"))
    wanted: list[tuple[str, bool, Callable[[Axes], None]]] = [
        ("GPU utilization", bool(used), lambda panel: _plain(panel, used, axis, "GPU utilization (%)", 105, "GPUs")),
        ("Memory bandwidth and power", bool(bandwidth or power), lambda panel: _both(panel, bandwidth, power, axis)),
        ("Temperature", bool(heat), lambda panel: _temperature(panel, heat, axis)),
    ]
    return _panels(wanted, axis, f"of {format.count(len(run.gpus), 'GPU')}")


def _gpu_lines(gpus: Sequence[Gpu], name: str) -> list[Line]:
    found = [Line(f"{gpu.node} GPU {gpu.index}", gauge(gpu.samples, name)) for gpu in gpus]
    return [line for line in found if line.points]


def _panels(wanted: list[tuple[str, bool, Callable[[Axes], None]]], axis: TimeAxis, of: str) -> DrawnFigure:
    """Those that have data, below each other."""
    shown = [(title, draw) for title, there, draw in wanted if there]
    missing = tuple(f"{title}: no data." for title, there, _ in wanted if not there)
    if not shown:
        return DrawnFigure(None, "", missing)
    figure, axes = style.figure([1.75] * len(shown))
    for at, (panel, (title, draw)) in enumerate(zip(axes, shown, strict=True)):
        draw(panel)
        panel.set_title(title, pad=16 if at == 0 and axis.epochs else 6)
    style.time_axis(axes, axis)
    return DrawnFigure(figure, f"{', '.join(title for title, _ in shown)} over time, {of}.", missing)


def _plain(panel: Axes, lines: Sequence[Line], axis: TimeAxis, label: str, most: float | None, what: str) -> None:
    style.draw(panel, lines, axis, what)
    style.from_zero(panel, label, most)


def _temperature(panel: Axes, lines: Sequence[Line], axis: TimeAxis) -> None:
    style.draw(panel, lines, axis, "GPUs")
    panel.set_ylabel("temperature (°C)")


def _both(panel: Axes, bandwidth: Sequence[Line], power: Sequence[Line], axis: TimeAxis) -> None:
    """Two axes: of many GPUs a band each, so that the two can be told apart."""
    over = grid(0.0, axis.end, axis.interval)
    panels: list[Axes] = []
    for lines, colour, label, most in (
        (bandwidth, COLOURS[0], "memory bandwidth (%)", 105.0),
        (power, COLOURS[1], "power (W)", None),
    ):
        if lines:
            own = panel.twinx() if panels else panel
            own.grid(visible=not panels)
            short = label.split(" (")[0]
            style.draw_band(own, band(lines, over), axis, colour, short, alone=len(lines) == 1)
            style.from_zero(own, label, most)
            own.yaxis.label.set_color(colour)
            own.spines["right"].set_visible(bool(panels))
            panels.append(own)
    style.legend(*panels)


def nodes(run: RunData, summary: Summary, axis: TimeAxis) -> DrawnFigure:
    """CPU, memory, network, storage and data wait of each node."""
    found = [
        _Panel("CPUs in use", _usage(run, lambda each: rates(each, "cpu_s")), "CPUs"),
        _Panel("CPU waiting for storage", _usage(run, lambda each: rates(each, "iowait_s")), "CPUs"),
        _Panel("Memory of the job", _usage(run, lambda each: gauge(each, "memory_bytes", _GIB)), "memory (GiB)"),
        _Panel("Network: received plus sent, by the chosen interface and by RDMA", _network(run), "rate (MiB/s)"),
        _Panel("Storage: read plus written", _storage(run), "rate (MiB/s)"),
        _Panel("Waiting for data", _waits(run, axis), "of the step time (%)"),
    ]
    several = [panel for panel in found if panel.title != "CPU waiting for storage" or _matters(panel.lines)]

    def drawing(panel: _Panel) -> Callable[[Axes], None]:
        return lambda axes: _plain(axes, panel.lines, axis, panel.label, panel.most, "nodes")

    wanted = [(panel.title, bool(panel.lines), drawing(panel)) for panel in several]
    return _panels(wanted, axis, f"of {format.count(len(run.nodes), 'node')}")


def _usage(run: RunData, points: Callable[..., list[tuple[float, float]]]) -> list[Line]:
    found = [Line(node, points(run.usage[node])) for node in run.nodes if node in run.usage]
    return [line for line in found if line.points]


def _matters(lines: Sequence[Line]) -> bool:
    """A panel of its own where a CPU at least waited for a tenth of the time."""
    return any(sum(value for _, value in line.points) > 0.1 * len(line.points) for line in lines)


def _network(run: RunData) -> list[Line]:
    chosen = [link for link in run.links if link.chosen or link.kind == "rdma"]
    found = []
    for node, links in groupby(sorted(chosen, key=lambda each: run.nodes.index(each.node)), lambda each: each.node):
        each = [rates(link.samples, way, _MIB) for link in links for way in ("received_bytes", "sent_bytes")]
        found.append(Line(node, summed(series for series in each if series)))
    return [line for line in found if line.points]


def _storage(run: RunData) -> list[Line]:
    return _usage(run, lambda each: summed(
        series for name in ("read_bytes", "written_bytes") if (series := rates(each, name, _MIB))
    ))  # fmt: skip


def _waits(run: RunData, axis: TimeAxis) -> list[Line]:
    """Of each node the mean of its ranks."""
    over = grid(0.0, axis.end, axis.interval)
    found = []
    for node in run.nodes:
        series = [
            [(time, 100 * part) for time, part in samples.ratios("data_s", "step_s")]
            for rank, samples in run.steps.items()
            if run.ranks[rank] == node
        ]
        found.append(Line(node, mean_of([each for each in series if each], over)))
    return [line for line in found if line.points]
