"""The examples below mpirun; with the same ranks all MPIs come to the same bits."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import pytest

from tests.examples import EXAMPLES, Figures, figures, over
from tests.mpirun.conftest import there
from tests.slurm.conftest import SRUNDDP

# Debian's Open MPI 4 carries the channel mpi on the cluster.
LAUNCHERS = ("openmpi5", "mpich")
pytestmark = pytest.mark.mpirun


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Figures]:
    """Starts an example on two ranks with an MPI, once."""
    shared = tmp_path_factory.mktemp("examples")

    @functools.cache
    def start(name: str, launcher: str) -> Figures:
        example = EXAMPLES[name]
        folder = shared / f"{name}-{launcher}"
        done = there(launcher).run(2, SRUNDDP, *example.words(shared, folder))
        return figures(example, done, folder)

    return start


@pytest.mark.parametrize(("name", "launcher"), over(LAUNCHERS))
def test_an_example_reaches_its_figure(
    started: Callable[[str, str], Figures], name: str, launcher: str
) -> None:
    assert started(name, launcher).last


@pytest.mark.soak
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_comes_to_the_same_bits_with_all_mpis(
    started: Callable[[str, str], Figures], name: str
) -> None:
    assert len({started(name, launcher) for launcher in LAUNCHERS}) == 1


def test_the_recall_of_the_classes_is_of_all_ranks_samples(
    started: Callable[[str, str], Figures],
) -> None:
    """Weighted by the classes' sizes it is the accuracy, which the loop counts by itself."""
    done = started("imbalanced", EXAMPLES["imbalanced"].channel)
    recall = [float(value) for value in re.findall(r"\d: ([\d.]+) %", done.output.splitlines()[-2])]
    sizes = (36, 36, 35, 37, 36, 37, 36, 36, 35, 36)  # of the samples to test with
    accuracy = re.findall(r"val accuracy ([\d.]+) %", done.output)[-1]
    assert sum(map(float.__mul__, recall, map(float, sizes))) / sum(sizes) == pytest.approx(
        float(accuracy), abs=0.02
    )
