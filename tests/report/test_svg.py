"""Charts: what is drawn where, what stands beside it, and that a browser and a reader can take
it.
"""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from srunddp.report.axis import Points, TimeAxis, ranges
from srunddp.report.charts import Chart
from srunddp.report.csv_files import NAN, TimeSeries
from srunddp.report.figure import Figure
from srunddp.report.html import chart as as_html

AXIS = TimeAxis(100.0, 10.0, [(5.0, "1"), (55.0, "2")])
HOSTILE = '<b onload="x">&\x1b[31m'


def parsed(html: str) -> ElementTree.Element:
    assert "\x1b" not in html
    return ElementTree.fromstring(html)


def words(html: str) -> list[str]:
    return [each.text or "" for each in parsed(html).iter("text")]


def paths(html: str, kind: str) -> list[str]:
    return [
        each.get("d", "")
        for each in parsed(html).iter("path")
        if (each.get("class") or "").startswith(kind)
    ]


def points(values: list[float]) -> Points:
    """One in each column of the axis; none for nan."""
    return [(10.0 * at + 5.0, value) for at, value in enumerate(values) if not math.isnan(value)]


def html_of(figure: Figure | None) -> str:
    assert figure
    return as_html(figure)


def panel(values: list[float], **given: object) -> Figure | None:
    return Chart("Power", AXIS, "W", **given).panel([("node01", points(values))])  # type: ignore[arg-type]


def chart(values: list[float], **given: object) -> str:
    return html_of(panel(values, **given))


@pytest.mark.parametrize(
    ("end", "interval", "width", "last"),
    [
        (100.0, 10.0, 10.0, 100.0),
        (86400.0, 5.0, 360.0, 86400.0),
        (1205.0, 5.0, 10.0, 1205.0),
        (3.0, 5.0, 5.0, 3.0),
    ],
)
def test_a_column_is_a_whole_number_of_samples(
    end: float, interval: float, width: float, last: float
) -> None:
    axis = TimeAxis(end, interval)
    assert (axis.width, axis.columns[-1][1]) == (width, last)
    assert len(axis.columns) <= 240
    assert all(begin == at * width for at, (begin, _) in enumerate(axis.columns))


def test_a_range_is_the_least_and_the_most_of_all_samples() -> None:
    """One hot sample of one GPU is not made less by an average; each GPU counts once for the
    median.
    """
    axis = TimeAxis(4800.0, 5.0)  # four samples in a column
    usual = [(5.0 * at, 60.0) for at in range(960)]
    hot = [(1000.0, 95.0), (1005.0, 70.0), (1010.0, 70.0)]
    idle = [(1000.0, 70.0), (1005.0, 0.0), (1010.0, 70.0)]
    assert ranges(map(axis.grouped, [usual, hot, idle]))[50] == (0.0, 70.0, 95.0)
    assert ranges(map(axis.grouped, [usual, [(1000.0, 70.0)], [(1000.0, 70.0)]]))[50] == (
        60.0,
        70.0,
        70.0,
    )
    assert math.isnan(ranges([axis.grouped([(0.0, 1.0)])])[1][0])
    medians = [
        each[1]
        for each in ranges([axis.grouped([(0.0, 1.0), (6.0, 9.0), (11.0, 2.0), (30.0, 4.0)])])
    ]
    assert medians[:3] == pytest.approx([2.0, 4.0, NAN], nan_ok=True)


def test_before_both_counters_are_known_a_ratio_is_not() -> None:
    columns = {"own_s": [NAN, NAN, 0.9, 1.9, 2.9], "steps": [0.0, 0.0, 9.0, 19.0, 29.0]}
    series = TimeSeries([0.0, 1.0, 2.0, 3.0, 4.0], columns)
    times, ratios = zip(*series.ratios("own_s", "steps"), strict=True)
    assert times == (2.5, 3.5)
    assert ratios == pytest.approx((0.1, 0.1))


@pytest.mark.parametrize(
    ("end", "first", "last"),
    [
        (20.0, "0 s", "20 s"),
        (600.0, "0 min", "10 min"),
        (86406.0, "0 h", "24 h"),
        (2.6e6, "0 d", "30 d"),
        (1e9, "0 d", "11574.1 d"),
    ],
)
def test_ticks_are_few_and_round(end: float, first: str, last: str) -> None:
    labels = [label for _, label in TimeAxis(end).ticks()]
    assert (labels[0], labels[-1], len(labels) <= 9) == (first, last, True)


def test_a_panel_has_its_words_its_line_and_text_by_column() -> None:
    html = chart([100.0, 250.0, NAN, *[300.0] * 7])
    root = parsed(html)
    drawn = next(each for each in root.iter("svg") if each.get("role") == "img")
    assert drawn.get("aria-label") == "Power (W)"
    assert words(html)[:7] == ["0", "100", "200", "300", "epoch", "1", "2"]
    # A gap where nothing is known, and the values where the axis has them: 0 is at 110 pixels.
    assert paths(html, "line c0") == [
        "M50.0 73.3L150.0 18.3h.1",
        "M350.0 0.0L450.0 0.0L550.0 0.0L650.0 0.0L750.0 0.0L850.0 0.0L950.0 0.0h.1",
    ]
    titles = [each.text for each in root.iter("title")]
    assert (len(titles), titles[1]) == (9, "0:10\nnode01: 250 W")
    assert "node01: 300 (100–300)" in "".join(root.itertext())
    assert panel([NAN] * 10) is None
    assert words(chart([5.0] * 10, most=100.0))[5] == "100"


@pytest.mark.parametrize(
    "values", [[0.0], [2.3], [1e-7, 3e15], [-4.0], [141.0, 141.0 + 3e-14], [141.0, 141.003]]
)
@pytest.mark.parametrize("from_zero", [True, False])
def test_an_axis_of_values_holds_them_all(values: list[float], from_zero: bool) -> None:
    html = chart([*values, *[values[0]] * (10 - len(values))], from_zero=from_zero)
    found = words(html)
    ticks = [float(word.replace(",", "")) for word in found[: found.index("epoch")]]
    assert ticks[0] <= min(values)
    assert ticks[-1] >= max(values)
    assert len(set(ticks)) == len(ticks) >= 2


def test_a_heat_map_joins_equal_cells_and_marks_rows() -> None:
    rows = {f"gpu{number}": [50.0] * 10 for number in range(64)}
    rows["gpu37"] = [*[50.0] * 5, 100.0, NAN, *[50.0] * 3]
    html = html_of(
        Chart("Heat", AXIS, "°C").heat_map(
            ((name, points(row)) for name, row in rows.items()), ["gpu37"], (0.0, 100.0)
        )
    )
    assert paths(html, "cell h15") == ["M50 37H60v1H50z"]
    assert paths(html, "cell missing") == ["M60 37H70v1H60z"]
    assert paths(html, "marked") == ["M0 37H100v1H0z"]
    labels = [word for word in words(html) if word.startswith("gpu")]
    assert "gpu37" in labels
    assert "gpu36" not in labels
    assert len(labels) < 25
    # From what is usual to what stands out.
    idle = Chart("Use", AXIS, "%").heat_map([("a", points([0.0] * 10))], (), (100.0, 0.0))
    assert paths(html_of(idle), "cell h15")
    assert Chart("Heat", AXIS, "°C").heat_map([("a", [])]) is None


def test_one_stall_does_not_hide_what_else_differs() -> None:
    rows = {str(rank): [50.0] * 10 for rank in range(8)} | {"3": [80.0] * 10}
    calm, stalled = (
        html_of(
            Chart("Own", AXIS, "ms").heat_map(
                (name, points([first, *row[1:]])) for name, row in rows.items()
            )
        )
        for first in (50.0, 9000.0)
    )
    assert paths(calm, "cell h12")[0].endswith(paths(stalled, "cell h12")[0][len("M10") :])
    assert "100 ms or more" in stalled
    hottest = [("gpu0", [(1.0, 40.0), (2.0, 95.0), (3.0, 41.0)])]
    heat = Chart("Heat", AXIS, "°C").heat_map(hottest, (), (30.0, 90.0), highest=True)
    assert paths(html_of(heat), "cell h15")


def test_bars_have_a_colour_for_each_name() -> None:
    rows = {
        "0": [("python", (0.0, 20.0)), ("import", (30.0, 50.0))],
        "1": [("import", (30.0, 60.0))],
    }
    html = html_of(Chart("Launch", AXIS).bars(rows, ["srun", "python", "import"]))
    assert (paths(html, "cell c1"), paths(html, "cell c2")) == (
        ["M0 0H20v1H0z"],
        ["M30 0H50v1H30zM30 1H60v1H30z"],
    )
    assert "srun" not in html
    assert "import: 30 s" in html
    # None is too short to be seen, and of many in a row there is the sum.
    spans = [("e", (0.0, 0.0)), ("e", (50.0, 50.0))]
    html = html_of(Chart("Pauses", AXIS).bars({"e": spans}, ["e"]))
    assert paths(html, "cell c0") == ["M0 0H0.25v1H0zM50 0H50.25v1H50z"]
    assert "e: 0 s, 2 times" in html
    assert Chart("Launch", AXIS).bars({"0": []}, ["srun"]) is None


def test_a_joined_line_has_no_gaps_and_a_band_has_its_ends() -> None:
    made = Chart("Loss", AXIS, limit=8.0, joined=True)
    bands = [(5.0, 0.0), (5.0, 2.0), (5.0, 4.0), (15.0, 0.0), (15.0, 2.0), (15.0, 4.0)]
    html = html_of(made.panel([("loss", points([4.0, NAN, NAN, 2.0])), ("median", bands)], 2))
    assert paths(html, "line c0") == ["M50.0 55.0L350.0 82.5h.1"]
    assert paths(html, "band") == ["M50.0 55.0L150.0 55.0L150.0 110.0L50.0 110.0z"]
    limit = next(each for each in parsed(html).iter("line") if each.get("class") == "limit")
    assert (limit.get("y1"), "limit: 8" in html) == ("0.0", True)


def test_names_are_words_and_nothing_more() -> None:
    axis = TimeAxis(100.0, 10.0, [(5.0, HOSTILE)])
    made = Chart(HOSTILE, axis, HOSTILE)
    for figure in (
        made.panel([(HOSTILE, points([1.0, 2.0]))]),
        made.heat_map([(HOSTILE, points([1.0]))], [HOSTILE]),
        made.bars({HOSTILE: [(HOSTILE, (0.0, 1.0))]}, [HOSTILE]),
    ):
        html = html_of(figure)
        assert "b" not in {each.tag for each in parsed(html).iter() if each.attrib}
        assert not re.search(r"url\(|https?:|<script", html)
