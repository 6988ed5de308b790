"""Runs the rendezvous on rank 0: waits for the other ranks, and when all have come, tells each of
them the world and the store's address.
"""

import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from srunddp.bootstrap.rendezvous import protocol
from srunddp.bootstrap.rendezvous.auth import Authenticator
from srunddp.bootstrap.rendezvous.listener import AuthenticatedListener
from srunddp.bootstrap.rendezvous.messages import (
    AbortReason,
    CannotCome,
    Deputies,
    Hello,
    Here,
    NotMet,
    RendezvousInfo,
    RendezvousMessage,
    Told,
    about,
    short_enough,
)
from srunddp.bootstrap.rendezvous.protocol import (
    Address,
    BoundSockets,
    CancelToken,
    RendezvousResult,
    port_of,
)
from srunddp.errors import PeerError, RendezvousError, Scope, SrunddpError
from srunddp.util.console import SAY_EVERY
from srunddp.util.hostlist import fold_in_order, fold_ranks
from srunddp.util.messages import send

MOST_DEPUTIES = 8


@dataclass(kw_only=True)
class RendezvousServer:
    """Waits on rank 0 for the other ranks, and answers all of them when the last has come.

    A rank says hello, gets ``Seen``, and counts as present once it has answered ``Here`` with its
    proof. So a rank that gave up in between does not count, and a process without a proof has no
    effect.

    Attributes:
        own: rank 0's hello.
        held: rank 0's listening sockets.
        channel: the name of the way by which the other ranks learn rank 0's address.
        layout: the node of each rank as far as the launcher tells it, to name ranks that are
            missing.
        trust: rank 0's kind of proof.
        say: takes a line for the log.
        interrupt: ends the wait when rank 0 itself fails.
        spares: the number of tasks of spare nodes, which come in addition to the ranks.
        may_shrink: whether a restart may go on with fewer nodes.
        names_nodes: whether to tell the ranks the names of their nodes, which may change.
        agent_store: whether to listen for the agent store.
        returns_at: the text that says where rank 0 listens for tasks that come back after their
            node was given up; empty if it does not listen for them.
        network_hint: how to find a network over which the ranks reach each other; empty if that
            cannot help.
        every: seconds between two lines that say which ranks are missing.
        linger: seconds for which ranks that come after a failure are told of it.
        connections: the connection of each rank that is present.
    """

    own: Hello
    held: BoundSockets
    channel: str
    layout: Mapping[int, str] = field(default_factory=dict)
    trust: Authenticator = field(default_factory=Authenticator)
    say: Callable[[str], None] = lambda _: None
    interrupt: CancelToken | None = None
    spares: int = 0
    may_shrink: bool = False
    names_nodes: bool = False
    agent_store: bool = False
    returns_at: str = ""
    network_hint: str = ""
    every: float = SAY_EVERY
    linger: float = protocol.TELL_FOR
    connections: dict[int, socket.socket] = field(default_factory=dict)
    _here: dict[int, Hello] = field(default_factory=dict)
    _settled: set[int] = field(default_factory=set)  # ranks that know of the failure or have ended

    def accept_all(self, deadline: float) -> RendezvousResult:
        """Wait until every rank has come, and then send each rank its :class:`RendezvousInfo`.

        Args:
            deadline: a time of :func:`time.monotonic`.

        Raises:
            RendezvousError: ranks did not come in time, one came twice, or a rank has another
                version, world size or address family.
            PeerError: a rank failed or was lost before all had come.
        """
        self._here[self.own.rank] = self.own
        with AuthenticatedListener(
            listening=(self.held.rendezvous,),
            own=self.own,
            trust=self.trust,
            say=self.say,
            interrupt=self.interrupt,
        ) as listener:
            try:
                self._await_all(listener, deadline)
            except SrunddpError as error:
                # Print the error before telling the ranks that are still to come: that takes time,
                # and the launcher may end this process meanwhile.
                self.say(f"error: {error}")
                error.said = True
                # After the deadline do not wait for the missing ranks again: they have had all
                # their time.
                late = time.monotonic() >= deadline
                self._settled.add(self.own.rank)
                tell_all(
                    listener,
                    about(error),
                    self._settled,
                    0.0 if late else self.linger,
                )
                raise
            # Close the socket, so that the kernel refuses further connections instead of queueing
            # them for nobody.
            self.held.rendezvous.close()
        agent_store = None
        # Listen for the agent store only now, when all ranks have found rank 0: before, a rank that
        # tries the same port might connect to it by mistake.
        if self.agent_store:
            agent_store = self.held.listen_for_agent_store()
        return RendezvousResult(
            meeting=self._tell(agent_store),
            connections=dict(self.connections),
            nodes={rank: hello.node for rank, hello in self._here.items()},
            addresses={rank: hello.address for rank, hello in self._here.items()},
            port=self.held.port_for_probes(agent_store),
            agent_store=agent_store,
        )

    def _await_all(self, listener: AuthenticatedListener, deadline: float) -> None:
        next_word = time.monotonic() + self.every
        while len(self.connections) < self.own.world_size - 1:
            now = time.monotonic()
            if now >= deadline:
                raise self._absent()
            if now >= next_word:
                self.say(f"waiting for {fold_ranks(self._missing(), self.layout)}")
                next_word += self.every
            self._take_what_comes(listener, min(deadline, next_word))

    def _take_what_comes(self, listener: AuthenticatedListener, until: float) -> None:
        """Wait once for messages of ranks, and handle them.

        Args:
            listener: yields the messages.
            until: the time of :func:`time.monotonic` at which the wait ends.

        Raises:
            SrunddpError: a rank has failed (rank 0 included), or does not belong to this world.
        """
        for hello, connection, message in listener.events(until - time.monotonic()):
            self._take(hello, connection, message)
        if self.interrupt and self.interrupt.failure:
            raise self.interrupt.failure.error_of(self.own.rank, self.own.node)

    def _take(
        self, hello: Hello, connection: socket.socket, message: RendezvousMessage | None
    ) -> None:
        match message:
            case None:
                # If the rank has connected again, only its new connection counts, and the rank may
                # close the old one.
                if self.connections.get(hello.rank) is connection:
                    self._settled.add(hello.rank)
                    raise PeerError(
                        f"{hello} was lost during the rendezvous: its process ended",
                        code=137,
                        expected="every rank to stay",
                        hint="see what ended it there: a signal, or the node's memory",
                    )
            case AbortReason() as reason:
                self._fail(hello, connection, reason)
            case CannotCome(reason=reason):
                self._fail(hello, connection, reason)
            case Here():
                if objection := self._objection(hello):
                    raise RendezvousError(objection, scope=Scope.JOB)
                self.connections[hello.rank] = connection
                self._here[hello.rank] = hello

    def _fail(self, hello: Hello, connection: socket.socket, reason: AbortReason) -> NoReturn:
        """Tell a rank that rank 0 knows of its failure, and raise the failure as an error."""
        send(connection, Told())
        self._settled.add(hello.rank)
        raise reason.error_of(hello.rank, hello.node)

    def _objection(self, hello: Hello) -> str:
        """Return why a rank does not belong to this world; empty if it does."""
        own = self.own
        # Compare the version first: in another one the other fields may mean something else.
        if hello.version != own.version:
            return (
                f"{hello} has srunddp {hello.version or 'of another version'}, {own} has"
                f" {own.version}; expected one version on all nodes -> start all ranks from one"
                " installation"
            )
        if hello.world_size != own.world_size or not self._has_room_for(hello):
            return (
                f"{hello} counts {hello.world_size} ranks, rank 0 counts {own.world_size}; expected"
                " one world size -> start all ranks with one command"
            )
        if (":" in hello.address) != (":" in own.address):
            return (
                f"{hello} has {hello.address}, {own} has {own.address}; expected IPv4 on all nodes"
                " or IPv6 on all -> correct ifaces.conf"
            )
        before = self._here.get(hello.rank)
        # A process may say hello again if the answer took too long, but two processes must not have
        # the same rank.
        if before and (before.node, before.pid) != (hello.node, hello.pid):
            return (
                f"rank {hello.rank} came twice, as process {before.pid} on {before.node} and"
                f" {hello.pid} on {hello.node}; expected each rank once -> start one srunddp per"
                " task"
            )
        return ""

    def _has_room_for(self, hello: Hello) -> bool:
        return 0 <= hello.rank < self.own.world_size

    @property
    def _ranks(self) -> int:
        return self.own.world_size - self.spares

    def _missing(self) -> list[int]:
        return [rank for rank in range(self.own.world_size) if rank not in self._here]

    def _absent(self) -> RendezvousError:
        missing = self._missing()
        hint = (
            "see whether they started, and whether their interface reaches it; `srunddp check`"
            " names the nodes that do not answer each other"
        )
        if self.network_hint:
            hint = f"{hint}; {self.network_hint}"
        return RendezvousError(
            f"{len(missing)} of {self.own.world_size} ranks did not come:"
            f" {fold_ranks(missing, self.layout)}",
            expected=f"all of them on {self.held.rendezvous_address}",
            hint=hint,
            scope=Scope.JOB,
        )

    def _tell(self, agent_store: socket.socket | None) -> RendezvousInfo:
        numbers = sorted(self._here)
        deputies = self._deputies()
        takeover = ""
        returns_at = ""
        secret = ""
        where = [Address(host, port) for _, host, port in deputies]
        if self.returns_at:
            standing = protocol.decode_advertisement(self.returns_at)
            # Use the secret that stays the same in the whole run: a task that is cut off would not
            # learn a new one.
            secret = standing.secret
            returns_at = protocol.encode_advertisement(
                self.own.token, [*standing.addresses, *where], secret
            )
        # A spare node's task can take over from rank 0 without further changes. If a rank takes
        # over, its former number becomes free, so the ranks must be renumbered, which needs
        # may_shrink.
        if any(self.may_shrink or number >= self._ranks for number, *_ in deputies):
            takeover = protocol.encode_advertisement(self.own.token, where, secret)
        infos = infos_of(
            [self._here[number] for number in numbers],
            self.held.store_address,
            self.channel,
            ranks=self._ranks,
            deputies=deputies,
            takeover=takeover,
            returns_at=returns_at,
            vacant=tuple(sorted({*range(self.own.world_size)} - {*numbers})),
            agent_store_port=port_of(agent_store),
            names_nodes=self.names_nodes,
        )
        meetings = dict(zip(numbers, infos, strict=True))
        for rank, connection in self.connections.items():
            # The listener has made the connection non-blocking, but the whole message must be sent.
            connection.setblocking(True)
            send(connection, meetings[rank])
        return meetings[self.own.rank]

    def _deputies(self) -> Deputies:
        """Return the deputies, at most ``MOST_DEPUTIES``: of each node the first task that listens.

        Tasks of spare nodes come first, because they can take over from rank 0 without a new number
        for any other rank. If the run may go on with fewer nodes, no task on rank 0's node is a
        deputy, because that node is given up together with rank 0.
        """
        listening = [hello for hello in self._here.values() if hello.deputy_port]
        if self.may_shrink:
            listening = [hello for hello in listening if hello.node != self.own.node]
        listening.sort(key=lambda hello: (hello.rank < self._ranks, hello.rank))
        # For equal keys a dict keeps the last value, which in reversed order is a node's first.
        first = {hello.node: hello for hello in reversed(listening)}
        chosen = [hello for hello in listening if first[hello.node] is hello][:MOST_DEPUTIES]
        return tuple((hello.rank, hello.address, hello.deputy_port) for hello in chosen)


def infos_of(
    hellos: Sequence[Hello],
    store: Address,
    channel: str,
    *,
    ranks: int | None = None,
    deputies: Deputies = (),
    takeover: str = "",
    returns_at: str = "",
    vacant: tuple[int, ...] = (),
    agent_store_port: int | None = None,
    names_nodes: bool = False,
) -> list[RendezvousInfo]:
    """Return rank 0's message for each rank, in the order of the hellos.

    Args:
        hellos: The hello of each rank and of each spare node's task, rank 0's first.
        store: The address of the ranks' store.
        channel: The name of the way by which the ranks have found rank 0.
        ranks: How many of the first hellos are of ranks; the rest are of spare nodes' tasks. None
            if all are of ranks.
        deputies, takeover, returns_at, vacant: As in :class:`RendezvousInfo`.
        agent_store_port: Where the agent store listens; None if there is none.
        names_nodes: Whether to tell the names of the ranks' nodes.
    """
    nodes = _nodes(hellos)
    sizes = Counter(nodes[:ranks])
    masks = Counter((node, hello.cpus) for node, hello in zip(nodes, hellos, strict=True))
    # A Counter keeps the order in which its keys were added, so nodes are numbered by their lowest
    # ranks.
    node_ranks = {node: node_rank for node_rank, node in enumerate(sizes)}
    node_list = ""
    if names_nodes:
        node_list = short_enough(fold_in_order(name for name, _ in sizes))
    return [
        RendezvousInfo(
            master_addr=store.host,
            master_port=agent_store_port or store.port,
            store_port=store.port if agent_store_port else 0,
            nnodes=len(sizes),
            node_rank=node_ranks.get(node, 0),
            # Prefer the launcher's number: nodes that are counted by name may have equal names.
            local_world_size=hello.local_world_size or sizes[node],
            run=hello.token,
            channel=channel,
            master_node=hellos[0].node,
            sharers=masks[node, hello.cpus],
            deputies=deputies,
            takeover=takeover,
            returns_at=returns_at,
            vacant=vacant,
            node_list=node_list,
        )
        for node, hello in zip(nodes, hellos, strict=True)
    ]


def _nodes(hellos: Sequence[Hello]) -> list[tuple[str, int]]:
    """Return for each rank its node's name, and a number that distinguishes nodes of equal names.

    Containers on several hosts may have the same name, but a node has each local rank only once.
    """
    before: Counter[tuple[str, int]] = Counter()
    nodes = []
    for hello in hellos:
        nodes.append((hello.node, before[hello.node, hello.local_rank]))
        before[hello.node, hello.local_rank] += 1
    return nodes


def tell_all(
    listener: AuthenticatedListener,
    message: AbortReason | NotMet,
    settled: set[int],
    seconds: float,
) -> None:
    """Tell a failure to all ranks that have come, and for some time to those that come later.

    Args:
        listener: has the connections, and accepts new ones.
        message: the failure.
        settled: the ranks that know of the failure already, or have ended; each rank that is told
            is added.
        seconds: for how long to wait at most; the wait ends as soon as every rank is settled.
    """
    for connection, peer in listener.known.items():
        send(connection, message)
        if peer.hello:
            settled.add(peer.hello.rank)
    # Other ranks may still be starting, or connect again because the answer took too long. If this
    # port was closed, they would look for rank 0 until their own timeout.
    deadline = time.monotonic() + seconds
    while len(settled) < listener.own.world_size and (remaining := deadline - time.monotonic()) > 0:
        for hello, connection, said in listener.events(remaining):
            if isinstance(said, AbortReason | CannotCome):
                send(connection, Told())
            elif said is not None:
                send(connection, message)
            settled.add(hello.rank)
