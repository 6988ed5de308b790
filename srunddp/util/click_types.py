"""What several commands have in common: options, kinds of value that click lacks, and how an answer ends."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click

from srunddp.errors import SrunddpError
from srunddp.util.console import write_stderr

MONITOR_SECONDS = 5
LOST_LEAST = 2.0  # a kernel counts some of this in whole seconds
MONITOR_LEAST = 0.1  # of which a sample still takes less than a hundredth
_CANNOT_PRINT = 74  # sysexits' EX_IOERR


class Seconds(click.FloatRange):
    """A number of seconds; ``nan`` is none, though it is within every range."""

    def __init__(self, *, positive: bool = True, least: float = 0.0) -> None:
        super().__init__(min=least, min_open=positive and not least, max=1e6)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """See click."""
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail("a number of seconds is expected", param, ctx)
        return number


def limit(name: str, default: float, text: str, **within: Any) -> Callable[[Any], Any]:
    """An option that is a time limit; ``within`` is for :class:`Seconds`."""
    kind = Seconds(**within)
    return click.option(name, type=kind, default=default, show_default=True, metavar="SECONDS", help=text)


class Run(click.Command):
    """``--monitor`` means ``--monitor=5``: click would take the script's name for its value."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See click."""
        takes = {name for option in self.params for name in option.opts if not getattr(option, "is_flag", False)}
        place = 0
        while place < len(args) and args[place].startswith("-") and args[place] not in ("-", "--"):
            if args[place] == "--monitor":
                args[place] = f"--monitor={MONITOR_SECONDS}"
            place += 2 if args[place] in takes else 1  # past the value of its own
        return super().parse_args(ctx, args)


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Around all that a command does: an error is one line and a fixed exit code."""
    try:
        yield
    except SrunddpError as error:
        write_stderr(f"srunddp: error: {error}\n")
        sys.exit(error.exit_code)


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """The same, also where nothing can be printed."""
    try:
        with refusing():
            yield
            sys.stdout.flush()
    except OSError as error:
        write_stderr(
            f"srunddp: error: standard output: {os.strerror(error.errno or 0)}; expected one that can be written\n"
        )
        os._exit(_CANNOT_PRINT)  # Python's own end would try to write once more
