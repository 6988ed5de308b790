"""Faults of the test cluster's data network; each is a context manager that mends what it broke."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tests.cluster.network import tool
from tests.cluster.nodes import NODES, Node

_ALL = "10.88.0.0/24"


@contextmanager
def link_down(node: Node) -> Iterator[None]:
    """The node's data interface is down."""
    tool("ip", "-n", node.namespace, "link", "set", node.data_interface, "down")
    try:
        yield
    finally:
        tool("ip", "-n", node.namespace, "link", "set", node.data_interface, "up")


@contextmanager
def packets_dropped(node: Node, *hooks: str) -> Iterator[None]:
    """What the node sends (`output`), what is sent to it (`input`), or both get lost; loopback is spared."""
    rules = {"input": f'iifname != "lo" ip saddr {_ALL} drop', "output": f'oifname != "lo" ip daddr {_ALL} drop'}
    with _table(node, {hook: rules[hook] for hook in hooks}):
        yield


@contextmanager
def packets_lost(percent: int) -> Iterator[None]:
    """On every node this many in a hundred packets that come in over the data network get lost."""
    rule = f'iifname != "lo" ip saddr {_ALL} numgen random mod 100 < {percent} drop'
    with ExitStack() as stack:
        for node in NODES:
            stack.enter_context(_table(node, {"input": rule}))
        yield


@contextmanager
def _table(node: Node, rules: dict[str, str]) -> Iterator[None]:
    chains = "".join(
        f"chain {hook} {{\ntype filter hook {hook} priority -10;\n{rule}\n}}\n" for hook, rule in rules.items()
    )
    nft = ("ip", "netns", "exec", node.namespace, "nft")
    tool(*nft, "-f", "-", text=f"table inet chaos {{\n{chains}}}\n")
    try:
        yield
    finally:
        tool(*nft, "delete", "table", "inet", "chaos")
