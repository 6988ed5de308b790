"""docs/interop.md names each program that is compared, and the versions that are installed."""

from __future__ import annotations

import re

from tests.conftest import ROOT
from tests.interop.conftest import FOR_ACCELERATE, STARTS_ITS_RANKS
from tests.interop.test_elastic import NAME
from tests.interop.test_same_bits import FOR_TORCHRUN

PAGE = (ROOT / "docs" / "interop.md").read_text()
# By their names on the page, if these differ.
NAMES = {
    "Lightning": "lightning",
    "PyTorch Ignite": "pytorch-ignite",
    "MosaicML streaming": "mosaicml-streaming",
    "PyTorch Geometric": "torch_geometric",
    "Open MPI": "openmpi",
}
NOT_PINNED = {"Python", "Slurm"}


def test_the_table_has_a_row_for_each_program_that_is_compared() -> None:
    table = PAGE.partition("## What was compared")[2].partition("Versions:")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    compared = (*STARTS_ITS_RANKS, *FOR_ACCELERATE, *FOR_TORCHRUN, NAME)
    assert len(rows) == len(compared) >= 20


def test_the_versions_are_those_that_are_pinned() -> None:
    said = re.search(r"Versions: (.*?)\. None", PAGE, re.DOTALL)
    assert said
    pinned = dict(
        line.split("==")
        for line in (ROOT / "tests" / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    for named in said[1].replace("\n", " ").split(", "):
        name, _, version = named.rpartition(" ")
        if name not in NOT_PINNED:
            assert pinned[NAMES.get(name, name.lower())] == version
