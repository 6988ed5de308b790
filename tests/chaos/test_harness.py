"""The harness that other tests rely on sees every process, reads every verdict, and repeats a
trial.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace

from tests.chaos.plan import Fault, Plan
from tests.chaos.processes import Watch
from tests.chaos.run import Result, wrong
from tests.chaos.trials import quantile, random_plan, table
from tests.chaos.verdict import Verdict, verdicts, victims
from tests.support.starting import until

ERRORS = """\
srun: error: node02: task 3: Exited with exit code 1
srunddp: rank 3 on node02 failed: ValueError: boom (exit code 1)
Traceback (most recent call last):
ValueError: boom
srunddp: ended with it: ranks 0-2 on node01, rank 4 on node03
"""
VERDICT = Verdict((3,), "node02", "ValueError: boom", 1)
FORK = "import os, time; os.fork(); time.sleep(60)"


def test_a_process_and_its_fork_are_found_by_their_mark() -> None:
    with Watch("CHAOS_RUN=harness") as watch:
        first = subprocess.Popen(
            [sys.executable, "-c", FORK], env={**os.environ, "CHAOS_RUN": "harness"}
        )
        until(lambda: len(watch.living()) == 2)
        before = time.monotonic()
        watch.kill()
        until(lambda: not watch.living())  # the zombie has ended, though nobody has waited for it
        for process in watch.all.values():
            assert process.ended is not None
            assert before < process.ended < before + 1.0
        first.wait()


def test_a_verdict_is_read() -> None:
    assert verdicts(ERRORS) == [VERDICT]
    assert victims(ERRORS) == "ranks 0-2 on node01, rank 4 on node03"
    lost = "srunddp: ranks 2-3 on node02 lost: no sign of life for 8 s (exit code 69)"
    assert verdicts(lost) == [Verdict((2, 3), "node02", "no sign of life for 8 s", 69, lost=True)]
    assert verdicts("srunddp: rank(s)" + lost[14:]) == verdicts(lost)


def test_a_verdict_out_of_form_is_not_taken_for_none() -> None:
    assert verdicts("srunddp: rank 3 on node02 failed: boom")[0].code == -1


def test_each_broken_promise_is_found() -> None:
    plan = Plan((Fault(3, "exception"),))
    right = Result(1, "", ERRORS, 3, 0.5, 0.6, (), (VERDICT,))
    assert wrong(plan, right, 2.0) == []
    broken = [
        replace(right, code=143),
        replace(right, gone=2.5),
        replace(right, gone=None),
        replace(right, left=("17 python",)),
        replace(right, verdicts=()),
        replace(right, verdicts=(VERDICT, VERDICT)),
        replace(right, culprit=None),
        *(
            replace(right, verdicts=(replace(VERDICT, **change),))
            for change in ({"ranks": (2,)}, {"node": "node01"}, {"cause": "exit"}, {"code": 3})
        ),
    ]
    assert [wrong(plan, result, 2.0) == [] for result in broken] == [False] * len(broken)


def test_the_last_supervisor_that_is_killed_need_not_be_named() -> None:
    """By a supervisor of another rank: there is none any more."""
    plan = Plan((Fault(0, "supervisor", "shutdown"),))
    silent = Result(137, "", "", 0, 0.1, 0.2, (), ())
    assert wrong(plan, silent, 2.0) == ["0 verdicts"]
    assert wrong(plan, replace(silent, alone=True), 2.0) == []
    assert wrong(plan, replace(silent, alone=True, code=0), 2.0) != []
    raised = Plan((Fault(0, "exception", "shutdown"),))
    assert "0 verdicts" in wrong(raised, replace(silent, alone=True), 2.0)


def test_a_seed_gives_the_same_trial_again() -> None:
    launchers = ("none", "pmi2")
    assert [random_plan(seed, launchers) for seed in range(50)] == [
        random_plan(seed, launchers) for seed in range(50)
    ]
    assert len({random_plan(seed, launchers) for seed in range(50)}) > 40


def test_the_table_counts_what_never_ended_as_the_longest() -> None:
    assert [quantile(range(1, 101), part) for part in (0.5, 0.95, 1.0)] == [50, 95, 100]
    good = {"kind": "exit3", "wrong": [], "gone": 0.25, "back": 0.5}
    rows = table([good, {**good, "gone": None, "wrong": ["gone after None s"]}]).splitlines()
    assert rows[2] == "| exit3 | 2 | 1 | 0.25 s | inf s | inf s | 0.50 s | 0.50 s | 0.50 s |"
