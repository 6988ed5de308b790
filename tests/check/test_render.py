"""A report tells the worst first, each thing once, with where it is and its hint; and programs find
it all.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from srunddp import __version__
from srunddp.bootstrap.rendezvous.messages import Hello
from srunddp.check import render
from srunddp.check.checks import limits
from srunddp.check.finding import Finding, Severity
from srunddp.check.messages import CollectedFacts
from srunddp.check.render import Report
from srunddp.errors import ConfigError
from tests.support.facts import tells


def finding(
    found: str = "full", *nodes: str, level: Severity = Severity.FAIL, **changes: Any
) -> Finding:
    words = {"check": "limits", "expected": "room", "hint": "clear it"}
    return Finding(level=level, found=found, nodes=nodes, **words | changes)


def report(*findings: Finding, ranks: int = 2, **seen: str) -> Report:
    """Two ranks to a node."""
    here = {
        rank: Hello("1207.0.0", rank, ranks, rank % 2, f"node{rank // 2 + 1:02d}", "", 1)
        for rank in range(ranks)
    }
    seen_limits = {"files": 1024, "memlock": -1, "rdma": False, "free": {"/tmp": 1 << 30}}
    facts = CollectedFacts(__version__, facts={"limits": seen_limits}, failed={})
    return Report(here, dict.fromkeys(here, facts), list(findings), seen)


# One table.


def test_equal_findings_are_one_row() -> None:
    """The worst comes first, else the order stays."""
    words = [("a", Severity.WARN), ("b", Severity.FAIL), ("c", Severity.WARN), ("d", Severity.FAIL)]
    assert [
        row.found for row in render.merged(finding(found, level=level) for found, level in words)
    ] == [*"bdac"]
    first = finding("full", "node03", ranks=(64,))
    last = finding("full", "node01", ranks=(4, 1))
    assert render.merged([first, finding("other", "node01"), last]) == [
        finding("full", "node03", "node01", ranks=(1, 4, 64)),
        finding("other", "node01"),
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"level": Severity.WARN},
        {"check": "x"},
        {"expected": "x"},
        {"hint": "x"},
        {"between": "b -> a"},
    ],
)
def test_findings_that_differ_in_a_word_are_not_one(change: dict[str, Any]) -> None:
    assert len(render.merged([finding(), finding(**change)])) == 2


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (finding("", "node01", "node02", "node04"), "node[01-02,04]"),
        (finding("", "node01", ranks=(3,)), "rank 3 on node01"),
        (finding("", "node02", "node01", ranks=(0, 1, 2, 5)), "ranks 0-2,5 on node[01-02]"),
        (finding("", ranks=(7,)), "rank 7"),
        (finding("", between="node03 -> node05"), "node03 -> node05"),
        (finding("", "node01:ib0"), "node01:ib0"),
        (finding(""), ""),
    ],
)
def test_where_it_is_is_said_in_folded_names(given: Finding, shown: str) -> None:
    assert render.where(given) == shown


def test_the_table_is_aligned_and_what_is_wrong_comes_first() -> None:
    """A check that failed is not called ok."""
    findings = [
        finding("odd", "node02", level=Severity.WARN, check="versions"),
        finding("full", "node01"),
    ]
    assert render.lines(report(*findings, limits="/tmp 1 GiB", launch="by srun")) == [
        "FAIL  limits    node01  full; expected room -> clear it",
        "WARN  versions  node02  odd; expected room -> clear it",
        "ok    launch            by srun",
        "      limits            /tmp 1 GiB",
    ]
    assert render.lines(Report({})) == []


@pytest.mark.parametrize(
    ("findings", "ranks", "job", "said"),
    [
        ("", 4, "1207", "check of job 1207: 4 of 4 ranks on 2 nodes, all is well"),
        ("w", 1, "", "check: 1 of 4 ranks on 1 node, 1 warning"),
        ("FF", 2, "", "check: 2 of 4 ranks on 1 node, 1 failure"),
        ("FGw", 3, "", "check: 3 of 4 ranks on 2 nodes, 2 failures and 1 warning"),
    ],
)
def test_the_first_line_counts(findings: str, ranks: int, job: str, said: str) -> None:
    """A warning alone stops no job."""
    levels = {each: Severity.FAIL if each.isupper() else Severity.WARN for each in findings}
    every = (
        finding(each, f"node{index}", level=levels[each]) for index, each in enumerate(findings)
    )
    found = report(*every, ranks=ranks)
    assert (render.verdict(found, 4, job), found.failed) == (said, "F" in findings)


# What is written.


def test_both_files_are_written_into_a_folder_that_is_made(tmp_path: Path) -> None:
    rows = (finding("full – ü", "node01", ranks=(rank,)) for rank in (1, 0))
    found = report(*rows, launch="by srun", limits="/tmp 1.0 GiB")
    folder = tmp_path / "new" / "folder"
    paths = render.write(found, ["the table"], str(folder), "1207", 69)
    assert paths == [str(folder / "preflight.1207.txt"), str(folder / "preflight.1207.json")]
    assert Path(paths[0]).read_text().startswith("the table\n\n")
    written = json.loads(Path(paths[1]).read_text())
    assert (written["job"], written["exit_code"], written["summaries"]) == (
        "1207",
        69,
        found.summaries,
    )
    words = {
        "level": "FAIL",
        "check": "limits",
        "found": "full – ü",
        "expected": "room",
        "hint": "clear it",
    }
    assert written["findings"] == [words | {"nodes": ["node01"], "ranks": [0, 1], "between": ""}]
    assert [(rank["rank"], rank["node"], rank["local_rank"]) for rank in written["ranks"]] == [
        (n, "node01", n) for n in (0, 1)
    ]
    assert written["ranks"][1]["checks"]["limits"]["facts"]["files"] == 1024


def test_whatever_a_path_is_called_it_can_be_written(tmp_path: Path) -> None:
    text, _ = render.write(
        report(finding("/data/\udcff")), ["… /data/\udcff"], str(tmp_path), "", 0
    )
    assert text == str(tmp_path / "preflight.local.txt")
    assert Path(text).read_bytes().startswith("… /data/\\udcff\n".encode())


@pytest.mark.parametrize("path", ["{}/file", "{}/file/x", "/proc/nowhere"])
def test_a_folder_that_cannot_be_written_is_one_error(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("")
    folder = path.format(tmp_path)
    with pytest.raises(ConfigError) as error:
        render.write(report(), [], folder, "", 0)
    assert tells(error.value.found, "cannot be written", folder)
    assert tells(error.value.hint, "--output-dir")


def test_facts_come_back_as_the_check_knows_them() -> None:
    found = report(ranks=3)
    del found.facts[1]
    found.facts[2] = CollectedFacts("", facts={}, failed={"limits": "OSError: stale"})
    assert [(one.rank, one.node, one.facts.files) for one in found.seen(limits.CHECK)] == [
        (0, "node01", 1024)
    ]
    assert [bool(rank["checks"]) for rank in render.as_json(found, "", 69)["ranks"]] == [
        True,
        False,
        True,
    ]


def test_a_link_in_the_folder_is_replaced_and_not_followed(tmp_path: Path) -> None:
    """Slurm starts in /tmp where the folder is missing, and there anyone may have left one."""
    (target := tmp_path / "target").write_text("mine")
    for name in ("preflight.7.txt", "preflight.7.txt.tmp"):
        (tmp_path / name).symlink_to(target)
    render.write(report(), ["the table"], str(tmp_path), "7", 0)
    assert target.read_text() == "mine"
    assert (tmp_path / "preflight.7.txt").read_text().startswith("the table\n")


# What variables and paths hold is shown, and no terminal obeys it.

COMMAND = "a\x1b]0;owned\x07b\rc\nd"
SHOWN = r"a\x1b]0;owned\x07b\rc\nd"


def test_a_row_of_the_table_stays_one_and_is_printable() -> None:
    one = finding(COMMAND, "node01", expected=COMMAND, hint=COMMAND)
    between = finding("no TCP", between=f"{COMMAND} -> node02")
    text = render.lines(report(one, between, paths=COMMAND, limits=COMMAND))
    assert len(text) == 4
    assert all(line.isprintable() and SHOWN in line for line in text)
    assert render.said(one).isprintable()


def test_the_lines_for_each_node_are_printable(tmp_path: Path) -> None:
    way = finding("no TCP", check="reach", between="node01:ib0 -> node02:ib0")
    wrong = finding("odd", "node02")
    found = report(way, wrong, ranks=4, launch="by srun", limits="full", reach="2 ways")
    found = replace(found, here={**found.here, 0: replace(found.here[0], node=COMMAND)})
    text, _ = render.write(found, ["the table"], str(tmp_path), "7", 0)
    assert Path(text).read_text().split("\n\n")[1].splitlines() == [
        f"{SHOWN} launch=ok limits=ok reach=ok",
        "node01 launch=ok limits=ok reach=FAIL",
        "node02 launch=ok limits=FAIL reach=FAIL",
    ]
