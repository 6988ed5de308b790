"""Writes the summary as text for a terminal, at most 120 columns wide."""

import math
import re
from collections.abc import Iterator, Sequence
from statistics import fmean
from textwrap import wrap

from srunddp.errors import one_line
from srunddp.report import format
from srunddp.report.advice import CPU_WAIT, DATA_WAIT, SLOWED, Advice, carried, too_short
from srunddp.report.overview import ends, failure, tiles
from srunddp.report.run import NAMES
from srunddp.report.summary import GpuFigures, NodeFigures, Summary, share
from srunddp.util.hostlist import group_by_key

# Widths in columns of the terminal.
_WIDTH = 120  # the most for a line
_TITLE = 12  # the topic before a sentence of figures()
_BAR = 20  # the bar of a tile
_NOTE = 13  # what precedes a note: its level and its cost
_MOST = 8  # the most nodes whose clock difference is reported
# Matches the blank between a figure and its unit, as in "12 %" or "3.2 GiB".
_BEFORE_UNIT = re.compile(
    r"(?<=\d) (?=(?:%|ms|s|min|h|d|[KMGTP]?i?B|k?W|kWh|J|°C|GPUs?|CPUs?)(?!\w))"
)


def lines(summary: Summary, notes: Sequence[Advice]) -> list[str]:
    """Return the lines of the whole summary, with the control characters in them escaped."""
    return [
        *(part for line in heading(summary) for part in wrapped(line)),
        *_tiles(summary),
        *_notes(summary, notes),
        "",
        *(
            line
            for title, said in figures(summary).items()
            for line in wrapped(f"{title:<{_TITLE}}{said}", _TITLE)
        ),
        *(line for noun, rows in tables(summary).items() if rows for line in _table(noun, rows)),
    ]


def wrapped(line: str, indent: int = 0, width: int = _WIDTH) -> Iterator[str]:
    """Break a line at blanks, but not between a figure and its unit.

    Args:
        line: The line to break.
        indent: Columns before continuation lines.
        width: The most columns of a line.
    """
    # wrap() breaks at ASCII blanks only, so a no-break space keeps a figure and its unit together.
    joined = _BEFORE_UNIT.sub("\xa0", one_line(line))
    margin = " " * indent
    for part in wrap(
        joined, width, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False
    ):
        yield part.replace("\xa0", " ")


def figures(summary: Summary) -> dict[str, str]:
    """Return a sentence on each topic that has figures in no tile and in no table, by the topic.
    A topic without known figures is left out.
    """
    rate = summary.throughput
    scaling = (
        f"{format.percent(rate.efficiency_share)} of the throughput per rank of {rate.baseline}"
    )
    found = {
        "time line": _time_line(summary),
        "steps": _steps(summary),
        "launch": _launch(summary),
        "scaling": scaling if rate.baseline else "",
        "checkpoints": _checkpoints(summary),
        "energy": _energy(summary),
        "software": _software(summary),
    }
    return {title: said for title, said in found.items() if said}


def heading(summary: Summary) -> list[str]:
    """Return the lines that say what ran, where, when, and how it ended. A failure that the text
    and the page show in a place of its own is left out.
    """
    if summary.script:
        script = f": {summary.script}"
    else:
        script = ""
    where = (
        f"{format.count(summary.world_size, 'rank')} on {format.count(len(summary.nodes), 'node')}"
    )
    models = group_by_key((gpu.name or "GPU of an unknown model", gpu) for gpu in summary.gpus)
    used = [
        summary.launcher,
        summary.backend,
        *(f"{len(gpus)} × {model}" for model, gpus in models.items()),
    ]
    if names := {n.interface for n in summary.per_node} - {""}:
        used.append(f"network {format.nodes(names)}")
    if summary.time_limit_s:
        limit = f" of {format.duration(summary.time_limit_s)}"
    else:
        limit = ""
    if summary.restarts:
        restarts = f", restart {summary.restarts}"
    else:
        restarts = ""
    if summary.resumed is not None:
        resumed = f", resumed after step {summary.resumed:,}"
    else:
        resumed = ""
    return [
        f"run {summary.name or '?'}{restarts}{script}",
        ", ".join(
            [
                f"{where} ({format.nodes(summary.nodes)})",
                *(each for each in used if each not in ("", "auto")),
            ]
        ),
        (
            f"started {format.moment(summary.started_unix_s)},"
            f" {format.duration(summary.seconds)}{limit}{resumed}"
        ),
        *summary.moves,
        *_ending(summary),
    ]


def _ending(summary: Summary) -> Iterator[str]:
    end = summary.ending
    failed = failure(summary)
    if end.running:
        yield "; ".join(
            [f"still running; last reading at {format.clock(end.last_s)}", *ends(summary)]
        )
    elif end.finished:
        yield f"ended with exit code 0{' on all ranks' if summary.world_size > 1 else ''}"
    elif end.cause or not failed:
        yield "; ".join(filter(None, [*ends(summary), "" if failed else end.cause]))


def _tiles(summary: Summary) -> Iterator[str]:
    yield ""
    if failed := failure(summary):
        yield from wrapped(f"FAIL  {failed}", 6)
        yield from wrapped(f"      -> {failed.hint}", 9)
        yield ""
    for tile in tiles(summary):
        filled = round((tile.share or 0.0) * _BAR)
        if tile.share is None:
            bar = ""
        else:
            bar = "█" * filled + "░" * (_BAR - filled)
        yield from wrapped(
            f"{tile.name:<16}  {tile.value:>7}  {bar:<{_BAR}}  {tile.detail}", _BAR + 29
        )


def _notes(summary: Summary, notes: Sequence[Advice]) -> Iterator[str]:
    said = remarks(summary)
    if any(note.cost for note in notes):
        of_what = ", with what each costs of the step time"
    else:
        of_what = ""
    if notes or said or not failure(summary):
        yield from ("", f"notes{of_what}" if notes else "notes: none")
    for note in notes:
        level = "WARN" if note.severity == "lost" else "note"
        if note.cost:
            cost = format.percent(note.cost)
        else:
            cost = ""
        yield from wrapped(f"{level}  {cost:>5}  {note}", _NOTE)
        yield from wrapped(f"{'':{_NOTE}}-> {note.hint}", _NOTE + 3)
    yield from (part for line in said for part in wrapped(f"  {line}", 2))


def remarks(summary: Summary) -> list[str]:
    """Return what the reader should know about the figures: that there are too few readings or
    steps, which nodes have no readings, and which clocks differed from rank 0's.
    """
    silent = [each.node for each in summary.per_node if not each.readings]
    if silent:
        none = f"no readings of {format.nodes(silent)}"
    else:
        none = ""
    return [*filter(None, [too_short(summary), none])] + [
        f"the clock of {format.nodes([each.node])} is {format.duration(abs(each.clock_s))} "
        f"{'ahead of' if each.clock_s > 0 else 'behind'} rank 0's: corrected in this report"
        for each in [each for each in summary.per_node if each.clock_s][:_MOST]
    ]


def _software(summary: Summary) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in summary.versions.items())
    commit = f"commit {summary.git_commit}" if summary.git_commit else ""
    return "; ".join(filter(None, [versions, commit]))


def _time_line(summary: Summary) -> str:
    if summary.first_step_s is None:
        found = []
    else:
        found = [f"first step after {format.duration(summary.first_step_s)}"]
    for noun, spans in (("epoch", summary.epochs), ("evaluation", summary.evaluations)):
        lasted = [each.end_s - each.begin_s for each in spans if each.end_s is not None]
        if lasted:
            mean = f" of {format.duration(fmean(lasted))} on average"
        else:
            mean = ""
        if spans:
            found.append(f"{format.count(len(spans), noun)}{mean}")
    return "; ".join(found)


def _steps(summary: Summary) -> str:
    longest = max((each.longest_s or 0.0 for each in summary.ranks), default=0.0)
    if longest:
        also = f", the longest {format.duration(longest)}"
    else:
        also = ""
    if summary.throughput.samples:
        samples = f"; {summary.throughput.samples:,.0f} samples"
    else:
        samples = ""
    if summary.steps:
        return f"{summary.steps:,} of {format.duration(summary.step_s)}{also}{samples}"
    return "none counted"


def _launch(summary: Summary) -> str:
    """Return a text with the duration of each launch phase, on the rank on which it lasted longest;
    empty if no phase is known.
    """
    phases = (each for launch in summary.launches.values() for each in launch.items())
    lasted = group_by_key((name, end - begin) for name, (begin, end) in phases)
    return ", ".join(
        f"{name} {format.duration(max(lasted[name]))}" for name in NAMES if name in lasted
    )


def _checkpoints(summary: Summary) -> str:
    found = summary.checkpoints
    part = share(summary.checkpoints.stood_s, summary.seconds)
    if found.background_s:
        beside = f", written in the background for {format.duration(found.background_s)}"
    else:
        beside = ""
    stood = (
        f"training paused for {format.duration(found.stood_s)}, {format.percent(part)} of the run"
    )
    if found.count:
        return f"{found.count}: {stood}{beside}"
    return ""


def _energy(summary: Summary) -> str:
    known = [gpu.energy_j for gpu in summary.gpus if gpu.energy_j is not None]
    each = share(summary.energy_j, summary.throughput.samples)
    if each is None:
        per_sample = ""
    else:
        per_sample = f", {format.number(each)} J per sample"
    if not known:
        return ""
    # One kWh is 3.6 million J.
    energy = format.number(sum(known) / 3.6e6)
    return f"{energy} kWh by {format.count(len(known), 'GPU')}{per_sample}"


def tables(summary: Summary) -> dict[str, list[format.Row]]:
    """Return the rows of each table, by what a row is about: ``node``, ``rank`` and ``GPU``."""
    return {
        "node": _node_rows(summary.per_node),
        "rank": _rank_rows(summary),
        "GPU": _gpu_rows(summary.gpus),
    }


def _table(noun: str, rows: Sequence[format.Row]) -> Iterator[str]:
    title, found = format.folded(noun, rows)
    yield ""
    yield from wrapped(title, 2)
    shown = [[one_line(cell) for cell in row] for row in found]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        line = "  ".join(map(str.ljust, row, widths)).rstrip()
        yield line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…"


def _node_rows(nodes: Sequence[NodeFigures]) -> list[format.Row]:
    return [
        {
            "node": format.Cell(format.nodes([each.node])),
            "CPUs used": format.cell(each.used_cpus, format.number, 0.1 * (each.cpus or math.inf)),
            "CPUs": format.cell(each.cpus, format.number),
            "memory": format.cell(
                each.memory_bytes, format.size, 0.1 * (each.memory_limit_bytes or math.inf)
            ),
            "read": _rate(each.read_bytes_per_s),
            "written": _rate(each.written_bytes_per_s),
            "iowait": format.cell(each.iowait_cpus, format.number, 1.0),
            "network": _rate(carried(each) if each.links else None),
            "interface": format.Cell(each.interface or format.UNKNOWN),
        }
        for each in nodes
    ]


def _rank_rows(summary: Summary) -> list[format.Row]:
    return [
        {
            "rank": format.Cell(str(each.rank)),
            "node": format.Cell(format.nodes([each.node])),
            "step": format.cell(each.step_s, format.duration),
            "own": format.cell(each.own_s, format.duration, DATA_WAIT * (each.step_s or math.inf)),
            "data wait": format.cell(share(each.data_s, each.step_s), format.percent, DATA_WAIT),
            "CPU wait": format.cell(each.delay_share, format.percent, CPU_WAIT / 2),
            "memory": format.cell(
                each.rss_bytes, format.size, 2.0**30 + (each.rss_bytes or 0.0) / 4
            ),
        }
        for each in summary.ranks
    ]


def _gpu_rows(gpus: Sequence[GpuFigures]) -> list[format.Row]:
    return [
        {
            "GPU": format.Cell(each.index or format.UNKNOWN),
            "node": format.Cell(format.nodes([each.node])),
            "used": format.cell(each.utilization_percent, "{:.0f} %".format, 10.0),
            "SMs active": format.cell(each.sm_percent, "{:.0f} %".format, 10.0),
            "tensor cores": format.cell(each.tensor_percent, "{:.0f} %".format, 10.0),
            "power": format.cell(each.power_w, "{:,.0f} W".format),
            "hottest": format.cell(each.temperature_c, "{:.0f} °C".format, 10.0),
            "throttled": format.cell(each.slowed_share, format.percent, SLOWED),
            "memory": format.cell(
                each.memory_bytes, format.size, 0.1 * (each.memory_limit_bytes or math.inf)
            ),
            "model": format.Cell(each.name or format.UNKNOWN),
        }
        for each in gpus
    ]


def _rate(value: float | None) -> format.Cell:
    return format.cell(value, format.rate, 2.0**20 + (value or 0.0) / 2)
