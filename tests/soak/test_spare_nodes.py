"""``--spare-nodes``: each node's loss again and again, and losses, cuts and ends at random moments
of each other.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median

import psutil
import pytest

from tests.cluster.nodes import NODES
from tests.slurm.conftest import SlurmJobRunner
from tests.slurm.spare_nodes import FENCE, SpareRun, cut, kill, supervisors, training, worker
from tests.slurm.test_spare_nodes import (
    batch_job,
    completed,
    lose,
    requeued,
    went_on,
)
from tests.soak.conftest import Show
from tests.support.starting import until

pytestmark = pytest.mark.soak

TIMES = 5
CAMPAIGNS = 60
# A folder; campaigns that are in it are not run again.
RESULTS = os.environ.get("SRUNDDP_SOAK_RESULTS")
# A task that was cut off looks for rank 0 for a minute, after it has tried to meet the others.
ENDS_WITHIN = 150.0
SRUN_MAY_WAIT = "srun may wait until Slurm has marked the lost node down"
HARMS = ("lose", "cut", "step", "supervisor", "worker", "cancel")


@pytest.mark.parametrize("name", [node.name for node in NODES])
def test_the_loss_of_each_node_again_and_again(
    name: str, undisturbed: str, runner: SlurmJobRunner, show: Show
) -> None:
    """Training goes on within the detection and 1.5 times a restart after a killed worker, in the
    same minutes.
    """
    gaps = []
    restarts = []
    for number in range(2):
        with training(runner, f"restart-{name}-{number}") as run:
            until(run.training)
            began = time.monotonic()
            os.kill(worker("node03"), signal.SIGKILL)
            went_on(run, undisturbed)
            restarts.append(run.gap(began))
    for number in range(TIMES):
        with training(runner, f"each-{name}-{number}") as run:
            began = lose(run, name)
            if name == "node06":
                assert (run.finish(150.0), run.weights()) == (0, {undisturbed}), run.said()
                continue
            went_on(run, undisturbed)
            gaps.append(run.gap(began))
            completed(run)
    show(
        f"{name}: {TIMES} of {TIMES}, seconds to the next step {sorted(gaps)}, after a killed"
        f" worker {sorted(restarts)}"
    )
    assert not gaps or median(gaps) < FENCE + 1.5 * median(restarts)


def test_the_batch_host_s_loss_again_and_again(runner: SlurmJobRunner, show: Show) -> None:
    for number in range(TIMES):
        requeued(runner, batch_job(runner, f"batch host {number}"))
    show(f"batch host: {TIMES} of {TIMES} PENDING")


def harm(run: SpareRun, what: str, name: str, stack: ExitStack, draw: random.Random) -> None:
    if what == "lose":
        run.lost.append(name)
        run.runner.cluster.lose(name)
    elif what == "cut":
        run.lost.append(name)
        broken = stack.enter_context(ExitStack())
        broken.enter_context(cut(name))
        if draw.random() < 0.7:
            time.sleep(draw.uniform(1.0, 24.0))
            broken.close()
    elif what == "step":
        run.lost.append(name)
        kill(name, "slurmd", "slurmstepd")
    elif what == "cancel":
        run.runner.cluster.cancel_all(60.0)
    else:
        with suppress(ProcessLookupError, IndexError, psutil.NoSuchProcess):
            os.kill(supervisors(name)[0] if what == "supervisor" else worker(name), signal.SIGKILL)


def problems(
    run: SpareRun, harms: list[tuple[str, str]], code: int | None, undisturbed: str
) -> list[str]:
    """What is not as it should be."""
    said = run.said()
    found = []
    harmed = {name for _, name in harms}
    over = "srunddp: ended with 0" in said or run.weights() == {undisturbed}
    if overlaps := run.overlaps():
        found.append(f"two starts at once: {overlaps[:3]}")
    if run.weights() - {undisturbed}:
        found.append("other bits")
    named = set(re.findall(r"srunddp: ranks? .* on (\w+) (?:lost|failed)", said))
    if wrong := named - harmed:
        found.append(f"{wrong} named")
    cancelled = any(what == "cancel" for what, _ in harms)
    # Slurm never hears of a task that ended while its node was cut off, even if that was for only 8
    # s. Then srun waits until the node is down, with a plain program too; srunddp says that it may.
    if code is None and SRUN_MAY_WAIT not in said:
        found.append("srun did not end")
    if not over and code == 0 and not cancelled:
        found.append("exit code 0 without an end")
    if (
        not over
        and not cancelled
        and not re.search(r"not restarted|no spare node|have met|lost|failed|cut off", said)
    ):
        found.append("no verdict")
    return found


@pytest.mark.parametrize("seed", range(CAMPAIGNS))
def test_losses_at_random_moments_of_each_other(
    seed: int, undisturbed: str, runner: SlurmJobRunner
) -> None:
    done = Path(RESULTS, f"spare-{seed}.json") if RESULTS else None
    if done and done.exists():
        return
    draw = random.Random(seed)
    spare = draw.choice((1, 2))
    names = [node.name for node in NODES]
    harms = [
        (draw.choices(HARMS, (4, 4, 2, 2, 1, 1))[0], draw.choice(names))
        for _ in range(draw.randint(1, 3))
    ]
    with training(runner, f"campaign-{seed}", spare=spare) as run, ExitStack() as stack:
        until(run.training)
        for what, name in harms:
            harm(run, what, name, stack, draw)
            time.sleep(draw.choice((0.0, draw.uniform(0.0, 3.0), draw.uniform(0.0, 25.0))))
        # Slurm waits for nodes that are lost; what counts is when the last of ours has ended on the
        # others.
        reached = {node.name for node in NODES} - {*run.lost}
        until(
            lambda: not any(supervisors(name) for name in reached),
            ENDS_WITHIN,
            lambda: (harms, run.said()),
        )
        stack.close()
        code = run.finish(ENDS_WITHIN)
        expected = undisturbed if spare == 1 else next(iter(run.weights()), "")
        assert problems(run, harms, code, expected) == [], (harms, code, run.said())
    if done:
        done.write_text(json.dumps({"harms": harms, "code": code, "said": run.said()}))
