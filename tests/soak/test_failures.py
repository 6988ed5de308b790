"""Failures at random, again and again: the right verdict each time, nothing left, and none where
nothing failed.
"""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.network import packets_lost
from tests.chaos.plan import WORLD_SIZE, Fault, Plan
from tests.chaos.relay import delayed
from tests.chaos.run import Run, Site, carry_out, started, wrong
from tests.chaos.trials import Sites, sites, table, try_one
from tests.slurm.conftest import SlurmJobRunner
from tests.slurm.test_failures import late
from tests.slurm.test_network_faults import CUT_OFF, FAULTS, LOST, cut_off
from tests.soak.conftest import Show

pytestmark = pytest.mark.soak

TRIALS = 200
CUTS = 20
PAIRS = 100
BAD_WEATHER = 600.0
PAUSE = 3.0
STALL = 60


@pytest.fixture
def where(runner: SlurmJobRunner, tmp_path: Path) -> Sites:
    return sites(runner.cluster, tmp_path)


@pytest.fixture
def site(where: Sites) -> Site:
    return where.cluster


def test_random_failures_are_all_named_and_nothing_is_left(where: Sites, show: Show) -> None:
    records = [try_one(seed, where)[0] for seed in range(TRIALS)]
    show(table(records))
    assert [record for record in records if record["wrong"]] == []


def test_of_two_close_failures_one_has_its_cause_and_code(site: Site) -> None:
    """Which: Python takes longer to end with an exception than the kernel with SIGKILL."""
    broken = []
    for seed in range(PAIRS):
        draw = random.Random(seed)
        first, second = draw.sample(range(WORLD_SIZE), 2)
        kinds = draw.choices(("exception", "exit3", "os_exit", "segv", "sigkill"), k=2)
        gap = draw.uniform(0.0, 0.1)
        plan = Plan(
            (Fault(first, kinds[0], delay=0.3), Fault(second, kinds[1], delay=0.3 + gap)),
            peers="block",
        )
        result = carry_out(plan, site)
        found = [wrong(plan, replace(result, culprit=rank), 2.0) for rank in (first, second)]
        if [] not in found:
            broken.append((seed, found))
    assert broken == []


def test_nodes_that_are_cut_off_are_named_and_all_end(site: Site) -> None:
    broken = []
    for seed in range(CUTS):
        draw = random.Random(seed)
        fault = draw.choice(sorted(FAULTS))
        cut = draw.choice((1, 2))
        result = cut_off(fault, f"node{cut + 1:02}", site)
        named = [(each.ranks, each.node, each.code) for each in result.verdicts]
        right = [((2 * cut, 2 * cut + 1), f"node{cut + 1:02}", LOST)]
        if result.gone is None or result.gone > CUT_OFF or result.code != LOST or named != right:
            broken.append((seed, fault, result.describe()))
    assert broken == []


def test_pauses_loss_and_delay_for_ten_minutes_end_nothing(site: Site) -> None:
    """Two runs at once: one trains by DistributedDataParallel, one needs no torch."""
    options = ("--stall-timeout", str(STALL))
    plans = [Plan(torch=torch, heartbeat=True, options=options) for torch in (True, False)]
    with started(plans[0], site) as one, started(plans[1], site) as other:
        runs = [(run, run.ready()) for run in (one, other)]
        draw = random.Random(0)
        end = time.monotonic() + BAD_WEATHER
        with delayed(0.2, 0.1), packets_lost(5):
            while time.monotonic() < end:
                run, ready = draw.choice(runs)
                rank = ready[draw.randrange(WORLD_SIZE)]
                pause(run, rank["supervisor"], rank["pid"])
        for run, _ in runs:
            assert run.process.poll() is None, run.finish(0).describe()
            assert all(
                each["time"] > end - 60.0 and each["steps"] > 20
                for each in run.said("steps").values()
            )
            assert len(run.watch.living(launchers=False)) == 2 * WORLD_SIZE


def pause(run: Run, *pids: int) -> None:
    """These processes stand still for three seconds; the others had half a second to go on
    before.
    """
    for pid in pids:
        assert run.watch.all[pid].ended is None, run.finish(0).describe()
        os.kill(pid, signal.SIGSTOP)
    time.sleep(PAUSE)
    for pid in reversed(pids):
        os.kill(pid, signal.SIGCONT)
    time.sleep(0.5)


def test_who_is_waited_for_is_said_after_half_a_minute(site: Site) -> None:
    plan = Plan(kill=True, options=("--timeout", "40"))
    with started(plan, site, late(4, 600)) as run:
        result = run.finish(60)
    waiting = [
        line for line in result.errors.splitlines() if "waiting for rank 4 on node03" in line
    ]
    assert len(waiting) == 1, result.describe()
    assert "1 of 6 ranks did not come: rank 4 on node03" in result.errors
    assert result.left == ()


def test_slurm_s_time_limit_leaves_nothing(site: Site) -> None:
    with started(
        Plan(stubborn=True, children=True), site, lambda words: [words[0], "--time=1", *words[1:]]
    ) as run:
        run.ready()
        run.until(lambda: "DUE TO TIME LIMIT" in (run.folder / "errors").read_text(), 150)
        run.failing()
        result = run.finish(20)
    # Slurm itself waits KillWait, 5 s here, before it kills what ignores its SIGTERM.
    assert result.gone is not None, result.describe()
    assert result.gone < 10.0


@pytest.mark.parametrize("kind", ["sleep", "gil"])
def test_a_rank_that_makes_no_step_is_named_ten_times(kind: str, site: Site) -> None:
    for rank in [*range(WORLD_SIZE), 0, 3, 4, 5]:
        plan = Plan((Fault(rank, kind),), heartbeat=True, options=("--stall-timeout", "5"))
        result = carry_out(plan, site)
        assert wrong(plan, result, 5 + 3.0) == [], result.describe()
