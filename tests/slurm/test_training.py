"""Real training on six nodes, two ranks each, with every socket of every node watched
throughout.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.nodes import NODES, Node
from tests.cluster.sockets import Socket
from tests.conftest import PROGRAMS, ROOT
from tests.slurm.conftest import OPEN_MPI, SRUNDDP, SlurmJobRunner
from tests.support.facts import tells

MNIST = str(ROOT / "docs" / "examples" / "mnist.py")
TORCHRUN_STYLE = str(PROGRAMS / "torchrun_style.py")
pytestmark = pytest.mark.slurm


@dataclass
class Watch:
    """Lists the sockets that our ranks hold, in every node, again and again until it is told to
    stop.
    """

    cluster: Cluster
    seen: dict[str, set[Socket]] = field(default_factory=dict)
    rounds: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Watch:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(1.0):
            for node in NODES:
                ours = {
                    s
                    for s in self.cluster.sockets(node.name)
                    if any(_is_rank(o.name) for o in s.owners)
                }
                self.seen.setdefault(node.name, set()).update(ours)
            self.rounds += 1


def _is_rank(name: str) -> bool:
    return name.startswith(("python", "srunddp", "pt_"))


def strays(
    seen: dict[str, set[Socket]], prefix: str, *, listeners: bool
) -> list[tuple[str, Socket]]:
    """The sockets of ranks that lie outside the network; a node's loopback is not a network."""
    wrong = []
    for node, sockets in seen.items():
        for socket in sockets:
            ends = [socket.local_address] + (
                [socket.peer_address] if socket.state == "established" else []
            )
            if socket.state == "listening" and not listeners:
                continue
            if any(not end.startswith((prefix, "127.", "::1")) for end in ends):
                wrong.append((node, socket))
    return wrong


def peers(watch: Watch, node: Node, address: str) -> set[str]:
    """Whom the ranks of a node were connected to from this address of it, other than themselves."""
    sockets = (
        s for s in watch.seen[node.name] if s.state == "established" and s.local_address == address
    )
    return {s.peer_address for s in sockets} - {address}


@pytest.fixture(scope="module")
def digits(runner: SlurmJobRunner) -> Path:
    return runner.cluster.shared / "digits"


@pytest.mark.parametrize(
    ("channel", "ranks"), [("slurm", 12), ("pmi", 6), pytest.param("mpi", 6, marks=OPEN_MPI)]
)
def test_mnist_trains_with_every_connection_in_the_data_network(
    runner: SlurmJobRunner, digits: Path, channel: str, ranks: int
) -> None:
    pmi = {"slurm": "none", "pmi": "pmi2", "mpi": "pmix"}[channel]
    options = (f"--mpi={pmi}", "-N6", f"-n{ranks}", SRUNDDP, "--channel", channel)
    with Watch(runner.cluster) as watch:
        done = runner.srun(*options, MNIST, "--data-dir", str(digits), "--epochs", "1", timeout=240)
    assert done.code == 0, done.errors
    assert (
        f"{ranks} ranks on 6 nodes, launcher Slurm, channel {channel}, master 10.88.0.11 "
        in done.errors
    )
    assert "hostname of the client socket" not in done.errors
    assert "val accuracy" in done.output
    # Open MPI listens on every address of the node, and talks over the one it is told.
    assert strays(watch.seen, "10.88.0.", listeners=channel != "mpi") == []
    for node in NODES:
        assert len(peers(watch, node, node.data)) >= 2, (node, watch.rounds)


def test_the_watch_sees_ranks_on_the_management_network(runner: SlurmJobRunner) -> None:
    management = runner.write_ifaces("management.conf", '- nodes: "*"\n  interface: mgmt0\n')
    with Watch(runner.cluster) as watch:  # for some rounds, however fast the machine is
        done = runner.srun(
            "-N1", "-n2", SRUNDDP, TORCHRUN_STYLE, ifaces=management, env={"PAUSE": "5"}
        )
    assert done.code == 0, done.errors
    assert strays(watch.seen, "10.88.0.", listeners=True)


def test_without_ifaces_conf_a_closed_network_is_named_while_the_ranks_wait(
    runner: SlurmJobRunner,
) -> None:
    """The nodes' names lead to the management network, which carries no training. The rank that
    knows says so long before the ranks give up, and says what to do.
    """
    options = ("-N2", "-n2", SRUNDDP, "--timeout", "24")
    done = runner.srun(*options, TORCHRUN_STYLE, env={"SRUNDDP_IFACES": ""})
    assert done.code != 0
    lines = [line for line in done.errors.splitlines() if line.startswith("srunddp: ")]
    notes = [line for line in lines if not line.startswith("srunddp: error: ")]
    (note,) = [line for line in notes if "rank 1 on node02" in line and "10.77.0.11:" in line]
    assert tells(
        note, "mgmt0", "10.77.0.12", "did not answer", "srun --mpi=pmi2 srunddp ifaces scan"
    )
    errors = [line for line in lines if line.startswith("srunddp: error: ")]
    assert any("1 of 2 ranks did not come: rank 1 on node02" in line for line in errors)
    assert all("ifaces scan" in line and "--ifaces" in line for line in errors), errors
    assert done.reports == []


@pytest.mark.parametrize(
    ("pmi", "channel"),
    [
        pytest.param("none", "slurm", marks=pytest.mark.gate),
        ("pmi2", "pmi"),
        pytest.param("pmix", "mpi", marks=OPEN_MPI),
    ],
)
def test_a_script_written_for_torchrun_runs_unchanged(
    runner: SlurmJobRunner, pmi: str, channel: str
) -> None:
    done = runner.srun(f"--mpi={pmi}", "-N3", "-n3", SRUNDDP, "--channel", channel, TORCHRUN_STYLE)
    assert done.code == 0, done.errors
    assert {rank: report["sum"] for rank, report in done.by_rank().items()} == dict.fromkeys(
        range(3), 6.0
    )


def test_process_groups_are_made_and_destroyed_in_every_way(runner: SlurmJobRunner) -> None:
    # Inherited from a torchrun around the job, this variable once made every rank wait for a store
    # nobody serves.
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    done = runner.srun(
        "-N3", "-n3", SRUNDDP, str(PROGRAMS / "many_groups.py"), "29611", env=env, timeout=180
    )
    assert done.code == 0, done.errors
    assert {rank: set(report["sums"]) for rank, report in done.by_rank().items()} == {
        rank: {6} for rank in range(3)
    }
    assert len(done.by_rank()[0]["sums"]) == 17


@pytest.mark.parametrize(
    ("way", "sums"), [("client", 6), ("subprocess", 6), ("exec", 6), ("some", 3)]
)
def test_a_process_that_is_no_rank_joins_over_nodes(
    runner: SlurmJobRunner, way: str, sums: int
) -> None:
    """By the interface of the run, as the ranks do."""
    done = runner.srun("-N3", "-n3", SRUNDDP, str(PROGRAMS / "joins.py"), way, timeout=180)
    assert done.code == 0, done.errors
    ranks = 2 if way == "some" else 3
    assert sorted((each["rank"], each["sum"]) for each in done.reports) == [
        (rank, sums) for rank in range(ranks)
    ]


def test_init_meets_under_plain_srun_and_says_it_is_unsupervised(runner: SlurmJobRunner) -> None:
    env = {"PYTHONPATH": str(ROOT)}
    program = str(PROGRAMS / "plain_init.py")
    done = runner.srun("-N2", "-n4", str(ROOT / ".venv/bin/python"), program, env=env)
    assert done.code == 0, done.errors
    assert {rank: report["sums"] for rank, report in done.by_rank().items()} == {
        rank: [10, 10] for rank in range(4)
    }
    assert done.errors.count("4 ranks without a supervisor") == 1


def test_a_network_that_has_only_ipv6_trains(runner: SlurmJobRunner) -> None:
    six = runner.write_ifaces(
        "six.conf", '- nodes: "*"\n  interface: ens6\n  address: "{node}-six"\n'
    )
    with Watch(runner.cluster) as watch:
        done = runner.srun("-N3", "-n3", SRUNDDP, TORCHRUN_STYLE, ifaces=six)
    assert done.code == 0, done.errors
    assert "master fd88::11 " in done.errors
    assert {report["sum"] for report in done.reports} == {6.0}
    assert strays(watch.seen, "fd88::", listeners=True) == []
    # Each rank's line to rank 0 is there all the time; those of Gloo may be too short-lived to be
    # seen.
    first, *others = NODES[:3]
    assert {node.six for node in others} <= peers(watch, first, first.six), watch.rounds
    for node in others:
        assert first.six in peers(watch, node, node.six), watch.rounds


def test_mixed_families_are_an_error_that_says_so(runner: SlurmJobRunner) -> None:
    text = (
        '- nodes: node01\n  interface: ens1f1\n  address: "{node}-data"\n'
        '- nodes: "*"\n  interface: ens6\n  address: "{node}-six"\n'
    )
    mixed = runner.write_ifaces("mixed.conf", text)
    for pmi in ("none", "pmi2"):
        where = (f"--mpi={pmi}", "-N2", "--nodelist=node[01-02]", "--kill-on-bad-exit=1")
        words = (*where, SRUNDDP, "--timeout", "10", TORCHRUN_STYLE)
        done = runner.srun(*words, ifaces=mixed)
        assert done.code != 0
        assert "expected IPv4 on all nodes or IPv6 on all" in done.errors
        assert "10.88.0.11" in done.errors
        assert "fd88::12" in done.errors
