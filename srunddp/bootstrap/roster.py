"""Rank 0's side of the meeting: who has come, who objects, and what all are told when the last is there."""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from srunddp.bootstrap.line import Held, Hello, Meeting, parse, send
from srunddp.errors import RendezvousError, Scope

_LONGEST_HELLO = 4096


@dataclass
class _Caller:
    """One connection to rank 0's line: what it has sent so far, and who it says it is."""

    text: bytearray = field(default_factory=bytearray)
    hello: Hello | None = None


@dataclass
class Roster:
    """Rank 0's side: greets the ranks as they come, and tells all of them once the last is there.

    A rank says hello, is answered ``seen``, and counts once it has answered ``here``: one that lost patience in
    between is not taken for present.

    Attributes:
        own: rank 0's hello; held: its sockets; channel: over which the others learn of them.
        layout: the node of each rank as far as the launcher tells, to name those that do not come.
        lines: the connection of each rank that is here.
    """

    own: Hello
    held: Held
    channel: str
    layout: Mapping[int, str] = field(default_factory=dict)
    lines: dict[int, socket.socket] = field(default_factory=dict)
    _callers: dict[socket.socket, _Caller] = field(default_factory=dict)

    def gather(self, deadline: float) -> Meeting:
        """Wait for every rank, then tell each one.

        Args:
            deadline: of :func:`time.monotonic`.

        Raises:
            RendezvousError: ranks that did not come, came twice, or speak another address family.
        """
        self.held.line.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(self.held.line, selectors.EVENT_READ)
            while len(self.lines) < self.own.world_size - 1:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise self._refuse(self._absent())
                for key, _ in selector.select(remaining):
                    self._handle(key.fileobj, selector)  # type: ignore[arg-type]
        self.held.line.close()
        for stranger in self._callers.keys() - self.lines.values():
            stranger.close()
        return self._tell()

    def _handle(self, ready: socket.socket, selector: selectors.BaseSelector) -> None:
        if ready is self.held.line:
            self._accept(selector)
            return
        if not self._read(ready):
            selector.unregister(ready)
            hello = self._callers.pop(ready).hello
            if hello and self.lines.get(hello.rank) is ready:
                del self.lines[hello.rank]
            ready.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            caller, _ = self.held.line.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise self._refuse(
                    f"rank 0 on {self.own.node} cannot open more than {len(self._callers)} connections; expected one "
                    f"for each of {self.own.world_size} ranks -> raise the limit of open files (ulimit -n)"
                ) from None
            return  # it has gone again
        caller.setblocking(False)
        self._callers[caller] = _Caller()
        selector.register(caller, selectors.EVENT_READ)

    def _read(self, ready: socket.socket) -> bool:
        """Read what a caller sent; False when it is gone, or none of ours."""
        caller = self._callers[ready]
        try:
            piece = ready.recv(_LONGEST_HELLO)
        except OSError:
            return False
        caller.text += piece
        while b"\n" in caller.text:
            line, _, rest = bytes(caller.text).partition(b"\n")
            caller.text = bytearray(rest)
            if not self._hear(ready, caller, parse(line)):
                send(ready, {"stranger": True})
                return False
        return bool(piece) and len(caller.text) < _LONGEST_HELLO

    def _hear(self, ready: socket.socket, caller: _Caller, message: Mapping[str, Any]) -> bool:
        if caller.hello and "here" in message:
            self.lines[caller.hello.rank] = ready
            return True
        hello = _hello(message)
        if not hello or hello.token != self.own.token:
            return False
        caller.hello = hello
        if objection := self._objection(hello):
            raise self._refuse(objection)
        send(ready, {"seen": True})
        return True

    def _objection(self, hello: Hello) -> str:
        if hello.world_size != self.own.world_size or not 0 <= hello.rank < self.own.world_size:
            return (
                f"rank {hello.rank} on {hello.node} counts {hello.world_size} ranks, rank 0 counts "
                f"{self.own.world_size}; expected one world size -> start all ranks with one command"
            )
        if (":" in hello.address) != (":" in self.own.address):
            return (
                f"rank {hello.rank} on {hello.node} has {hello.address}, rank 0 on {self.own.node} has "
                f"{self.own.address}; expected IPv4 on all nodes or IPv6 on all -> correct ifaces.conf"
            )
        before = self._hello_of(hello.rank)
        # A rank that lost patience says hello again; two processes must not share a rank.
        if before and (before.node, before.pid) != (hello.node, hello.pid):
            return (
                f"rank {hello.rank} came twice, as process {before.pid} on {before.node} "
                f"and {hello.pid} on {hello.node}; expected each rank once -> start one srunddp per task"
            )
        return ""

    def _hello_of(self, rank: int) -> Hello | None:
        if rank == self.own.rank:
            return self.own
        return self._callers[self.lines[rank]].hello if rank in self.lines else None

    def _absent(self) -> str:
        missing = [rank for rank in range(self.own.world_size) if not self._hello_of(rank)]
        return (
            f"{len(missing)} of {self.own.world_size} ranks did not come: {named(missing, self.layout)}; expected all "
            f"of them on {self.held.line_address} -> see whether they started, and whether their interface reaches it"
        )

    def _refuse(self, why: str) -> RendezvousError:
        # Not to those that have not said hello: they may be another job's, and not looking for us.
        for connection, caller in self._callers.items():
            if caller.hello:
                send(connection, {"failed": why})
        return RendezvousError(why, scope=Scope.JOB)

    def _tell(self) -> Meeting:
        hellos = [self._hello_of(rank) or self.own for rank in range(self.own.world_size)]
        sizes = Counter(hello.node for hello in hellos)
        node_ranks = {node: node_rank for node_rank, node in enumerate(sizes)}
        store = self.held.store_address
        meetings = [
            Meeting(
                master_addr=store.host,
                master_port=store.port,
                nnodes=len(sizes),
                node_rank=node_ranks[hello.node],
                local_world_size=sizes[hello.node],
                run=self.own.token,
                channel=self.channel,
            )
            for hello in hellos
        ]
        for rank, line in self.lines.items():
            line.setblocking(True)
            send(line, {"meeting": asdict(meetings[rank])})
        return meetings[self.own.rank]


def named(ranks: Iterable[int], layout: Mapping[int, str]) -> str:
    """``ranks 4-5 on node03`` for ranks 4 and 5, folded; without nodes where the layout is not known."""
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet
    from ClusterShell.RangeSet import RangeSet

    by_node: dict[str, list[int]] = {}
    for rank in ranks:
        by_node.setdefault(layout.get(rank, ""), []).append(rank)
    parts = []
    for node, theirs in by_node.items():
        where = f" on {NodeSet(node, resolver=RESOLVER_NOGROUP)}" if node else ""
        parts.append(f"rank{'s' if len(theirs) > 1 else ''} {RangeSet.fromlist(map(str, theirs))}{where}")
    return ", ".join(parts)


def _hello(message: Mapping[str, Any]) -> Hello | None:
    try:
        hello = Hello(**message["hello"])
    except (KeyError, TypeError):
        return None
    return hello if all(type(getattr(hello, each.name)).__name__ == each.type for each in fields(hello)) else None
