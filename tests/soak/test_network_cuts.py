"""Cuts, flaps and losses between nodes that all reach rank 0, at random: who was at fault is named,
and nobody else; and a spare node takes the place of one of these, and of no other.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from srunddp.util.hostlist import expand
from tests.chaos.network import cut_between, packets_lost, reset_between
from tests.cluster.nodes import node
from tests.slurm.conftest import SlurmJobRunner
from tests.slurm.spare_nodes import SpareRun
from tests.slurm.test_network_between_nodes import trained
from tests.soak.conftest import Show
from tests.supervisor.test_cut_between_nodes import SCRIPT, STALL, ended
from tests.support.namespaces import switch_address, switched_nodes

pytestmark = pytest.mark.soak

CAMPAIGNS = 60
# A folder; campaigns that are in it are not run again.
RESULTS = os.environ.get("SRUNDDP_SOAK_RESULTS")
ENDS_WITHIN = 150.0
LOST = 69
LIMIT = 8.0  # of a collective
HOOKS = (("input", "output"), ("input",), ("output",))
FAULTS = ("pair", "star", "two pairs", "flap", "reset", "loss", "reset and loss")
LASTS = ("pair", "star", "two pairs")


@dataclass(frozen=True)
class Campaign:
    """What is drawn.

    Attributes:
        fault: What happens.
        ranks, spares: How many nodes with ranks there are, and how many spare ones.
        stalls: Whether a stall ends a start, and not a collective's time limit.
        pairs: The nodes between which it happens, and which packets are lost.
        seconds: For how long, if it is mended.
        percent: How many packets in a hundred are lost everywhere.
    """

    fault: str
    ranks: int
    spares: int
    stalls: bool
    pairs: tuple[tuple[str, str, tuple[str, ...]], ...]
    seconds: float
    percent: int

    @classmethod
    def drawn(cls, seed: int) -> Campaign:
        """The campaign of a seed."""
        draw = random.Random(seed)
        fault = FAULTS[seed % len(FAULTS)]
        spares = draw.choice((0, 1, 1))
        ranks = 5 if fault == "two pairs" else draw.randint(3, 6 - spares)
        if fault == "star":
            ranks = max(4, ranks)
        others = [f"node0{number}" for number in range(2, ranks + 1)]
        draw.shuffle(others)
        first, second, *more = others
        names = [(first, second)]
        if fault == "star":
            names.append((first, more[0]))
        elif fault == "two pairs":
            names.append((more[0], more[1]))
        elif fault == "loss":
            names = []
        return cls(
            fault=fault,
            ranks=ranks,
            spares=spares,
            # Where the cut stays, the next start hangs while Gloo connects, before the first step.
            stalls=draw.random() < 0.5
            and not (fault in LASTS and (not spares or fault == "two pairs")),
            pairs=tuple((one, other, draw.choice(HOOKS)) for one, other in names),
            seconds=draw.uniform(1.0, 12.0) if fault == "flap" else 0.5,
            percent=draw.choice((5, 10, 20)) if "loss" in fault else 0,
        )

    @property
    def at_fault(self) -> set[str]:
        """The nodes that have lost packets of each other."""
        return {name for one, other, _ in self.pairs for name in (one, other)}

    @property
    def spares_suffice(self) -> bool:
        """Whether one spare node is enough to go on."""
        return self.spares > 0 and self.fault != "two pairs"

    def faults(self) -> list[AbstractContextManager[None]]:
        """What is done to the network."""
        kind = reset_between if "reset" in self.fault else None
        found = [
            kind(node(one), node(other)) if kind else cut_between(node(one), node(other), *hooks)
            for one, other, hooks in self.pairs
        ]
        return found + ([packets_lost(self.percent)] if self.percent else [])


def disturb(campaign: Campaign, stack: ExitStack) -> None:
    broken = stack.enter_context(ExitStack())
    for fault in campaign.faults():
        broken.enter_context(fault)
    if campaign.fault in ("flap", "reset", "reset and loss"):
        time.sleep(campaign.seconds)
        broken.close()
    if campaign.fault == "reset and loss":
        stack.enter_context(packets_lost(campaign.percent))


def named(said: str) -> set[str]:
    """The nodes in the lines about cuts."""
    found = set()
    for line in re.findall(r"^srunddp: .*cannot reach.*$", said, re.MULTILINE):
        cut, _, _ = line.removeprefix("srunddp: ").partition("; ")
        for word in re.findall(r"node\[[\d,-]+\]|node\d+", cut):
            found |= {*expand(word)}
    return found


def problems(campaign: Campaign, run: SpareRun, code: int | None) -> list[str]:
    """What is not as it should be."""
    said = run.said()
    found = []
    if wrong := named(said) - campaign.at_fault:
        found.append(f"{wrong} named")
    if lost := re.findall(r"^srunddp: ranks? .* on (\w+) lost", said, re.MULTILINE):
        found.append(f"{lost} lost")
    if campaign.fault in LASTS:
        return found + problems_of_a_cut_that_lasts(campaign, said, code, left(run))
    return found + problems_of_one_that_is_mended(campaign, said, code, left(run))


def left(run: SpareRun) -> set[str]:
    """The nodes that have ranks in the first start, and none in the last one that makes steps."""
    notes = run.notes()
    last = max(note.start for note in notes)
    return {note.node for note in notes if not note.start} - {
        note.node for note in notes if note.start == last
    }


def problems_of_a_cut_that_lasts(
    campaign: Campaign, said: str, code: int | None, left: set[str]
) -> list[str]:
    found = []
    if not named(said) >= {*campaign.pairs[0][:2]}:
        found.append("the cut is not named")
    if not campaign.spares_suffice:
        if code != LOST or left:
            found.append(f"{code}, {left} left")
        return found
    if code != 0:
        found.append(f"{code}, although there is a spare node")
    common = {campaign.pairs[0][0]} if campaign.fault == "star" else campaign.at_fault
    if len(left) != 1 or not left <= common:
        found.append(f"{left} left")
    return found


def problems_of_one_that_is_mended(
    campaign: Campaign, said: str, code: int | None, left: set[str]
) -> list[str]:
    found = []
    if code != 0:
        found.append(f"{code}, although the network works again")
    # A long flap may still last when the nodes try.
    guilty = campaign.at_fault if campaign.fault == "flap" else set[str]()
    if not left <= guilty:
        found.append(f"{left} left, although nobody is at fault any more")
    if not named(said) <= guilty:
        found.append(f"{named(said)} named, although the network works")
    return found


@pytest.mark.parametrize("seed", range(CAMPAIGNS))
def test_who_is_at_fault_is_named_and_nobody_else(
    seed: int, runner: SlurmJobRunner, show: Show
) -> None:
    done = Path(RESULTS, f"cuts-{seed}.json") if RESULTS else None
    if done and done.exists():
        return
    campaign = Campaign.drawn(seed)
    options = [f"--restarts={1 if campaign.fault in LASTS and not campaign.spares_suffice else 5}"]
    options += [f"--spare-nodes={campaign.spares}"] if campaign.spares else []
    options += ["--stall-timeout=6"] if campaign.stalls else []
    with (
        trained(
            runner,
            f"cuts-{seed}",
            *options,
            nodes=campaign.ranks + campaign.spares,
            limit="100" if campaign.stalls else f"{LIMIT:g}",
        ) as run,
        ExitStack() as stack,
    ):
        disturb(campaign, stack)
        code = run.finish(ENDS_WITHIN)
        said = run.said()
        found = problems(campaign, run, code)
    show(f"{seed}: {campaign}: {code}, {found or 'as it should be'}")
    assert found == [], (campaign, code, said)
    if done:
        done.write_text(json.dumps({"campaign": asdict(campaign), "code": code, "said": said}))


# Without Slurm: more nodes on one switch, and any cuts between those that are not rank 0's.


@dataclass(frozen=True)
class SwitchCampaign:
    """What is drawn.

    Attributes:
        nodes: How many there are, with a rank each.
        cuts: Between which nodes, and in which direction seen from the first.
        percent: How many packets in a hundred are lost everywhere.
        mended_after: After how many seconds all is well again; None for never.
        stalls: Whether all wait, and not one rank fails.
    """

    nodes: int
    cuts: tuple[tuple[int, int, tuple[str, ...]], ...]
    percent: int
    mended_after: float | None
    stalls: bool

    @classmethod
    def drawn(cls, seed: int) -> SwitchCampaign:
        """The campaign of a seed."""
        draw = random.Random(seed)
        nodes = draw.randint(3, 6)
        pairs = [*itertools.combinations(range(2, nodes + 1), 2)]
        chosen = draw.sample(pairs, min(len(pairs), draw.choice((0, 1, 1, 1, 2, 3))))
        ordered = [draw.sample(pair, 2) for pair in chosen]
        return cls(
            nodes=nodes,
            cuts=tuple((one, other, draw.choice(HOOKS)) for one, other in ordered),
            percent=draw.choice((0, 0, 10, 20)),
            mended_after=draw.choice((None, None, None, draw.uniform(0.0, 6.0))),
            stalls=draw.random() < 0.3,
        )

    @property
    def at_fault(self) -> set[str]:
        """The nodes that do not get all packets of each other."""
        return {f"node0{number}" for one, other, _ in self.cuts for number in (one, other)}

    def rules(self) -> dict[int, dict[str, str]]:
        """Those of each node, by hook."""
        found: dict[int, dict[str, list[str]]] = {}
        for one, other, hooks in self.cuts:
            for hook in hooks:
                whose = "saddr" if hook == "input" else "daddr"
                words = f"ip {whose} {switch_address(other)} drop"
                found.setdefault(one, {}).setdefault(hook, []).append(words)
        if self.percent:
            for number in range(1, self.nodes + 1):
                words = f"numgen random mod 100 < {self.percent} drop"
                found.setdefault(number, {}).setdefault("input", []).append(words)
        return {
            number: {hook: "\n".join(words) for hook, words in hooks.items()}
            for number, hooks in found.items()
        }


@pytest.fixture(scope="module")
def switched() -> Iterator[list[str]]:
    with switched_nodes(6) as names:
        yield names


@pytest.mark.parametrize("seed", range(CAMPAIGNS))
def test_on_a_switch_exactly_the_nodes_of_all_cuts_are_named(
    seed: int, switched: list[str], tmp_path: Path, show: Show
) -> None:
    campaign = SwitchCampaign.drawn(seed)
    script = STALL if campaign.stalls else SCRIPT
    options = ("--stall-timeout=4",) if campaign.stalls else ()
    found = ended(
        tmp_path,
        switched[: campaign.nodes],
        campaign.rules(),
        28000 + 10 * seed,
        script,
        *options,
        mended_after=campaign.mended_after,
    )
    said = found.errors[0]
    show(f"{seed}: {campaign}: {found.codes}, {sorted(named(said))}")
    assert len({*found.codes}) == 1, found.text
    assert "lost" not in found.text
    if campaign.mended_after is None:
        assert named(said) == campaign.at_fault, found.text
        assert (found.codes[0] == LOST) == bool(campaign.cuts)
    assert named(said) <= campaign.at_fault, found.text
    assert (found.codes[0] == LOST) == bool(named(said)), found.text
