"""Benchmarks: ratios within one run, started by hand; none of them is a test."""

from __future__ import annotations

import contextlib
import io
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any


def numbers(*defaults: int) -> list[int]:
    """The numbers of the command line; a default for each that is not there."""
    given = [int(word) for word in sys.argv[1:]]
    return [*given, *defaults[len(given) :]]


def quartiles(ratios: Iterable[float], digits: int = 3) -> str:
    """The median and the quartiles as words."""
    low, middle, high = (f"{value:.{digits}f}" for value in statistics.quantiles(ratios, n=4))
    return f"median {middle} (quartiles {low} to {high})"


def train(trainer: Any, data: Any, epochs: int = 1) -> None:
    """So many epochs more, without a word."""
    trainer.config = replace(trainer.config, epochs=trainer.state.epoch + epochs)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(data)


def in_turn(
    loops: Mapping[str, Callable[[], None]], rounds: int, clock: Callable[[], float] = time.process_time
) -> dict[str, list[float]]:
    """The seconds of each loop in each of the rounds, in which all are run one after the other."""
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(rounds):
        for name, loop in loops.items():
            start = clock()
            loop()
            times[name].append(clock() - start)
    return times


def ratio(ours: list[float], theirs: list[float]) -> str:
    """That of the smallest times, which a busy machine disturbs least, and those of neighbouring rounds but the first.

    Needs at least three rounds.
    """
    neighbours = quartiles((a / b for a, b in zip(ours[1:], theirs[1:], strict=True)), 4)
    return f"{min(ours) / min(theirs):.4f}; of neighbours: {neighbours}"
