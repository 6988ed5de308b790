"""Contains the checks that each rank makes by itself, one module for each check."""

from typing import Any

from srunddp.check.checks import cpus, gpus, interface, launch, limits, paths, spare_nodes, versions
from srunddp.check.finding import Check

# In the order in which the report shows them.
CHECKS: tuple[Check[Any], ...] = tuple(
    each.CHECK for each in (launch, interface, paths, versions, gpus, cpus, limits)
)
WITH_SPARES = (*CHECKS, spare_nodes.CHECK)
