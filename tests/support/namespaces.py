"""Makes nodes on this machine: network namespaces with cables between them, and a process in each
that answers the questions of a check.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from srunddp.bootstrap.rendezvous.messages import Hello
from srunddp.check.messages import CheckMessage
from srunddp.check.session import CheckSession, Handler, UnknownQuestionError, serve
from tests.cluster.network import tool
from tests.conftest import missing
from tests.support.starting import until

A = TypeVar("A", bound=CheckMessage)
NODES = ("west", "east")
# The addresses of both nodes, by interface, without the node's number. The two addresses of data0
# are in the same network, those of data1 in different networks.
NETWORKS = {
    "data0": ("10.201.1.{}/24", "10.201.1.{}/24"),
    "data1": ("10.201.2.{}/25", "10.201.3.{}/25"),
}


def address(node: str, interface: str) -> str:
    """Return the address of a node's interface: for data0 ``10.201.1.1`` on west, ``10.201.1.2`` on
    east.
    """
    number = NODES.index(node)
    return NETWORKS[interface][number].format(number + 1).partition("/")[0]


@contextmanager
def two_nodes(networks: Mapping[str, tuple[str, str]] = NETWORKS) -> Iterator[dict[str, str]]:
    """Make two namespaces with a cable for each of the networks, and remove them at the end of the
    block. Yield the names of the namespaces, by node.
    """
    if os.geteuid() != 0:
        missing("root, for network namespaces")
    names = {node: f"sdt-{os.getpid()}-{node}" for node in NODES}
    with ExitStack() as stack:
        for name in names.values():
            tool("ip", "netns", "add", name)
            stack.callback(tool, "ip", "netns", "del", name)
            tool("ip", "-n", name, "link", "set", "lo", "up")
        west, east = names.values()
        for interface, addresses in networks.items():
            ends = (
                interface,
                "netns",
                west,
                "type",
                "veth",
                "peer",
                "name",
                interface,
                "netns",
                east,
            )
            tool("ip", "link", "add", *ends)
            for number, name in enumerate(names.values()):
                own = addresses[number].format(number + 1)
                six = f"fd00:201::{number + 1}/64"
                tool("ip", "-n", name, "addr", "add", own, "dev", interface)
                if interface == next(iter(networks)):
                    tool("ip", "-n", name, "addr", "add", six, "dev", interface, "nodad")
                tool("ip", "-n", name, "link", "set", interface, "up")
        # It takes some time until the interfaces at both ends of a new cable are up.
        until(
            lambda: all(_up(name, interface) for name in names.values() for interface in networks)
        )
        yield names


def switch_address(number: int) -> str:
    """Return the address of a node of :func:`switched_nodes`, by the node's number from 1 on."""
    return f"10.202.0.{number}"


@contextmanager
def switched_nodes(count: int) -> Iterator[list[str]]:
    """Make namespaces for some nodes on one switch, each with the interface ``data0``, and remove
    them at the end of the block. Yield the names of the namespaces.
    """
    if os.geteuid() != 0:
        missing("root, for network namespaces")
    switch = f"sdt-{os.getpid()}-switch"
    names = [f"sdt-{os.getpid()}-{number}" for number in range(1, count + 1)]
    with ExitStack() as stack:
        for name in (switch, *names):
            tool("ip", "netns", "add", name)
            stack.callback(tool, "ip", "netns", "del", name)
            tool("ip", "-n", name, "link", "set", "lo", "up")
        tool("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge")
        tool("ip", "-n", switch, "link", "set", "bridge0", "up")
        for number, name in enumerate(names, 1):
            port = f"port{number}"
            ends = ("data0", "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
            tool("ip", "link", "add", *ends)
            tool("ip", "-n", switch, "link", "set", port, "master", "bridge0", "up")
            tool("ip", "-n", name, "addr", "add", f"{switch_address(number)}/24", "dev", "data0")
            tool("ip", "-n", name, "link", "set", "data0", "up")
        until(lambda: all(_up(name, "data0") for name in names))
        yield names


def _up(namespace: str, interface: str) -> bool:
    return " UP " in tool("ip", "-n", namespace, "-br", "link", "show", "dev", interface)


@contextmanager
def coordinator_of(
    names: Mapping[str, str], handle: Callable[[str], Handler]
) -> Iterator[CheckSession]:
    """Open a session with a process in each namespace. Rank 1 is west and rank 2 is east.

    Args:
        names: The names of the namespaces, by node.
        handle: Called in a node's process, with the node. Returns the function that answers the
            questions of the session.
    """
    fork = multiprocessing.get_context("fork")
    session = CheckSession({}, _answers_nothing)
    children = []
    for rank, (node, name) in enumerate(names.items(), 1):
        ours, theirs = socket.socketpair()
        children.append(
            fork.Process(
                target=_within, args=(name, theirs, lambda node=node: handle(node)), daemon=True
            )
        )
        children[-1].start()
        theirs.close()
        session.connections[rank] = ours
        session.here[rank] = Hello("t", rank, 3, 0, node, "", 1)
    try:
        yield session
    finally:
        session.shutdown(0)
        for child in children:
            child.join(10.0)
            child.kill()


def _answers_nothing(question: CheckMessage) -> CheckMessage:
    raise UnknownQuestionError(question.kind)


def _within(namespace: str, connection: socket.socket, handle: Callable[[], Handler]) -> None:
    with Path("/run/netns", namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")
    serve(connection, handle())


@contextmanager
def rules(namespace: str, by_hook: Mapping[str, str], table: str = "sdt") -> Iterator[None]:
    """Put rules of nftables into effect in a namespace until the end of the block.

    Args:
        namespace: The name of the namespace.
        by_hook: The rules by hook, such as ``ip saddr 10.201.1.2 drop`` for ``input``.
        table: The name of the table for the rules. The rules of all tables are in effect together.
    """
    chains = "".join(
        f"chain {hook} {{\ntype filter hook {hook} priority -10;\n{words}\n}}\n"
        for hook, words in by_hook.items()
    )
    nft = ("ip", "netns", "exec", namespace, "nft")
    tool(*nft, "-f", "-", text=f"table inet {table} {{\n{chains}}}\n")
    try:
        yield
    finally:
        tool(*nft, "delete", "table", "inet", table)


def rule(namespace: str, hook: str, words: str) -> AbstractContextManager[None]:
    """Put a rule of nftables for one hook into effect; see :func:`rules`."""
    return rules(namespace, {hook: words})


def asked(session: CheckSession, node: str, question: CheckMessage, wanted: type[A]) -> A:
    """Ask the process on a node a question, and return the answer."""
    rank = {name: rank for rank, name in session.nodes.items()}[node]
    return session.ask({rank: question}, 20.0, wanted)[rank]
