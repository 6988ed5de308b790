"""What short logs are judged to be, the rules that set something aside, and a check's failures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from srunddp.triage import jobs
from srunddp.triage.collect import collect
from srunddp.triage.diagnose import diagnose
from srunddp.triage.diagnosis import Diagnosis
from srunddp.triage.render import lines, record
from srunddp.triage.rules import PEER, RULES
from tests.conftest import ROOT
from tests.support.facts import tells
from tests.support.starting import write

SHORT = yaml.safe_load((Path(__file__).parent / "short_logs.yaml").read_text(encoding="utf-8"))
CHECK = """\
check of job 77: 64 of 64 ranks on 8 nodes, 2 failures
FAIL  limits     node03  0 MiB free in /tmp; expected 1 GiB or more -> clear /tmp
FAIL  reach      node05  no TCP from 10.0.0.3 to 10.0.0.5: timed out; expected a way -> open it
ok    gpus               8 on each node
"""


def judged(
    folder: Path, text: str | dict[str, str], name: str = "slurm-1.out"
) -> tuple[Diagnosis, str, dict[str, Any]]:
    """The diagnosis of a log with that text, or of several by their names, its lines and its
    JSON.
    """
    for each, content in text.items() if isinstance(text, dict) else [(name, text)]:
        write(folder / each, content)
    job = jobs.find([str(folder)], "")
    evidence = collect(job.logs)
    job.add_to(evidence)
    found = diagnose(evidence)
    return found, "\n".join(lines(found, evidence)), json.loads(json.dumps(record(found, evidence)))


@pytest.mark.parametrize("row", SHORT)
def test_a_short_log_is_judged_as_its_row_tells(row: dict[str, Any], tmp_path: Path) -> None:
    found, said, printed = judged(tmp_path, row.get("files") or row["log"])
    keys = {"cause", "certainty", "rank", "node"} & set(row)
    assert {key: printed[key] for key in keys} == {key: row[key] for key in keys}
    assert (found.first.text if found.first else "").startswith(row.get("first", ""))
    assert row.get("says", "") in said
    if "followed" in row:
        assert [each["text"] for each in printed["followed"]] == row["followed"]
    if rule := row.get("rule"):
        assert [each["rule"] for each in printed["set_aside"]] == [rule]
        assert re.search(rf"^set aside: .*\({rule}: .+\)$", said, re.MULTILINE)


def since_25_05(text: str) -> str:
    """The same log with slurmstepd's lines as Slurm 25.05 and later write them."""
    cancelled = re.sub(
        r"(CANCELLED AT \S+) \*{3}$", r"\1 DUE to SIGNAL Killed ***", text, flags=re.M
    )

    def timed(line: re.Match[str]) -> str:
        at = re.search(r" AT (\S+)", line[1])
        return f"[{at[1] if at else '2026-03-01T10:00:00'}.979] {line[1]}"

    return re.sub(r"^slurmstepd[\w-]*: (error: .*)$", timed, cancelled, flags=re.M)


OLD_STEPD = [row for row in SHORT if "log" in row and since_25_05(row["log"]) != row["log"]]


@pytest.mark.parametrize("row", OLD_STEPD)
def test_slurmstepds_lines_since_slurm_25_05_say_the_same(
    row: dict[str, Any], tmp_path: Path
) -> None:
    told = ("cause", "certainty", "rank", "node")
    old = judged(tmp_path / "24.11", row["log"])[2]
    new = judged(tmp_path / "25.05", since_25_05(row["log"]))[2]
    assert {key: new[key] for key in told} == {key: old[key] for key in told}


AT = "ON node01 CANCELLED AT 2026-11-26T13:23:01"
OOM = "Detected 1 oom_kill event in StepId=4711.0. Some of the step tasks have been OOM Killed."


@pytest.mark.parametrize(
    ("says", "cause", "certainty"),
    [
        (f"*** STEP 7.0 {AT} DUE to SIGNAL Killed ***", "cancelled", "likely"),
        (f"*** JOB 7 {AT} DUE to SIGNAL Terminated ***", "cancelled", "likely"),
        (f"*** JOB 7 {AT} DUE TO PREEMPTION ***", "preempted", "certain"),
        (f"*** JOB 7 {AT} DUE TO TIME LIMIT ***", "time-limit", "certain"),
        (OOM, "host-out-of-memory", "certain"),
        ("execve(): python: No such file or directory", "module-missing", "likely"),
    ],
)
@pytest.mark.parametrize(
    "time", ["2026-11-26T13:23:01.979", "2026-11-26T13:23:01+01:00", "Nov 26 13:23:01"]
)
def test_slurm_26_05_is_understood(
    says: str, cause: str, certainty: str, time: str, tmp_path: Path
) -> None:
    """As it wrote them, with several values of LogTimeFormat."""
    found = judged(tmp_path, f"2026-11-26T13:20:00 step 1\n[{time}] error: {says}\n")[2]
    assert (found["cause"], found["certainty"]) == (cause, certainty)


def test_the_failure_of_a_task_is_no_cancellation(tmp_path: Path) -> None:
    """Slurm 25.05 and later say so; before, it read as somebody's scancel."""
    found = judged(
        tmp_path,
        "srun: error: node02: task 2: Exited with exit code 1\nsrun: Terminating StepId=1.0\n"
        f"[2026-11-26T13:23:01.979] error: *** STEP 1.0 {AT} DUE TO TASK FAILURE ***\n"
        "srun: error: node01: task 0: Killed\n",
    )[2]
    assert (found["cause"], found["rank"]) == ("unknown", 2)


CUT = (
    "node02 and node03 cannot reach each other by TCP; then rank 0 on node01 failed: RuntimeError:"
    " [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting"
)


@pytest.mark.parametrize("where", ["failure.json", "slurm-1.out"])
def test_nodes_that_do_not_reach_each_other_are_named_and_no_rank(
    where: str, tmp_path: Path
) -> None:
    texts = {
        "failure.json": json.dumps(
            {
                "rank": None,
                "node": "node[02-03]",
                "cause": CUT,
                "victims": [{"rank": 3, "node": "node04", "cause": ""}],
            }
        ),
        "slurm-1.out": f"srunddp: {CUT} (exit code 69)\n",
    }
    _, said, printed = judged(tmp_path, {where: texts[where]})
    assert (printed["cause"], printed["certainty"]) == ("network-unreachable", "certain")
    assert printed["rank"] is None
    assert "node02 and node03 cannot reach" in said


def test_a_report_that_is_nested_too_deeply_is_none(tmp_path: Path) -> None:
    _, said, _ = judged(
        tmp_path,
        {"4711.0/failure.json": 100_000 * "[", "4711.0/n1.rank0.log": "step 1\nMemoryError\n"},
    )
    assert tells(said, "note: ", "4711.0/failure.json", "cut off")


def test_the_reference_has_each_rule_in_its_order() -> None:
    table = (
        (ROOT / "docs/reference/triage.md")
        .read_text(encoding="utf-8")
        .partition("| rule | the line is set aside because |")[2]
    )
    rows = re.findall(r"^\| `([\w-]+)` \| (.+) \|$", table.partition("\n\n")[0], re.MULTILINE)
    assert rows == [(rule.name, rule.sentence) for rule in (*RULES, PEER)]
    assert {rule.name for rule in (*RULES, PEER)} == {row["rule"] for row in SHORT if "rule" in row}


def test_an_empty_log_is_told_to_be_empty(tmp_path: Path) -> None:
    assert tells(judged(tmp_path, "")[1].splitlines()[0], "no failure", "empty")


@pytest.mark.parametrize(
    "ended", ["", "srun: error: node[01-08]: tasks 0-63: Exited with exit code 69\n"]
)
def test_failures_of_a_check_are_the_cause(ended: str, tmp_path: Path) -> None:
    found, said, printed = judged(tmp_path, CHECK + ended)
    assert (found.cause, found.certainty, found.node, found.rank) == (
        "check-failed",
        "certain",
        "node03",
        None,
    )
    assert printed["hint"] == "clear /tmp"
    assert "\nhint: clear /tmp\n" in said
    assert "then what followed: FAIL  reach" in said


def test_the_json_of_a_check_is_read(tmp_path: Path) -> None:
    finding = {
        "level": "FAIL",
        "check": "limits",
        "found": "full",
        "expected": "room",
        "hint": "clear /tmp",
    }
    text = json.dumps(
        {"findings": [{**finding, "nodes": ["n3"], "ranks": [5]}, {**finding, "level": "WARN"}]}
    )
    found, _, printed = judged(tmp_path, text, "preflight.77.json")
    assert (found.cause, found.certainty, found.rank, found.node) == (
        "check-failed",
        "certain",
        5,
        "n3",
    )
    assert printed["text"] == "FAIL limits: full; expected room -> clear /tmp"
