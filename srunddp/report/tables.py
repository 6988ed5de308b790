"""The tables of a report: rows of words, their header first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from srunddp.errors import one_line
from srunddp.report import format
from srunddp.report.run import NAMES
from srunddp.report.slurm import View
from srunddp.report.summary import GpuFigures, NodeFigures, RankFigures, Summary, share

MOST = 16  # rows that a terminal shows


def node_rows(nodes: Sequence[NodeFigures]) -> list[list[str]]:
    """The table of nodes, its header first; the header alone for none."""
    rows = [["node", "CPUs used", "memory", "read", "written", "iowait", "network in", "out", "interface"]]
    for each in nodes:
        chosen = [link for link in each.links if link.chosen or link.kind == "rdma"]
        rows.append(
            [
                format.nodes([each.node]),
                f"{_figure(each.used)} of {_figure(each.cpus)}",
                f"{format.size(each.memory_bytes)} of {format.size(each.memory_limit_bytes)}",
                format.rate(each.read),
                format.rate(each.written),
                _figure(each.iowait),
                format.rate(sum(link.received for link in chosen) if chosen else None),
                format.rate(sum(link.sent for link in chosen) if chosen else None),
                each.interface or format.UNKNOWN,
            ]
        )
    return rows


def rank_rows(summary: Summary) -> list[list[str]]:
    """The table of ranks: those with most of their own first where it is cut."""
    rows = [["rank", "node", "steps", "step", "own", "data wait", "CPU", "CPU wait", "memory"]]
    ranks: Sequence[RankFigures] = summary.ranks
    if len(ranks) > MOST:
        ranks = sorted(ranks, key=lambda each: -(each.own_s or 0.0))
    for each in ranks:
        rows.append(
            [
                str(each.rank),
                format.nodes([each.node]),
                str(each.steps),
                format.duration(each.step_s),
                format.duration(each.own_s),
                format.percent(share(each.data_s, each.step_s)),
                format.duration(each.cpu_s),
                format.percent(each.delay),
                format.size(each.rss_bytes),
            ]
        )
    return rows


def gpu_rows(gpus: Sequence[GpuFigures]) -> list[list[str]]:
    """The table of GPUs: those used least first where it is cut; with what Hopper and newer ones measure beyond."""
    activity = any(each.sm is not None or each.tensor is not None for each in gpus)
    more = ["SMs active", "tensor cores"] if activity else []
    rows = [["GPU", "node", "used", *more, "memory bandwidth", "power", "energy", "hottest", "memory", "model"]]
    if len(gpus) > MOST:
        gpus = sorted(gpus, key=lambda each: each.utilization if each.utilization is not None else 101.0)
    for each in gpus:
        rows.append(
            [
                each.index or format.UNKNOWN,
                format.nodes([each.node]),
                _unit(each.utilization, "%"),
                *([_unit(each.sm, "%"), _unit(each.tensor, "%")] if activity else []),
                _unit(each.bandwidth, "%"),
                _unit(each.power_w, "W"),
                format.energy(each.energy_j),
                _unit(each.temperature_c, "°C"),
                f"{format.size(each.memory_bytes)} of {format.size(each.memory_limit_bytes)}",
                each.name or format.UNKNOWN,
            ]
        )
    return rows


def _figure(value: float | None) -> str:
    return format.UNKNOWN if value is None else format.figure(value)


def _unit(value: float | None, unit: str) -> str:
    return format.UNKNOWN if value is None else f"{value:.0f} {unit}"


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns below each other; of many rows the first, and how many more there are."""
    if len(rows) < 2:
        return
    shown = [[one_line(cell) for cell in row] for row in rows[: MOST + 1]]
    widths = [max(len(row[at]) for row in shown) for at in range(len(shown[0]))]
    yield ""
    for row in shown:
        yield "  ".join(map(str.ljust, row, widths)).rstrip()
    if len(rows) > len(shown):
        yield f"and {len(rows) - len(shown)} more"


def launch_rows(summary: Summary) -> list[tuple[str, float, float, int]]:
    """Of each phase the shortest, the longest, and whose that is; ``srun`` is how far the processes are apart."""
    rows = []
    for name in NAMES:
        lasted = {
            launch.rank: phase.end - phase.begin
            for launch in summary.launches
            for phase in launch.phases
            if phase.name == name
        }
        if name == "srun" and lasted:
            lasted = {launch.rank: launch.process for launch in summary.launches}
        if lasted:
            slowest = max(lasted, key=lambda rank: lasted[rank])
            rows.append((name, min(lasted.values()), lasted[slowest], slowest))
    return rows


def slurm_rows(view: View) -> list[list[str]]:
    """Our figures beside Slurm's."""
    head = ["", "srunddp", "Slurm", "difference"]
    return [head, *([row.name, row.ours, row.theirs, row.difference] for row in view.rows)]
