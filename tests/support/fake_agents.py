"""Many clients of torch's TCPStore in few processes: those of ``init_process_group``, or torchrun's
agents.

``python -m tests.support.fake_agents server`` has the store, and ``python -m
tests.support.fake_agents WAY PORT RANKS FIRST LAST`` the clients from FIRST to before LAST. They
begin upon a line of input.
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


@without_reverse_dns()  # which takes 5 s where DNS does not answer, and is not what is measured
def join_store(port: int, ranks: int, rank: int) -> TCPStore:
    """What each rank does at least: it sets a key of its own, and counts itself; the last one says
    so.
    """
    store = client(port)
    store.set(f"rank {rank}", HOST)
    if store.add("here", 1) == ranks:
        store.set("all are here", "1")
    return store


@without_reverse_dns()
def join_rendezvous(port: int, ranks: int, rank: int) -> DynamicRendezvousHandler:
    """torchrun's rendezvous with ``--rdzv-backend=c10d``, of one agent a node."""
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
        # Of IPv4 alone, or it would ask DNS for the name of each client's address, too.
        listening = protocol.listen(HOST, [0])
        port = listening.getsockname()[1]
        server = TCPStore(
            HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        tell(port=server.port)
        sys.stdin.readline()
    else:
        main(sys.argv[1], *map(int, sys.argv[2:]))
