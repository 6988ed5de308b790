"""Plays many clients of torch's TCPStore in few processes: those of ``init_process_group``, or
torchrun's agents.

``python -m tests.support.fake_agents server`` serves the store. ``python -m
tests.support.fake_agents WAY PORT RANKS FIRST LAST`` plays the clients from FIRST up to, but not
including, LAST. They begin when it reads a line.
"""

from __future__ import annotations

import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from srunddp.bootstrap.process_group.store import without_reverse_dns
from srunddp.bootstrap.rendezvous import protocol
from srunddp.util.kernel_file import raise_open_files_limit
from tests.support.fake_ranks import HOST, tell

THREADS = 16
LONG = timedelta(seconds=300)
JOIN = timedelta(seconds=60)


def client(port: int) -> TCPStore:
    return TCPStore(HOST, port, is_master=False, timeout=LONG, wait_for_workers=False)


@without_reverse_dns()  # a reverse look-up would take 5 s if DNS does not answer
def join_store(port: int, ranks: int, rank: int) -> TCPStore:
    """Do the least that each rank of a process group does: set a key, and add 1 to a counter. The
    last rank sets a key for which all wait.
    """
    store = client(port)
    store.set(f"rank {rank}", HOST)
    if store.add("here", 1) == ranks:
        store.set("all are here", "1")
    return store


@without_reverse_dns()
def join_rendezvous(port: int, ranks: int, rank: int) -> DynamicRendezvousHandler:
    """Join torchrun's rendezvous with ``--rdzv-backend=c10d``, as the agent of one node does."""
    store = client(port)
    within = RendezvousTimeout(join=JOIN)
    backend = C10dRendezvousBackend(store, "4711")
    handler: DynamicRendezvousHandler
    handler = DynamicRendezvousHandler.from_backend(
        "4711", store, backend, ranks, ranks, HOST, within
    )
    assert handler.next_rendezvous().world_size == ranks
    return handler


def main(way: str, port: int, ranks: int, first: int, last: int) -> None:
    is_store = way == "store"
    with ThreadPoolExecutor(THREADS if is_store else last - first) as pool:
        tell(ready=True)
        sys.stdin.readline()
        join = partial(join_store if is_store else join_rendezvous, port, ranks)
        try:
            joined = list(pool.map(join, range(first, last)))
        except RendezvousTimeoutError:
            tell(at=math.inf)
            return
        for each in joined:
            if isinstance(each, TCPStore):
                each.get("all are here")
        tell(at=time.monotonic())
        sys.stdin.readline()


if __name__ == "__main__":
    raise_open_files_limit()
    if sys.argv[1] == "server":
        # Give the store a socket for IPv4 only. With its own socket it would ask DNS for the name
        # of each client's address.
        listening = protocol.listen(HOST, [0])
        port = listening.getsockname()[1]
        server = TCPStore(
            HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        tell(port=server.port)
        sys.stdin.readline()
    else:
        main(sys.argv[1], *map(int, sys.argv[2:]))
