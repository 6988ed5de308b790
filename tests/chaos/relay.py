"""Delay on the test cluster's data network, for kernels without netem.

Every node gets a TUN interface, and with it routes to the others' data addresses that are narrower
than the network's. A process of its own reads the packets of all, keeps each for a while, and
writes it to where it goes.

python -m tests.chaos.relay DELAY JITTER     in seconds; ends with its standard input
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.cluster.network import tool
from tests.cluster.nodes import NODES, Node
from tests.conftest import ROOT

NAME = "chaos0"
_TUNSETIFF = 0x400454CA
_TUN_WITHOUT_HEADER = 0x0001 | 0x1000
_CLONE_NEWNET = 0x40000000
_LONGEST_PACKET = 1 << 16


@contextmanager
def delayed(delay: float, jitter: float = 0.0) -> Iterator[None]:
    """Every packet between two nodes takes `delay` seconds, give or take `jitter`.

    Connections that were made before go on, now with the delay.
    """
    command = [sys.executable, "-m", "tests.chaos.relay", str(delay), str(jitter)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as relay:
        assert relay.stdin
        assert relay.stdout
        try:
            assert relay.stdout.readline() == "ready\n", "the relay did not start"
            yield
        finally:
            relay.stdin.close()  # the interfaces go with it, and the routes with them


class Relay:
    """Holds each packet until its time has come."""

    def __init__(self, delay: float, jitter: float) -> None:
        self._delay = delay
        self._jitter = jitter
        self._opened = {socket.inet_aton(node.data): open_tun(node) for node in NODES}
        self._kept: list[tuple[float, int, bytes]] = []
        self._count = 0

    def run(self) -> None:
        """Until standard input ends."""
        with selectors.DefaultSelector() as selector:
            for descriptor in (sys.stdin.fileno(), *self._opened.values()):
                selector.register(descriptor, selectors.EVENT_READ)
            while True:
                due = self._kept[0][0] - time.monotonic() if self._kept else None
                for key, _ in selector.select(due if due is None else max(due, 0)):
                    if key.fd == sys.stdin.fileno():
                        return
                    self._keep(os.read(key.fd, _LONGEST_PACKET))
                self._send_due()

    def _keep(self, packet: bytes) -> None:
        wait = self._delay + random.uniform(-self._jitter, self._jitter)
        self._count += 1
        heapq.heappush(self._kept, (time.monotonic() + wait, self._count, packet))

    def _send_due(self) -> None:
        while self._kept and self._kept[0][0] <= time.monotonic():
            packet = heapq.heappop(self._kept)[2]
            # The destination of an IPv4 header; a packet to nobody is lost.
            if packet[0] >> 4 == 4 and (descriptor := self._opened.get(packet[16:20])):
                os.write(descriptor, packet)


def open_tun(node: Node) -> int:
    """A TUN interface in the node's network; this process stays in that network."""
    with open(f"/var/run/netns/{node.namespace}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {node.namespace}")
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", NAME.encode(), _TUN_WITHOUT_HEADER))
    others = [
        f"route add {other.data}/32 dev {NAME} src {node.data}" for other in NODES if other != node
    ]
    # Without IPv6 addresses of its own, which would send packets by themselves.
    lines = [f"link set {NAME} addrgenmode none", f"link set {NAME} up", *others]
    tool("ip", "-n", node.namespace, "-batch", "-", text="\n".join(lines))
    return descriptor


def main() -> None:
    relay = Relay(*map(float, sys.argv[1:3]))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    relay.run()


if __name__ == "__main__":
    main()
