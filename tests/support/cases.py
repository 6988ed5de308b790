"""Parametrized cases of which the quick tier runs the first ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_after(count: int, cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Mark all cases but the first ones as slow.

    For a test that starts processes in each of its cases: the quick tier shows that the behaviour
    is there, and the other tiers that it is there in each case.

    Args:
        count: How many cases the quick tier runs.
        cases: The values of each case, in the order of the test's parameters.
    """
    return [
        pytest.param(*values, marks=() if index < count else pytest.mark.slow)
        for index, values in enumerate(cases)
    ]
