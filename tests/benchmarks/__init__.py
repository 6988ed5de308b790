"""Benchmarks: ratios within one run, started by hand; none of them is a test."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable


def numbers(*defaults: int) -> list[int]:
    """The numbers of the command line; a default for each that is not there."""
    given = [int(word) for word in sys.argv[1:]]
    return [*given, *defaults[len(given) :]]


def quartiles(ratios: Iterable[float], digits: int = 3) -> str:
    """The median and the quartiles as words."""
    low, middle, high = (f"{value:.{digits}f}" for value in statistics.quantiles(ratios, n=4))
    return f"median {middle} (quartiles {low} to {high})"
