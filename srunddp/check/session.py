"""The ranks of a check come together; then rank 0 asks all others, and each answers.

The connections need not go over the interface of the training: a check has to work just where a
meeting would not. So rank 0 listens on every address of its node, and the others try each one that
the channel tells or that its names lead to. Rank 0 takes whoever has come when the time is over.
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
_LONGEST = 1 << 24  # bytes of an answer; what is longer is none
_PIECE = 1 << 16  # bytes that are read at once
_LATEST = 600.0  # seconds without a question, after which a rank takes rank 0 for lost
_SEND_WITHIN = 5.0  # seconds: a rank that does not read its questions must not hold up the others
_A_HOST = 1.0  # seconds for one of rank 0's addresses, at first; more at each further turn
_NO_ANSWER = "it sent what is no answer"
come_within = limit("--timeout", 30.0, "How long rank 0 waits for the others.")


class UnknownQuestionError(Exception):
    """Rank 0 asks what this rank cannot answer; it may be another version of srunddp."""


class RankZeroLostError(RendezvousError):
    """Rank 0 had been found, and is gone."""


@dataclass
class CheckSession:
    """Rank 0's side of a check, after all have come who will.

    Attributes:
        here: what each rank that came said of itself, rank 0 included.
        handle: what rank 0 itself does for a question.
        connections: to each other rank that still answers.
        objections: what is wrong with ranks that came.
        refused: who connected and did not prove to be of this run.
        errors: why a rank is not asked any more, or could not answer.
    """

    here: dict[int, Hello]
    handle: Handler
    connections: dict[int, socket.socket] = field(default_factory=dict)
    objections: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)

    @property
    def nodes(self) -> dict[int, str]:
        """Return the node of each rank that came."""
        return {rank: hello.node for rank, hello in sorted(self.here.items())}

    def take(self, hello: Hello, connection: socket.socket) -> None:
        """Let a rank take part, unless something is wrong with it."""
        objection = _objection(hello, self.here[0], self.here.get(hello.rank))
        if objection:
            self.objections.append(objection)
            return
        self.here[hello.rank] = hello
        # It may take the place of one that has broken, whose end `forget` then passes over.
        self.connections[hello.rank] = connection

    def forget(self, rank: int, connection: socket.socket) -> None:
        """Take out a rank whose connection was closed; it may come anew, by another one."""
        if self.connections.get(rank) is connection:
            del self.connections[rank]
            del self.here[rank]

    @property
    def node_leaders(self) -> dict[str, int]:
        """Return the first rank of each node that still answers."""
        answering = (
            (node, rank)
            for rank, node in self.nodes.items()
            if rank == 0 or rank in self.connections
        )
        return {node: ranks[0] for node, ranks in group_by_key(answering).items()}

    def ask(
        self, questions: Mapping[int, CheckMessage], within: float, wanted: type[A]
    ) -> dict[int, A]:
        """Ask ranks something at once, rank 0 perhaps among them.

        Args:
            questions: By rank.
            within: Seconds. A rank that does not answer in time is left out, and is asked no more,
                like one that is lost.
            wanted: The kind of answer, or CheckMessage where the questions have several.

        Returns:
            The answers by rank, without the ranks that could not answer.
        """
        deadline = time.monotonic() + within
        waiting = {rank for rank in questions if rank in self.connections}
        # A question that could not be sent whole needs no handling here. Its rank is lost, or does
        # not answer in time, and is dropped below either way.
        for rank in waiting:
            self.connections[rank].settimeout(_SEND_WITHIN)
            send(self.connections[rank], questions[rank])
        own = None
        if 0 in questions:
            # In a thread: a file system that hangs on other nodes may hang here as well.
            own = call_in_daemon_thread(partial(_answer, self.handle, questions[0]))
        answers = self._collect(waiting, deadline)
        late = f"no answer within {within:g} s"
        # Messages have no numbers: the answer of a rank that is late would be taken for that to the
        # next question. So its connection is closed.
        for rank in waiting:
            self._drop(rank, late)
        if own:
            try:
                answers[0] = own.result(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                answers[0] = CannotAnswer(late)
        return self._wanted(answers, wanted)

    def _wanted(self, answers: Mapping[int, CheckMessage], wanted: type[A]) -> dict[int, A]:
        """Return the answers of one kind, and note why the others are none."""
        found: dict[int, A] = {}
        for rank, answer in sorted(answers.items()):
            if isinstance(answer, CannotAnswer):
                # The first reason stays: what fails afterwards may only follow from it.
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
        """Ask these ranks the same, or every rank that came; see :meth:`ask`."""
        asked = self.here if ranks is None else ranks
        return self.ask(dict.fromkeys(asked, question), within, wanted)

    def _collect(self, waiting: set[int], deadline: float) -> dict[int, CheckMessage]:
        """Read the answers; ranks that answer or are lost are taken out of ``waiting``."""
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
                    # Before the socket is closed: another thread may get its number at once.
                    selector.unregister(key.fileobj)
                    waiting.discard(rank)
                    if isinstance(answer, CheckMessage):
                        answers[rank] = answer
                    else:
                        self._drop(rank, answer)
        return answers

    def _read(self, rank: int, received: LineBuffer) -> CheckMessage | str | None:
        """Read what a rank has sent.

        Returns:
            Its answer; a text that says why none will come; None while it is still to come.
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
        """Have all others end with this exit code."""
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
    """Wait on rank 0 for all other ranks.

    Args:
        own: what rank 0 says of itself.
        listening: its sockets, which are closed at the end.
        trust: the proof that a rank is of this run.
        handle: what rank 0 does for a question.
        deadline: a time of :func:`time.monotonic`; ranks that have not come by then are missing.
    """
    session = CheckSession({0: own}, handle)
    with AuthenticatedListener(
        listening=listening, own=own, trust=trust, say=session.refused.append
    ) as listener:
        # A rank is here once it has proven that it is of this run; strangers only reach `say`.
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
    # A client waits for this; a check has no use for what is in it.
    accepted = RendezvousInfo(master_addr="", master_port=0, run=own.token, master_node=own.node)
    for connection in session.connections.values():
        # The listener's selector needed it non-blocking; `ask` sets limits of time of its own.
        connection.setblocking(True)
        send(connection, accepted)
    return session


def _objection(hello: Hello, own: Hello, before: Hello | None) -> str:
    """Say what is wrong with a rank that comes; empty where nothing is. ``before``: the hello of a
    process that came as the same rank.
    """
    if hello.world_size != own.world_size or not 0 < hello.rank < own.world_size:
        return f"{hello} counts {hello.world_size} ranks, rank 0 counts {own.world_size}"
    # The same process may come twice: it connects anew when its first connection has broken.
    if before and (before.node, before.pid) != (hello.node, hello.pid):
        return f"rank {hello.rank} came twice, from {before.node} and from {hello.node}"
    return ""


def serve(connection: socket.socket, handle: Handler) -> int:
    """Answer rank 0's questions, on another rank, until the check is over.

    Args:
        connection: to rank 0.
        handle: what this rank does for a question.

    Returns:
        The exit code that rank 0 names.

    Raises:
        RankZeroLostError: rank 0 is gone.
    """
    # After a time-out of its socket a file object cannot be read any more. It need not be: upon the
    # first time-out rank 0 is taken for lost.
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
        # The socket's own time-out has no errno.
        why = os.strerror(error.errno) if error.errno else "no word from it"
    raise RankZeroLostError(
        f"rank 0 was lost: {why}", expected="rank 0 to stay", hint="see rank 0's own message"
    )


def _answer(handle: Handler, question: CheckMessage | None) -> CheckMessage:
    if question is None:
        return CannotAnswer("rank 0 asks what this srunddp does not know")
    try:
        return handle(question)
    except Exception as error:  # what one rank cannot do must not hide what the others can
        return CannotAnswer(f"{type(error).__name__}: {error}")


def open_session(
    context: CheckContext, handle: Handler, timeout: float, ports: range | None = None
) -> CheckSession:
    """Begin a check on rank 0, with all ranks that come in time.

    Args:
        context: what rank 0 knows of itself.
        handle: what it does for a question.
        timeout: seconds that the others have.
        ports: to listen on; None for those of ifaces.conf, or any.

    Raises:
        SrunddpError: the others cannot find this rank.
    """
    environment = context.environment
    deadline = time.monotonic() + timeout
    token = discovery.token(environment)
    # Nobody can come: no port is opened, and no MPI is started.
    if environment.world_size == 1:
        return CheckSession({0: discovery.hello(environment, token)}, handle)
    # There is a connection for each rank, and the usual soft limit is 1,024.
    raise_open_files_limit()
    listening = _listen(context, ports)
    # The ports are told only once they are open: the others connect as soon as they know them.
    published = protocol.encode_advertisement(
        token, [Address(*each.getsockname()[:2]) for each in listening]
    )
    introduction = discovery.introduce(environment, _published(context, published, timeout))
    return gather(introduction.hello, listening, introduction.trust, handle, deadline)


def join(
    command: str, context: CheckContext, handle: Handler, timeout: float, ports: range | None = None
) -> tuple[int, bool]:
    """Find rank 0, from another rank, and answer its questions; or say why it is not found.

    Args:
        command: the name of the command, for the message.
        context: what this rank knows of itself.
        handle: what it does for a question.
        timeout: seconds to find rank 0.
        ports: on which rank 0 may listen; None for those of ifaces.conf, or any.

    Returns:
        This rank's exit code, and whether rank 0 was found. Where it was not, the code is 0: rank 0
        misses this rank, and its exit code is the job's, whereas another one here would have the
        launcher end rank 0 before it has reported.

    Raises:
        RankZeroLostError: rank 0 was found, and is gone.
    """
    environment = context.environment
    deadline = time.monotonic() + timeout
    try:
        introduction = discovery.introduce(environment, _published(context, None, timeout))
        connection = _find(
            # Over PMI and MPI rank 0 has told its addresses; otherwise its node's name leads to
            # them.
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
    """Connect to rank 0, by each of its hosts in turn: one that swallows packets must not hold up
    the others.
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
                raise  # rank 0 itself refuses this rank
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
    """Listen at all addresses by which others may reach this node, that of the training's interface
    first.
    """
    environment = context.environment
    hosts = ["127.0.0.1"] if environment.one_node else _own_addresses(context)
    if not hosts:
        raise _unreachable(environment.node)
    entry = entry_for(context.loaded.entries, environment.node, or_default=True)
    candidates = discovery.rendezvous_ports(environment, entry, ports)
    # Where no address at all can be listened on, the second call raises the reason.
    return listen_where_possible(hosts, candidates) or [listen(hosts[0], candidates)]


def _own_addresses(context: CheckContext) -> list[str]:
    """The addresses of this node, that of the training's interface first."""
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
    """Tell where rank 0 may listen: at each address to which its name in ifaces.conf leads, and to
    which its own name does.
    """
    found = []
    wrong = []
    entries = context.loaded.entries
    # The address that an entry has for rank 0's node may be the very mistake that is to be found.
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
    """Publish ``message`` on rank 0, and return on each rank what was published. MPI waits for ever
    where a rank is missing, and is given up in time.
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
