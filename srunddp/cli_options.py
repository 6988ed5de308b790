"""Options that several commands have."""

from __future__ import annotations

import math
from typing import Any

import click


class Seconds(click.FloatRange):
    """A number of seconds; ``nan`` is none, though it is within every range."""

    def __init__(self, *, positive: bool = True) -> None:
        super().__init__(min=0, min_open=positive, max=1e6)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """See click."""
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail("a number of seconds is expected", param, ctx)
        return number
