"""What variables and paths hold is shown, and no terminal obeys it."""

from __future__ import annotations

from pathlib import Path

from srunddp.bootstrap.rendezvous.protocol import Hello
from srunddp.check import render
from srunddp.check.checks import paths
from srunddp.check.finding import Finding, Severity
from srunddp.check.preflight import Report
from srunddp.explain.context import Explanation, Row
from srunddp.util.filesystem import Place

COMMAND = "a\x1b]0;owned\x07b\rc\nd"
SHOWN = r"a\x1b]0;owned\x07b\rc\nd"


def test_a_line_of_an_explanation_stays_one_and_is_printable() -> None:
    rows = (Row("master", COMMAND, f"MASTER_ADDR={COMMAND}", (f"OTHER={COMMAND}: {COMMAND}",)),)
    text = Explanation(0, rows, (COMMAND,), ()).text
    lines = text.splitlines()
    assert (len(lines), text.count(SHOWN)) == (3, 5)
    assert all(line.isprintable() and line.startswith("[rank 0] ") for line in lines)


def test_a_row_of_the_table_stays_one_and_is_printable() -> None:
    finding = Finding(Severity.WARN, "paths", f"the working directory is {COMMAND}", COMMAND, COMMAND, ("node01",))
    between = Finding(Severity.FAIL, "reach", "no TCP", "TCP", "mend", between=f"{COMMAND} -> node02")
    text = render.lines([finding, between], {"paths": COMMAND, "env": COMMAND})
    assert len(text) == 4
    assert all(line.isprintable() and SHOWN in line for line in text)
    assert render.said(finding).isprintable()
    assert render.where(between) == f"{SHOWN} -> node02"


def test_the_lines_for_each_node_in_the_report_are_printable(tmp_path: Path) -> None:
    place = Place(role=COMMAND, path=COMMAND, kind="file", error="", system="ext4", identity="", content="")
    facts = {"places": [place]}
    report = Report({0: Hello("", 0, 1, 0, "node01", "", 1)}, {0: {paths.NAME: {"facts": facts}}})
    assert render.per_node(report) == [f"node01 {SHOWN}=ok"]
