"""A task whose node was given up waits at rank 0, and the next start takes it back: of four nodes
with two tasks each one was lost, and two have ranks.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest

from srunddp.bootstrap.environment.detect import detect
from srunddp.bootstrap.network.ifaces_entry import DEFAULT
from srunddp.bootstrap.network.interface import SelectedInterface
from srunddp.bootstrap.rendezvous.auth import Authenticator
from srunddp.bootstrap.rendezvous.client import Round, come_back, join
from srunddp.bootstrap.rendezvous.messages import Hello, RendezvousInfo
from srunddp.bootstrap.rendezvous.protocol import (
    Address,
    bind_store,
    decode_advertisement,
    encode_advertisement,
)
from srunddp.bootstrap.rendezvous.rank_setup import RankSetup, RendezvousOptions
from srunddp.errors import ConfigError, NotNeededError, RendezvousError
from srunddp.spare_nodes import srun
from srunddp.spare_nodes.layout import set_spare_nodes
from srunddp.spare_nodes.returning import Search, dismiss, wait_for_link, wait_for_next_start
from srunddp.spare_nodes.srun import SrunState
from srunddp.supervisor.limits import Limits
from srunddp.util import slurm_command
from srunddp.util.tcp import waiting_at
from tests.bootstrap.rendezvous.test_client import LONG, hello, soon
from tests.spare_nodes.test_server import (
    TASKS,
    come,
    here,
    nodes,
    reassigned,
    refused,
    spare_node_server,
)
from tests.support.connections import Clock
from tests.support.launchers import PID, step
from tests.support.starting import until

Ended = Future[RendezvousInfo]


def returning(task: int, node: str = "") -> Hello:
    """The launcher's number of the task stays, whatever numbers there were since."""
    one = hello(TASKS + task, TASKS, node or f"n{task // 2 + 1}")
    return replace(one, local_world_size=2)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as entered:
        yield entered


class Returning:
    """Tasks that come back, each in a thread, until the test is over."""

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.rounds = list[Round]()
        self._pool = ThreadPoolExecutor(TASKS)

    def come(self, address: Address, *hellos: Hello) -> list[Ended]:
        return self.come_to([address], *hellos)

    def come_to(self, addresses: list[Address], *hellos: Hello) -> list[Ended]:
        """To the first of these where somebody listens."""
        return [self._pool.submit(self._come, addresses, one) for one in hellos]

    def _come(self, addresses: list[Address], one: Hello) -> RendezvousInfo:
        come_back(addresses, one, Authenticator(), None, 5.0, self._why_over)

    def _why_over(self, found: Round) -> str:
        self.rounds.append(found)
        return "the test is over" if self.is_over.is_set() else ""

    def come_again(self, address: Address, node: str, *numbers: int) -> list[Future[object]]:
        """As the tasks of a spare node that they are now."""
        hellos = [hello(number, TASKS, node) for number in numbers]
        return [self._pool.submit(join, [address], one, soon()) for one in hellos]

    def end(self) -> None:
        self.is_over.set()
        self._pool.shutdown()


@pytest.fixture
def back() -> Iterator[Returning]:
    them = Returning()
    yield them
    them.end()


def test_both_tasks_of_a_node_come_back_as_those_of_a_spare_one(back: Returning) -> None:
    """They get numbers that nobody has, and nobody's rank moves for them."""
    with spare_node_server(1, 2, 3, 12, 13) as server:
        ends = back.come(server.address, returning(4), returning(5))
        until(lambda: here(server, 12, 13))
        others = come(server, 1, 2, 3)
        assert sorted(reassigned(end) for end in ends) == [(4, "2(x2)"), (5, "2(x2)")]
        meeting = come(server, 4, 5)[0].result(LONG)
        assert meeting.vacant == (6, 7)
        assert nodes(server) == "n1 n1 n2 n2"
        assert [each.result(LONG).nnodes for each in others] == [2, 2, 2]
        assert server.said == ["n3 is a spare node from now on"]


def test_it_takes_the_place_of_another_node_but_not_its_own(back: Returning) -> None:
    """In the start that follows its failure another one is used."""
    with spare_node_server(1, 6, 7, 10, 11, left=("n2",)) as server:
        ends = back.come(server.address, returning(2), returning(3))
        come(server, 1, 6, 7)
        assert sorted(reassigned(end)[0] for end in ends) == [4, 5]
        back.come_again(server.address, "n2", 4, 5)
        assert nodes(server) == "n1 n1 n4 n4"
    with spare_node_server(1, 12, 13) as server:
        ends = back.come(server.address, returning(4), returning(5))
        come(server, 1)
        assert sorted(reassigned(end)[0] for end in ends) == [2, 3]
        back.come_again(server.address, "n3", 2, 3)
        assert nodes(server) == "n1 n1 n3 n3"


def test_they_are_no_part_of_the_majority(back: Returning) -> None:
    """They had no part in the last start, of which both sides of a network may have tasks."""
    with spare_node_server(1, quorum=3) as server:
        back.come(server.address, returning(4), returning(5))
        until(lambda: here(server, 12, 13))
        refused(server, come(server, 1), "2 tasks have met after the loss of a node")
        server.held.rendezvous.close()


def test_a_node_without_one_of_its_tasks_stays_away(back: Returning) -> None:
    where = encode_advertisement("1207.0", [Address("127.0.0.1", 1)])
    with spare_node_server(1, 2, 3, returns_at=where) as server:
        (end,) = back.come(server.address, returning(4))
        until(lambda: here(server, 12))
        come(server, 1, 2, 3)
        assert nodes(server) == "n1 n1 n2 n2"
        assert {*server.result().nodes} == {0, 1, 2, 3}
        assert not end.done()


def test_a_task_that_comes_back_in_vain_to_the_last_start_ends_well(back: Returning) -> None:
    """No other start needs it, and it would find nobody."""
    with spare_node_server(1, 2, 3) as server:
        (end,) = back.come(server.address, returning(4))
        until(lambda: here(server, 12))
        come(server, 1, 2, 3)
        with pytest.raises(NotNeededError) as caught:
            end.result(LONG)
        assert caught.value.exit_code == 0
        assert nodes(server) == "n1 n1 n2 n2"


def test_a_task_waits_in_the_kernel_until_the_next_start(back: Returning) -> None:
    """Rank 0 reads nothing meanwhile, but counts who waits."""
    standing = socket.create_server(("127.0.0.1", 0))
    address = Address(*standing.getsockname()[:2])
    ends = back.come(address, returning(4), returning(5))
    until(lambda: waiting_at(standing) == 2)
    time.sleep(1.5)  # longer than any other rank waits for an answer
    assert waiting_at(standing) == 2
    held = bind_store("127.0.0.1", standing, [0])
    with spare_node_server(1, 2, 3, held=held) as server:
        come(server, 1, 2, 3)
        assert sorted(reassigned(end)[0] for end in ends) == [4, 5]
        come(server, 4, 5)
        assert server.result()


def test_a_task_that_has_found_a_deputy_goes_on_to_rank_0(back: Returning) -> None:
    """A deputy listens too, and may be the first that a node reaches whose network comes back."""
    deputy = socket.create_server(("127.0.0.1", 0))
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        rank_0 = Address(*reserved.getsockname()[:2])
    where = [rank_0, Address(*deputy.getsockname()[:2])]
    (end,) = back.come_to(where, returning(4))
    until(lambda: waiting_at(deputy) == 1)
    with socket.create_server((rank_0.host, rank_0.port)) as standing:
        standing.settimeout(LONG)
        until(lambda: standing.accept()[0].recv(1) == b"{")
        assert not end.done()
        back.is_over.set()
    deputy.close()


def test_after_a_restart_a_rank_soon_gives_up_where_nobody_listens() -> None:
    """Who is rank 0, or takes over, listens all the time; so the rank can come back soon."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = Address(*gone.getsockname()[:2])
    began = time.monotonic()
    with pytest.raises(RendezvousError, match="did not reach rank 0"):
        join([address], hello(1, TASKS), soon(), lost_after=5.0)
    assert time.monotonic() - began < LONG / 4


def test_where_nobody_listens_the_task_hears_why_it_looks_no_longer(back: Returning) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = Address(*gone.getsockname()[:2])
    (end,) = back.come(address, returning(4))
    until(lambda: len(back.rounds) >= 2)
    assert back.rounds[1] == Round(are_all_closed=True)
    back.is_over.set()
    with pytest.raises(RendezvousError, match="the test is over"):
        end.result(LONG)


@pytest.fixture
def rank_0() -> Iterator[RankSetup]:
    """One that listens for the next start."""
    variables = {
        "SLURM_STEP_NODELIST": "n[1-3]",
        "SLURM_STEP_NUM_NODES": "3",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_TASKS_PER_NODE": "1,1,1",
    }
    environment = set_spare_nodes(detect(step(0, **variables), pid=PID), 0, 2)
    place = SelectedInterface("lo", "127.0.0.1", {}, "")
    with socket.create_server(("127.0.0.1", 0)) as standing:
        where = encode_advertisement("1207.0", [Address(*standing.getsockname()[:2])])
        options = RendezvousOptions(max_restarts=3)
        setup = RankSetup(options, environment, (DEFAULT,), place)
        yield replace(setup, standing=standing, returns_at=where)


def test_when_the_run_is_over_those_that_wait_end_well(rank_0: RankSetup) -> None:
    """And one that is gone keeps nobody."""
    assert rank_0.standing
    own = decode_advertisement(rank_0.returns_at)
    from srunddp.bootstrap.rendezvous.discovery import introduce

    said = introduce(rank_0.environment, rank_0.returns_at)
    one = replace(said.hello, rank=4)
    socket.create_connection(rank_0.standing.getsockname()).close()
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(come_back, own.addresses, one, said.trust, None, 5.0, lambda _: "")
        until(lambda: rank_0.standing is not None and waiting_at(rank_0.standing) == 2)
        began = time.monotonic()
        dismiss(rank_0, rank_0.standing)
        with pytest.raises(NotNeededError) as caught:
            end.result(LONG)
    assert caught.value.exit_code == 0
    assert time.monotonic() - began < 2.5


SOON = 60.0


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Ask for another round after some seconds; srun is in this state, and Slurm knows the node."""
    clock = Clock()
    it = Search("n3", SOON, clock)

    def asked(
        after: float,
        found: Round = Round(),  # noqa: B008
        state: SrunState = SrunState.THERE,
        nodes: str = "n[1-4]",
    ) -> str:
        clock.now += after
        monkeypatch.setattr(srun, "state", lambda: state)
        monkeypatch.setattr(slurm_command, "output", lambda *_, **__: f"{nodes}\n")
        return it.why_over(found)

    return asked


def test_the_time_counts_once_srun_can_be_reached(search: Callable[..., str]) -> None:
    assert search(0.0, state=SrunState.CUT_OFF) == ""
    assert search(2 * SOON, state=SrunState.CUT_OFF) == ""
    assert search(SOON - 1.0) == ""
    assert search(SOON, Round(has_waited=True)) == ""
    assert search(SOON - 1.0) == ""
    assert search(2.0) == "they have not answered for 61 s"


def test_nobody_waits_for_slurm_where_the_others_wait_for_the_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was told to come back, and asks in the next round."""
    asked = list[str]()

    def state() -> SrunState:
        asked.append("srun")
        return SrunState.ENDED

    monkeypatch.setattr(srun, "state", state)
    it = Search("n3", SOON, Clock(), is_awaited=True)
    assert (it.why_over(Round()), asked) == ("", [])
    assert (it.why_over(Round()), asked) == ("srun has ended", ["srun"])


def test_a_node_that_slurm_has_set_down_does_not_come_back(search: Callable[..., str]) -> None:
    """It is out of the job. Where Slurm says nothing, the node goes on trying."""
    assert search(0.0, state=SrunState.CUT_OFF) == ""
    assert search(1.0, nodes="") == ""
    assert search(1.0, Round(has_waited=True), nodes="n[1-2,4]").startswith("Slurm has taken")


def test_an_srun_that_is_there_is_not_tried_again_and_again(search: Callable[..., str]) -> None:
    """It prints a line each time."""
    assert search(0.0) == ""
    assert search(1.0, state=SrunState.ENDED) == ""
    assert search(1.0, Round(has_waited=True), state=SrunState.ENDED) == "srun has ended"


@pytest.mark.parametrize(
    ("found", "state", "said"),
    [
        (Round(has_waited=True), SrunState.ENDED, "srun has ended"),
        (Round(are_all_closed=True), SrunState.THERE, "no process of the run listens any more"),
        (Round(are_all_closed=True), SrunState.CUT_OFF, "no process of the run listens any more"),
    ],
)
def test_nobody_waits_for_a_run_that_is_gone(
    found: Round, state: SrunState, said: str, search: Callable[..., str]
) -> None:
    assert search(0.0) == ""
    assert any(search(1.0, found, state).startswith(said) for _ in range(4))


def test_a_node_without_an_interface_waits_for_its_link(
    rank_0: RankSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a time that counts once srun can be reached."""
    states = iter([SrunState.CUT_OFF] * 3 + [SrunState.THERE] * 100)
    monkeypatch.setattr(srun, "state", lambda: next(states))
    monkeypatch.setattr(slurm_command, "output", lambda *_, **__: "")
    tried = list[float]()

    def prepare() -> RankSetup:
        tried.append(time.monotonic())
        if len(tried) < after:
            raise ConfigError("interface eth0 is down")
        return rank_0

    after = 3
    assert wait_for_link(prepare, "n3", 60.0) is rank_0
    after = 1000
    with pytest.raises(ConfigError, match="is down"):
        wait_for_link(prepare, "n3", 0.5)


def test_nobody_on_the_own_node_is_looked_for(
    rank_0: RankSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that listens there comes back itself, and never answers."""
    monkeypatch.setattr(srun, "state", lambda: SrunState.THERE)
    monkeypatch.setattr(slurm_command, "output", lambda *_, **__: "")
    from srunddp.bootstrap.rendezvous.discovery import introduce

    said = introduce(rank_0.environment, rank_0.returns_at)
    with pytest.raises(RendezvousError, match="no process of the run listens"):
        wait_for_next_start(rank_0, said, None, 5.0, Limits())
    assert rank_0.standing
    assert waiting_at(rank_0.standing) == 0
