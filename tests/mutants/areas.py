"""The parts of the product that are changed, and the tests that are nearest to each.

No test here needs a cluster, an MPI or a GPU. Tests marked ``alone`` are left out, as a mutant runs
on a busy machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from tests.mutants.mutations import Mutation, find_all

_QUICK = "not slow and not alone"
_SLOW = "slow and not alone"
_ALL = "not alone"


@dataclass(frozen=True)
class TestSet:
    """Tests that pytest runs at once: the files and folders, and the expression of markers that
    chooses from them.
    """

    __test__ = False  # for pytest, which would collect it by its name

    paths: tuple[str, ...]
    markers: str

    @property
    def arguments(self) -> list[str]:
        """For pytest."""
        return ["-m", self.markers, *self.paths]


@dataclass(frozen=True)
class Area:
    """A folder of the product.

    Attributes:
        folder: its path from the root of the tree.
        tests: sets of tests, the nearest and quickest first.
    """

    folder: str
    tests: tuple[TestSet, ...]

    @property
    def name(self) -> str:
        """As the table of results has it."""
        return self.folder.removeprefix("srunddp/")


_RUN = "tests/run"
AREAS = (
    Area(
        "srunddp/supervisor",
        (
            TestSet(("tests/supervisor",), _QUICK),
            TestSet(("tests/supervisor",), _SLOW),
            TestSet((f"{_RUN}/test_restarts.py",), _ALL),
        ),
    ),
    Area(
        "srunddp/bootstrap",
        (
            TestSet(("tests/bootstrap",), _QUICK),
            TestSet(("tests/bootstrap",), _SLOW),
            TestSet((f"{_RUN}/test_cli.py",), _ALL),
        ),
    ),
    Area(
        "srunddp/spare_nodes",
        (
            TestSet(("tests/spare_nodes",), _ALL),
            TestSet(("tests/supervisor", "tests/bootstrap/rendezvous"), _QUICK),
        ),
    ),
    Area(
        "srunddp/run",
        (TestSet((_RUN, "tests/stage/test_paths.py"), _QUICK), TestSet((_RUN,), _SLOW)),
    ),
    Area(
        "srunddp/train/data",
        (TestSet(("tests/train/data",), _ALL), TestSet(("tests/train/test_resume.py",), _ALL)),
    ),
    Area(
        "srunddp/train/checkpoint",
        (
            TestSet(("tests/train/checkpoint",), _ALL),
            TestSet(("tests/train/test_resume.py",), _ALL),
        ),
    ),
    Area("srunddp/sbatch", (TestSet(("tests/sbatch",), _QUICK), TestSet(("tests/sbatch",), _SLOW))),
)


def area_of(file: str) -> Area:
    """The area that a file of the product belongs to."""
    return next(area for area in AREAS if file.startswith(f"{area.folder}/"))


def nearest_tests(root: Path, file: str) -> list[TestSet]:
    """The sets of tests for a file of the product: first the test file of its name, where there is
    one.
    """
    module = Path(file).relative_to("srunddp")
    own = Path("tests") / module.with_name(f"test_{module.name}")
    if (root / own).is_file():
        first = [TestSet((str(own),), _ALL)]
    else:
        first = []
    return [*first, *area_of(file).tests]


def draw(root: Path, seed: int, areas: Sequence[Area] = AREAS) -> Iterator[Mutation]:
    """Mutations of the tree in a random order, of one area after the other; the same ones for the
    same seed.
    """
    shuffled = [_shuffled(root, seed, area) for area in areas]
    for round_of_all in zip_longest(*shuffled):
        yield from (mutation for mutation in round_of_all if mutation is not None)


def _shuffled(root: Path, seed: int, area: Area) -> Iterator[Mutation]:
    mutations = find_all(root, [area.folder])
    random.Random(f"{seed} {area.folder}").shuffle(mutations)
    return (each for each in mutations if each.is_python((root / each.file).read_bytes()))
