"""How long rank 0 waits for the others: an option of every command that the ranks of a job run together before it."""

from __future__ import annotations

import math

import click

DEFAULT = 30.0


def _number(_: click.Context, __: click.Parameter, value: float) -> float:
    if math.isnan(value):  # it is within every bound
        raise click.BadParameter("a number of seconds is expected")
    return value


TIMEOUT = click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True, max=1e6),
    default=DEFAULT,
    show_default=True,
    metavar="SECONDS",
    callback=_number,
    help="How long rank 0 waits for the others.",
)
