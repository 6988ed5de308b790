"""A training that fails as the plan says, without torch: its collective is one byte to rank 0 and one back."""

import os
import signal
import socket
import time

import faults

SIZE = int(os.environ["WORLD_SIZE"])


def connect(plan):
    """Rank 0's connections to all, or another's to rank 0."""
    where = plan.folder / "port"
    if faults.RANK == 0:
        with socket.create_server((os.environ["MASTER_ADDR"], 0)) as listener:
            (plan.folder / ".port").write_text(str(listener.getsockname()[1]))
            (plan.folder / ".port").rename(where)
            return [listener.accept()[0] for _ in range(SIZE - 1)]
    while not where.exists():
        time.sleep(0.01)
    return [socket.create_connection((os.environ["MASTER_ADDR"], int(where.read_text())))]


def receive(connection, plan):
    try:
        ended = not connection.recv(1)
    except OSError:
        ended = True
    if ended and plan.peers == "block":
        while True:  # as a rank whose neighbours in the ring are well
            signal.pause()
    if ended:
        raise RuntimeError("Connection closed by peer")


def all_reduce(connections, plan):
    if faults.RANK == 0:
        for connection in connections:
            receive(connection, plan)
        for connection in connections:
            connection.sendall(b".")
    else:
        connections[0].sendall(b".")
        receive(connections[0], plan)


def main():
    plan = faults.Plan()
    plan.begin()
    plan.at("bootstrap")
    connections = connect(plan)
    all_reduce(connections, plan)
    plan.ready()
    while plan.step():
        all_reduce(connections, plan)
    for connection in connections:
        connection.close()
    plan.at("shutdown")


main()
