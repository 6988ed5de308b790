"""Rank 0 asks all other ranks, and each answers: over connections that need not go over the interface of the training.

A check has to work just where a meeting would not. So rank 0 listens on every address of its node, and the others try
each one that the channel tells or that its names lead to. Rank 0 takes whoever has come when the time is over.
"""

import contextlib
import json
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from srunddp.bootstrap.rendezvous.auth import Authenticator
from srunddp.bootstrap.rendezvous.listener import AuthenticatedListener
from srunddp.bootstrap.rendezvous.protocol import Hello, RendezvousInfo
from srunddp.check.finding import call_in_daemon_thread
from srunddp.errors import RendezvousError
from srunddp.util.json_lines import parse, send

Handler = Callable[[Mapping[str, Any]], Any]
_LONGEST = 1 << 24
_PIECE = 1 << 16
_LATEST = 600.0
_SEND_WITHIN = 5.0
_OVER, _ANSWER, _FAILED = "over", "answer", "failed"


class CoordinatorLostError(RendezvousError):
    """Rank 0 had been found, and is gone."""


@dataclass
class Coordinator:
    """Rank 0's side, after all have come who will.

    Attributes:
        here: what each rank that came said of itself, rank 0 included.
        handle: what rank 0 itself does for a question.
        connections: to each other rank that still answers.
        objections: what is wrong with ranks that came; refused: connections that proved nothing.
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
        """The node of each rank that came."""
        return {rank: hello.node for rank, hello in sorted(self.here.items())}

    @property
    def node_leaders(self) -> dict[str, int]:
        """The first rank of each node that still answers."""
        first: dict[str, int] = {}
        for rank, node in self.nodes.items():
            if rank == 0 or rank in self.connections:
                first.setdefault(node, rank)
        return first

    def ask(self, questions: Mapping[int, Mapping[str, Any]], within: float) -> dict[int, Any]:
        """Ask ranks something at once, rank 0 perhaps among them, and wait so many seconds.

        Returns:
            The answers by rank. One that does not answer in time, or is lost, is left out, and is asked no more.
        """
        deadline = time.monotonic() + within
        waiting = {rank for rank in questions if rank in self.connections}
        for rank in waiting:
            self.connections[rank].settimeout(_SEND_WITHIN)
            send(self.connections[rank], dict(questions[rank]))
        # In a thread, for it may hang here as it may there.
        own = call_in_daemon_thread(partial(_answered, self.handle, questions[0])) if 0 in questions else None
        answers, late = self._collect(waiting, deadline), f"no answer within {within:g} s"
        for rank in waiting:
            self._drop(rank, late)
        try:
            answers |= {0: own.result(max(0.0, deadline - time.monotonic()))} if own else {}
        except TimeoutError:
            answers[0] = {_FAILED: late}
        failed = {rank: str(message[_FAILED]) for rank, message in answers.items() if _FAILED in message}
        self.errors = failed | self.errors
        return {rank: answers[rank].get(_ANSWER) for rank in sorted(answers.keys() - failed)}

    def broadcast(
        self, question: Mapping[str, Any], within: float, ranks: Iterable[int] | None = None
    ) -> dict[int, Any]:
        """Ask these ranks the same, or every rank that came."""
        return self.ask(dict.fromkeys(self.here if ranks is None else ranks, question), within)

    def _collect(self, waiting: set[int], deadline: float) -> dict[int, dict[str, Any]]:
        """What ranks answer. In ``waiting`` are left those that neither answer nor are lost."""
        answers: dict[int, dict[str, Any]] = {}
        texts = {rank: bytearray() for rank in waiting}
        with selectors.DefaultSelector() as selector:
            for rank in texts:
                selector.register(self.connections[rank], selectors.EVENT_READ, rank)
            while waiting and (ready := selector.select(max(0.0, deadline - time.monotonic()))):
                for key, _ in ready:
                    rank, text, piece = key.data, texts[key.data], b""
                    with contextlib.suppress(OSError):
                        piece = self.connections[rank].recv(_PIECE)
                    text += piece
                    if piece and len(text) <= _LONGEST and not text.endswith(b"\n"):
                        continue
                    selector.unregister(key.fileobj)
                    waiting.discard(rank)
                    if message := parse(bytes(text)):
                        answers[rank] = message
                    else:
                        self._drop(rank, "it sent what is no answer" if piece else "its process ended")
        return answers

    def _drop(self, rank: int, why: str) -> None:
        self.errors.setdefault(rank, why)
        self.connections.pop(rank).close()

    def shutdown(self, code: int) -> None:
        """All others end with this exit code."""
        for connection in self.connections.values():
            send(connection, {_OVER: code})
            connection.close()


def gather(
    own: Hello, listening: Sequence[socket.socket], trust: Authenticator, handle: Handler, deadline: float
) -> Coordinator:
    """On rank 0: wait for all other ranks, and take those that have come by a time of :func:`time.monotonic`."""
    coordinator = Coordinator({0: own}, handle)
    with AuthenticatedListener(listening=listening, own=own, trust=trust, say=coordinator.refused.append) as listener:
        while len(coordinator.here) < own.world_size and (left := deadline - time.monotonic()) > 0:
            for hello, connection, message in listener.events(left):
                if message is None and coordinator.connections.get(hello.rank) is connection:
                    del coordinator.connections[hello.rank], coordinator.here[hello.rank]
                elif message and "here" in message:
                    if objection := _objection(hello, own, coordinator.here.get(hello.rank)):
                        coordinator.objections.append(objection)
                    else:
                        coordinator.connections[hello.rank], coordinator.here[hello.rank] = connection, hello
    for each in listening:
        each.close()
    # A client waits for this; a check has no use for what is in it.
    accepted = asdict(RendezvousInfo(master_addr="", master_port=0, run=own.token, master_node=own.node))
    for connection in coordinator.connections.values():
        connection.setblocking(True)
        send(connection, {"meeting": accepted})
    return coordinator


def _objection(hello: Hello, own: Hello, before: Hello | None) -> str:
    if hello.world_size != own.world_size or not 0 < hello.rank < own.world_size:
        return f"{hello} counts {hello.world_size} ranks, rank 0 counts {own.world_size}"
    if before and (before.node, before.pid) != (hello.node, hello.pid):
        return f"rank {hello.rank} came twice, from {before.node} and from {hello.node}"
    return ""


def serve(connection: socket.socket, handle: Handler) -> int:
    """On another rank: answer rank 0's questions until it says that it is over.

    Returns:
        The exit code that rank 0 said.

    Raises:
        CoordinatorLostError: rank 0 is gone.
    """
    connection.settimeout(_LATEST)
    why = "its process ended"
    try:
        with connection, connection.makefile("rb") as reader:
            for text in reader:
                message = parse(text)
                if _OVER in message:
                    return int(message[_OVER])
                connection.sendall(json.dumps(_answered(handle, message)).encode() + b"\n")
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else "no word from it"
    raise CoordinatorLostError(f"rank 0 was lost: {why}", expected="rank 0 to stay", hint="see rank 0's own message")


def _answered(handle: Handler, question: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {_ANSWER: handle(question)}
    except Exception as error:  # what one rank cannot do must not hide what the others can
        return {_FAILED: f"{type(error).__name__}: {error}"}
