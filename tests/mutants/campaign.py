"""Runs the nearest tests on one mutant after the other, and keeps what came of it in a file.

A test that fails on a mutant counts if it fails there once more by itself, and passes on the
unchanged code. A run of tests that does not end counts if the same run ends on the unchanged code
in a third of the time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, Self

from tests.mutants.areas import TestSet
from tests.mutants.mutations import Mutation, Place
from tests.mutants.workspace import Outcome

# Seconds for a set of tests. The limit is three times what they last took on code that passed them.
# A set that takes longer than the first limit is timed on the unchanged code, and then run again.
_FIRST_LIMIT = 180.0
_SHORTEST_LIMIT = 60.0
_LONGEST_LIMIT = 3600.0
_MOST_TRIES = 4  # of one set of tests, as each flake costs another run


class BrokenTestsError(Exception):
    """Tests of a set do not end on the unchanged code."""


class Status(StrEnum):
    """What the tests make of a mutant."""

    KILLED = "killed"
    TIMED_OUT = "timed out"
    SURVIVED = "survived"


@dataclass(frozen=True)
class Result:
    """What came of one mutant.

    Attributes:
        file, line, function, kind, before, after: of its :class:`Mutation`.
        status: what the tests made of it.
        by: the test that noticed it, or the tests that did not end; empty for a survivor.
        seconds: that all its runs took.
        flakes: tests that failed once and not again.
    """

    file: str
    line: int
    function: str
    kind: str
    before: str
    after: str
    status: Status
    by: str
    seconds: float
    flakes: tuple[str, ...] = ()

    @property
    def place(self) -> Place:
        """Of the mutation."""
        return Place(self.file, self.function, self.before, self.after)

    @classmethod
    def of_json(cls, text: str) -> Self:
        """Read a line of the file of results."""
        read: dict[str, Any] = json.loads(text)
        return cls(**read | {"status": Status(read["status"]), "flakes": tuple(read["flakes"])})

    def to_json(self) -> str:
        """Write a line of the file of results."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Results:
    """The file of results; of a mutant that was run more than once the last line counts."""

    path: Path

    def read(self) -> dict[Place, Result]:
        """All that is there."""
        if self.path.is_file():
            lines = self.path.read_text().splitlines()
        else:
            lines = []
        found = map(Result.of_json, lines)
        return {result.place: result for result in found}

    def add(self, result: Result) -> None:
        """Append one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(f"{result.to_json()}\n")


class Runner(Protocol):
    """Runs tests on the code as it is, or within :meth:`changed` on a mutant; see
    :class:`Workspace`.
    """

    def changed(self, mutation: Mutation) -> Any:
        """A context within which the code has the mutation."""

    def run(self, tests: TestSet, limit: float, left_out: Sequence[str] = ()) -> Outcome:
        """Run these tests up to the first failure."""

    def run_again(self, test: str, limit: float) -> Outcome:
        """Run one test."""


@dataclass
class Campaign:
    """Decides for each mutant whether the tests notice it.

    Attributes:
        runner: runs the tests.
        nearest: the sets of tests for a file, in the order in which they are run.
        say: takes a line on what happens.
        broken: tests that fail on the unchanged code; they are left out.
    """

    runner: Runner
    nearest: Callable[[str], list[TestSet]]
    say: Callable[[str], None] = lambda _: None
    broken: set[str] = field(default_factory=set)
    _limits: dict[TestSet, float] = field(default_factory=dict)

    def judge(self, mutation: Mutation) -> Result:
        """Run the nearest tests on a mutant until one set of them notices it."""
        began = time.monotonic()
        flakes: list[str] = []
        status = Status.SURVIVED
        by = ""
        for tests in self.nearest(mutation.file):
            status, by = self._try(mutation, tests, flakes)
            if status is not Status.SURVIVED:
                break
        return Result(
            file=mutation.file,
            line=mutation.line,
            function=mutation.function,
            kind=mutation.kind,
            before=mutation.before,
            after=mutation.after,
            status=status,
            by=by,
            seconds=round(time.monotonic() - began, 1),
            flakes=tuple(flakes),
        )

    def _try(self, mutation: Mutation, tests: TestSet, flakes: list[str]) -> tuple[Status, str]:
        left_out = set(self.broken)
        for _ in range(_MOST_TRIES):
            limit = self._limits.get(tests, _FIRST_LIMIT)
            outcome = self._run(mutation, tests, limit, left_out)
            if outcome.passed:
                self._limits[tests] = max(_SHORTEST_LIMIT, 3 * outcome.seconds)
                return Status.SURVIVED, ""
            if outcome.timed_out:
                # The limit may be of a time when the machine had less to do.
                self._limits[tests] = max(
                    _SHORTEST_LIMIT, 3 * self._time_unchanged(tests, left_out)
                )
                if self._limits[tests] <= limit:
                    return Status.TIMED_OUT, " ".join(tests.paths)
            elif not outcome.failed:
                # pytest itself did not get through, as after an error in a conftest.py or a signal.
                if not self._run(mutation, tests, limit, left_out).passed:
                    return Status.KILLED, f"pytest, with code {outcome.code}"
            else:
                test = outcome.failed[0]
                if self._is_noticed_by(test, mutation, limit):
                    return Status.KILLED, test
                flakes.append(test)
                left_out.add(test)
        return Status.SURVIVED, ""

    def _run(
        self, mutation: Mutation, tests: TestSet, limit: float, left_out: Iterable[str]
    ) -> Outcome:
        with self.runner.changed(mutation):
            return self.runner.run(tests, limit, sorted(left_out))

    def _is_noticed_by(self, test: str, mutation: Mutation, limit: float) -> bool:
        """Whether a test fails once more on the mutant, and passes on the unchanged code."""
        with self.runner.changed(mutation):
            if self.runner.run_again(test, limit).passed:
                self.say(f"failed once and not again: {test}")
                return False
        if not self.runner.run_again(test, limit).passed:
            self.say(f"left out from now on, as it fails on the unchanged code: {test}")
            self.broken.add(test)
            return False
        return True

    def _time_unchanged(self, tests: TestSet, left_out: Iterable[str]) -> float:
        """The seconds that tests take on the unchanged code.

        Raises:
            BrokenTestsError: they do not end, or too many of them fail.
        """
        without = set(left_out)
        for _ in range(_MOST_TRIES):
            outcome = self.runner.run(tests, _LONGEST_LIMIT, sorted(without))
            if outcome.passed:
                self.say(
                    f"{' '.join(tests.paths)} ({tests.markers}): {outcome.seconds:.0f} s on the"
                    " unchanged code"
                )
                return outcome.seconds
            if not outcome.failed:
                break
            without.update(outcome.failed)
        raise BrokenTestsError(f"{' '.join(tests.paths)} on the unchanged code: {outcome.output}")
