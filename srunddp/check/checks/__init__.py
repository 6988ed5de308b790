"""The checks that every rank makes by itself, in the order of the report."""

from __future__ import annotations

from typing import Any

from srunddp.check.checks import cpus, gpus, interface, launch, limits, paths, versions
from srunddp.check.finding import Check

CHECKS: tuple[Check[Any], ...] = (
    launch.CHECK,
    interface.CHECK,
    paths.CHECK,
    versions.CHECK,
    gpus.CHECK,
    cpus.CHECK,
    limits.CHECK,
)
