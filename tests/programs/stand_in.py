"""A training that fails as the plan says: DistributedDataParallel over Gloo, or without torch.

Without torch its collective is one byte to rank 0 and one back.
"""

import ctypes
import os
import signal
import socket
import time
from collections.abc import Callable

import faults

# A collective, and the end of what it needs.
Collective = tuple[Callable[[], None], Callable[[], None]]


def ddp(plan: faults.Plan) -> Collective:
    """A step of DistributedDataParallel, and the end of the group."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    plan.at("bootstrap")
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()

    return step, dist.destroy_process_group


def sockets(plan: faults.Plan) -> Collective:
    """A collective over sockets, and their end."""
    plan.at("bootstrap")
    connections = connect(plan)

    def all_reduce() -> None:
        if faults.RANK == 0:
            for connection in connections:
                receive(connection, plan)
        for connection in connections:
            connection.sendall(b".")
        if faults.RANK:
            receive(connections[0], plan)

    def close() -> None:
        for connection in connections:
            connection.close()

    return all_reduce, close


def connect(plan: faults.Plan) -> list[socket.socket]:
    """Rank 0's connections to all, or another's to rank 0."""
    where = plan.folder / f"port{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    address = os.environ["MASTER_ADDR"]
    if faults.RANK == 0:
        with socket.create_server((address, 0)) as listener:
            (plan.folder / ".port").write_text(str(listener.getsockname()[1]))
            (plan.folder / ".port").rename(where)
            return [listener.accept()[0] for _ in range(int(os.environ["WORLD_SIZE"]) - 1)]
    while not where.exists():
        time.sleep(0.01)
    return [socket.create_connection((address, int(where.read_text())))]


def receive(connection: socket.socket, plan: faults.Plan) -> None:
    try:
        ended = not connection.recv(1)
    except OSError:
        ended = True
    if ended and plan.peers == "block":
        while True:  # as a rank whose neighbours in the ring are well
            signal.pause()
    if ended:
        # As torch says it: raised by C++ in a call, and by no raise statement.
        text = b"[gloo/transport/tcp/pair.cc:534] Connection closed by peer"
        ctypes.pythonapi.PyErr_SetString(ctypes.py_object(RuntimeError), text)


def main() -> None:
    plan = faults.Plan()
    plan.begin()
    step, close = (ddp if plan.torch else sockets)(plan)
    step()
    plan.ready()
    while plan.step():
        step()
    close()
    plan.at("shutdown")


main()
