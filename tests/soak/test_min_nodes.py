"""``--min-nodes``: nodes are lost, cut off and cut from each other at random moments of each other,
with and without a spare node.
"""

from __future__ import annotations

import json
import os
import random
import re
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from tests.chaos.network import cut_between
from tests.cluster.nodes import NODES, node
from tests.slurm.conftest import SRUNDDP, SlurmJobRunner
from tests.slurm.spare_nodes import (
    PROGRAM,
    TRAINING,
    SpareRun,
    cut,
    kill,
    launched,
    network_in_two,
    supervisors,
    worker,
)
from tests.soak.conftest import Show
from tests.support.starting import until

pytestmark = pytest.mark.soak

CAMPAIGNS = 60
# A folder; campaigns that are in it are not run again.
RESULTS = os.environ.get("SRUNDDP_SOAK_RESULTS")
FEWEST = 3
ENDS_WITHIN = 300.0
# srun may wait until Slurm has marked a lost node down; what has come from the ranks is there then.
SRUN_ENDS_WITHIN = 60.0
HARMS = ("lose", "cut", "flap", "pair", "parts", "step", "worker")
# What a run is sure to survive if nothing else happens: the majority that is left goes on.
SURVIVED = ("lose", "cut", "flap", "step", "worker")


@dataclass(frozen=True)
class Harm:
    """One thing that happens to the nodes of a run.

    Attributes:
        what: One of ``HARMS``.
        names: The nodes that it happens to; of "pair", the two between which the network is cut; of
            "parts", those that are cut off from all others.
        seconds: How long it lasts, if it is mended.
        pause: The seconds until the next one.
    """

    what: str
    names: tuple[str, ...]
    seconds: float
    pause: float

    @classmethod
    def drawn(cls, draw: random.Random) -> Harm:
        """The next harm."""
        what = draw.choices(HARMS, (3, 3, 3, 2, 2, 2, 1))[0]
        count = {"pair": 2, "parts": draw.choice((1, 2, 3))}.get(what, 1)
        return cls(
            what=what,
            names=tuple(draw.sample([each.name for each in NODES], count)),
            seconds=draw.choice((draw.uniform(1.0, 12.0), draw.uniform(12.0, 40.0))),
            pause=draw.choice((0.0, draw.uniform(0.0, 3.0), draw.uniform(0.0, 25.0))),
        )


@dataclass(frozen=True)
class Campaign:
    """What is drawn.

    Attributes:
        spares: How many of the six nodes are spare ones.
        harms: What happens, one after the other.
    """

    spares: int
    harms: tuple[Harm, ...]

    @classmethod
    def drawn(cls, seed: int) -> Campaign:
        """The campaign of a seed."""
        draw = random.Random(seed)
        spares = draw.choice((0, 0, 1))
        count = draw.choice((1, 1, 2, 3))
        return cls(spares, tuple(Harm.drawn(draw) for _ in range(count)))

    @property
    def harmed(self) -> set[str]:
        """All nodes that something happens to."""
        return {name for harm in self.harms for name in harm.names}

    @property
    def is_survived(self) -> bool:
        """Whether the run goes on for sure, to its end."""
        return len(self.harms) == 1 and self.harms[0].what in SURVIVED


def harm(run: SpareRun, harm: Harm, stack: ExitStack) -> None:
    first = harm.names[0]
    if harm.what == "lose":
        run.lost.append(first)
        run.runner.cluster.lose(first)
    elif harm.what == "step":
        run.lost.append(first)
        kill(first, "slurmd", "slurmstepd")
    elif harm.what == "worker":
        if supervisors(first):
            os.kill(worker(first), 9)
    elif harm.what == "cut":
        run.lost.append(first)
        stack.enter_context(cut(first))
    elif harm.what == "flap":
        run.lost.append(first)
        with cut(first):
            time.sleep(harm.seconds)
    elif harm.what == "pair":
        one, other = harm.names
        with cut_between(node(one), node(other), "input", "output"):
            time.sleep(harm.seconds)
    else:
        here = [node(name) for name in harm.names]
        with network_in_two(here, [each for each in NODES if each not in here]):
            time.sleep(harm.seconds)


def world_sizes(run: SpareRun) -> dict[int, int]:
    """How many nodes have made a step in each start."""
    nodes: dict[int, set[str]] = {}
    for note in run.notes():
        nodes.setdefault(note.start, set()).add(note.node)
    return {start: len(names) for start, names in nodes.items()}


def problems(campaign: Campaign, run: SpareRun) -> list[str]:
    """What is not as it should be."""
    said = run.said()
    # Without a restart, srunddp says nothing at the end.
    ended = "srunddp: ended with 0" in said or len(run.weights()) == 1
    found = []
    if overlaps := run.overlaps():
        found.append(f"two starts at once: {overlaps[:3]}")
    if min(world_sizes(run).values()) < FEWEST:
        found.append(f"fewer nodes than it may have: {world_sizes(run)}")
    if len(run.weights()) > 1:
        found.append("ranks of one training with different weights")
    named = set(re.findall(r"^srunddp: ranks? .* on (\w+) (?:lost|failed)", said, re.MULTILINE))
    if wrong := named - campaign.harmed:
        found.append(f"{wrong} named")
    if campaign.is_survived and not ended:
        found.append("it has not gone on")
    if ended and not run.weights():
        found.append("it has ended well, without a rank that has trained to the end")
    if not ended and not re.search(r"not restarted|lost|failed|cut off|cannot reach", said):
        found.append("no reason for its end")
    return found


@pytest.mark.parametrize("seed", range(CAMPAIGNS))
def test_a_run_goes_on_with_the_nodes_that_are_left(
    seed: int, runner: SlurmJobRunner, show: Show
) -> None:
    done = Path(RESULTS, f"min-nodes-{seed}.json") if RESULTS else None
    if done and done.exists():
        return
    campaign = Campaign.drawn(seed)
    folder = runner.cluster.shared / f"min-nodes-{seed}"
    options = ["--restarts=5", f"--min-nodes={FEWEST}"]
    options += [f"--spare-nodes={campaign.spares}"] if campaign.spares else []
    program = (PROGRAM, *TRAINING[:2], f"--output-dir={folder}", *TRAINING[2:])
    words = ("-N6", "--time=10", SRUNDDP, *options, *program, "--scale_lr=sqrt", "--epochs=5")
    with launched(runner, folder, *words) as run, ExitStack() as stack:
        until(run.training, why=run.said)
        for each in campaign.harms:
            harm(run, each, stack)
            time.sleep(each.pause)
        # Slurm waits for nodes that are lost; what counts is when the last of ours has ended on the
        # others.
        reached = {each.name for each in NODES} - {*run.lost}
        until(
            lambda: not any(supervisors(name) for name in reached),
            ENDS_WITHIN,
            lambda: (campaign, run.said()),
        )
        stack.close()
        run.finish(SRUN_ENDS_WITHIN)
        found = problems(campaign, run)
        said = run.said()
        sizes = world_sizes(run)
    show(f"{seed}: {campaign}: nodes of each start {sizes}, {found or 'as it should be'}")
    assert found == [], (campaign, said)
    if done:
        done.write_text(json.dumps({"campaign": asdict(campaign), "said": said}))
