"""What a note advises helps: real runs with a trouble, before and after its hint was followed, in
pairs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from srunddp.cli import main
from srunddp.report import advice as judging
from srunddp.report.run import read
from srunddp.report.summarize import summary_of
from tests.conftest import ROOT
from tests.support.made_up_run import GIB, MadeUp

PAIRS = 3
PROGRAM = ROOT / "tests" / "programs" / "advised.py"
LIMIT = 200.0  # seconds
Report = dict[str, Any]


@dataclass(frozen=True)
class Trouble:
    """A run that a note is about.

    Attributes:
        rule: The note.
        kind: What the program does.
        settings: Of the run with the trouble.
        hint: A regular expression that the note's hint matches.
        followed: The settings that follow the hint, of the hint's match; they replace those of the
            same name.
        figure: Has to be greater afterwards.
        ranks: Their number.
        cpus: How many CPUs each run may use, before and after.
    """

    rule: str
    kind: str
    settings: tuple[str, ...]
    hint: str
    followed: Callable[[re.Match[str]], tuple[str, ...]]
    figure: Callable[[Report], float]
    ranks: int = 1
    cpus: tuple[int, int] = (2, 2)


def samples_per_s(report: Report) -> float:
    found: float = report["throughput"]["per_s"]
    return found


def samples_per_cpu_s(report: Report) -> float:
    """How many samples a second of CPU time trains: what other processes of a busy machine do does
    not change it.
    """
    found: float = report["throughput"]["samples"] / report["ranks"][0]["cpu_s"]
    return found


def finite(report: Report) -> float:
    return float(report["not_finite"] is None)


TROUBLES = {
    "storage is waited for": Trouble(
        "data wait",
        "storage",
        ("--dataloader.num_workers=0", "--batch_size=16", "--rows=2000"),
        r"--dataloader.num_workers=(\d+) \(now 0\)",
        lambda match: (f"--dataloader.num_workers={match[1]}",),
        samples_per_s,
    ),
    "one CPU computes samples": Trouble(
        "data wait",
        "computed",
        ("--dataloader.num_workers=1", "--batch_size=16", "--rows=2000"),
        "more --cpus-per-task, with as many --dataloader.num_workers more",
        lambda _: ("--dataloader.num_workers=2",),
        samples_per_s,
        cpus=(1, 2),
    ),
    "steps too short for workers": Trouble(
        "data wait",
        "memory",
        ("--dataloader.num_workers=1", "--batch_size=64", "--rows=200000"),
        "a larger --batch_size.*--dataloader.num_workers=0",
        lambda _: ("--batch_size=1024", "--dataloader.num_workers=0"),
        samples_per_cpu_s,
    ),
    "steps too short": Trouble(
        "data wait",
        "memory",
        ("--dataloader.num_workers=0", "--batch_size=64", "--rows=400000"),
        "a larger --batch_size",
        lambda _: ("--batch_size=1024",),
        samples_per_cpu_s,
    ),
    "rank 0 writes in a callback": Trouble(
        "slow rank",
        "memory",
        ("--writes=true", "--width=1024", "--batch_size=64", "--rows=8000"),
        "see what rank 0 alone does in each step, such as writing in a callback",
        lambda _: ("--writes=false",),
        samples_per_s,
        ranks=2,
    ),
    "more threads than CPUs": Trouble(
        "cpu oversubscribed",
        "memory",
        ("--num_threads=4", "--width=1024", "--batch_size=256", "--rows=200000"),
        "fewer --num_threads",
        lambda _: ("--num_threads=1",),
        samples_per_cpu_s,
        cpus=(1, 1),
    ),
    "the learning rate is too high": Trouble(
        "not finite",
        "memory",
        ("--lr=1e6", "--log_every=1", "--batch_size=64", "--rows=60000"),
        "a lower learning rate",
        lambda _: ("--lr=0.01",),
        finite,
    ),
}


def replaced(settings: tuple[str, ...], by: tuple[str, ...]) -> list[str]:
    """Return the settings with those of the same name replaced."""
    known = dict(each.split("=", 1) for each in (*settings, *by))
    return [f"{name}={value}" for name, value in known.items()]


def reported(trouble: Trouble, settings: list[str], cpus: int, folder: Path) -> Report:
    """Run the program, and return its report."""
    command = (
        "mpirun",
        *("--allow-run-as-root", "--oversubscribe", "--bind-to", "none"),
        *("-n", str(trouble.ranks)),
        *(sys.executable, str(ROOT / "bin" / "srunddp"), "--quiet"),
        *("--monitor=0.2", f"--monitor-dir={folder / 'logs'}"),
        *(str(PROGRAM), trouble.kind, *settings, f"--output_dir={folder / 'output'}"),
    )
    own = sorted(os.sched_getaffinity(0))[:cpus]
    done = subprocess.run(
        command,
        cwd=ROOT,
        preexec_fn=lambda: os.sched_setaffinity(0, own),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shown = CliRunner(env={"PATH": ""}).invoke(main, ["report", str(folder / "logs"), "--json"])
    assert shown.exit_code == 0, shown.output
    found: Report = json.loads(shown.stdout)
    return found


@pytest.mark.alone
@pytest.mark.nightly
@pytest.mark.parametrize("name", TROUBLES)
def test_a_run_is_better_after_its_note_was_followed(name: str, tmp_path: Path) -> None:
    """In each of three pairs, whichever of the two runs is first."""
    trouble = TROUBLES[name]
    before = reported(trouble, list(trouble.settings), trouble.cpus[0], tmp_path / "first")
    notes = {note["rule"]: note["hint"] for note in before["notes"]}
    assert trouble.rule in notes, before["remarks"]
    match = re.search(trouble.hint, notes[trouble.rule])
    assert match, notes[trouble.rule]
    ways = {
        "before": (list(trouble.settings), trouble.cpus[0]),
        "after": (replaced(trouble.settings, trouble.followed(match)), trouble.cpus[1]),
    }
    for pair in range(PAIRS):
        # The other one first in every second pair, as the machine may get slower or faster.
        order = ["before", "after"] if pair % 2 == 0 else ["after", "before"]
        found = {}
        for way in order:
            report = reported(trouble, *ways[way], tmp_path / f"{way}-{pair}")
            found[way] = trouble.figure(report)
        print(f"{name}: {found}")
        assert found["after"] > found["before"], name


@pytest.mark.parametrize(
    ("rule", "made_up", "hint", "followed"),
    [
        (
            "time limit",
            MadeUp(time_limit=7200.0),
            r"--time=(\d+):(\d+):00",
            lambda match: MadeUp(time_limit=3600.0 * int(match[1]) + 60.0 * int(match[2])),
        ),
        (
            "memory unused",
            MadeUp(memory_limit=64 * GIB),
            r"--mem=(\d+)G",
            lambda match: MadeUp(memory_limit=int(match[1]) * GIB),
        ),
    ],
)
def test_a_smaller_request_gets_no_note(
    rule: str,
    made_up: MadeUp,
    hint: str,
    followed: Callable[[re.Match[str]], MadeUp],
    tmp_path: Path,
) -> None:
    """The run fits into what the hint says, and the note is gone."""
    (note,) = judging.notes(summary_of(read(made_up.write(tmp_path / "before"))))
    assert note.rule == rule
    match = re.search(hint, note.hint)
    assert match, note.hint
    after = summary_of(read(followed(match).write(tmp_path / "after")))
    assert judging.notes(after) == ()
    assert after.time_limit_s is None or after.seconds < after.time_limit_s
    assert all((node.memory_bytes or 0) < (node.memory_limit_bytes or 0) for node in after.per_node)
