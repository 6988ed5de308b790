"""Two nodes on this machine with several networks between them: namespaces, whose ranks share its
GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.cluster.network import tool
from tests.gpu.ranks import variables_here
from tests.gpu.requirements import gpus, need_tool
from tests.support import namespaces
from tests.support.namespaces import NODES
from tests.support.starting import bare

# Processes in two network namespaces cannot pass file descriptors by abstract sockets, which these
# would use.
ONE_HOST = {"NCCL_CUMEM_ENABLE": "0", "NCCL_CUMEM_HOST_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}


@contextmanager
def two_nodes(rails: int, *, strict: bool = False) -> Iterator[dict[str, str]]:
    """Namespaces by node; their interfaces r0, r1, ... are in one subnet each. Gone at the end.

    Args:
        strict: packets that come by another rail than their answer would leave by are dropped
            (rp_filter=1).
    """
    need_tool("ip")
    subnets = {f"r{rail}": (f"10.202.{rail}.{{}}/24",) * 2 for rail in range(rails)}
    with ExitStack() as stack:
        try:
            names = stack.enter_context(namespaces.two_nodes(subnets))
        except RuntimeError as error:
            pytest.skip(f"needs network namespaces, and ip said: {error}")
        for name in names.values():
            for interface in ("all", "default", *subnets):
                file = f"/proc/sys/net/ipv4/conf/{interface}/rp_filter"
                tool("ip", "netns", "exec", name, "sh", "-c", f"echo {int(strict)} > {file}")
        yield names


def switch(name: str, rail: int, way: str) -> None:
    """Set a rail of a node ``up`` or ``down``."""
    tool("ip", "-n", name, "link", "set", f"r{rail}", way)


def within(
    names: Mapping[str, str], per_node: int, port: int, variables: Mapping[str, str]
) -> dict[int, list[str]]:
    """For each rank the command below which it is on its node, with explicit variables and no
    others.
    """
    size = len(NODES) * per_node
    commands = {}
    for rank in range(size):
        node = NODES[rank // per_node]
        of_rank = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % per_node),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "10.202.0.1",
            "MASTER_PORT": str(port),
            "SLURMD_NODENAME": node,
        }
        if gpus() >= size:  # else all share the first one, as the variables say
            of_rank["CUDA_VISIBLE_DEVICES"] = str(rank)
        environ = bare(variables_here(of_rank | ONE_HOST | dict(variables)))
        values = [f"{key}={value}" for key, value in environ.items()]
        commands[rank] = ["ip", "netns", "exec", names[node], "env", "-i", *values]
    return commands


def ifaces(folder: Path, interface: str) -> Path:
    """An ifaces.conf with this for all nodes."""
    file = folder / "ifaces.conf"
    file.write_text(f'- nodes: "*"\n  interface: {interface}\n')
    return file
