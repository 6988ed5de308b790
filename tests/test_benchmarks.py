"""How benchmarks are run and shown; what they measure is not looked at here."""

from __future__ import annotations

import importlib
import inspect
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.benchmarks import page, runner
from tests.benchmarks.__main__ import LONG, NAMES
from tests.benchmarks.benchmark import Case, CaseResult, Limit, NotMeasuredError, Result, Sample

pytestmark = pytest.mark.slow  # the runner imports torch


class CountedWays:
    """A case of two repeats that counts its runs, of which the third way cannot be had."""

    def __init__(self, stop_after: int = 100) -> None:
        self.runs: Counter[str] = Counter()
        self.stop_after = stop_after

    def run(self, way: str, seconds: float) -> Sample:
        if sum(self.runs.values()) == self.stop_after:
            raise KeyboardInterrupt
        self.runs[way] += 1
        if way == "absent":
            raise NotMeasuredError("no such package")
        return {"wall": seconds + self.runs[way]}

    def cases(self) -> Iterator[Case]:
        seconds = {"ours": 1.0, "theirs": 3.0, "absent": 0.0}
        ways = {
            way: lambda _, way=way, each=each: self.run(way, each) for way, each in seconds.items()
        }
        yield Case("a case", ways, 2, (Limit("wall", "theirs", 0.5),))

    def measure(self, file: Path, *, again: bool = False) -> Result:
        return runner.run(self.cases(), "Title", "about", file, again=again)


def test_each_way_is_measured_so_often_unless_it_cannot(tmp_path: Path) -> None:
    ways = CountedWays()
    result = ways.measure(tmp_path / "name.json")
    assert ways.runs == {"ours": 2, "theirs": 2, "absent": 1}
    case = result.cases["a case"]
    assert (case.values("ours", "wall"), case.values("theirs", "wall")) == ([2.0, 3.0], [4.0, 5.0])
    assert case.not_measured == {"absent": "no such package"}


def test_a_run_that_was_cut_off_is_taken_up(tmp_path: Path) -> None:
    file = tmp_path / "name.json"
    first = CountedWays(stop_after=3)
    second = CountedWays()
    with pytest.raises(KeyboardInterrupt):
        first.measure(file)
    whole = second.measure(file)
    assert first.runs + second.runs == {"ours": 2, "theirs": 2, "absent": 1}
    assert CountedWays().measure(file) == whole == Result.of(json.loads(file.read_text()))
    third = CountedWays()
    third.measure(file, again=True)
    assert third.runs["ours"] == 2


def test_another_version_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "name.json"
    ways = CountedWays()
    CountedWays().measure(file)
    monkeypatch.setattr(runner, "setting", lambda: {"commit": "another"})
    assert ways.measure(file).setting == {"commit": "another"}
    assert ways.runs["ours"] == 2


def test_the_order_of_ways_differs_between_repeats() -> None:
    assert len({tuple(runner.order("a case", list("abcdef"), repeat)) for repeat in range(5)}) > 1


def of(**samples: list[float]) -> CaseResult:
    limits = [Limit("wall", "theirs", 0.5)]
    return CaseResult(
        limits=limits,
        samples={way: [{"wall": each} for each in found] for way, found in samples.items()},
    )


def test_a_ratio_is_that_of_minima_beside_the_one_in_pairs() -> None:
    result = Result("T", "", {}, "", cases={"c": of(ours=[1.0, 2.0, 6.0], theirs=[4.0, 4.0, 8.0])})
    assert "|  | theirs | 0.250 (0.500) | wall 0.5: met |" in page.table(result)
    result.cases["c"] = of(ours=[3.0, 3.0], theirs=[4.0, math.inf])
    assert "|  | theirs | 0.750 (0.750), 1 of 2 failed | wall 0.5: missed |" in page.table(result)
    result.cases["c"] = of(ours=[3.0], theirs=[math.inf])
    assert "|  | theirs | 1 of 1 failed |  |" in page.table(result)


def test_a_plot_has_a_bar_for_each_ratio() -> None:
    drawn = page.plot(
        Result("T", "", {}, "", cases={"c <": of(ours=[1.0], theirs=[4.0], others=[0.5])})
    )
    assert drawn.count("<rect") == 2
    assert "c &lt;: wall" in drawn
    assert ">0.250</text>" in drawn


def test_the_page_has_the_results_in_its_folder() -> None:
    """``bin/bench --page`` writes it."""
    text = page.PAGE.read_text()
    assert page.rendered(text) == text
    for file in page.PUBLISHED.glob("*.json"):
        assert file.with_suffix(".svg").read_text() == page.plot(
            Result.of(json.loads(file.read_text()))
        )


@pytest.mark.parametrize("name", [*NAMES, *LONG])
def test_a_benchmark_has_cases_and_says_what_it_measures(name: str) -> None:
    module = importlib.import_module(f"tests.benchmarks.{name}")
    assert list(inspect.signature(module.cases).parameters) == ["quick"]
    documentation = inspect.getdoc(module)
    assert documentation
    title, _, about = documentation.partition("\n\n")
    assert "\n" not in title
    assert about
