"""What a benchmark consists of.

A module of this package is a benchmark if it has a function ``cases(quick)``, a generator of
:class:`Case`. It sets up what a case needs before it yields it, and removes that when it goes on.
The first line of the module's docstring is the benchmark's title, and the rest says what is
measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

Sample = Mapping[str, float]
"""The metrics of one run, less being better. The first one of a case is that of its plot."""

FAILED = math.inf
"""The metric of a run that failed, as far as a peer's runs sometimes do."""


class NotMeasuredError(Exception):
    """A way cannot be measured here; the message says why."""


@dataclass(frozen=True)
class Limit:
    """The ratio of the minima of srunddp's metric and another way's, which is to be at most so
    much.
    """

    metric: str
    way: str
    at_most: float


@dataclass(frozen=True)
class Case:
    """Some ways to do the same thing, measured in turn; in each repeat in another order.

    Attributes:
        name: what is done, with its size.
        ways: what measures each way; called with the number of the repeat, from 0. The first way is
            srunddp's. One that raises :class:`NotMeasuredError` is not tried again.
        repeats: so many times each.
        limits: the targets.
        unit: of the metrics.
    """

    name: str
    ways: Mapping[str, Callable[[int], Sample]]
    repeats: int = 7
    limits: tuple[Limit, ...] = ()
    unit: str = "s"


@dataclass
class CaseResult:
    """What was measured: the samples of each way, and why a way was not measured."""

    unit: str = "s"
    limits: list[Limit] = field(default_factory=list)
    samples: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    not_measured: dict[str, str] = field(default_factory=dict)

    def values(self, way: str, metric: str) -> list[float]:
        """In the order of the repeats; empty where the way was not measured, or has no such
        metric.
        """
        return [sample[metric] for sample in self.samples.get(way, []) if metric in sample]


@dataclass
class Result:
    """A benchmark's results, as its JSON file has them.

    Attributes:
        setting: the machine, the versions and the commit; a run is taken up only where they are the
            same.
        began: the day; complete: whether all cases were measured.
        cases: by name, in order.
    """

    title: str
    about: str
    setting: dict[str, Any]
    began: str
    complete: bool = False
    cases: dict[str, CaseResult] = field(default_factory=dict)

    @classmethod
    def of(cls, stored: dict[str, Any]) -> Self:
        """From what a JSON file has, which is :func:`dataclasses.asdict` of it."""
        cases = {
            name: CaseResult(**{**case, "limits": [Limit(**limit) for limit in case["limits"]]})
            for name, case in stored["cases"].items()
        }
        return cls(**{**stored, "cases": cases})
