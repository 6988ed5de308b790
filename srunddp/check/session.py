"""Connects the ranks of a check to rank 0, which then asks questions that each rank answers.

A check has to work even when a rendezvous over the interface of the training would fail. Therefore
rank 0 listens on every address of its node. The other ranks try each address that rank 0 has
published over the channel; if the channel publishes none, they try the addresses to which the names
of rank 0's node resolve. At the time limit, rank 0 goes on with the ranks that have connected.
"""

import contextlib
import itertools
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from srunddp.bootstrap.environment import mpi
from srunddp.bootstrap.network.ifaces_entry import DEFAULT, entry_for
from srunddp.bootstrap.network.interface import list_interfaces, why_unusable
from srunddp.bootstrap.rendezvous import client, discovery, protocol
from srunddp.bootstrap.rendezvous.auth import Authenticator
from srunddp.bootstrap.rendezvous.listener import AuthenticatedListener
from srunddp.bootstrap.rendezvous.messages import Hello, Here, RendezvousInfo
from srunddp.bootstrap.rendezvous.protocol import Address, listen, listen_where_possible
from srunddp.check.finding import CheckContext, call_in_daemon_thread
from srunddp.check.messages import CannotAnswer, CheckIsOver, CheckMessage
from srunddp.errors import RendezvousError, SrunddpError
from srunddp.util.click_types import limit
from srunddp.util.console import write_stderr
from srunddp.util.hostlist import group_by_key
from srunddp.util.json_lines import LineBuffer
from srunddp.util.kernel_file import raise_open_files_limit
from srunddp.util.messages import send

Handler = Callable[[CheckMessage], CheckMessage]
A = TypeVar("A", bound=CheckMessage)
_LONGEST = 1 << 24  # bytes of an answer; a longer one counts as invalid
_PIECE = 1 << 16  # bytes per read
_LATEST = 600.0  # seconds without a question, after which a rank considers rank 0 lost
# Seconds for which rank 0 tries to send a question to a rank that does not read it. Meanwhile the
# other ranks wait for their questions.
_SEND_WITHIN = 5.0
# Seconds for which a rank tries each host of rank 0 at first. In the second round it tries each
# host for twice as long, in the third for three times as long, and so on.
_A_HOST = 1.0
_NO_ANSWER = "it sent something that is no answer"
come_within = limit("--timeout", 30.0, "How long rank 0 waits for the others.")


class UnknownQuestionError(Exception):
    """This rank does not know the kind of question that rank 0 asks, perhaps because rank 0 has a
    different version of srunddp.
    """


class RankZeroLostError(RendezvousError):
    """This rank had found rank 0, but then lost the connection to it."""


@dataclass
class CheckSession:
    """Rank 0's connections to the other ranks of a check, over which it asks them questions.

    Attributes:
        here: The hello of each rank that has connected, by rank. Rank 0 is included.
        handle: Returns the answer of rank 0 itself to a question.
        connections: The connection to each other rank that has answered all questions so far.
        objections: For each rank that was refused although it proved that it belongs to the run,
            the reason.
        refused: A line for each process that could not prove that it belongs to the run.
        errors: For each rank that was lost, answered too late or could not answer, the first
            reason.
    """

    here: dict[int, Hello]
    handle: Handler
    connections: dict[int, socket.socket] = field(default_factory=dict)
    objections: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)

    @property
    def nodes(self) -> dict[int, str]:
        """The node of each rank that has connected."""
        return {rank: hello.node for rank, hello in sorted(self.here.items())}

    def take(self, hello: Hello, connection: socket.socket) -> None:
        """Add a rank that has connected. If :func:`_objection` gives a reason to refuse it, add
        this reason to :attr:`objections` instead.
        """
        objection = _objection(hello, self.here[0], self.here.get(hello.rank))
        if objection:
            self.objections.append(objection)
            return
        self.here[hello.rank] = hello
        # The rank may have connected before, over a connection that broke. When rank 0 notices the
        # end of that connection later, `forget` ignores it.
        self.connections[hello.rank] = connection

    def forget(self, rank: int, connection: socket.socket) -> None:
        """Remove a rank whose connection was closed. The rank may connect again later."""
        if self.connections.get(rank) is connection:
            del self.connections[rank]
            del self.here[rank]

    @property
    def node_leaders(self) -> dict[str, int]:
        """For each node, the lowest of its ranks that have answered all questions so far."""
        answering = (
            (node, rank)
            for rank, node in self.nodes.items()
            if rank == 0 or rank in self.connections
        )
        return {node: ranks[0] for node, ranks in group_by_key(answering).items()}

    def ask(
        self, questions: Mapping[int, CheckMessage], within: float, wanted: type[A]
    ) -> dict[int, A]:
        """Ask several ranks at once, and wait for their answers.

        Args:
            questions: The question for each rank; rank 0 may be among them. A rank without a
                connection is skipped.
            within: Seconds in which a rank has to answer. A rank that takes longer is not asked
                again, just like a rank that was lost.
            wanted: The type of the answers; an answer of a different type counts as none.
                ``CheckMessage`` allows all types.

        Returns:
            The answers by rank, without ranks that did not or could not answer.
        """
        deadline = time.monotonic() + within
        waiting = {rank for rank in questions if rank in self.connections}
        # send() does not tell whether a question was sent completely. If it was not, its rank does
        # not answer it, and is dropped below.
        for rank in waiting:
            self.connections[rank].settimeout(_SEND_WITHIN)
            send(self.connections[rank], questions[rank])
        own = None
        if 0 in questions:
            # Rank 0 answers in a thread, because a file system that hangs on other nodes may hang
            # here too.
            own = call_in_daemon_thread(partial(_answer, self.handle, questions[0]))
        answers = self._collect(waiting, deadline)
        late = f"no answer within {within:g} s"
        # Messages have no numbers, so a late answer would be taken for the answer to the next
        # question. Closing the connection prevents this.
        for rank in waiting:
            self._drop(rank, late)
        if own:
            try:
                answers[0] = own.result(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                answers[0] = CannotAnswer(late)
        return self._wanted(answers, wanted)

    def _wanted(self, answers: Mapping[int, CheckMessage], wanted: type[A]) -> dict[int, A]:
        """Return the answers of type ``wanted``. For each other answer, add the reason to
        :attr:`errors`.
        """
        found: dict[int, A] = {}
        for rank, answer in sorted(answers.items()):
            if isinstance(answer, CannotAnswer):
                # Keep the first reason, because later errors may only be its consequences.
                self.errors.setdefault(rank, answer.why)
            elif isinstance(answer, wanted):
                found[rank] = answer
            else:
                self.errors.setdefault(rank, _NO_ANSWER)
        return found

    def broadcast(
        self,
        question: CheckMessage,
        within: float,
        wanted: type[A],
        ranks: Iterable[int] | None = None,
    ) -> dict[int, A]:
        """Ask several ranks the same question.

        Args:
            question: The question.
            within: Seconds in which a rank has to answer, as in :meth:`ask`.
            wanted: The type of the answers, as in :meth:`ask`.
            ranks: The ranks to ask; None for every rank that has connected.

        Returns:
            The answers by rank, without ranks that did not or could not answer.
        """
        asked = self.here if ranks is None else ranks
        return self.ask(dict.fromkeys(asked, question), within, wanted)

    def _collect(self, waiting: set[int], deadline: float) -> dict[int, CheckMessage]:
        """Read the answers of the ranks in ``waiting``, until all have answered or ``deadline`` is
        reached. Return the answers by rank.

        A rank that has answered or was lost is removed from ``waiting``. The ranks that are too
        late remain.
        """
        answers: dict[int, CheckMessage] = {}
        received = {rank: LineBuffer() for rank in waiting}
        with selectors.DefaultSelector() as selector:
            for rank in received:
                selector.register(self.connections[rank], selectors.EVENT_READ, rank)
            while waiting:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    break  # the time is over
                for key, _ in ready:
                    rank = key.data
                    answer = self._read(rank, received[rank])
                    if answer is None:
                        continue
                    # Unregister before the socket is closed: another thread may get its descriptor
                    # at once.
                    selector.unregister(key.fileobj)
                    waiting.discard(rank)
                    if isinstance(answer, CheckMessage):
                        answers[rank] = answer
                    else:
                        self._drop(rank, answer)
        return answers

    def _read(self, rank: int, received: LineBuffer) -> CheckMessage | str | None:
        """Read what a rank has sent since the last call.

        Returns:
            The answer; a text that says why there will be no answer; or None if the answer is not
            complete yet.
        """
        piece = b""
        with contextlib.suppress(OSError):  # a reset connection ends like a closed one
            piece = self.connections[rank].recv(_PIECE)
        lines = received.feed(piece)
        if piece and not lines and len(received) <= _LONGEST:
            return None
        answer = CheckMessage.decode(lines[0]) if lines else None
        if answer:
            return answer
        if piece:
            return _NO_ANSWER
        return "its process ended"

    def _drop(self, rank: int, why: str) -> None:
        self.errors.setdefault(rank, why)
        self.connections.pop(rank).close()

    def shutdown(self, code: int) -> None:
        """End the check: tell every other rank to exit with this code, and close its connection."""
        for connection in self.connections.values():
            send(connection, CheckIsOver(code))
            connection.close()


def gather(
    own: Hello,
    listening: Sequence[socket.socket],
    trust: Authenticator,
    handle: Handler,
    deadline: float,
) -> CheckSession:
    """Accept the connections of the other ranks on rank 0, until all ranks have connected or the
    time is over.

    Args:
        own: Rank 0's hello.
        listening: The sockets on which rank 0 listens; this function closes them.
        trust: Checks the proof of each process that connects.
        handle: Returns the answer of rank 0 itself to a question.
        deadline: A time of :func:`time.monotonic`; a rank that has not connected by then takes no
            part in the check.
    """
    session = CheckSession({0: own}, handle)
    with AuthenticatedListener(
        listening=listening, own=own, trust=trust, say=session.refused.append
    ) as listener:
        # The listener reports only processes that have proven that they belong to the run. For any
        # other process it adds a line to `refused`.
        while len(session.here) < own.world_size:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            for hello, connection, message in listener.events(left):
                if isinstance(message, Here):
                    session.take(hello, connection)
                elif message is None:
                    session.forget(hello.rank, connection)
    for each in listening:
        each.close()
    # Send each rank the message for which client.join() waits: it says that the rank is accepted.
    # A check does not use the content of the message.
    accepted = RendezvousInfo(master_addr="", master_port=0, run=own.token, master_node=own.node)
    for connection in session.connections.values():
        # The listener's selector needed non-blocking sockets; `ask` sets time limits of its own.
        connection.setblocking(True)
        send(connection, accepted)
    return session


def _objection(hello: Hello, own: Hello, before: Hello | None) -> str:
    """Return why a rank that connects is refused; empty if it is accepted.

    Args:
        hello: The hello of the rank.
        own: Rank 0's hello.
        before: The hello of the process that has connected before as the same rank; None if there
            is none.
    """
    if hello.world_size != own.world_size or not 0 < hello.rank < own.world_size:
        return f"{hello} counts {hello.world_size} ranks, rank 0 counts {own.world_size}"
    # The same process may come twice: it connects again when its first connection has broken.
    if before and (before.node, before.pid) != (hello.node, hello.pid):
        return f"rank {hello.rank} came twice, from {before.node} and from {hello.node}"
    return ""


def serve(connection: socket.socket, handle: Handler) -> int:
    """Answer rank 0's questions on another rank until the check is over.

    Args:
        connection: The connection to rank 0.
        handle: Answers a question.

    Returns:
        The exit code that rank 0 tells this rank to end with.

    Raises:
        RankZeroLostError: The connection ended, or rank 0 asked nothing for ``_LATEST`` seconds.
    """
    # A file object of a socket cannot be read again after a time-out. Use one all the same, because
    # the first time-out already means that rank 0 is lost.
    connection.settimeout(_LATEST)
    why = "its process ended"
    try:
        with connection, connection.makefile("rb") as reader:
            for line in reader:
                question = CheckMessage.decode(line)
                if isinstance(question, CheckIsOver):
                    return question.exit_code
                connection.sendall(_answer(handle, question).encode())
    except OSError as error:
        # A time-out of the socket has no errno.
        why = os.strerror(error.errno) if error.errno else "no word from it"
    raise RankZeroLostError(
        f"rank 0 was lost: {why}", expected="rank 0 to stay", hint="see rank 0's own message"
    )


def _answer(handle: Handler, question: CheckMessage | None) -> CheckMessage:
    if question is None:
        return CannotAnswer("rank 0 asks a question that this srunddp does not know")
    try:
        return handle(question)
    except Exception as error:  # a rank's failure to answer must not hide the answers of others
        return CannotAnswer(f"{type(error).__name__}: {error}")


def open_session(
    context: CheckContext, handle: Handler, timeout: float, ports: range | None = None
) -> CheckSession:
    """Start a check on rank 0, with all ranks that connect in time.

    Args:
        context: What the checks know about rank 0.
        handle: Returns the answer of rank 0 itself to a question.
        timeout: Seconds in which the other ranks have to connect.
        ports: The ports on which rank 0 may listen; None for the ports of ifaces.conf, or for any
            port if it names none.

    Raises:
        SrunddpError: No address can be bound, or nothing can be published over the channel.
    """
    environment = context.environment
    deadline = time.monotonic() + timeout
    token = discovery.token(environment)
    # With a single rank, open no port and start no MPI, because no other rank can connect.
    if environment.world_size == 1:
        return CheckSession({0: discovery.hello(environment, token)}, handle)
    # Each rank needs a connection, and the usual soft limit is 1,024 open files.
    raise_open_files_limit()
    listening = _listen(context, ports)
    # Publish the ports only when they are open, because the other ranks connect at once.
    published = protocol.encode_advertisement(
        token, [Address(*each.getsockname()[:2]) for each in listening]
    )
    introduction = discovery.introduce(environment, _published(context, published, timeout))
    return gather(introduction.hello, listening, introduction.trust, handle, deadline)


def join(
    command: str, context: CheckContext, handle: Handler, timeout: float, ports: range | None = None
) -> tuple[int, bool]:
    """Connect to rank 0 from another rank, and answer its questions until the check is over. If
    rank 0 is not found, print why.

    Args:
        command: The name of the command, for the message.
        context: What the checks know about this rank.
        handle: Returns this rank's answer to a question.
        timeout: Seconds in which rank 0 has to be found.
        ports: The ports on which rank 0 may listen; None for the ports of ifaces.conf, or for any
            port if it names none.

    Returns:
        This rank's exit code, and whether rank 0 was found. If it was not found, the exit code is
        0, because with any other code the launcher could end rank 0 before it has written its
        report. Rank 0 then reports this rank as missing, and the job ends with rank 0's exit code.

    Raises:
        RankZeroLostError: Rank 0 was found and then lost.
    """
    environment = context.environment
    deadline = time.monotonic() + timeout
    try:
        introduction = discovery.introduce(environment, _published(context, None, timeout))
        connection = _find(
            # Over PMI and MPI, rank 0 publishes its addresses. Otherwise they are worked out from
            # its node's name.
            introduction.addresses or _candidates(context, ports),
            introduction.hello,
            deadline,
            introduction.trust,
        )
    except SrunddpError as error:
        write_stderr(f"srunddp: {command} on {environment.node}: error: {error}\n")
        return 0, False
    return serve(connection, handle), True


def _find(
    candidates: Sequence[Address], hello: Hello, deadline: float, own: Authenticator
) -> socket.socket:
    """Connect to rank 0, and return the connection.

    Each host at which rank 0 may listen is tried for a limited time, again and again until
    ``deadline``: otherwise a host that drops packets would leave no time for the other hosts.

    Raises:
        RendezvousError: Rank 0 refused this rank, or was not found before ``deadline``.
    """
    hosts = dict.fromkeys(address.host for address in candidates)
    turns = ((1 + turn, host) for turn in itertools.count() for host in hosts)
    while True:
        turn, host = next(turns)
        until = min(deadline, time.monotonic() + turn * _A_HOST)
        try:
            return client.join(
                [each for each in candidates if each.host == host], hello, until, own
            )[0]
        except RendezvousError as error:
            if time.monotonic() < until:
                raise  # rank 0 itself has refused this rank
            if until == deadline:
                raise RendezvousError(
                    error.found,
                    expected=error.expected,
                    hint=(
                        "see whether it started; `srun --mpi=pmi2` tells all addresses of its node"
                        " to the others"
                    ),
                ) from None


def _listen(context: CheckContext, ports: range | None) -> list[socket.socket]:
    """Return sockets that listen on all addresses of this node at which other ranks may reach it.
    The socket on the address of the training's interface comes first.

    Raises:
        SrunddpError: The node has no address, or none can be bound.
    """
    environment = context.environment
    hosts = ["127.0.0.1"] if environment.one_node else _own_addresses(context)
    if not hosts:
        raise _unreachable(environment.node)
    entry = entry_for(context.loaded.entries, environment.node, or_default=True)
    candidates = discovery.rendezvous_ports(environment, entry, ports)
    # If no address can be bound, the second call raises the reason.
    return listen_where_possible(hosts, candidates) or [listen(hosts[0], candidates)]


def _own_addresses(context: CheckContext) -> list[str]:
    """Return the addresses of this node, the address of the training's interface first."""
    hosts = [context.interface.address] if context.interface else []
    for link in list_interfaces():
        if not why_unusable(link):
            hosts += link.addresses
    return list(dict.fromkeys(hosts))


def _unreachable(node: str) -> RendezvousError:
    found = f"node {node} has no interface that is up and has an address"
    return RendezvousError(
        found, expected="one by which other nodes reach it", hint="see `ip addr` there"
    )


def _candidates(context: CheckContext, ports: range | None) -> list[Address]:
    """Return the addresses and ports at which rank 0 may listen: first on the addresses that
    ifaces.conf gives for its node, then on the addresses to which the node's own name resolves.

    Raises:
        SrunddpError: No address can be found in either way.
    """
    found = []
    wrong = []
    entries = context.loaded.entries
    # An entry's address for rank 0's node may be just the mistake that the check has to find, so
    # also try without it.
    by_own_name = (*(replace(entry, address="") for entry in entries), DEFAULT)
    for known in (entries, by_own_name):
        try:
            found += discovery.candidate_addresses(context.environment, None, known, ports)
        except SrunddpError as error:
            wrong.append(error)
    if not found:
        raise wrong[0] if wrong else _unreachable(context.environment.node)
    return list(dict.fromkeys(found))


def _published(context: CheckContext, message: str | None, timeout: float) -> str:
    """Publish ``message`` over the channel on rank 0, and return on every rank what rank 0 has
    published; empty if ranks do not publish anything over this channel.

    Args:
        context: What the checks know about this rank.
        message: What rank 0 publishes; None on the other ranks.
        timeout: Seconds in which rank 0's message has to be published.

    Raises:
        RendezvousError: MPI_Init has not returned within ``timeout``, perhaps because it waits for
            a rank that is missing.
    """
    environment = context.environment
    name = context.interface.name if context.interface else None

    def broadcast(message: str | None) -> str:
        try:
            return call_in_daemon_thread(
                partial(mpi.broadcast, message, environment.world_size, name)
            ).result(timeout)
        except TimeoutError:
            raise RendezvousError(
                (
                    f"rank {environment.rank} on {environment.node} is still in MPI_Init after"
                    f" {timeout:g} s"
                ),
                expected="all ranks to reach it, and MPI to reach all nodes",
                hint=(
                    "look for ranks that did not start; start with `srun --mpi=pmi2`, which needs"
                    " no MPI"
                ),
            ) from None

    return discovery.discover(environment, message, timeout, broadcast, lambda _: None)[1]
