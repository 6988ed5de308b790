"""Serve and join torch's store at 127.0.0.2; print how many queries each step sent to the name
server, 127.0.0.1.
"""

import json
import multiprocessing
import signal
import socket
import sys
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing.synchronize import Event

from torch.distributed import TCPStore

from srunddp.bootstrap.process_group.store import without_reverse_dns

LONG = 30.0
# Forked, since torch takes long to import; apart, since a process in which one look-up failed tries
# no other.
FORK = multiprocessing.get_context("fork")


def serve(listening: socket.socket, ready: Event) -> None:
    host, port = listening.getsockname()
    with without_reverse_dns():
        store = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
    ready.set()
    signal.pause()
    del store


def join(host: str, port: int, *, quiet: bool) -> None:
    with without_reverse_dns() if quiet else nullcontext():
        store = TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=LONG)
        )
    store.add("joined", 1)


def queries(name_server: socket.socket) -> int:
    """Those since the last call: they wait in the socket, and nobody answers."""
    count = 0
    try:
        while name_server.recv(512, socket.MSG_DONTWAIT):
            count += 1
    except BlockingIOError:
        pass
    return count


def main() -> None:
    name_server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    name_server.bind(("127.0.0.1", 53))
    listening = socket.create_server(("127.0.0.2", 0))
    ready = FORK.Event()
    FORK.Process(target=serve, args=(listening, ready), daemon=True).start()
    assert ready.wait(LONG)
    report = {"server": queries(name_server)}
    for kind in ("quiet", "stock"):
        client = FORK.Process(
            target=join, args=listening.getsockname(), kwargs={"quiet": kind == "quiet"}
        )
        client.start()
        client.join()
        assert client.exitcode == 0, kind
        report[kind] = queries(name_server)
    sys.stdout.write(json.dumps(report) + "\n")


main()
