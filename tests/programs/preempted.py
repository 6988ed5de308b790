"""A training that can be preempted, without torch: its collectives are numbers over sockets, and so is its checkpoint.

preempted.py FOLDER [STEPS]   goes on from FOLDER's newest checkpoint; without STEPS never ends at first, and soon then
"""

import os
import socket
import sys
import time
from pathlib import Path

from srunddp.train.config import PreemptionConfig
from srunddp.train.preemption.requeue import stop_and_requeue
from srunddp.train.preemption.signals import Preemption, StopRequest

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
PACE = 0.02  # seconds a step
ATTEMPT = os.environ.get("SLURM_RESTART_COUNT", "0")


class Ranks:
    """The greatest number of all ranks, or rank 0's; every call is a barrier."""

    def __init__(self, folder: Path) -> None:
        where = folder / f"port.{ATTEMPT}"
        if SIZE == 1:
            self.peers = []
        elif RANK == 0:
            with socket.create_server((os.environ["MASTER_ADDR"], 0)) as listener:
                write(where, str(listener.getsockname()[1]))
                self.peers = [listener.accept()[0] for _ in range(SIZE - 1)]
        else:
            while not where.exists():
                time.sleep(0.01)
            self.peers = [socket.create_connection((os.environ["MASTER_ADDR"], int(where.read_text())))]

    def greatest(self, number: int) -> int:
        if RANK == 0:
            number = max([number, *map(receive, self.peers)])
            for peer in self.peers:
                peer.sendall(number.to_bytes(4, "big"))
            return number
        self.peers[0].sendall(number.to_bytes(4, "big"))
        return receive(self.peers[0])

    def broadcast(self, number: int) -> int:
        return self.greatest(number if RANK == 0 else 0)


def receive(peer: socket.socket) -> int:
    data = peer.recv(4, socket.MSG_WAITALL)
    if len(data) < 4:
        raise RuntimeError("Connection closed by peer")
    return int.from_bytes(data, "big")


def write(path: Path, text: str) -> None:
    """Whole or not there."""
    new = path.with_name(f".{path.name}.tmp")
    new.write_text(text)
    new.replace(path)


def save(folder: Path, step: int) -> Path:
    path = folder / f"step-{step:08d}.pt"
    if RANK == 0:
        write(path, f"{step}\n" * 1000)
    return path


def load(folder: Path) -> int:
    """The step of the newest checkpoint, which has to be whole."""
    paths = sorted(folder.glob("step-*.pt"))
    if not paths:
        return 0
    (step,) = set(paths[-1].read_text().splitlines())
    return int(step)


def main(folder: Path, steps: int = 0) -> None:
    ranks, first = Ranks(folder), load(folder)
    steps = steps or (first + 5 if first else 1_000_000)
    with Preemption(PreemptionConfig(lead_seconds=float(os.environ.get("LEAD", "120"))), RANK) as preemption:
        for step in range(first + 1, steps + 1):
            time.sleep(PACE)
            request, cause = preemption.pending()
            agreed = ranks.greatest(128 * request + cause)
            write(folder / f"at.{ATTEMPT}.{RANK}", f"{os.getpid()} {first} {step}")
            if agreed:
                path = save(folder, step)
                ranks.greatest(0)  # it is whole
                stop_and_requeue(
                    preemption, (StopRequest(agreed // 128), agreed % 128), step, path, broadcast=ranks.broadcast
                )
    if RANK == 0:
        print(f"done from step {first} to {steps}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:3]))
