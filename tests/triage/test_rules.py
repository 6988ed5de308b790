"""The rules that set something aside, their table in the reference, and what is said without a failure."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from srunddp.triage.collect import collect
from srunddp.triage.diagnose import Diagnosis, diagnose
from srunddp.triage.logs import find
from srunddp.triage.render import lines, record
from srunddp.triage.rules import PEER, RULES
from tests.support.starting import ROOT, write

TOP = 'Traceback (most recent call last):\n  File "/p/a.py", line 1, in <module>\n    f()\n'
CAUGHT = TOP.replace("<module>", "fit")
PEERS = (
    f"[rank0]: {TOP.rstrip()}\n[rank0]: RuntimeError: [x/pair.cc:553] Connection closed by peer [10.0.0.2]:1\n".replace(
        "\n  ", "\n[rank0]:   "
    )
)
FAILED = f"{TOP}ValueError: bad\n"
NOTICE = "[2026-03-01 10:00:00,1] [ERROR] [ft_launcher7@n1] NVML Error\n"
FULL = "OSError: [Errno 28] No space left on device\n"


def judged(folder: Path, text: str, name: str = "slurm-1.out") -> tuple[Diagnosis, str, dict[str, object]]:
    """The diagnosis of a log with that text, its lines and its JSON."""
    write(folder / name, text)
    evidence = collect(find([str(folder)]))
    found = diagnose(evidence)
    return found, "\n".join(lines(found, evidence)), json.loads(json.dumps(record(found, evidence)))


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("quoted", f"+ echo address already in use\n{FAILED}"),
        ("ignored", f"Exception ignored in: <f>\n{CAUGHT}{FULL}{FAILED}"),
        ("handled", f"{CAUGHT}{FULL}trying again with another folder\n{FAILED}"),
        ("launcher-notice", f"{NOTICE}{CAUGHT}{FULL}{FAILED}"),
        ("warning", f"2026-03-01 10:00:00 WARNING CUDA out of memory\n{FAILED}"),
        ("ended-by-launcher", f"{FAILED}srun: Terminating StepId=1.0\nsrun: error: n1: task 3: Terminated\n"),
        ("survived", f"{CAUGHT}{FULL}step 1\nstep 2\nstep 3\n{FAILED}"),
        ("peer-error", f"{FAILED}{PEERS}"),
    ],
)
def test_what_a_rule_sets_aside_is_named_with_it(rule: str, text: str, tmp_path: Path) -> None:
    found, said, printed = judged(tmp_path, text)
    assert (found.cause, found.first and found.first.text) == ("script-error", "ValueError: bad")
    assert [each["rule"] for each in printed["set_aside"]] == [rule]  # type: ignore[index, attr-defined]
    assert re.search(rf"^set aside: .*\({rule}: .+\)$", said, re.MULTILINE)


def test_an_error_before_a_good_end_is_set_aside(tmp_path: Path) -> None:
    found, said, _ = judged(tmp_path, "step 1\nConnection refused\nTraining finished\n")
    assert found.cause is None
    assert said.splitlines()[1].startswith("set aside: Connection refused (shutdown: ")


def test_the_reference_has_each_rule_in_its_order() -> None:
    table = (ROOT / "docs/reference.md").read_text(encoding="utf-8").partition("| rule | it sets aside what |")[2]
    rows = re.findall(r"^\| `([\w-]+)` \| (.+) \|$", table.partition("\n\n")[0], re.MULTILINE)
    assert rows == [(rule.name, rule.sentence) for rule in (*RULES, PEER)]


@pytest.mark.parametrize(
    "text",
    [
        "hello\n",
        "loading data\nmodel built\n",
        "srunddp: 64 ranks on 8 nodes, launcher Slurm, channel pmi, master 10.0.0.1 port 40000, interface a (b)\n",
        "step 1 loss 0.1\nstep 2 loss 0.1\nloss saved\n",
    ],
)
def test_a_log_without_an_end_is_not_called_well(text: str, tmp_path: Path) -> None:
    found, said, _ = judged(tmp_path, text)
    assert (found.cause, found.certainty) == ("unknown", "unknown")
    assert said.splitlines()[0].startswith("no failure found, and no end either; last words: ")
    assert said.splitlines()[0].endswith(f"{text.splitlines()[-1]!r}")


def test_where_nothing_tells_the_first_line_says_so(tmp_path: Path) -> None:
    assert judged(tmp_path, "")[1].startswith("no failure found, and no end either; the logs are empty\n")


@pytest.mark.parametrize(
    "word", ["exit code 0", "Training finished", "State: COMPLETED", "Done.", "stopped after 9 epochs"]
)
def test_a_word_of_a_good_end_is_enough(word: str, tmp_path: Path) -> None:
    assert judged(tmp_path, f"step 1\n{word}\n")[1] == "nothing failed"


CHECK = """\
check of job 77: 64 of 64 ranks on 8 nodes, 2 failures
FAIL  limits     node03  0 MiB free in /tmp; expected 1 GiB or more -> clear /tmp
FAIL  reach      node05  no TCP from 10.0.0.3 to 10.0.0.5: timed out; expected a way -> open the port
ok    gpus               8 on each node
"""


@pytest.mark.parametrize("ended", ["", "srun: error: node[01-08]: tasks 0-63: Exited with exit code 69\n"])
def test_failures_of_a_check_are_the_cause(ended: str, tmp_path: Path) -> None:
    found, said, printed = judged(tmp_path, CHECK + ended)
    assert (found.cause, found.certainty, found.node, found.rank) == ("check-failed", "certain", "node03", None)
    assert printed["hint"] == "clear /tmp"
    assert "\nhint: clear /tmp\n" in said
    assert "then what followed: FAIL  reach" in said


def test_the_json_of_a_check_is_read(tmp_path: Path) -> None:
    finding = {"level": "FAIL", "check": "limits", "found": "full", "expected": "room", "hint": "clear /tmp"}
    text = json.dumps({"findings": [{**finding, "nodes": ["n3"], "ranks": [5]}, {**finding, "level": "WARN"}]})
    evidence = collect(find([str(write(tmp_path / "preflight.77.json", text))]))
    found = diagnose(evidence)
    assert (found.cause, found.certainty, found.rank, found.node) == ("check-failed", "certain", 5, "n3")
    assert found.first is not None
    assert found.first.text == "FAIL limits: full; expected room -> clear /tmp"


@pytest.mark.parametrize(
    "text",
    [
        "usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --epochz 3\n",
        "usage: a [-h]\na: error: argument --batch-size: invalid int value: '32k'\n",
        "train.py: error: --lr must be positive\n",
        "Usage: train.py [OPTIONS]\nTry 'train.py --help' for help.\n\nError: No such option: --epochz\n",
        "srunddp: error: no option --nosuch; expected an option of srunddp run -> see srunddp run --help\n",
    ],
)
def test_a_wrong_option_is_an_error_of_usage(text: str, tmp_path: Path) -> None:
    found, said, _ = judged(tmp_path, text)
    assert found.cause == "usage-error"
    assert text.splitlines()[-1] in said.splitlines()[0]
    assert "traceback" not in said


@pytest.mark.parametrize(
    ("text", "rank", "line"),
    [
        # A rank that all others miss.
        (f"rank 0 of 2\nrank 1 of 2\n{PEERS}", 1, "RuntimeError: "),
        # One that a signal ended before the launcher ended any.
        (f"{PEERS}srun: error: n1: task 1: Terminated\n", 1, "srun: error: n1: task 1: Terminated"),
        # One without a traceback: its own last word, before its peers speak.
        (
            f"no more shards: giving up\n{PEERS}srun: error: n1: task 1: Exited with exit code 1\n",
            1,
            "no more shards: ",
        ),
        # Tracebacks without a label: the exit that the launcher told of first, if others only missed that rank.
        (f"{FAILED}srun: error: n1: task 3: Exited with exit code 1\n{PEERS}", 3, "ValueError: bad"),
        # Of two at once the traceback that began first.
        ("[rank2]: " + TOP.split("\n")[0] + "\n" + FAILED + "[rank2]: " + FULL, 2, FULL.strip()),
        ("step 9: 16%|#| 8/50[rank1]: " + FAILED.replace("\n", "\n[rank1]: ", 3), 1, "ValueError: bad"),
    ],
)
def test_the_first_rank_and_its_line_are_found(text: str, rank: int, line: str, tmp_path: Path) -> None:
    found = judged(tmp_path, text)[0]
    assert found.first is not None
    assert (found.rank, found.first.text[: len(line)]) == (rank, line)
