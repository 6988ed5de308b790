"""Rank 0 asks all other ranks, and each answers: over lines that need not go over the interface of the training.

A check has to work just where a meeting would not. So rank 0 listens on every address of its node, and the others try
each one that the channel tells or that its names lead to. Rank 0 takes whoever has come when the time is over.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from srunddp.bootstrap.door import Door
from srunddp.bootstrap.line import Hello, Meeting, parse, send
from srunddp.bootstrap.trust import Trust
from srunddp.errors import RendezvousError
from srunddp.site.half_open import half_open

Act = Callable[[Mapping[str, Any]], Any]
_LONGEST = 1 << 24
_PIECE = 1 << 16
_LATEST = 600.0
_OVER = "over"


@dataclass
class Hub:
    """Rank 0's side, after all have come who will.

    Attributes:
        here: what each rank that is here said of itself, rank 0 included.
        act: what rank 0 itself does for a question.
        lines: to each other rank that is here.
        objections: what is wrong with ranks that came.
        unanswered: addresses from which packets came while ranks were missing, but not the answers to our answers.
    """

    here: dict[int, Hello]
    act: Act
    lines: dict[int, socket.socket] = field(default_factory=dict)
    objections: list[str] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    _asked: int = 0
    _text: dict[int, bytearray] = field(default_factory=dict)

    @property
    def nodes(self) -> dict[int, str]:
        """The node of each rank that is here."""
        return {rank: hello.node for rank, hello in sorted(self.here.items())}

    def ask(self, questions: Mapping[int, Mapping[str, Any]], within: float) -> dict[int, Any]:
        """Ask ranks something at once, rank 0 perhaps among them.

        Args:
            questions: for each rank its question.
            within: seconds for all of them.

        Returns:
            The answers by rank; those that did not answer in time, or are lost, are left out.
        """
        self._asked += 1
        deadline = time.monotonic() + within
        for rank, question in questions.items():
            if rank in self.lines:
                self.lines[rank].settimeout(within)
                send(self.lines[rank], {"asked": self._asked, **question})
        answers = {0: self.act(questions[0])} if 0 in questions else {}
        waiting = {rank for rank in questions if rank in self.lines}
        with selectors.DefaultSelector() as selector:
            for rank in waiting:
                selector.register(self.lines[rank], selectors.EVENT_READ, rank)
            while waiting and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    if (done := self._read(key.data)) is not None:
                        answers |= done
                        waiting.discard(key.data)
                        selector.unregister(key.fileobj)
        return answers

    def ask_all(self, question: Mapping[str, Any], within: float, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """Ask these ranks the same, or every rank that is here."""
        return self.ask(dict.fromkeys(self.here if ranks is None else ranks, question), within)

    def _read(self, rank: int) -> dict[int, Any] | None:
        """The answer to the last question, empty where the rank is lost; None while there is none."""
        text = self._text.setdefault(rank, bytearray())
        try:
            piece = self.lines[rank].recv(_PIECE)
        except OSError:
            piece = b""
        text += piece
        if not piece or len(text) > _LONGEST:
            self.lines.pop(rank).close()
            return {}
        while b"\n" in text:
            line, _, rest = bytes(text).partition(b"\n")
            text[:] = rest
            message = parse(line)
            if message.get("asked") == self._asked:  # an earlier question's answer came too late
                return {rank: message.get("answer")}
        return None

    def dismiss(self, code: int) -> None:
        """All others end with this exit code."""
        for line in self.lines.values():
            send(line, {_OVER: code})
            line.close()


def gather(own: Hello, listening: Sequence[socket.socket], trust: Trust, act: Act, deadline: float) -> Hub:
    """On rank 0: wait for all other ranks, and take those that have come by the deadline.

    Args:
        own: rank 0's hello.
        listening: its sockets.
        trust: its kind of proof.
        act: what rank 0 does itself for a question.
        deadline: of :func:`time.monotonic`.
    """
    hub = Hub({0: own}, act)
    with Door(listening, own.token, trust, own.world_size, hub.objections.append) as door:
        while len(hub.here) < own.world_size and (left := deadline - time.monotonic()) > 0:
            for hello, line, message in door.events(left):
                if message is None and hub.lines.get(hello.rank) is line:
                    del hub.lines[hello.rank], hub.here[hello.rank]
                elif message and "here" in message:
                    _take(hub, hello, line)
    if len(hub.here) < own.world_size:
        hub.unanswered = half_open(listening)
    for listener in listening:
        listener.close()
    for line in hub.lines.values():
        line.setblocking(True)
        send(line, {"meeting": asdict(Meeting("", 0, 0, 0, 0, own.token, "", own.node))})
    return hub


def _take(hub: Hub, hello: Hello, line: socket.socket) -> None:
    if objection := _objection(hello, hub.here[0], hub.here.get(hello.rank)):
        hub.objections.append(objection)
    else:
        hub.lines[hello.rank], hub.here[hello.rank] = line, hello


def _objection(hello: Hello, own: Hello, before: Hello | None) -> str:
    if hello.world_size != own.world_size or not 0 < hello.rank < own.world_size:
        return f"rank {hello.rank} on {hello.node} counts {hello.world_size} ranks, rank 0 counts {own.world_size}"
    if before and (before.node, before.pid) != (hello.node, hello.pid):
        return f"rank {hello.rank} came twice, from {before.node} and from {hello.node}"
    return ""


def serve(line: socket.socket, act: Act) -> int:
    """On another rank: answer rank 0's questions until it says that it is over.

    Returns:
        The exit code that rank 0 said.

    Raises:
        RendezvousError: rank 0 was lost.
    """
    line.settimeout(_LATEST)
    try:
        with line, line.makefile("rb") as reader:
            for text in reader:
                message = parse(text)
                if _OVER in message:
                    return int(message[_OVER])
                answer = {"asked": message.get("asked"), "answer": act(message)}
                line.sendall(json.dumps(answer).encode() + b"\n")
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else "no word from it"
    else:
        why = "its process ended"
    raise RendezvousError(f"rank 0 was lost: {why}", expected="rank 0 to stay", cure="see rank 0's own message")
