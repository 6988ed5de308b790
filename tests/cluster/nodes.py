"""The plan of the cluster: its machines, their interfaces and their addresses."""

import os
from dataclasses import dataclass

INSTANCE = int(os.environ.get("SRUNDDP_TEST_CLUSTER", "1")) + int(
    os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]
)
"""Clusters of different numbers can be up at the same time; each worker of pytest-xdist has one of
its own.
"""
PREFIX = "sdp-" if INSTANCE == 1 else f"sdp{INSTANCE}-"
"""Marks the namespaces as ours, so that cleaning up cannot hit somebody else's."""

MANAGEMENT_INTERFACE = "mgmt0"
SIX_INTERFACE = "ens6"
DOWN_INTERFACE = "spare0"
BARE_INTERFACE = "bare0"
BRIDGE_INTERFACE = "docker0"
BRIDGE_ADDRESS = "172.17.0.1"


@dataclass(frozen=True)
class Machine:
    """A hostname in a network namespace of its own; `number` ends each of its addresses."""

    name: str
    number: int

    @property
    def namespace(self) -> str:
        return PREFIX + self.name

    @property
    def management(self) -> str:
        return f"10.77.0.{self.number}"


@dataclass(frozen=True)
class Node(Machine):
    """A compute node, with the networks that only compute nodes have."""

    data_interface: str

    @property
    def data(self) -> str:
        return f"10.88.0.{self.number}"

    @property
    def six(self) -> str:
        return f"fd88::{self.number}"

    @property
    def data_name(self) -> str:
        return f"{self.name}-data"

    @property
    def six_name(self) -> str:
        return f"{self.name}-six"


LOGIN = Machine("login", 1)
SWITCH = PREFIX + "switch"
"""The namespace with every cable's other end, so that no machine sees interfaces that are not its
own.
"""

NODES = (
    Node("node01", 11, "ens1f1"),
    Node("node02", 12, "ens1f1"),
    Node("node03", 13, "ens1f0np0"),
    Node("node04", 14, "ens1f1"),
    Node("node05", 15, "ens1f0"),
    Node("node06", 16, "ens1f0np0"),
)
MACHINES: tuple[Machine, ...] = (LOGIN, *NODES)


def machine(name: str) -> Machine:
    """The machine of this hostname."""
    for candidate in MACHINES:
        if candidate.name == name:
            return candidate
    raise KeyError(f"no machine {name!r}: there are {', '.join(m.name for m in MACHINES)}")


def node(name: str) -> Node:
    """The compute node of this hostname."""
    found = machine(name)
    if not isinstance(found, Node):
        raise KeyError(f"{name!r} is not a compute node")
    return found
