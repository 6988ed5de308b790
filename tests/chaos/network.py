"""Faults of the test cluster's data network; each is a context manager that mends what it broke."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from tests.cluster.network import tool
from tests.cluster.nodes import NODES, Node
from tests.support.namespaces import rule, rules

_ALL = "10.88.0.0/24"


@contextmanager
def link_down(node: Node) -> Iterator[None]:
    """The node's data interface is down."""
    tool("ip", "-n", node.namespace, "link", "set", node.data_interface, "down")
    try:
        yield
    finally:
        tool("ip", "-n", node.namespace, "link", "set", node.data_interface, "up")


def packets_dropped(node: Node, *hooks: str) -> AbstractContextManager[None]:
    """What the node sends (`output`), what is sent to it (`input`), or both get lost; loopback is
    spared.
    """
    drops = {
        "input": f'iifname != "lo" ip saddr {_ALL} drop',
        "output": f'oifname != "lo" ip daddr {_ALL} drop',
    }
    return rules(node.namespace, {hook: drops[hook] for hook in hooks})


@contextmanager
def packets_lost(percent: int) -> Iterator[None]:
    """On every node this many in a hundred packets that come in over the data network get lost."""
    lost = f'iifname != "lo" ip saddr {_ALL} numgen random mod 100 < {percent} drop'
    with ExitStack() as stack:
        for node in NODES:
            stack.enter_context(rule(node.namespace, "input", lost))
        yield


def cut_between(node: Node, other: Node, *hooks: str) -> AbstractContextManager[None]:
    """What a node sends to another (`output`), what comes from it (`input`), or both get lost."""
    drops = {
        "input": f"ip saddr {other.data} drop",
        "output": f"ip daddr {other.data} drop",
    }
    return rules(node.namespace, {hook: drops[hook] for hook in hooks}, f"cut_{other.name}")


def reset_between(node: Node, other: Node) -> AbstractContextManager[None]:
    """The connections between two nodes are reset as soon as something is sent over them."""
    reset = f"ip saddr {other.data} meta l4proto tcp reject with tcp reset"
    return rules(node.namespace, {"input": reset}, f"reset_{other.name}")


@contextmanager
def new_connections_dropped(*nodes: Node) -> Iterator[None]:
    """A firewall on these nodes drops new connections over the data network, and no packets of
    older ones.
    """
    with ExitStack() as stack:
        for node in nodes:
            new = f"ip saddr {_ALL} tcp flags & (syn | ack) == syn drop"
            stack.enter_context(rules(node.namespace, {"input": new}, "firewall"))
        yield
