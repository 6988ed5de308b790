from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from srunddp.bootstrap.environment import detect
from srunddp.bootstrap.environment.rank_zero_discovery import broadcast_over_pmi
from srunddp.bootstrap.environment.types import Environment
from srunddp.bootstrap.network.ifaces_entry import DEFAULT
from srunddp.bootstrap.network.interface import NetworkInterface, SelectedInterface
from srunddp.bootstrap.rendezvous import discovery, protocol
from srunddp.bootstrap.rendezvous.auth import HmacAuthenticator
from srunddp.bootstrap.rendezvous.early_failure import report_early_failure
from srunddp.bootstrap.rendezvous.protocol import RendezvousResult, bind_store, listen
from srunddp.bootstrap.rendezvous.rank_setup import (
    RankSetup,
    Rejoin,
    RendezvousOptions,
    SpareNodeTerms,
    listen_as_deputy,
)
from srunddp.bootstrap.rendezvous.roles import rendezvous, search_report
from srunddp.errors import ConfigError, PeerError, ReassignedError
from srunddp.spare_nodes.layout import set_spare_nodes
from srunddp.spare_nodes.spare_nodes import SpareNodes
from tests.bootstrap.environment.test_rank_zero_discovery import answering, launcher
from tests.bootstrap.rendezvous.test_client import rank_zero
from tests.support.facts import tells
from tests.support.launchers import PID, hydra, open_mpi, step
from tests.support.starting import LONG

BROKEN = ConfigError("no file train.py", expected="a script to run", hint="correct the path")
SOON = RendezvousOptions(timeout=LONG)


def on_hydra(rank: int, size: int = 2) -> Environment:
    return detect.detect(hydra(rank, size), channel="pmi")


def test_over_pmi_rank_zeros_failure_reaches_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with launcher(2) as server, ThreadPoolExecutor(1) as pool:
        monkeypatch.setenv("PMI_FD", str(server.ends[0].fileno()))
        other = pool.submit(
            broadcast_over_pmi, None, descriptor=server.ends[1].fileno(), timeout=LONG
        )
        # However busy this machine is.
        monkeypatch.setattr(protocol, "TELL_FOR", LONG)
        assert report_early_failure(on_hydra(0), SOON, BROKEN)
        with pytest.raises(
            PeerError, match=r"rank 0 on .* failed: no file train\.py; expected a script"
        ) as caught:
            protocol.decode_advertisement(other.result())
    assert caught.value.exit_code == 78


def test_over_pmi_another_ranks_failure_reaches_rank_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    held = bind_store("127.0.0.1", listen("127.0.0.1", [0]), [0])
    published = protocol.encode_advertisement("1207.0.0", [held.rendezvous_address])
    secret = HmacAuthenticator(bytes.fromhex(protocol.decode_advertisement(published).secret))
    with (
        launcher(2) as server,
        rank_zero(2, held=held, trust=secret) as zero,
        ThreadPoolExecutor(1) as pool,
    ):
        monkeypatch.setenv("PMI_FD", str(server.ends[1].fileno()))
        first = pool.submit(
            broadcast_over_pmi, published, descriptor=server.ends[0].fileno(), timeout=LONG
        )
        # However busy this machine is.
        monkeypatch.setattr(protocol, "TELL_FOR", LONG)
        assert report_early_failure(on_hydra(1), SOON, BROKEN)
        assert first.result() == published
        with pytest.raises(PeerError, match=r"rank 1 on .* failed: no file train\.py") as caught:
            zero.result()
    assert caught.value.exit_code == 78


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_of_which_nobody_could_be_told_is_the_rank_s_own_to_print(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nobody prints it: the run ends without a word."""
    with answering() as launcher_is_gone:
        monkeypatch.setenv("PMI_FD", str(launcher_is_gone))
        assert not report_early_failure(on_hydra(rank), SOON, BROKEN)


def test_where_nobody_looks_nobody_is_told_or_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not report_early_failure(detect.detect(open_mpi(1), channel="mpi"), SOON, BROKEN)
    assert not report_early_failure(detect.detect({}), SOON, BROKEN)
    monkeypatch.setattr(discovery, "addresses_of", lambda _: set())
    who = detect.detect(step(0), pid=PID)
    assert report_early_failure(who, RendezvousOptions(timeout=300), BROKEN)


def explicit(rank: int, here: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % here),
        "LOCAL_WORLD_SIZE": str(here),
        "WORLD_SIZE": "64",
        "MASTER_ADDR": "node00",
        "MASTER_PORT": "29500",
    }


def of_step(rank: int, here: int, *, cyclic: bool = False) -> dict[str, str]:
    """One of 64 ranks of a Slurm step."""
    nodes = 64 // here
    if cyclic:
        local_rank, node = divmod(rank, nodes)
        ranks = range(node, 64, nodes)
    else:
        node, local_rank = divmod(rank, here)
        ranks = range(node * here, node * here + here)
    return step(
        SLURM_PROCID=str(rank),
        SLURM_LOCALID=str(local_rank),
        SLURM_NODEID=str(node),
        SLURM_STEP_NODELIST=f"n[0-{nodes - 1}]",
        SLURM_STEP_NUM_NODES=str(nodes),
        SLURM_STEP_NUM_TASKS="64",
        SLURM_STEP_TASKS_PER_NODE=f"{here}(x{nodes})",
        SLURM_DISTRIBUTION="cyclic" if cyclic else "block",
        SLURM_GTIDS=",".join(map(str, ranks)),
        SLURMD_NODENAME=f"n{node}",
    )


def prepared(environment: Environment) -> RankSetup:
    chosen = SelectedInterface("eth0", "10.0.0.1", {}, "the default route")
    return RankSetup(SOON, environment, (DEFAULT,), chosen)


@pytest.mark.parametrize(
    ("variables", "speakers"),
    [
        (lambda rank: of_step(rank, 8), [1, 8, 16, 24]),
        (lambda rank: of_step(rank, 8, cyclic=True), [1, 2, 3]),
        (lambda rank: of_step(rank, 1), [1, 2, 3]),
        (lambda rank: of_step(rank, 32), [1, 32]),
        (lambda rank: open_mpi(rank, 64, rank % 8, 8), [1, 8, 16, 24]),
        (lambda rank: explicit(rank, 8), [1, 8, 16, 24]),
    ],
)
def test_one_rank_a_node_and_few_nodes_say_that_they_wait(
    variables: Callable[[int], dict[str, str]], speakers: list[int]
) -> None:
    found = []
    for rank in range(1, 64):
        environment = detect.detect(variables(rank), pid=PID)
        if search_report(prepared(environment), print).say:
            found.append(rank)
    assert found == speakers


def test_the_way_to_a_network_that_works_is_named_where_it_helps() -> None:
    """Over the closed network a scan would not meet either: over PMI it does."""
    slurm = prepared(detect.detect(of_step(1, 8), pid=PID))
    assert tells(
        search_report(slurm, print).network_hint, "srun --mpi=pmi2", "ifaces scan", "--ifaces"
    )
    published = prepared(detect.detect(hydra(1, 8, 1, 4), channel="pmi"))
    hint = search_report(published, print).network_hint
    assert "ifaces scan" in hint
    assert "pmi2" not in hint
    one_node = prepared(on_hydra(1))
    assert search_report(one_node, print).network_hint == ""
    again = Rejoin(generation=1, published="", channel="slurm", run="1207.0.0")
    after_a_restart = replace(slurm, options=replace(SOON, rejoin=again))
    assert search_report(after_a_restart, print).network_hint == ""


def links(*addresses: str) -> tuple[NetworkInterface, ...]:
    return tuple(
        NetworkInterface(f"eth{index}", True, 0, (address,), ())
        for index, address in enumerate(addresses)
    )


def test_rank_zero_is_heard_on_its_own_addresses_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that its name leads to and the interface beside; not all of the node's, and nobody
    else's.
    """
    monkeypatch.setattr(
        discovery, "list_interfaces", lambda: links("127.0.0.1", "10.0.0.1", "10.1.0.1", "10.2.0.1")
    )
    monkeypatch.setattr(discovery, "addresses_of", lambda _: {"10.1.0.1", "127.0.0.1", "10.9.9.9"})
    who = detect.detect(step(0), pid=PID)
    assert discovery.resolve_node(who, None, (DEFAULT,)) == ["10.1.0.1"]
    chosen = SelectedInterface("eth1", "10.0.0.1", {}, "")
    assert discovery.resolve_node(who, chosen, (DEFAULT,)) == ["10.0.0.1", "10.1.0.1"]
    assert discovery.resolve_node(replace(who, local_world_size=4), None, (DEFAULT,)) == [
        "127.0.0.1"
    ]


def test_without_an_interface_all_own_addresses_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        discovery, "list_interfaces", lambda: links("127.0.0.1", "10.0.0.1", "10.1.0.1")
    )
    who = detect.detect(step(1), pid=PID)
    found = discovery.candidate_addresses(who, None, (DEFAULT,), range(40000, 40002))
    assert {address.host for address in found} == {"10.0.0.1", "10.1.0.1"}
    assert {address.port for address in found} == {40000, 40001}


@pytest.mark.parametrize(("rank", "listens"), [(0, False), (1, True), (2, True), (3, False)])
def test_a_rank_of_each_node_listens_for_the_time_without_rank_0(rank: int, listens: bool) -> None:
    """Of two on each of two nodes; on rank 0's the next one."""
    who = detect.detect(step(rank), pid=PID)
    found = listen_as_deputy(
        RankSetup(SOON, who, (DEFAULT,), SelectedInterface("lo", "127.0.0.1", {}, ""))
    )
    assert bool(found.deputy) == listens
    if found.deputy:
        found.deputy.close()


@pytest.mark.parametrize(("last", "port"), [(20404, 20403), (20403, 20402), (20402, 0)])
def test_a_deputy_leaves_the_first_two_ports_to_a_rank_0(last: int, port: int) -> None:
    who = detect.detect(step(2), pid=PID)
    options = replace(SOON, ports=range(20400, last))
    place = SelectedInterface("lo", "127.0.0.1", {}, "")
    found = listen_as_deputy(RankSetup(options, who, (DEFAULT,), place))
    assert (found.deputy.getsockname()[1] if found.deputy else 0) == port
    if found.deputy:
        found.deputy.close()
    else:
        with pytest.raises(ConfigError, match="2 ports with --spare-nodes; expected 3 or more"):
            listen_as_deputy(
                RankSetup(options, replace(who, world_size=2, spares=2), (DEFAULT,), place)
            )


def on_node(task: int, size: int) -> Environment:
    """One task of a step with one task on each node."""
    changes = {
        "SLURM_STEP_NODELIST": f"node[1-{size}]",
        "SLURM_STEP_NUM_NODES": str(size),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{size})",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(task),
        "SLURM_GTIDS": str(task),
        "SLURMD_NODENAME": f"node{task + 1}",
    }
    return detect.detect(step(task, **changes), pid=PID)


class Restart:
    """Tasks that meet again after a restart, whose rank 0 listens already."""

    def __init__(self, rejoin: Rejoin) -> None:
        self.held = bind_store("127.0.0.1", listen("127.0.0.1", [0]), [0])
        published = protocol.encode_advertisement("1207.0.0", [self.held.rendezvous_address])
        self.options = replace(SOON, rejoin=replace(rejoin, published=published))

    def __enter__(self) -> Restart:
        return self

    def __exit__(self, *_: object) -> None:
        self.held.rendezvous.close()
        self.held.store.close()

    def meet(self, environment: Environment) -> RendezvousResult:
        place = SelectedInterface("lo", "127.0.0.1", {}, "")
        held = self.held if environment.rank == 0 else None
        setup = RankSetup(self.options, environment, (DEFAULT,), place, held)
        spare_nodes = SpareNodes(
            setup=setup, lost_after=20.0, restart_grace=0.0, folder=None, say=lambda _: None
        )
        found = rendezvous(
            setup, lambda message: message or "", replacing_server=spare_nodes.server
        )
        for connection in found.connections.values():
            connection.close()
        return found


AGAIN = Rejoin(generation=1, published="", channel="slurm", run="1207.0.0")


def test_a_restart_without_spare_nodes_waits_for_every_rank() -> None:
    with Restart(AGAIN) as restart, ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda rank: restart.meet(on_node(rank, 2)), range(2)))
    assert [each.meeting.nnodes for each in found] == [2, 2]
    assert found[0].nodes == {0: "node1", 1: "node2"}


def test_a_restart_with_spare_nodes_gives_a_lost_rank_to_one_of_them() -> None:
    """Of three nodes the second is gone, and the third is spare."""
    terms = SpareNodeTerms(
        rank=0, lost_after=20.0, within=20.0, expected=(2,), not_before=0.0, quorum=2
    )
    rejoin = replace(AGAIN, spare_nodes=terms)
    with Restart(rejoin) as restart, ThreadPoolExecutor(1) as pool:
        zero = pool.submit(restart.meet, set_spare_nodes(on_node(0, 3), 1))
        spare = set_spare_nodes(on_node(2, 3), 1)
        with pytest.raises(ReassignedError) as told:
            restart.meet(spare)
        restart.meet(replace(spare, rank=told.value.rank))
        assert told.value.rank == 1
        assert zero.result().nodes == {0: "node1", 1: "node3"}
