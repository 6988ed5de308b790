"""Faults on random nodes: a check names each and blames no other; a healthy cluster passes clean
every time.
"""

from __future__ import annotations

import random
from contextlib import ExitStack

import pytest

from tests.cluster.nodes import NODES
from tests.slurm.conftest import SlurmJobRunner
from tests.slurm.planted import (
    checked,
    full_tmp,
    hidden,
    mtu,
    one_way_dropped,
    own_name_on_loopback,
    slowed,
    with_clock_off,
    with_gpus,
    with_other_torch,
)
from tests.soak.conftest import Show

pytestmark = [pytest.mark.slurm, pytest.mark.soak]

ROUNDS = 20


def test_faults_on_random_nodes_are_named_and_no_other_node(
    runner: SlurmJobRunner, show: Show
) -> None:
    draw = random.Random(0)
    wrong = []
    planted = 0
    project = runner.cluster.shared / "soak-lab" / "project"
    project.mkdir(parents=True)
    for number in range(ROUNDS):
        at = draw.sample(NODES, len(NODES))
        shell = {
            at[0].name: with_other_torch(),
            at[1].name: full_tmp(runner),
            at[2].name: with_clock_off(),
        }
        lost = tuple(draw.sample(NODES, 2))
        expected = {
            ("FAIL", "versions", at[0].name),
            ("FAIL", "limits", at[1].name),
            ("WARN", "clock", at[2].name),
            ("WARN", "interface", at[3].name),
            ("WARN", "interface", at[4].name),
            ("FAIL", "paths", at[5].name),
            ("FAIL", "reach", f"{lost[0].name} -> {lost[1].name}"),
        }
        with mtu(at[3], 1400), own_name_on_loopback(at[4]), one_way_dropped(*lost):
            faults = {**shell, at[5].name: hidden(project.parent)}
            done = checked(
                runner, f"--path={project}", faults=faults, srun=("-N6", "-n6", "--mpi=pmi2")
            )
        planted += len(expected)
        if done.named() != expected or done.code != 69:
            wrong.append((number, done.named() ^ expected, done.text))
    show(f"{planted} faults in {ROUNDS} checks, {len(wrong)} checks wrong")
    assert wrong == []


def test_a_slow_link_or_a_duplicate_gpu_is_named_alone(runner: SlurmJobRunner, show: Show) -> None:
    draw = random.Random(1)
    wrong = []
    for number in range(ROUNDS):
        slow, shared = draw.sample(NODES, 2)
        gpus = {each.name: with_gpus(runner.cluster.shared, "GPU-a", "GPU-b") for each in NODES}
        gpus[shared.name] = with_gpus(runner.cluster.shared, "GPU-a", "GPU-a")
        with ExitStack() as stack:
            if number % 2:
                stack.enter_context(slowed(slow, f"{draw.choice([20, 50, 100, 200])}mbit"))
                done = checked(runner, "--collective", srun=("-N6", "-n6"))
                expected = {("WARN", "rate", slow.name)}
            else:
                done = checked(runner, faults=gpus)
                expected = {("FAIL", "gpus", shared.name)}
        if done.named() != expected:
            wrong.append((number, done.named() ^ expected, done.text))
    show(f"{ROUNDS} faults, {len(wrong)} wrong")
    assert wrong == []


def test_a_healthy_cluster_passes_clean_every_time(runner: SlurmJobRunner) -> None:
    for number in range(ROUNDS):
        done = checked(runner, *(["--collective"] if number % 4 == 0 else []))
        assert (done.code, done.findings) == (0, []), done.text
