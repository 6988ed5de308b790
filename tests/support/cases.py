"""Marks parametrized cases so that the quick tier runs only the first ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_after(count: int, cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return the cases as parameters, and mark all but the first ones as slow.

    This is for a test that starts processes in each case: the quick tier checks the behaviour in a
    few cases, and the other tiers check it in all cases.

    Args:
        count: How many cases the quick tier runs.
        cases: The values of each case, in the order of the test's parameters.
    """
    return [
        pytest.param(*values, marks=() if index < count else pytest.mark.slow)
        for index, values in enumerate(cases)
    ]
