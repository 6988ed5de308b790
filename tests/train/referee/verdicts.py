"""How far what the Trainer makes of a program is from what the plain loop makes of it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.train.local_world import run_ranks
from tests.train.referee.plain import Figures, Journey, Outcome, PlainLoop, Weights
from tests.train.referee.programs import PROGRAMS
from tests.train.referee.trained import Result, train_first_part, train_whole

BOUND = 1e-12  # the figures are about 1: sums in another order differ by some last digits
WORLD_SIZES = (1, 2, 3)
OTHER_SIZE = {1: 2, 2: 3, 3: 1}


@dataclass(frozen=True)
class Verdict:
    """One program on one journey.

    Attributes:
        program: Its name.
        journey: Where it was trained.
        differences: The greatest one by what differs, of all ranks.
        error: What the training ended in; empty where it came to its end.
    """

    program: str
    journey: Journey
    differences: Mapping[str, float]
    error: str = ""

    @property
    def worst(self) -> float:
        """The greatest difference; infinite where something is missing or the training failed."""
        if self.error:
            return math.inf
        return max(self.differences.values())

    def __str__(self) -> str:
        if self.error:
            return f"{self.journey}: {self.error}"
        shown = ", ".join(f"{name} {value:.1e}" for name, value in self.differences.items())
        return f"{self.journey}: {shown}"


def judge_whole(folder: Path, names: Sequence[str]) -> Iterator[Verdict]:
    """Train these programs to the end on each number of ranks; ``folder``: for the checkpoints."""
    for size in WORLD_SIZES:
        own_folder = folder / f"whole{size}"
        by_rank = run_ranks(size, own_folder, train_whole, own_folder, names)
        for name in names:
            yield verdict(name, Journey(size), [results[name] for results in by_rank])


def judge_interrupted(
    folder: Path, seed: int, names: Sequence[str], *, in_turn: bool = False
) -> Iterator[Verdict]:
    """Train these programs to some step on each number of ranks, and to the end on another.

    Args:
        folder: For the checkpoints.
        seed: Of the steps after which the worlds change.
        names: The programs.
        in_turn: Each program is trained on one pair of worlds, the next program on the next pair,
            in place of all pairs.
    """
    steps = {name: plain(name, Journey(1)).steps for name in names}
    for number, (size, other) in enumerate(OTHER_SIZE.items()):
        own_folder = folder / f"interrupted{size}"
        chosen = names[number :: len(OTHER_SIZE)] if in_turn else names
        cuts = {name: cut(seed, name, size, steps[name]) for name in chosen}
        first = run_ranks(size, own_folder, train_first_part, own_folder, cuts)
        rest = run_ranks(other, own_folder, train_whole, own_folder, chosen)
        for name in chosen:
            journey = Journey(size, cuts[name], other)
            early = errors([results[name] for results in first])
            if early:
                yield Verdict(name, journey, {}, early)
            else:
                yield verdict(name, journey, [results[name] for results in rest])


def cut(seed: int, name: str, size: int, steps: int) -> int:
    """The step after which the first ranks end, before the last one."""
    return random.Random(f"{seed}, {name}, {size}").randrange(1, steps)


def plain(name: str, journey: Journey) -> Outcome:
    """What the plain loop makes of a program."""
    program = PROGRAMS[name]()
    return PlainLoop(program.problem, journey, evaluate_at_cut=program.cut_by_max_steps).run()


def verdict(name: str, journey: Journey, results: Sequence[Result]) -> Verdict:
    """Compare what each rank has come to with the plain loop."""
    error = errors(results)
    if error:
        return Verdict(name, journey, {}, error)
    expected = plain(name, journey)
    every = [differences(expected, each) for each in results if isinstance(each, Outcome)]
    return Verdict(name, journey, {what: max(each[what] for each in every) for what in every[0]})


def errors(results: Sequence[Result]) -> str:
    """The first error of a rank; empty where there is none."""
    for number, each in enumerate(results):
        if isinstance(each, str) and each:
            return f"rank {number}: {each}"
    return ""


def differences(expected: Outcome, found: Outcome) -> dict[str, float]:
    """The greatest difference of each part; infinite where one has what the other has not."""
    return {
        "weights": of_weights(expected.weights, found.weights),
        "rates": of_lists(expected.rates, found.rates),
        "training": of_figures(expected.train, found.train),
        "validation": of_figures(expected.val, found.val),
        "evaluations": of_figures(expected.evaluations, found.evaluations),
        "evaluate()": of_figures({0: expected.last}, {0: found.last}),
        "resumed at": abs(expected.resumed_at - found.resumed_at),
        "steps": abs(expected.steps - found.steps),
        "best step": abs(expected.best_step - found.best_step),
        "best weights": of_weights(expected.best_weights, found.best_weights),
    }


def of_weights(expected: Weights, found: Weights) -> float:
    if expected.keys() != found.keys():
        return math.inf
    return max(finite(float((value - found[name]).abs().max())) for name, value in expected.items())


def of_figures(expected: Mapping[int, Figures], found: Mapping[int, Figures]) -> float:
    if expected.keys() != found.keys():
        return math.inf
    every = [0.0]
    for number, figures in expected.items():
        if figures.keys() != found[number].keys():
            return math.inf
        every.append(of_lists(list(figures.values()), [found[number][name] for name in figures]))
    return max(every)


def of_lists(expected: Sequence[float], found: Sequence[float]) -> float:
    if len(expected) != len(found):
        return math.inf
    pairs = zip(expected, found, strict=True)
    return max((finite(abs(one - other)) for one, other in pairs), default=0.0)


def finite(difference: float) -> float:
    """The difference; infinite where it is not a number."""
    if math.isnan(difference):
        return math.inf
    return difference
