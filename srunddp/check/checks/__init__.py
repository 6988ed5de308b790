"""The checks that every rank makes by itself, each a module here."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from srunddp.check.finding import Check

_MODULES = (  # in the order of the report
    "launch",
    "interface",
    "paths",
    "versions",
    "gpus",
    "cpus",
    "limits",
)
CHECKS: tuple[Check[Any], ...] = tuple(import_module(f"{__name__}.{name}").CHECK for name in _MODULES)
