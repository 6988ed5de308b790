"""Defines the machines of the cluster, their interfaces and their addresses."""

import os
from dataclasses import dataclass

INSTANCE = int(os.environ.get("SRUNDDP_TEST_CLUSTER", "1")) + int(
    os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]
)
"""The number of this process's cluster. Clusters with different numbers can be up at the same time;
each worker of pytest-xdist has a different one.
"""
PREFIX = "sdp-" if INSTANCE == 1 else f"sdp{INSTANCE}-"
"""The beginning of the names of the cluster's namespaces. It keeps the cleaning up from removing
namespaces of anything else.
"""

MANAGEMENT_INTERFACE = "mgmt0"
SIX_INTERFACE = "ens6"
DOWN_INTERFACE = "spare0"
BARE_INTERFACE = "bare0"
BRIDGE_INTERFACE = "docker0"
BRIDGE_ADDRESS = "172.17.0.1"


@dataclass(frozen=True)
class Machine:
    """A machine with its own hostname and network namespace.

    Attributes:
        name: The hostname.
        number: The last part of each of the machine's addresses.
    """

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
    """A compute node, with the networks that only compute nodes have.

    Attributes:
        data_interface: The name of the node's interface to the data network.
    """

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
"""The namespace with the other end of each machine's cables, so that no machine sees interfaces of
another machine.
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
    """Return the machine with this hostname.

    Raises:
        KeyError: There is no such machine.
    """
    for candidate in MACHINES:
        if candidate.name == name:
            return candidate
    raise KeyError(f"no machine {name!r}: there are {', '.join(m.name for m in MACHINES)}")


def node(name: str) -> Node:
    """Return the compute node with this hostname.

    Raises:
        KeyError: There is no such machine, or it is not a compute node.
    """
    found = machine(name)
    if not isinstance(found, Node):
        raise KeyError(f"{name!r} is not a compute node")
    return found
