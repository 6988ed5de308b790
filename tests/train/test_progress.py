"""The line of an epoch, and the bar or lines before it."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import select
import struct
import sys
import termios
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import pytest

from srunddp.train.progress import EpochRecord, Progress, SilentProgress, describe
from tests.support.cost import in_empty_calls

TRAIN = {"loss": 0.23456, "accuracy": 0.92341}
# For tensors of no dimension: they are read by float() as well, and need no torch.
HALF: Any = 0.5
QUARTER: Any = 0.25


class Clock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


# The line.


def test_an_epoch_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Progress().end_epoch(EpochRecord(1, TRAIN))
    Progress().end_epoch(EpochRecord(12, TRAIN, {"loss": 0.1234, "top5 accuracy": 1.0, "mae": 2.0}))
    assert (
        capsys.readouterr().out
        == "Epoch 1 - loss 0.2346, accuracy 92.34 %\nEpoch 12 - loss 0.2346, accuracy 92.34 %, val"
        " loss 0.1234, val top5 accuracy 100.00 %, val mae 2.0000\n"
    )


@pytest.mark.parametrize(
    ("world_size", "device", "end"),
    [
        (2, "cuda", ", 12345 samples/s (6172 per GPU)"),
        (2, "cpu", ", 12345 samples/s (6172 per rank)"),
        (1, "cuda", ", 12345 samples/s"),
    ],
)
def test_the_throughput_ends_the_line(world_size: int, device: str, end: str) -> None:
    record = EpochRecord(
        1, {"loss": 1.0}, samples_per_second=12345.0, world_size=world_size, device=device
    )
    assert describe(record) == f"Epoch 1 - loss 1.0000{end}"


def test_records_of_equal_figures_ignore_the_throughput() -> None:
    assert EpochRecord(1, TRAIN, samples_per_second=1.0) == EpochRecord(
        1, TRAIN, samples_per_second=2.0
    )


# What is counted.


@pytest.mark.parametrize("kind", [SilentProgress, Progress])
def test_throughput_is_of_the_epochs_samples_and_training_alone(kind: type[SilentProgress]) -> None:
    clock = Clock()
    progress = kind(clock)
    assert progress.samples_per_second == 0.0
    for epoch in (1, 2):
        clock.now += 100
        progress.start_epoch(epoch, 2, 4, 2)
        progress.step(30, HALF)
        clock.now += 2
        with progress.paused():
            clock.now += 50
            with contextlib.suppress(ZeroDivisionError), progress.paused():
                clock.now += 7
                _ = 1 / 0
            assert progress.samples_per_second == 15.0
        progress.step(30, None)
        clock.now += 1
        assert progress.samples_per_second == 20.0


@pytest.mark.parametrize("kind", [SilentProgress, Progress])
def test_a_step_without_output_costs_some_empty_calls(kind: type[SilentProgress]) -> None:
    progress = kind()
    progress.start_epoch(1, 1, None, 0)
    assert in_empty_calls(lambda: progress.step(64, HALF)) < 20


# Lines.


def test_without_a_terminal_a_line_comes_each_30_s_at_most(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    progress = Progress(clock)
    progress.start_epoch(2, 3, 1000, 100)
    for _ in range(100):
        clock.now += 1
        progress.step(64, QUARTER)
    progress.end_epoch(EpochRecord(2, TRAIN))
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        f"srunddp: epoch 2 of 3, step {step} of 1000 ({share} %), loss 0.2500, 64 samples/s"
        for step, share in ((130, 13), (160, 16), (190, 19))
    ]
    assert out == "Epoch 2 - loss 0.2346, accuracy 92.34 %\n"


def test_of_what_is_not_known_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    progress = Progress(clock)
    progress.start_epoch(1, 0, None, 0)
    clock.now += 30
    progress.step(60, None)
    progress.log("hello")
    progress.close()
    assert capsys.readouterr() == (
        "",
        "srunddp: epoch 1, step 1, 2 samples/s\nsrunddp: hello\n",
    )


# Streams that are not there.


def run_through(progress: Progress, clock: Clock) -> None:
    progress.start_epoch(1, 1, 10, 0)
    clock.now += 30  # a line is due
    progress.step(1, HALF)
    progress.log("hello")
    progress.end_epoch(EpochRecord(1, TRAIN))
    progress.close()


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


def broken_pipe() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


@pytest.mark.parametrize(
    "make", [closed, broken_pipe, partial(Path("/dev/full").open, "w"), lambda: None]
)
def test_a_stream_that_cannot_be_written_ends_nothing(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = make()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    clock = Clock()
    run_through(Progress(clock), clock)
    monkeypatch.undo()
    if stream is not None and not stream.closed:
        with pytest.raises(OSError, match=r"space|pipe"):
            stream.close()  # what it could not write was in it


# A terminal.


class Terminal:
    """A pseudo-terminal, and what it has shown."""

    def __init__(self, columns: int) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(
            theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24 if columns else 0, columns, 0, 0)
        )
        self.stream = os.fdopen(theirs, "w")
        self.shown = ""

    def shows(self, pattern: str) -> bool:
        """Whether it does within 5 s: the kernel passes on later what was written."""
        while not re.search(pattern, self.shown):
            if not select.select([self._ours], [], [], 5)[0]:
                return False
            self.shown += os.read(self._ours, 1 << 16).decode()
        return True

    def hang_up(self) -> None:
        if self._ours >= 0:
            os.close(self._ours)
            self._ours = -1


@pytest.fixture(params=[100, 0], ids=["wide", "without a size"])
def terminal(request: pytest.FixtureRequest) -> Iterator[Terminal]:
    there = Terminal(request.param)
    yield there
    there.hang_up()
    with contextlib.suppress(OSError):  # what was still to be written
        there.stream.close()


def started(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, clock: Clock, done: int = 0
) -> Progress:
    # In the test itself: pytest gives it a standard error of its own after the fixtures.
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    progress = Progress(clock)
    progress.start_epoch(1, 3, 10, done)
    return progress


def test_a_terminal_shows_a_bar(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a thread of its own."""
    clock = Clock()
    threads = os.listdir("/proc/self/task")
    progress = started(terminal, monkeypatch, clock, done=2)
    assert terminal.shows(r"\repoch 1/3:  20%\|.*\| 2/10 ")
    assert os.listdir("/proc/self/task") == threads
    progress.step(64, HALF)
    clock.now += 1
    progress.step(64, QUARTER)
    assert terminal.shows(r"\repoch 1/3:  40%\|.*\| 4/10 .*loss 0.2500, 128 sam")
    assert " 3/10 " not in terminal.shown  # nothing was due yet
    progress.close()


def test_a_line_does_not_tear_the_bar(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    progress = started(terminal, monkeypatch, Clock())
    progress.log("hello")
    assert terminal.shows(r"\repoch 1/3:[^\r]*\r +\rsrunddp: hello\r\n\repoch 1/3:")
    progress.close()


def test_the_bar_is_gone_before_the_epochs_line(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = started(terminal, monkeypatch, Clock())
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    progress.end_epoch(EpochRecord(1, TRAIN))
    assert terminal.shows(r"\r +\rEpoch 1 - loss 0.2346, accuracy 92.34 %\r\n$")


def test_a_terminal_that_hangs_up_ends_nothing(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    progress = started(terminal, monkeypatch, clock)
    assert terminal.shows("epoch 1/3")
    terminal.hang_up()
    with pytest.raises(OSError, match="Input/output error"):
        os.write(terminal.stream.fileno(), b"x")
    run_through(progress, clock)
