"""The examples on the real cluster, over every channel; with the same ranks all channels come to
the same bits.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import pytest

from tests.examples import EXAMPLES, FOLDER, Figures, figures, over
from tests.slurm.conftest import SRUNDDP, SlurmJobRunner

CHANNELS = {"slurm": "none", "pmi": "pmi2", "mpi": "pmix"}
pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def started(runner: SlurmJobRunner) -> Callable[[str, str], Figures]:
    """Starts an example over a channel, once: two ranks on one node and one on another."""

    @functools.cache
    def start(name: str, channel: str) -> Figures:
        example = EXAMPLES[name]
        shared = runner.cluster.shared
        folder = shared / "examples" / f"{name}-{channel}"
        words = (f"--mpi={CHANNELS[channel]}", "-N2", "-n3", SRUNDDP, "--channel", channel)
        done = runner.srun(*words, *example.words(shared, folder), timeout=180)
        assert (
            f"3 ranks on 2 nodes, launcher Slurm, channel {channel}, master 10.88." in done.errors
        )
        return figures(example, done, folder)

    return start


@pytest.mark.parametrize(("name", "channel"), over(CHANNELS))
def test_an_example_reaches_its_figure(
    started: Callable[[str, str], Figures], name: str, channel: str
) -> None:
    assert started(name, channel).last


@pytest.mark.soak
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_comes_to_the_same_bits_over_all_channels(
    started: Callable[[str, str], Figures], name: str
) -> None:
    assert len({started(name, channel) for channel in CHANNELS}) == 1


@pytest.mark.soak
def test_the_simple_example_trains_on_six_different_interfaces(runner: SlurmJobRunner) -> None:
    folder = runner.cluster.shared / "examples" / "six"
    example = EXAMPLES["simple"]
    words = ("-N6", "--ntasks-per-node=1", SRUNDDP, "--backend=gloo", f"--ifaces={runner.ifaces}")
    done = runner.srun(
        *words, *example.words(runner.cluster.shared, folder), timeout=180, ifaces=runner.ifaces
    )
    assert figures(example, done, folder).last
    assert "6 ranks on 6 nodes, launcher Slurm" in done.errors
    assert "backend gloo" in done.errors


def test_one_file_runs_on_one_process_one_node_and_two_nodes(runner: SlurmJobRunner) -> None:
    script = str(FOLDER / "single_to_multi.py")
    baseline = runner.cluster.shared / "one.json"
    speeds: dict[int, float] = {}
    efficiencies: dict[int, float] = {}
    for layout in (("-N1", "-n1"), ("-N1", "-n2"), ("-N2", "-n4")):
        done = runner.srun(
            *layout, SRUNDDP, script, "--epochs=3", "--channels=16", f"--baseline={baseline}"
        )
        assert done.code == 0, done.errors
        found = re.search(
            r"^world_size (\d), nnodes (\d): ([\d.]+) samples/s$", done.output, re.MULTILINE
        )
        assert found, done.output
        assert (f"-N{found[2]}", f"-n{found[1]}") == layout
        speeds[int(found[1])] = float(found[3])
        efficiencies |= {
            int(found[1]): float(part)
            for part in re.findall(r"scaling efficiency ([\d.]+) %", done.output)
        }
    assert efficiencies == pytest.approx(
        {ranks: 100 * speeds[ranks] / ranks / speeds[1] for ranks in (2, 4)}, abs=0.1
    )
