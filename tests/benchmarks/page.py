"""Tables and plots of the results: ratios of srunddp's metrics to those of the other ways."""

from __future__ import annotations

import html
import json
import math
import shutil
import statistics
from collections.abc import Iterable
from pathlib import Path

from tests.benchmarks.benchmark import CaseResult, Limit, Result
from tests.conftest import ROOT

PUBLISHED = ROOT / "docs" / "benchmarks"
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN = "<!-- {}: begin -->"
END = "<!-- {}: end -->"
# a plot's pixels, and the largest ratio it shows
LEFT = 330
BAR = 340
ROW = 18
MOST = 1.25


def publish(folder: Path) -> None:
    """Copy the results to the documentation's folder, and write its page anew."""
    PUBLISHED.mkdir(exist_ok=True)
    for file in sorted(folder.glob("*.json")):
        if ".quick" not in file.name and folder != PUBLISHED:
            shutil.copy(file, PUBLISHED)
    for file in PUBLISHED.glob("*.json"):
        file.with_suffix(".svg").write_text(plot(_read(file)))
    PAGE.write_text(rendered(PAGE.read_text()))


def rendered(text: str) -> str:
    """The page with all that lies between its marks made anew from the results."""
    for file in sorted(PUBLISHED.glob("*.json")):
        begin = BEGIN.format(file.stem)
        end = END.format(file.stem)
        before, found, rest = text.partition(begin)
        assert found, f"{PAGE} has no place for {file.stem}: {begin}"
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{_section(file.stem, _read(file))}\n{end}{after}"
    return text


def _read(file: Path) -> Result:
    return Result.of(json.loads(file.read_text()))


def _section(name: str, result: Result) -> str:
    machine = result.setting["machine"]
    versions = result.setting["versions"]
    given = ", ".join(f"{key} {value}" for key, value in versions.items())
    where = f"{machine['cores']} cores of {machine['CPU']}, GPU: {machine['GPU']}"
    return (
        f"{result.about}\n\n![{result.title}](benchmarks/{name}.svg)\n\n{table(result)}\n\n"
        f"`bin/bench {name}`, {result.began}, commit {result.setting['commit']}, {where}; {given}."
    )


def table(result: Result) -> str:
    """In Markdown: for each case srunddp's minima, and the ratios to each other way."""
    metrics = list(
        dict.fromkeys(metric for case in result.cases.values() for metric in _metrics(case))
    )
    rows = [["case", "divided by", *metrics, "target"], ["---"] * (len(metrics) + 3)]
    for name, case in result.cases.items():
        own, *others = case.samples
        rows.append([name, f"({own}'s own)", *(_own(case, own, metric) for metric in metrics), ""])
        rows += [
            ["", way, *(_ratio(case, own, way, metric) for metric in metrics), _targets(case, way)]
            for way in others
        ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _metrics(case: CaseResult) -> Iterable[str]:
    return dict.fromkeys(
        metric for samples in case.samples.values() for sample in samples for metric in sample
    )


def _own(case: CaseResult, way: str, metric: str) -> str:
    values = case.values(way, metric)
    # one in brackets is the metric's own
    if metric.endswith(")"):
        unit = ""
    else:
        unit = case.unit
    if values:
        return f"{min(values):.3g} {unit}".strip()
    return ""


def _ratio(case: CaseResult, own: str, way: str, metric: str) -> str:
    if way in case.not_measured:
        return f"not measured: {case.not_measured[way]}"
    ours = case.values(own, metric)
    theirs = case.values(way, metric)
    if not ours or not theirs:
        return ""
    failed = theirs.count(math.inf)
    if failed:
        lost = f", {failed} of {len(theirs)} failed"
    else:
        lost = ""
    if failed == len(theirs):
        return lost.removeprefix(", ")
    # Those of one repeat were measured one soon after the other: what disturbs the machine for
    # longer is in both.
    pairs = [one / other for one, other in zip(ours, theirs, strict=False) if math.isfinite(other)]
    return f"{_shown(min(ours) / min(theirs))} ({_shown(statistics.median(pairs))}){lost}"


def _shown(ratio: float) -> str:
    return f"{ratio:.3f}" if ratio >= 0.1 else f"{ratio:.2g}"


def ratio_of(case: CaseResult, limit: Limit) -> float | None:
    """That of the minima; None where one of them was not measured, or failed."""
    ours = case.values(next(iter(case.samples)), limit.metric)
    theirs = case.values(limit.way, limit.metric)
    if ours and theirs and math.isfinite(min(theirs)):
        return min(ours) / min(theirs)
    return None


def _targets(case: CaseResult, way: str) -> str:
    words = []
    for limit in case.limits:
        if limit.way == way and (found := ratio_of(case, limit)) is not None:
            words.append(
                f"{limit.metric} {limit.at_most:g}: {'met' if found <= limit.at_most else 'missed'}"
            )
    return "; ".join(words)


def plot(result: Result) -> str:
    """SVG: a bar for each ratio of the first metric; a line at 1, where both take as long, and a
    mark at a target.
    """
    shapes = []
    y = ROW
    for name, case in result.cases.items():
        _, *others = case.samples
        metric = next(iter(_metrics(case)))
        shapes.append(f'<text x="8" y="{y + 13}" class="case">{html.escape(name)}: {metric}</text>')
        y += ROW
        for way in others:
            ratio = ratio_of(case, Limit(metric, way, 1.0))
            if ratio is None or not math.isfinite(ratio):  # ours failed
                continue
            targets = [
                each.at_most for each in case.limits if (each.metric, each.way) == (metric, way)
            ]
            shapes += _bar(y, way, ratio, targets)
            y += ROW
        y += ROW // 2
    one = LEFT + BAR / MOST
    style = (
        "text{font:12px"
        " sans-serif;fill:#333}.case{font-weight:bold}.bar{fill:#4878a8}.above{fill:#b5651d}"
        ".one{stroke:#888;stroke-dasharray:3 3}.target{stroke:#111;stroke-width:2}"
        "@media(prefers-color-scheme:dark){text{fill:#ddd}.target{stroke:#eee}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + BAR + 90} {y + 8}"'
        f' role="img"><title>{html.escape(result.title)}</title><style>{style}</style><text'
        f' x="{one - 4}" y="12" text-anchor="end">faster ←</text><text x="{one + 4}" y="12">→'
        f' slower</text>{"".join(shapes)}<line class="one" x1="{one}" x2="{one}" y1="{ROW}"'
        f' y2="{y}"/></svg>\n'
    )


def _bar(y: int, way: str, ratio: float, targets: Iterable[float]) -> list[str]:
    width = BAR * min(ratio, MOST) / MOST
    kind = "bar" if ratio <= 1 else "above"
    marks = [LEFT + BAR * target / MOST for target in targets]
    return [
        f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">over {html.escape(way)}</text>',
        f'<rect class="{kind}" x="{LEFT}" y="{y + 2}" width="{width:.1f}" height="{ROW - 5}"/>',
        f'<text x="{LEFT + BAR + 12}" y="{y + 12}">{_shown(ratio)}</text>',
        *(
            f'<line class="target" x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + ROW - 1}"/>'
            for x in marks
        ),
    ]
