"""The summary as a terminal shows it."""

from collections.abc import Iterable, Iterator, Sequence

from srunddp.errors import one_line
from srunddp.report import format
from srunddp.report.advice import Advice, too_short
from srunddp.report.run import NAMES
from srunddp.report.slurm import SlurmAccounting
from srunddp.report.summary import GpuFigures, NodeFigures, Span, Summary, median_or_none, share
from srunddp.util.hostlist import fold_ranks, group_by_key

_TITLE = 12
MOST = 16  # rows that a terminal shows


def lines(summary: Summary, notes: Sequence[Advice], view: SlurmAccounting | None = None) -> list[str]:
    """All of it, with Slurm's view where it was asked; nothing in it is obeyed by a terminal."""
    parts = [
        *heading(summary),
        *_notes(summary, notes),
        *(line for title, found in sections(summary).items() if found for line in ("", *_titled(title, found))),
        *table(node_rows(summary.per_node)),
        *table(rank_rows(summary)),
        *table(gpu_rows(summary.gpus)),
        *(_slurm(view) if view else ()),
    ]
    return [one_line(part) for part in parts]


def sections(summary: Summary) -> dict[str, list[str]]:
    """The figures in sentences, by what they are about; empty where nothing is known."""
    about = {
        "time line": _time_line,
        "steps": _steps,
        "launch": _launch,
        "throughput": _throughput,
        "checkpoints": _checkpoints,
        "energy": _energy,
    }
    return {title: list(found(summary)) for title, found in about.items()}


def heading(summary: Summary) -> list[str]:
    """What ran, where, when, and how it ended."""
    script = f": {summary.script}" if summary.script else ""
    where = f"{format.count(summary.world_size, 'rank')} on {format.count(len(summary.nodes), 'node')}"
    how = ", ".join(part for part in (summary.launcher, summary.backend) if part not in ("", "auto"))
    limit = f" of {format.duration(summary.time_limit_s)}" if summary.time_limit_s else ""
    restarts = f", restart {summary.restarts}" if summary.restarts else ""
    resumed = f", resumed after step {summary.resumed}" if summary.resumed is not None else ""
    return [
        f"run {summary.name or '?'}{restarts}{script}",
        f"{where} ({format.nodes(summary.nodes)}){f', {how}' if how else ''}",
        f"started {format.moment(summary.started)}, {format.duration(summary.seconds)}{limit}{resumed}",
        ending(summary),
    ]


def ending(summary: Summary) -> str:
    """How the run ended, in a sentence."""
    end = summary.ending
    by_code = group_by_key((code, rank) for rank, code in end.codes.items())
    if end.running:
        return f"still running; last sample at {format.clock(end.last)}"
    if not by_code:
        return f"no end recorded: killed; last sample at {format.clock(end.last)}"
    if not end.missing and len(by_code) == 1:
        said = f"ended with exit code {next(iter(by_code))}{' on all ranks' if summary.world_size > 1 else ''}"
    else:
        codes = [f"exit code {code} on {fold_ranks(ranks, {})}" for code, ranks in sorted(by_code.items())]
        said = f"ended with {', '.join(codes)}"
    if end.missing:
        said += f"; no end recorded of {fold_ranks(end.missing, {})}: killed; last sample at {format.clock(end.last)}"
    return f"{said}; {one_line(end.cause)}" if end.cause and not end.finished else said


def _notes(summary: Summary, notes: Sequence[Advice]) -> Iterator[str]:
    why = too_short(summary)
    yield from ("", "notes" if notes else f"notes: none; {why}" if why else "notes: none")
    yield from (f"  {note.rule}: {note}" for note in notes)
    yield from (f"  {line}" for line in remarks(summary))


def remarks(summary: Summary) -> list[str]:
    """What is to be known of the figures: nodes of which there are none, and those whose clock differs."""
    silent = [each.node for each in summary.per_node if not each.samples]
    return ([f"no samples of {format.nodes(silent)}"] if silent else []) + [
        f"the clock of {format.nodes([each.node])} is {format.duration(abs(each.clock))} "
        f"{'ahead of' if each.clock > 0 else 'behind'} rank 0's: taken out"
        for each in [each for each in summary.per_node if each.clock][:MOST]
    ]


def _titled(title: str, found: Iterable[str]) -> Iterator[str]:
    return (f"{'' if at else title:<{_TITLE}}{line}" for at, line in enumerate(found))


def _time_line(summary: Summary) -> Iterator[str]:
    if summary.first_step is not None:
        yield f"first step after {format.duration(summary.first_step)}"
    if summary.epochs:
        yield f"{format.count(len(summary.epochs), 'epoch')}{_each(summary.epochs)}: {_listed(summary.epochs)}"
    if summary.evaluations:
        yield f"{format.count(len(summary.evaluations), 'evaluation')}{_each(summary.evaluations)}"


def _each(spans: Sequence[Span]) -> str:
    lasted = [each.end - each.begin for each in spans if each.end is not None]
    return f" of {format.duration(sum(lasted) / len(lasted))} on average" if lasted else ""


def _listed(spans: Sequence[Span]) -> str:
    """Where they begin; of many the first and the last."""
    shown = [f"{each.number if each.number is not None else '?'} at {format.clock(each.begin)}" for each in spans]
    return ", ".join(shown if len(shown) <= 6 else [*shown[:3], "…", *shown[-2:]])


def _steps(summary: Summary) -> Iterator[str]:
    if not summary.steps:
        yield "none counted"
        return
    longest = max((each.longest_s or 0.0 for each in summary.ranks), default=0.0)
    yield (
        f"{summary.steps}, {format.duration(summary.step_s)} each"
        + (f", the longest {format.duration(longest)}" if longest else "")
        + (f", {format.percent(summary.data_share)} waiting for data" if summary.data_share is not None else "")
    )
    if slowest := summary.slowest:
        yield (
            f"slowest: {fold_ranks([slowest.rank], summary.layout)}, "
            f"{format.duration(slowest.own_s)} of its own work per step; median rank "
            f"{format.duration(median_or_none([each.own_s for each in summary.ranks]))}"
        )


def _launch(summary: Summary) -> Iterator[str]:
    shown = []
    for name, least, most, _ in launch_rows(summary):
        few, many = format.duration(least), format.duration(most)
        shown.append(f"{name} {many if few == many or most <= 0 else f'{few} to {many}'}")
    if shown:
        yield ", ".join(shown)


def _throughput(summary: Summary) -> Iterator[str]:
    found = summary.throughput
    if found.per_s is not None:
        per_rank = format.format_number(found.per_s / max(1, summary.world_size))
        rate = f"{format.format_number(found.per_s)} samples/s from the first step to the last, {per_rank} per rank"
        yield f"{rate}; {found.samples:.0f} samples"
    if found.efficiency is not None:
        yield f"scaling efficiency {format.percent(found.efficiency)}: per rank, over that of {found.baseline}"
    elif found.own_share is not None and summary.world_size > 1:
        yield (
            f"computing {format.percent(found.own_share)} of the step time: neither waiting for data nor for slower "
            "ranks (for the scaling efficiency: --baseline DIR|JOBID)"
        )


def _checkpoints(summary: Summary) -> Iterator[str]:
    found = summary.checkpoints
    if found.count:
        part = share(found.stood_s, summary.seconds)
        background = f", {format.duration(found.background_s)} of writing beside it" if found.background_s else ""
        yield (
            f"{found.count}: training stood still for {format.duration(found.stood_s)}, "
            f"{format.percent(part)} of the run{background}"
        )


def _energy(summary: Summary) -> Iterator[str]:
    if summary.energy_j is not None:
        per_sample = share(summary.energy_j, summary.throughput.samples)
        each = f", {format.format_number(per_sample)} J per sample" if per_sample is not None else ""
        known = sum(gpu.energy_j is not None for gpu in summary.gpus)
        yield f"{format.energy(summary.energy_j)} by {format.count(known, 'GPU')}{each}"


def _slurm(view: SlurmAccounting) -> Iterator[str]:
    yield from ("", f"Slurm's view: {view.sentence}", *table(slurm_rows(view)))
    if view.seff:
        yield from ("", *view.seff.splitlines())


def node_rows(nodes: Sequence[NodeFigures]) -> list[list[str]]:
    """The table of nodes, its header first; empty for none."""
    links = {node.node: [link for link in node.links if link.chosen or link.kind == "rdma"] for node in nodes}
    return _with_header(
        {
            "node": format.nodes([each.node]),
            "CPUs used": f"{_figure(each.used)} of {_figure(each.cpus)}",
            "memory": f"{format.size(each.memory_bytes)} of {format.size(each.memory_limit_bytes)}",
            "read": format.rate(each.read),
            "written": format.rate(each.written),
            "iowait": _figure(each.iowait),
            "network in": format.rate(sum(link.received for link in links[each.node]) if links[each.node] else None),
            "out": format.rate(sum(link.sent for link in links[each.node]) if links[each.node] else None),
            "interface": each.interface or format.UNKNOWN,
        }
        for each in nodes
    )


def rank_rows(summary: Summary) -> list[list[str]]:
    """The table of ranks: those with most of their own first where it is cut."""
    many = len(summary.ranks) > MOST
    return _with_header(
        {
            "rank": str(each.rank),
            "node": format.nodes([each.node]),
            "steps": str(each.steps),
            "step": format.duration(each.step_s),
            "own": format.duration(each.own_s),
            "data wait": format.percent(share(each.data_s, each.step_s)),
            "CPU": format.duration(each.cpu_s),
            "CPU wait": format.percent(each.delay),
            "memory": format.size(each.rss_bytes),
        }
        for each in sorted(summary.ranks, key=lambda each: -(each.own_s or 0.0) if many else 0.0)
    )


def gpu_rows(gpus: Sequence[GpuFigures]) -> list[list[str]]:
    """The table of GPUs: those used least first where it is cut; with what Hopper and newer ones measure beyond."""
    activity = any(each.sm is not None or each.tensor is not None for each in gpus)
    if len(gpus) > MOST:
        gpus = sorted(gpus, key=lambda each: each.utilization if each.utilization is not None else 101.0)
    return _with_header(
        {
            "GPU": each.index or format.UNKNOWN,
            "node": format.nodes([each.node]),
            "used": _unit(each.utilization, "%"),
            **({"SMs active": _unit(each.sm, "%"), "tensor cores": _unit(each.tensor, "%")} if activity else {}),
            "memory bandwidth": _unit(each.bandwidth, "%"),
            "power": _unit(each.power_w, "W"),
            "energy": format.energy(each.energy_j),
            "hottest": _unit(each.temperature_c, "°C"),
            "memory": f"{format.size(each.memory_bytes)} of {format.size(each.memory_limit_bytes)}",
            "model": each.name or format.UNKNOWN,
        }
        for each in gpus
    )


def _with_header(rows: Iterable[dict[str, str]]) -> list[list[str]]:
    listed = list(rows)
    return [list(listed[0]), *(list(row.values()) for row in listed)] if listed else []


def _figure(value: float | None) -> str:
    return format.UNKNOWN if value is None else format.format_number(value)


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
        found = [(rank, phases[name]) for rank, phases in summary.launches.items() if name in phases]
        lasted = [(end - begin, rank) for rank, (begin, end) in found]
        if name == "srun" and lasted:  # the first process of all has none
            lasted += [(0.0, rank) for rank, phases in summary.launches.items() if name not in phases]
        if lasted:
            most, slowest = max(lasted, key=lambda pair: pair[0])
            rows.append((name, min(lasted)[0], most, slowest))
    return rows


def slurm_rows(view: SlurmAccounting) -> list[list[str]]:
    """Our figures beside Slurm's."""
    return [["", "srunddp", "Slurm", "difference"], *map(list, view.rows)]
