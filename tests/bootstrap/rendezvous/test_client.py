from __future__ import annotations

import os
import resource
import select
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any
from unittest.mock import patch

import pytest

from srunddp.bootstrap.environment import detect
from srunddp.bootstrap.network.ifaces_entry import DEFAULT
from srunddp.bootstrap.rendezvous import client, discovery, listener, protocol
from srunddp.bootstrap.rendezvous.auth import CLIENT, Authenticator, Challenge, HmacAuthenticator
from srunddp.bootstrap.rendezvous.client import SearchReport, join, report_failure
from srunddp.bootstrap.rendezvous.messages import (
    AbortReason,
    Goodbye,
    Hello,
    Here,
    NotMet,
    RendezvousInfo,
    RendezvousMessage,
    Seen,
    Stranger,
    Told,
    error_from,
)
from srunddp.bootstrap.rendezvous.protocol import (
    Address,
    BoundSockets,
    CancelToken,
    RendezvousResult,
    bind_store,
    listen,
)
from srunddp.bootstrap.rendezvous.server import RendezvousServer, infos_of
from srunddp.errors import PeerError, RendezvousError, Scope
from srunddp.util.json_lines import parse
from srunddp.util.messages import receive, send
from tests.support.facts import tells
from tests.support.launchers import PID, step
from tests.support.starting import until

LONG = 180.0  # a limit that only a broken rendezvous reaches, on however busy a machine
TOKEN = "1207.0.0"
NONCE = "0" * 32
UNPROVEN = Authenticator()


def soon(seconds: float = LONG) -> float:
    return time.monotonic() + seconds


def hello(
    rank: int,
    world_size: int = 2,
    node: str = "node01",
    *,
    token: str = TOKEN,
    pid: int | None = None,
    address: str = "127.0.0.1",
) -> Hello:
    return Hello(token, rank, world_size, rank, node, address, 1000 + rank if pid is None else pid)


def greeting(one: Hello, kind: str = "none") -> Hello:
    """The first message of a rank."""
    return replace(one, nonce=NONCE, proof_kind=kind)


def heard(connection: socket.socket) -> RendezvousMessage | None:
    """The next message that comes over a connection."""
    return receive(connection, RendezvousMessage)


class RankZero:
    """Rank 0 on 127.0.0.1, which gathers in a thread."""

    def __init__(
        self,
        own: Hello,
        held: BoundSockets | None = None,
        layout: dict[int, str] | None = None,
        within: float = LONG,
        kind: Callable[..., RendezvousServer] = RendezvousServer,
        **more: Any,
    ) -> None:
        self.held = held or bind_store("127.0.0.1", listen("127.0.0.1", [0]), [0])
        self.interrupt = CancelToken()
        self.said: list[str] = []
        quick = {"every": LONG, "linger": 0.2}
        self.rendezvous = kind(
            own=own,
            held=self.held,
            channel="slurm",
            layout=layout or {},
            say=self.said.append,
            interrupt=self.interrupt,
            **(quick | more),
        )
        self.address = self.held.rendezvous_address
        self._result: Future[RendezvousResult] = Future()
        self._thread = threading.Thread(target=self._gather, args=(within,))
        self._thread.start()

    def _gather(self, within: float) -> None:
        try:
            self._result.set_result(self.rendezvous.accept_all(soon(within)))
        except BaseException as error:
            self._result.set_exception(error)

    def result(self) -> RendezvousResult:
        return self._result.result(LONG)

    def meeting(self) -> RendezvousInfo:
        """As it would have come over a connection."""
        return self.result().meeting

    def refusal(self) -> str:
        with pytest.raises(RendezvousError) as caught:
            self.meeting()
        assert caught.value.exit_code == 69
        return str(caught.value)

    def refusal_of_any_kind(self) -> None:
        with pytest.raises((RendezvousError, PeerError)):
            self.meeting()

    def end(self) -> None:
        self.interrupt.fail("the test is over", 1)
        self._thread.join(LONG)
        for held in (self.held.rendezvous, self.held.store, *self.rendezvous.connections.values()):
            held.close()
        self.interrupt.close()

    @property
    def token(self) -> str:
        return self.rendezvous.own.token

    def connect(self) -> socket.socket:
        return socket.create_connection((self.address.host, self.address.port), timeout=LONG)


@contextmanager
def rank_zero(
    world_size: int = 2,
    node: str = "node01",
    *,
    token: str = TOKEN,
    held: BoundSockets | None = None,
    **more: Any,
) -> Iterator[RankZero]:
    """Keyword arguments are RankZero's, and those that it hands on to the server."""
    host = held.rendezvous_address.host if held else "127.0.0.1"
    server = RankZero(hello(0, world_size, node, token=token, address=host), held, **more)
    try:
        yield server
    finally:
        server.end()


def meet(server: RankZero, *hellos: Hello, within: float = LONG) -> list[RendezvousInfo]:
    """All these ranks find rank 0 at once; what each of them was told, rank 0 first."""
    with ThreadPoolExecutor(max(len(hellos), 1)) as pool:
        found = [pool.submit(join, [server.address], one, soon(within)) for one in hellos]
        answers = [one.result(2 * LONG) for one in found]
    for connection, _ in answers:
        connection.close()
    return [server.meeting(), *(meeting for _, meeting in answers)]


def refusal(server: RankZero | Address, one: Hello, within: float = LONG) -> str:
    address = server if isinstance(server, Address) else server.address
    with pytest.raises(RendezvousError) as caught:
        join([address], one, soon(within))
    assert caught.value.exit_code == 69
    return str(caught.value)


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mute stranger costs a rank this long before it looks elsewhere."""
    monkeypatch.setattr(client, "ANSWER_WITHIN", 0.3)


# They meet.


def test_all_ranks_are_told_the_stores_address() -> None:
    """And nobody is said to be waited for when all come soon."""
    with rank_zero(3) as server:
        meetings = meet(server, hello(1, 3), hello(2, 3))
        port = server.held.store_address.port
        store = {"master_addr": "127.0.0.1", "master_port": port, "master_node": "node01"}
        place = {
            "run": TOKEN,
            "channel": "slurm",
            "nnodes": 1,
            "node_rank": 0,
            "local_world_size": 3,
            "sharers": 3,
        }
        place |= {"deputies": (), "takeover": "", "returns_at": "", "vacant": ()}
        place |= {"store_port": 0, "node_list": ""}
        assert [asdict(meeting) for meeting in meetings] == [store | place] * 3
        assert port != server.address.port
        assert server.said == []


def test_ranks_of_a_cyclic_placement_get_their_nodes_numbers() -> None:
    """``-m cyclic`` with 4, 1 and 1 tasks: arithmetic on ranks would be wrong. One rank has CPUs of
    its own.
    """
    hellos = [hello(rank, 6, node) for rank, node in enumerate("cabccc")]
    hellos[3] = replace(hellos[3], cpus="its own")
    with rank_zero(6, "c") as server:
        meetings = meet(server, *hellos[1:])
    assert [(each.node_rank, each.local_world_size, each.sharers) for each in meetings] == [
        *((0, 4, 3), (1, 1, 1), (2, 1, 1)),
        *((0, 4, 1), (0, 4, 3), (0, 4, 3)),
    ]
    assert {each.nnodes for each in meetings} == {3}


def test_the_ranks_may_come_in_any_order_and_late() -> None:
    """Rank 0 begins to listen only after the others have begun to look for it."""
    late = socket.socket()
    late.bind(("127.0.0.1", 0))
    address = Address(*late.getsockname()[:2])
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(join, [address], hello(rank, 3), soon()) for rank in (2, 1)]
        threading.Event().wait(0.1)  # refused meanwhile
        late.listen()
        held = BoundSockets(
            rendezvous=late,
            store=socket.socket(),
            rendezvous_address=address,
            store_address=address,
        )
        with rank_zero(3, held=held) as server:
            assert [other.result(LONG)[1] for other in others] == [server.meeting()] * 2
            for other in others:
                other.result()[0].close()


def test_of_those_that_listen_one_on_each_of_eight_nodes_is_told() -> None:
    """Those that may act for rank 0 when it is gone; rank 1 does not listen, and ranks 2 and 3
    share a node.
    """
    hellos = [
        replace(hello(rank, 13, f"n{rank}"), deputy_port=7000 + rank) for rank in range(1, 13)
    ]
    hellos[0] = replace(hellos[0], deputy_port=0)
    hellos[2] = replace(hellos[2], node="n2")
    with rank_zero(13) as server:
        meetings = meet(server, *hellos)
    deputies = [[(rank, host, port) for rank, host, port in each.deputies] for each in meetings]
    assert deputies == [[(rank, "127.0.0.1", 7000 + rank) for rank in (2, *range(4, 11))]] * 13


@pytest.mark.parametrize("local_size", [0, 1])
def test_hosts_with_one_name_are_nodes_of_their_own(local_size: int) -> None:
    """Containers; where the launcher says how many ranks a node has, that is kept."""
    hellos = [
        replace(hello(rank, 4, "worker"), local_rank=rank // 2, local_world_size=local_size)
        for rank in range(4)
    ]
    meetings = infos_of(hellos, Address("127.0.0.1", 1), "pmi")
    each = local_size or 2
    assert [(one.node_rank, one.local_world_size, one.nnodes) for one in meetings] == [
        (0, each, 2),
        (1, each, 2),
    ] * 2


def test_they_meet_over_ipv6() -> None:
    try:
        held = bind_store("::1", listen("::1", [0]), [0])
    except RendezvousError:
        pytest.skip("this machine has no IPv6")
    with rank_zero(2, held=held) as server:
        assert str(server.address) == f"[::1]:{server.address.port}"
        assert meet(server, hello(1, 2, address="::1"))[1].master_addr == "::1"


def test_the_lines_stay_open_after_the_meeting() -> None:
    """They carry failures and goodbyes later; rank 0 listens no longer."""
    with rank_zero(2) as server:
        connection, _ = join([server.address], hello(1), soon())
        server.meeting()
        send(server.rendezvous.connections[1], Told())
        assert heard(connection) == Told()
        send(connection, Goodbye())
        server.rendezvous.connections[1].settimeout(LONG)
        assert heard(server.rendezvous.connections[1]) == Goodbye()
        connection.close()
        with pytest.raises(ConnectionRefusedError):
            server.connect()


# What is held.


def test_both_sockets_listen_on_one_address_alone() -> None:
    held = bind_store("127.0.0.1", listen("127.0.0.1", [0]), [0])
    with held.rendezvous, held.store:
        for address in (held.rendezvous_address, held.store_address):
            socket.create_connection(("127.0.0.1", address.port), timeout=LONG).close()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.2", address.port), timeout=LONG)


@pytest.mark.parametrize("few", [False, True])
def test_the_nodes_try_the_network_where_no_agent_store_listens(few: bool) -> None:
    """Else each try would start one where a firewall leaves two ports."""
    held = bind_store("127.0.0.1", listen("127.0.0.1", [0]), [0])
    ports = (held.rendezvous_address.port, held.store_address.port)
    if few:
        held = replace(held, ports=ports)
    with rank_zero(held=held, agent_store=True) as server:
        meet(server, hello(1))
        found = server.result()
        assert found.agent_store is not None
        with found.agent_store as agent_store:
            assert found.port in ports
            assert found.port != agent_store.getsockname()[1]
            assert (found.port == ports[0]) == (not few)


def test_taken_ports_and_foreign_addresses_are_named() -> None:
    with ExitStack() as stack:
        taken = [stack.enter_context(stranger("mute")).address.port for _ in range(3)]
        with pytest.raises(RendezvousError) as caught:
            bind_store("127.0.0.1", listen("127.0.0.1", taken), [0])
        text = str(caught.value)
        ports = (f"all {len(taken)} ports", min(taken), max(taken), "127.0.0.1")
        assert tells(text, *ports, "; expected ")
        assert "--port" in text
        with pytest.raises(RendezvousError, match=f"port {taken[0]} on 127.0.0.1 taken by others"):
            bind_store("127.0.0.1", listen("127.0.0.1", taken[:1]), [0])
    with pytest.raises(
        RendezvousError, match=r"203\.0\.113\.7:0 cannot be bound: Cannot assign requested address"
    ):
        bind_store("203.0.113.7", listen("203.0.113.7", [0]), [0])


# Strangers where rank 0 could be.


ANSWERS = {
    "http": b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n",
    "store": bytes(range(256)) * 8,
    "endless": b"x" * 100_000,
    "empty-lines": b"\n\n\n",
    "json": b'{"jsonrpc": "2.0", "error": {}}\n',
    "json-list": b'[{"kind": "world"}]\n',
    "other-job": Stranger().encode(),
}
STRANGERS = ("mute", "closing", "banner", *ANSWERS)


class StrangersServer(socketserver.ThreadingTCPServer):
    """Somebody else's server; notes every byte that each connection brings."""

    # As servers do. Otherwise the connections of an earlier run keep a port for a minute.
    allow_reuse_address = True

    def __init__(self, kind: str, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), socketserver.BaseRequestHandler)
        self.address = Address(*self.socket.getsockname()[:2])
        self.kind = kind
        self.received: list[bytearray] = []

    def finish_request(self, request: Any, client_address: object) -> None:
        received = bytearray()
        self.received.append(received)
        request.settimeout(LONG)
        with suppress(OSError):
            if self.kind == "banner":
                request.sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n")
            while piece := request.recv(4096):
                received += piece
                if self.kind == "closing":
                    return
                if len(received) == len(piece):
                    request.sendall(ANSWERS.get(self.kind, b""))


@contextmanager
def stranger(kind: str, port: int = 0) -> Iterator[StrangersServer]:
    with StrangersServer(kind, port) as server, ThreadPoolExecutor(1) as pool:
        pool.submit(server.serve_forever, 0.01)
        try:
            yield server
        finally:
            server.shutdown()


def heard_the_hello_alone(server: StrangersServer, one: Hello) -> bool:
    # A banner is read before our hello has been sent whole, perhaps.
    texts = [bytes(received) for received in server.received if received]
    return all(text.endswith(b"\n") and RendezvousMessage.decode(text) == one for text in texts)


@pytest.mark.parametrize(
    "text",
    [b"", b"\n", b"[1]\n", b"7\n", b'"hello"\n', b"{\n", b"\xff\xfe\n", b"9" * 5000, b"[" * 4000],
    ids=lambda text: repr(text[:8]),
)
def test_a_line_that_is_no_message_of_ours_is_empty(text: bytes) -> None:
    assert parse(text) == {}
    assert RendezvousMessage.decode(text) is None


def test_two_steps_on_the_same_ports_meet_each_their_own() -> None:
    """Both prefer the same ports; the second takes the next one, and nobody meets the other's
    store.
    """
    first = bind_store("127.0.0.1", listen("127.0.0.1", [0]), [0])
    ports = [first.rendezvous_address.port, 0]
    second = bind_store("127.0.0.1", listen("127.0.0.1", ports), [0])
    both = [first.rendezvous_address, second.rendezvous_address]
    with rank_zero(3, held=first) as one, rank_zero(3, held=second, token="1207.1.0") as two:
        with ThreadPoolExecutor(4) as pool:
            asked = [
                pool.submit(join, both, hello(rank, 3, token=server.token), soon())
                for rank in (1, 2)
                for server in (one, two)
            ]
            answers = [answer.result(LONG) for answer in asked]
        assert [meeting for _, meeting in answers] == [one.meeting(), two.meeting()] * 2
        for connection, _ in answers:
            connection.close()


def test_rank_zero_walks_on_from_taken_ports_and_is_found_there() -> None:
    """The ports that job and step lead to are taken by strangers of three kinds."""
    who = detect.detect(step(0), pid=PID)
    ports = discovery.rendezvous_ports(who, DEFAULT, None)
    assert len(ports) == len(set(ports)) == 24
    with ExitStack() as stack:
        strangers = [
            stack.enter_context(stranger(kind, port))
            for kind, port in zip(STRANGERS, ports, strict=False)
        ]
        held = bind_store("127.0.0.1", listen("127.0.0.1", ports), [0])
        assert held.rendezvous_address.port in ports[len(strangers) :]
        server = stack.enter_context(rank_zero(2, held=held))
        candidates = [Address("127.0.0.1", port) for port in ports]
        connection, meeting = join(candidates, hello(1), soon())
        connection.close()
        assert meeting == server.meeting()
        assert all(heard_the_hello_alone(other, hello(1)) for other in strangers)


# Strangers that call rank 0.


@pytest.mark.parametrize(
    "said",
    [
        *(
            b"",
            b"GET / HTTP/1.1\r\nHost: node01\r\n\r\n",
            b"\x3c\x85\xf7\xce" + bytes(60),
            b"\n",
            b"{}\n",
            b"[]\n",
        ),
        *(Here("").encode(), b'{"kind": "hello"}\n', b'{"kind": "hello", "token": "1207.0.0"}\n'),
        *(
            greeting(replace(hello(1), **wrong)).encode()
            for wrong in (
                {"token": "1207.0.1"},
                {"rank": "1"},
                {"rank": True},
                {"world_size": 2.0},
                {"node": None},
                {"node": "node\x1b[31m"},
                {"node": "n" * 300},
            )
        ),
        *(
            replace(greeting(hello(1)), nonce="0" * 7).encode(),
            greeting(hello(1), "trust me").encode(),
        ),
        *(b'{"kind": "hello", "token": "12', b"x" * 100_000, b"\xff\xfe\x00\n"),
    ],
    ids=lambda said: repr(said[:30]),
)
@pytest.mark.parametrize("stays", [True, False], ids=["stays", "leaves"])
def test_a_calling_stranger_is_told_nothing(said: bytes, stays: bool) -> None:
    with rank_zero(2) as server, server.connect() as caller:
        try:
            caller.sendall(said)
        except ConnectionError:
            assert len(said) > 4096  # it was cut off
        if not stays:
            caller.close()
        found = meet(server, hello(1))
        assert found[1] == found[0]
        if stays:
            answer = bytearray()
            with suppress(ConnectionError):
                while piece := caller.recv(4096):
                    answer += piece
            assert bytes(answer) in (b"", Stranger().encode())


# Ranks that contradict each other.


@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes_of_one_rank_are_both_named_to_all(rank: int) -> None:
    with rank_zero(3) as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(refusal, server, hello(1, 3))
        until(lambda: 1 in server.rendezvous.connections)
        second = refusal(server, hello(rank, 3, "node02", pid=22))
        found = (
            f"rank {rank} came twice, as process {1000 + rank} on node01 and 22 on node02;"
            " expected "
        )
        assert second.startswith(found)
        assert first.result(LONG) == second == server.refusal()


@pytest.mark.parametrize(("rank", "world_size"), [(1, 3), (1, 1), (2, 2), (-1, 2)])
def test_world_sizes_that_differ_are_told_to_both(rank: int, world_size: int) -> None:
    with rank_zero(2) as server:
        text = refusal(server, hello(rank, world_size, "node02"))
        assert text.startswith(
            f"rank {rank} on node02 counts {world_size} ranks, rank 0 counts 2; expected "
        )
        assert server.refusal() == text


def test_address_families_that_differ_are_told_to_both() -> None:
    with rank_zero(2) as server, server.connect() as caller:
        send(caller, greeting(hello(1, node="node02", address="fd00::7")))
        assert isinstance(heard(caller), Seen)
        send(caller, Here(""))
        answer = heard(caller)
        assert isinstance(answer, NotMet)
        assert answer.text.startswith(
            "rank 1 on node02 has fd00::7, rank 0 on node01 has 127.0.0.1; expected IPv4 on all"
        )
        assert server.refusal() == answer.text


@pytest.mark.parametrize(("own", "published"), [("127.0.0.1", "::1"), ("::1", "127.0.0.1")])
def test_a_rank_of_the_other_family_says_so(own: str, published: str) -> None:
    """Published over PMI or MPI, the address may be of a family in which this rank has none."""
    text = refusal(Address(published, 40000), hello(1, address=own), within=0.3)
    assert "IPv4" in text
    assert "IPv6" in text


# Ranks that do not come.


def test_missing_ranks_are_named_with_their_nodes() -> None:
    """Strangers do not delay that, and hear nothing of it. A rank that went before it could answer
    is missing.
    """
    layout = {rank: f"node{rank // 2:02d}" for rank in range(8)}
    with (
        rank_zero(8, layout=layout, within=2) as server,
        ThreadPoolExecutor(3) as pool,
        server.connect() as mute,
    ):
        mute.sendall(b"half a line")
        began = time.monotonic()
        with greeted(server, hello(3, 8)):
            pass
        came = [pool.submit(refusal, server, hello(rank, 8)) for rank in (1, 2, 4)]
        text = server.refusal()
        missing = ("rank 3 on node01", "rank 5 on node02", "ranks 6-7 on node03")
        assert tells(text, "4 of 8 ranks", *missing, "; expected ", server.address, " -> ")
        assert [one.result(LONG) for one in came] == [text] * 3
        assert time.monotonic() - began < LONG / 3
        # It may be another job's rank, which would end by what the others are told.
        assert mute.recv(4096) == b""


def test_rank_zero_not_found_says_where_it_looked() -> None:
    with socket.socket() as silent, stranger("http") as other:
        silent.bind(("127.0.0.1", 0))  # and does not listen
        nowhere = Address(*silent.getsockname()[:2])
        text = refusal(nowhere, hello(1, node="node02"), within=0.3)
        where = ("rank 1 on node02", "127.0.0.1", f"rank 0 at {nowhere}", "Connection refused")
        assert tells(text, *where, "; expected ")
        assert "somebody else" in refusal(other.address, hello(1), within=0.3)
        with pytest.raises(RendezvousError, match=f"at {nowhere} and 2 more: "):
            join([nowhere] * 3, hello(1), soon(0.3))
        with pytest.raises(RendezvousError, match=f"{other.address}.* somebody else"):
            join([other.address, nowhere], hello(1), soon(0.5))


@contextmanager
def dropping() -> Iterator[Address]:
    """An address at which the kernel drops what comes, as a firewall does: its queue is full."""
    with ExitStack() as stack:
        full = stack.enter_context(closing(listen("127.0.0.1", [0])))
        full.listen(0)
        caller = stack.enter_context(socket.socket())
        caller.connect(full.getsockname())
        yield Address(*full.getsockname()[:2])


@contextmanager
def closed() -> Iterator[Address]:
    """An address at which no process listens."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        yield Address(*silent.getsockname()[:2])


@contextmanager
def broadcast() -> Iterator[Address]:
    """An address to which no connection leads."""
    yield Address("127.255.255.255", 9)


@contextmanager
def mute() -> Iterator[Address]:
    """An address at which a process accepts, and says nothing."""
    with stranger("mute") as other:
        yield other.address


def lines_of_search(candidates: list[Address], within: float, **more: Any) -> list[str]:
    """What a rank says that does not find rank 0 so long."""
    said: list[str] = []
    terms: dict[str, Any] = {"interface": "mgmt0", "network_hint": "try another"}
    terms |= {"say": said.append, "after": 0.1, "every": 0.1} | more
    report = SearchReport(**terms)
    # With the product's own patience each try of an address that drops takes seconds.
    with (
        patch.object(client, "ANSWER_WITHIN", 0.1),
        pytest.raises(RendezvousError, match="did not reach rank 0"),
    ):
        join(candidates, hello(1, node="node02"), soon(within), report=report)
    return said


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        (closed, "Connection refused"),
        (broadcast, "Network is unreachable"),
        (mute, "accepted the connection"),
        (dropping, "did not answer"),
    ],
)
def test_a_rank_that_waits_says_why_it_does_not_reach_rank_zero(
    where: Callable[[], AbstractContextManager[Address]], reason: str
) -> None:
    with where() as address:
        (line,) = lines_of_search([address], within=1.5)
    assert tells(
        line, "rank 1 on node02", "mgmt0, 127.0.0.1", address, reason, " -> ", "try another"
    )
    assert ("accepted" in line) is (where is mute)


def test_a_rank_that_waits_says_so_again_if_the_reason_is_another_one() -> None:
    with socket.socket() as late:
        late.bind(("127.0.0.1", 0))
        address = Address(*late.getsockname()[:2])
        said: list[str] = []

        def say(line: str) -> None:
            said.append(line)
            late.listen()

        lines_of_search([address], within=2.0, say=say)
    assert len(said) == 2
    assert "Connection refused" in said[0]
    assert "accepted the connection" in said[1]


def test_addresses_of_several_networks_are_told_by_their_reasons() -> None:
    with closed() as one, closed() as two, broadcast() as three:
        (line,) = lines_of_search([one, three, two], within=0.5)
    assert f"{one} and 1 more: Connection refused; {three}: Network is unreachable" in line


def test_a_rank_that_is_not_to_speak_and_one_that_comes_in_time_say_nothing() -> None:
    with closed() as address:
        assert lines_of_search([address], within=0.5, say=None) == []
    said: list[str] = []
    with rank_zero(2) as server:
        connection, _ = join(
            [server.address], hello(1), soon(), report=SearchReport(say=said.append)
        )
        connection.close()
    assert said == []


def test_what_a_name_holds_does_not_reach_the_terminal_while_a_rank_waits() -> None:
    with closed() as address:
        (line,) = lines_of_search([address], within=0.5, interface="eth0\x1b[31m")
    assert line.isprintable()


def test_among_mute_strangers_a_rank_stops_in_time() -> None:
    with stranger("mute") as other:
        began = time.monotonic()
        assert "did not answer" in refusal(other.address, hello(1), within=0.5)
        assert 0.4 < time.monotonic() - began < LONG / 3


# Ranks that go again.


@contextmanager
def greeted(server: RankZero, one: Hello) -> Iterator[socket.socket]:
    """A rank that has said hello and was seen."""
    with server.connect() as caller:
        send(caller, greeting(one))
        assert isinstance(heard(caller), Seen)
        yield caller


def test_a_rank_that_lost_patience_may_say_hello_again() -> None:
    with rank_zero(3) as server:
        with greeted(server, hello(1, 3)) as impatient:
            again = meet_later(server, hello(1, 3))
            until(lambda: 1 in server.rendezvous.connections)
            impatient.close()
            meetings = meet(server, hello(2, 3))
        connection, meeting = again.result(LONG)
        connection.close()
        assert meetings == [meeting] * 2


def test_a_rank_that_ended_while_waiting_is_named_to_all() -> None:
    with rank_zero(4) as server:
        found = meet_later(server, hello(2, 4))
        until(lambda: 2 in server.rendezvous.connections)
        with greeted(server, hello(1, 4, "node02")) as caller:
            send(caller, Here(""))
            until(lambda: 1 in server.rendezvous.connections)
        text = "rank 1 on node02 was lost during the rendezvous: its process ended; expected "
        for failed in (server.result, lambda: found.result(LONG)):
            said, code = peer_error(failed)
            assert (said.startswith(text), code) == (True, 137)


def meet_later(server: RankZero, one: Hello) -> Future[tuple[socket.socket, RendezvousInfo]]:
    pool = ThreadPoolExecutor(1)
    found = pool.submit(join, [server.address], one, soon())
    pool.shutdown(wait=False)
    return found


def test_a_rank_that_loses_rank_zero_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:
        address = Address(*listening.getsockname()[:2])
        text = pool.submit(refusal, address, hello(1, node="node02"))
        connection, _ = listening.accept()
        with connection:
            assert heard(connection) == hello(1, node="node02")
            send(connection, Seen(nonce=NONCE, proof=""))
            assert heard(connection) == Here("")
        assert f"rank 1 on node02 lost rank 0 at {address} during the rendezvous" in text.result(
            LONG
        )


# Ranks that are waited for.


def test_rank_zero_says_again_and_again_who_is_missing_and_where() -> None:
    """Until its own failure ends the meeting at once for all."""
    layout = {0: "node01", 1: "node01", 2: "node02", 3: "node03", 4: "node03"}
    with rank_zero(5, layout=layout, every=0.1) as server:
        found = meet_later(server, hello(1, 5))
        until(lambda: server.said.count("waiting for rank 2 on node02, ranks 3-4 on node03") > 1)
        began = time.monotonic()
        server.interrupt.fail("its worker ended with 3", 3)
        for one in (lambda: found.result(LONG), server.result):
            assert peer_error(one) == ("rank 0 on node01 failed: its worker ended with 3", 3)
        assert time.monotonic() - began < LONG / 3


# Failures before all have met.


def peer_error(failed: Callable[[], object]) -> tuple[str, int]:
    with pytest.raises(PeerError) as caught:
        failed()
    return str(caught.value), caught.value.exit_code


def test_a_rank_that_fails_early_ends_all_with_its_words() -> None:
    """Those that are there, and those that come afterwards."""
    with rank_zero(4, linger=LONG) as server:
        found = meet_later(server, hello(1, 4))
        until(lambda: 1 in server.rendezvous.connections)
        failure = AbortReason("no file train.py; expected a script", 78)
        assert report_failure(
            [server.address], hello(2, 4, "node02", address=""), UNPROVEN, failure, soon()
        )
        late = meet_later(server, hello(3, 4))
        text = "rank 2 on node02 failed: no file train.py; expected a script"
        for one in (server.result, lambda: found.result(LONG), lambda: late.result(LONG)):
            assert peer_error(one) == (text, 78)


def test_a_failure_that_reached_nobody_is_not_told() -> None:
    with stranger("http") as other:
        assert not report_failure(
            [other.address], hello(1, address=""), UNPROVEN, AbortReason("broken", 78), soon(0.3)
        )
    assert not report_failure([], hello(1, address=""), UNPROVEN, AbortReason("broken", 78), soon())


def test_a_rank_whose_worker_dies_while_it_waits_ends_all() -> None:
    with closing(CancelToken()) as interrupt, rank_zero(4) as server, ThreadPoolExecutor(2) as pool:
        other = meet_later(server, hello(1, 4))
        failing = pool.submit(
            join, [server.address], hello(2, 4, "node02"), soon(), None, interrupt
        )
        until(lambda: {1, 2} <= server.rendezvous.connections.keys())
        interrupt.fail("its worker was killed", 137)
        text = "rank 2 on node02 failed: its worker was killed"
        for one in (server.result, lambda: other.result(LONG), lambda: failing.result(LONG)):
            assert peer_error(one) == (text, 137)


class FailsAsAllHaveMet(CancelToken):
    """A failure that comes when rank 0's last answer is there, and has not been read."""

    greeted = False

    def wait(self, deadline: float, connection: socket.socket | None = None) -> bool:
        is_there = super().wait(deadline, connection)
        if connection and self.greeted:
            self.fail("its worker was killed", 137)
            return False
        self.greeted = connection is not None
        return is_there


def test_a_worker_that_dies_as_all_have_met_has_met_them() -> None:
    """Else this rank leaves, and rank 0, which takes it for present, may have it start anew."""
    with closing(FailsAsAllHaveMet()) as interrupt, rank_zero(2) as server:
        connection, meeting = join([server.address], hello(1), soon(), None, interrupt)
        with connection:
            assert server.result().meeting.run == meeting.run
            assert interrupt.failure
            assert connection.gettimeout() is None


def test_worker_that_dies_during_the_search_is_told() -> None:
    with (
        closing(CancelToken()) as interrupt,
        rank_zero(3) as server,
        stranger("mute") as mute,
        ThreadPoolExecutor(1) as pool,
    ):
        failing = pool.submit(
            join, [mute.address, server.address], hello(2, 3), soon(), None, interrupt
        )
        until(lambda: mute.received)
        interrupt.fail("its worker was killed", 137)
        for one in (server.result, lambda: failing.result(LONG)):
            assert peer_error(one) == ("rank 2 on node01 failed: its worker was killed", 137)


def test_a_failure_that_reached_nobody_is_printed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "TELL_FOR", 0.2)
    with closing(CancelToken()) as interrupt, socket.socket() as silent:
        interrupt.fail("its worker was killed", 137)
        silent.bind(("127.0.0.1", 0))
        with pytest.raises(PeerError) as caught:
            join([Address(*silent.getsockname()[:2])], hello(1), soon(), None, interrupt)
    assert caught.value.scope is Scope.RANK


@pytest.mark.parametrize("code", [0, 256, -1, 10**9])
def test_a_failure_of_any_code_ends_with_a_valid_one(code: int) -> None:
    told = RendezvousMessage.decode(AbortReason("x", code).encode())
    assert isinstance(told, AbortReason)
    assert told.error_of(1, "node02").exit_code == 1
    assert error_from(told).exit_code == 1


@pytest.mark.parametrize("letter", ["x", "é", "日", "\x00", '"'])
def test_a_failure_told_at_any_length_reaches_rank_zero(letter: str) -> None:
    """As a line has a limit of bytes, and JSON takes up to six of them for a character."""
    reason = AbortReason(letter * 100_000, 7)
    with rank_zero(3) as server:
        with closing(CancelToken()) as interrupt:
            failed = ThreadPoolExecutor(1).submit(
                join, [server.address], hello(1, 3), soon(), None, interrupt
            )
            until(lambda: 1 in server.rendezvous.connections or failed.done())
            interrupt.fail(reason.text, reason.exit_code)
            assert peer_error(lambda: failed.result(LONG))[1] == 7
        text, code = peer_error(server.result)
    assert (len(text) > 400, code) == (True, 7)


@pytest.mark.parametrize(("shares", "address"), [(True, "127.0.0.5"), (False, "127.0.0.1")])
def test_a_rank_connects_from_the_address_of_its_interface_within_a_subnet(
    monkeypatch: pytest.MonkeyPatch, shares: bool, address: str
) -> None:
    """A node may have several addresses in a subnet. Into another one the kernel's routes lead."""
    monkeypatch.setattr(client, "shares_subnet", lambda *_: shares)
    with rank_zero(2) as server:
        connection, _ = join([server.address], hello(1, address="127.0.0.5"), soon())
        with connection:
            assert connection.getsockname()[0] == address
            server.meeting()


# Crowds.


@pytest.mark.parametrize("says", ["nothing", "hello"])
def test_of_too_many_connections_without_a_proof_the_oldest_are_closed(
    monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    """Whatever they have said: an honest rank that comes after them meets at once."""
    monkeypatch.setattr(listener, "UNPROVEN", 20)
    with rank_zero(2) as server, ExitStack() as stack:
        callers = []
        for _ in range(100):
            callers.append(stack.enter_context(server.connect()))
            if says == "hello":
                send(callers[-1], greeting(hello(1)))
        with suppress(ConnectionResetError):  # if what it has sent was not read
            while callers[0].recv(4096):
                pass
        assert len(set(os.listdir("/proc/self/fd"))) < 100 + 100 + 60
        found = meet(server, hello(1))
        assert found[0] == found[1]
    assert sum("prove nothing" in line for line in server.said) == 1


def test_many_connections_of_one_address_displace_none_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "UNPROVEN", 20)
    with rank_zero(2) as server, ExitStack() as stack:
        slow = stack.enter_context(server.connect())
        send(slow, greeting(hello(1)))
        assert isinstance(heard(slow), Seen)
        address = (server.address.host, server.address.port)
        first, *_ = [
            stack.enter_context(socket.create_connection(address, source_address=("127.0.0.2", 0)))
            for _ in range(100)
        ]
        assert first.recv(1) == b""
        send(slow, Here(""))
        assert isinstance(heard(slow), RendezvousInfo)


def test_a_mute_connection_is_closed_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "PATIENCE", 0.2)
    with rank_zero(2, every=0.1) as server, server.connect() as caller:
        caller.sendall(b'{"kind": ')
        assert caller.recv(1) == b""
        found = meet(server, hello(1))
        assert found[0] == found[1]


@contextmanager
def free_descriptors(count: int) -> Iterator[None]:
    """So many, and no more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        free = [stack.enter_context(open(os.devnull)).fileno() for _ in range(count + 1)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("more", [0, 1])
def test_who_takes_the_last_descriptor_stays(more: int) -> None:
    """And of those that come after it, one takes the place of the oldest."""
    sockets = listen("127.0.0.1", [0])
    here = hello(0, 3)
    with sockets, ExitStack() as stack:
        address = sockets.getsockname()
        peers = stack.enter_context(
            listener.AuthenticatedListener(listening=[sockets], own=here, trust=UNPROVEN, say=print)
        )
        callers = [stack.enter_context(socket.create_connection(address)) for _ in range(2 + more)]
        with free_descriptors(2):
            for _ in range(3 + more):
                assert not list(peers.events(0.1))
                callers[-1].send(b" ")  # so that there is an event
            for rank, caller in enumerate(callers[more:], 1):
                caller.sendall(greeting(hello(rank, 3)).encode())
                assert not list(peers.events(LONG))
                assert isinstance(heard(caller), Seen)
        for caller in callers[:more]:
            assert not caller.recv(1)


def test_who_stops_at_one_word_finds_the_others_later() -> None:
    """As by the error of a rank that failed: the others are to be told of it."""
    sockets = listen("127.0.0.1", [0])
    own = hello(0, 3)
    with (
        sockets,
        listener.AuthenticatedListener(
            listening=[sockets], own=own, trust=UNPROVEN, say=print
        ) as peers,
        ExitStack() as stack,
    ):
        callers = [
            stack.enter_context(socket.create_connection(sockets.getsockname())) for _ in range(2)
        ]
        for rank, caller in enumerate(callers, 1):
            caller.sendall(greeting(hello(rank, 3)).encode())
            while not select.select([caller], [], [], 0.0)[0]:
                assert not list(peers.events(0.1))
            assert isinstance(heard(caller), Seen)
        for caller in callers:
            caller.sendall(Here("").encode())
            caller.close()
        who = []
        for _ in range(4):  # what each says, and its end
            other, connection, message = next(iter(peers.events(LONG)))
            who.append((other.rank, type(message).__name__))
            assert (connection.fileno() == -1) == (message is None)
        assert sorted(who) == sorted(
            (rank, kind) for rank in (1, 2) for kind in ("Here", "NoneType")
        )


def cost_per_rank(size: int) -> float:
    """Have a world of this size meet, and return the seconds of CPU that this took per rank.

    All other ranks are played by one thread, so that it is rank 0 that is measured.
    """
    trust = HmacAuthenticator(b"s" * 32)
    with rank_zero(size, "node000", trust=trust) as server, ExitStack() as stack:
        began = time.process_time()
        connections = {rank: stack.enter_context(server.connect()) for rank in range(1, size)}
        for rank, one in connections.items():
            send(one, greeting(hello(rank, size, f"node{rank // 8:03d}"), "secret"))
        for rank, one in connections.items():
            seen = heard(one)
            assert isinstance(seen, Seen)
            challenge = Challenge(TOKEN, rank, str(server.address), NONCE, seen.nonce)
            send(one, Here(trust.sign(challenge.text(CLIENT))))
        infos = [heard(one) for one in connections.values()]
        result = server.result()
        spent = time.process_time() - began
        assert [info.node_rank for info in infos if isinstance(info, RendezvousInfo)] == [
            rank // 8 for rank in range(1, size)
        ]
        assert result.nodes[size - 1] == f"node{(size - 1) // 8:03d}"
        assert sorted(result.connections) == list(range(1, size))
    return spent / size


@pytest.mark.slow
def test_2048_ranks_meet_at_a_cost_in_proportion_to_their_number() -> None:
    """Within seconds, that is: CPU time is what says so, whatever else the machine does."""
    few = cost_per_rank(128)
    many = cost_per_rank(2048)
    assert many < 3 * few  # in proportion to the square it would be 16
    assert 2048 * many < 30.0  # ten times what it takes
