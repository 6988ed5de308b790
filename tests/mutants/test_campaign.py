"""What is made of the tests' outcomes on a mutant, and what is kept of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests.conftest import ROOT, missing
from tests.mutants.areas import TestSet
from tests.mutants.campaign import BrokenTestsError, Campaign, Result, Results, Status
from tests.mutants.mutations import Mutation, Place, find_mutations
from tests.mutants.summary import Summary
from tests.mutants.workspace import Outcome, Workspace

MUTATION = Mutation("srunddp/run/cli.py", 3, "f", "comparison", 0, 1, "b", "a < b", "a <= b")
NEAREST = TestSet(("tests/near.py",), "")
OTHERS = TestSet(("tests/far.py",), "")
PASSED = Outcome(0, (), 10.0, "")
HANGS = Outcome(None, (), 180.0, "")
BROKEN = Outcome(4, (), 1.0, "ImportError in conftest.py")


def failed(test: str) -> Outcome:
    return Outcome(1, (test,), 1.0, "")


@dataclass
class FakeRunner:
    """Has the outcomes of the runs, and notes what was run: ``+`` before what ran on the mutant."""

    outcomes: list[Outcome]
    asked: list[str] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)
    is_changed: bool = False

    @contextmanager
    def changed(self, _: Mutation) -> Iterator[None]:
        self.is_changed = True
        yield
        self.is_changed = False

    def run(self, tests: TestSet, limit: float, left_out: Sequence[str] = ()) -> Outcome:
        return self.run_again(" -".join([*tests.paths, *left_out]), limit)

    def run_again(self, test: str, limit: float) -> Outcome:
        self.asked.append("+" * self.is_changed + test)
        self.limits.append(limit)
        return self.outcomes.pop(0)


def judged(runner: FakeRunner) -> Result:
    result = Campaign(runner, lambda _: [NEAREST, OTHERS]).judge(MUTATION)
    assert not runner.outcomes
    return result


def test_a_survivor_has_passed_all_sets_of_tests() -> None:
    runner = FakeRunner([PASSED, PASSED])
    assert (judged(runner).status, judged(FakeRunner([PASSED, PASSED])).by) == (Status.SURVIVED, "")
    assert runner.asked == ["+tests/near.py", "+tests/far.py"]


def test_a_test_that_fails_twice_on_the_mutant_alone_kills_it() -> None:
    runner = FakeRunner([failed("near::one"), failed("near::one"), PASSED])
    result = judged(runner)
    assert (result.status, result.by, result.flakes) == (Status.KILLED, "near::one", ())
    assert runner.asked == ["+tests/near.py", "+near::one", "near::one"]


def test_a_flake_kills_nothing_and_the_other_tests_go_on() -> None:
    runner = FakeRunner(
        [failed("near::flake"), PASSED, PASSED, failed("far::one"), failed("far::one"), PASSED]
    )
    result = judged(runner)
    assert (result.status, result.by, result.flakes) == (
        Status.KILLED,
        "far::one",
        ("near::flake",),
    )
    assert runner.asked[:3] == ["+tests/near.py", "+near::flake", "+tests/near.py -near::flake"]


def test_a_test_that_fails_on_the_unchanged_code_is_left_out_from_then_on() -> None:
    runner = FakeRunner(
        [failed("near::old"), failed("near::old"), failed("near::old"), PASSED, PASSED]
    )
    campaign = Campaign(runner, lambda _: [NEAREST, OTHERS])
    assert campaign.judge(MUTATION).status is Status.SURVIVED
    runner.outcomes += [PASSED, PASSED]
    campaign.judge(MUTATION)
    assert runner.asked[-2:] == ["+tests/near.py -near::old", "+tests/far.py -near::old"]


def test_what_hangs_is_killed_where_the_unchanged_code_takes_a_third_of_the_limit() -> None:
    runner = FakeRunner([HANGS, replace(PASSED, seconds=59.0)])
    result = judged(runner)
    assert (result.status, result.by) == (Status.TIMED_OUT, "tests/near.py")
    assert runner.asked == ["+tests/near.py", "tests/near.py"]


def test_on_a_slower_machine_what_hangs_gets_more_time() -> None:
    runner = FakeRunner([HANGS, replace(PASSED, seconds=400.0), PASSED, PASSED])
    assert judged(runner).status is Status.SURVIVED
    assert runner.limits[2] == 1200.0


def test_the_limit_is_three_times_what_the_tests_last_took() -> None:
    runner = FakeRunner([replace(PASSED, seconds=100.0), PASSED] * 2)
    campaign = Campaign(runner, lambda _: [NEAREST, OTHERS])
    for _ in range(2):
        campaign.judge(MUTATION)
    assert runner.limits[2:] == [300.0, 60.0]


def test_where_pytest_itself_does_not_start_twice_the_mutant_is_killed() -> None:
    assert judged(FakeRunner([BROKEN, BROKEN])).by == "pytest, with code 4"
    assert judged(FakeRunner([BROKEN, PASSED, PASSED, PASSED])).status is Status.SURVIVED


def test_tests_that_do_not_end_on_the_unchanged_code_end_the_campaign() -> None:
    with pytest.raises(BrokenTestsError, match=r"tests/near\.py on the unchanged code"):
        judged(FakeRunner([HANGS, HANGS]))


def result_of(number: int, status: Status) -> Result:
    return Result(
        "srunddp/run/cli.py",
        number,
        "f",
        "not",
        f"not a{number}",
        f"a{number}",
        status,
        "",
        1.0,
        ("x::y",),
    )


def test_results_are_there_for_the_next_call_and_the_last_one_counts(tmp_path: Path) -> None:
    results = Results(tmp_path / "new" / "results.jsonl")
    assert results.read() == {}
    survived = result_of(1, Status.SURVIVED)
    killed = result_of(1, Status.KILLED)
    other = result_of(2, Status.TIMED_OUT)
    for each in (survived, other, killed):
        results.add(each)
    assert list(results.read().values()) == [killed, other]


def test_equivalent_mutants_are_not_counted() -> None:
    results = [
        result_of(number, Status.SURVIVED if number < 3 else Status.KILLED) for number in range(12)
    ]
    places = [each.place for each in results]
    summary = Summary.of(results, places, places[:1])
    assert [each.line for each in summary.survivors] == [1, 2]
    assert not summary.is_good
    assert "survived: srunddp/run/cli.py:1 in f, not\n  - not a1\n  + a1" in summary.render()
    assert Summary.of(results, places, [*places[:2], Place("a.py", "", "", "")]).is_good
    last = Summary.of(results, places, places[:2]).render().splitlines()
    assert last[2].split() == ["all", "10", "9", "0", "1"]
    assert last[3].startswith("2 more are equivalent")


@pytest.mark.slow
def test_the_copy_runs_changed_code_and_the_developer_s_tree_stays_as_it_is(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    try:
        workspace.prepare()
    except OSError as error:
        missing(f"unshare: {error}")
    file = "srunddp/spare_nodes/lease.py"
    tests = TestSet(("tests/spare_nodes/test_lease.py",), "not slow")
    original = (ROOT / file).read_bytes()
    assert workspace.run(tests, 300.0).passed
    (mutation, *_) = [each for each in find_mutations(ROOT, file) if each.kind == "return"]
    with workspace.changed(mutation):
        outcome = workspace.run(tests, 300.0)
        assert not outcome.passed
        assert outcome.failed
        assert not workspace.run_again(outcome.failed[0], 300.0).passed
        assert (ROOT / file).read_bytes() == original
    assert (workspace.tree / file).read_bytes() == original
    assert workspace.run_again(outcome.failed[0], 300.0).passed
