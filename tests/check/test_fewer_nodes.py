"""What a check says of a run that may go on with fewer nodes, and on which ranks it tests that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from srunddp._version import __version__
from srunddp.bootstrap.network.interface import SelectedInterface
from srunddp.bootstrap.process_group.store import ProcessGroupContext
from srunddp.bootstrap.rendezvous.messages import Hello
from srunddp.check import allreduce, preflight
from srunddp.check.allreduce import AllReduceFacts
from srunddp.check.fewer_nodes import FewerNodes, fewer_nodes
from srunddp.check.finding import CheckContext
from srunddp.check.messages import CheckMessage, CollectedFacts, CollectFacts
from srunddp.check.session import CheckSession
from tests.support.facts import tells
from tests.support.made_up_site import subject
from tests.support.starting import slurm


def context(tasks: str, ranks: int, *, spare_nodes: int = 0, min_nodes: int = 0) -> CheckContext:
    """Of rank 0 of a step of three nodes."""
    step = {
        "SLURM_STEP_NODELIST": "node[01-03]",
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURMD_NODENAME": "node01",
        "SLURM_GTIDS": "0",
    }
    known = subject(slurm(0, ranks) | step)
    return replace(known, spare_nodes=spare_nodes, min_nodes=min_nodes)


@pytest.mark.parametrize(
    ("sizes", "fewest", "said"),
    [
        ((2,) * 6, 4, ("down to 8 of 12 ranks", "4 of 6 nodes", "is a multiple of 10")),
        ((4, 4), 1, ("down to 4 of 8 ranks", "1 of 2 nodes", "keeps its samples")),
        ((2, 1, 3), 2, ("down to 3 of 6 ranks", "2 of 3 nodes", "is a multiple of 10")),
        ((8,) * 64, 32, ("down to 256 of 512 ranks", "cannot keep", "scale_lr")),
    ],
)
def test_the_smallest_world_and_what_a_step_needs_are_told(
    sizes: tuple[int, ...], fewest: int, said: tuple[str, ...]
) -> None:
    told = FewerNodes(sizes, fewest).summary()
    assert tells(told, *said)
    assert ("multiple" in told) == ("multiple" in said[-1])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"spare_nodes": 1}, None),
        ({"min_nodes": 2}, FewerNodes((2, 2, 2), 2)),
        ({"min_nodes": 1, "spare_nodes": 1}, FewerNodes((2, 2), 1)),
        ({"min_nodes": 3}, None),  # it needs all nodes
        ({"min_nodes": 4}, None),  # a run refuses that
    ],
    ids=str,
)
def test_only_a_run_that_may_shrink_has_a_smallest_world(
    options: dict[str, int], expected: FewerNodes | None
) -> None:
    assert fewer_nodes(context("2(x3)", 6, **options)) == expected


class _Ranks(CheckSession):
    """Ranks that answer at once, each by a responder of its own."""

    def __init__(self, contexts: Iterable[CheckContext]) -> None:
        self.responders = [preflight.Responder(each) for each in contexts]
        here = {
            rank: Hello("", rank, 6, rank % 2, f"node0{rank // 2 + 1}", "", 1 + rank)
            for rank in range(len(self.responders))
        }
        super().__init__(here, self.responders[0].handle)

    def ask(self, questions, within, wanted):  # type: ignore[no-untyped-def]
        answers = dict[int, CheckMessage]()
        for rank, question in questions.items():
            if isinstance(question, CollectFacts):
                answers[rank] = CollectedFacts(__version__, {}, {})
            else:
                answers[rank] = self.responders[rank].handle(question)
        return answers


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """The rank, the number of ranks and that of nodes in each all-reduce."""
    found = list[tuple[int, int, int]]()

    def measured(place: ProcessGroupContext, within: float) -> AllReduceFacts:
        environment = place.environment
        found.append((environment.rank, environment.world_size, place.meeting.nnodes))
        return AllReduceFacts(backend="gloo", sweep=((1 << 20, 1e9),))

    monkeypatch.setattr(allreduce, "run", measured)
    return found


def examined(**options: int) -> dict[str, str]:
    """The summaries of a check with ``--collective`` of two ranks on each of three nodes."""
    own = context("2(x3)", 6, **options)
    lo = SelectedInterface("lo", "127.0.0.1", {}, "made up")
    contexts = [
        replace(own, interface=lo, environment=replace(own.environment, rank=rank))
        for rank in range(6)
    ]
    session = _Ranks(contexts)
    report = preflight.examine(session, session.responders[0], 1.0, with_collective=True)
    assert report.findings == []
    return report.summaries


def test_a_collective_is_tested_over_the_first_nodes_alone_too(
    worlds: list[tuple[int, int, int]],
) -> None:
    summaries = examined(min_nodes=2)
    assert worlds == [(rank, 6, 3) for rank in range(6)] + [(rank, 4, 2) for rank in range(4)]
    assert tells(summaries["fewer-nodes"], "4 of 6 ranks", "first 2 nodes", "gloo", "1 MiB 1.000")


def test_without_the_option_a_collective_is_tested_once(worlds: list[tuple[int, int, int]]) -> None:
    assert "fewer-nodes" not in examined()
    assert worlds == [(rank, 6, 3) for rank in range(6)]
