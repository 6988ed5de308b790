"""Thousands of connections to rank 0's real supervisor, from a few processes that play all other supervisors.

python -m tests.support.fake_ranks head LINES IDLE                  rank 0; after IDLE seconds it prints what it costs
python -m tests.support.fake_ranks members PORT FIRST LAST CULPRIT  the ranks from FIRST to before LAST
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import selectors
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

from srunddp.supervisor import signals
from srunddp.supervisor.connection import SupervisorConnection
from srunddp.supervisor.coordinator import Coordinator
from srunddp.supervisor.failure import Failure, FailureRecorder
from srunddp.supervisor.failure_monitor import PING_EVERY, RankContext
from srunddp.supervisor.output.redirect import OutputRedirect, OutputTarget
from srunddp.supervisor.signals import Launcher
from srunddp.supervisor.stacks import StackDump
from srunddp.supervisor.supervisor import RendezvousOutcome, Supervisor
from srunddp.supervisor.worker_process import WorkerProcess, pipe
from tests.conftest import ROOT

PER_NODE = 8
PROCESSES = 4


@dataclass(frozen=True)
class Seen:
    """What many ranks showed.

    Attributes:
        took: seconds from the failure until the last rank knew the verdict; informed: how many knew it.
        codes: the exit codes that they received; code: of rank 0's supervisor; errors: what it said.
        cost: CPU, as a part of one core, and memory of rank 0's supervisor while idle.
    """

    took: float
    informed: int
    codes: list[int]
    code: int
    errors: str
    cost: dict[str, float]


def fail_one_of_many(ranks: int, culprit: int, idle: float = 0.5) -> Seen:
    head = _start("head", ranks, idle)
    parts = []
    try:
        port = _read(head)["port"]
        bounds = [1 + ranks * part // PROCESSES for part in range(PROCESSES + 1)]
        parts = [_start("members", port, *pair, culprit) for pair in itertools.pairwise(bounds)]
        assert _read(head)["ready"]
        cost = _read(head)
        began = time.monotonic()
        for part in parts:
            part.stdin.write("fail\n")
            part.stdin.flush()
        answers = [_read(part) for part in parts]
        errors = head.communicate(timeout=30)[1]
    finally:
        for process in (head, *parts):
            process.kill()
            process.wait()
    took = max(answer["at"] for answer in answers) - began
    codes = sorted({code for answer in answers for code in answer["codes"]})
    return Seen(took, sum(answer["informed"] for answer in answers), codes, head.returncode, errors, cost)


def _start(*words: object) -> Any:
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "tests.support.fake_ranks", *map(str, words)]
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def _read(process: Any) -> dict[str, Any]:
    line = process.stdout.readline()
    assert line, process.stderr.read()
    return dict(json.loads(line))


def node(rank: int) -> str:
    return f"node{rank // PER_NODE:04d}"


def allow_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def head(count: int, idle: float) -> int:
    allow_files()
    listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
    tell(port=listening.getsockname()[1])
    ends: dict[int, socket.socket] = {}
    while len(ends) < count:
        end, _ = listening.accept()
        ends[int(end.makefile().readline())] = end
    nodes = {rank: node(rank) for rank in range(count + 1)}
    context = RankContext(
        rank=0,
        node=node(0),
        nodes=nodes,
        stall_timeout=300.0,
        step=lambda: 1,
        stacks=lambda: "",
        link_is_up=lambda: True,
    )
    worker = subprocess.Popen(["sleep", "600"])
    signals.block()
    ours, _theirs = pipe()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    connections = {rank: SupervisorConnection(end) for rank, end in ends.items()}
    monitor = Coordinator(context, connections)
    threading.Thread(target=tell_cost, args=(idle, before), daemon=True).start()
    return Supervisor(
        agent=Agent(monitor),
        recorder=FailureRecorder(0, node(0), StackDump(), None),
        process=WorkerProcess(worker.pid),
        pipe=ours,
        output=OutputRedirect(OutputTarget(None, True, "")),
        grace=0.0,
        restart_grace=0.0,
        launcher=Launcher(None),
    ).run()


class Agent:
    """Rank 0 has met the others already, and has no sampler."""

    def __init__(self, monitor: Coordinator) -> None:
        self.monitor = monitor

    def rendezvous(self) -> RendezvousOutcome:
        return {}, self.monitor

    def on_rendezvous(self, _: dict[str, Any]) -> None:
        tell(ready=True)

    def announce_termination(self) -> None: ...

    def stop_sampler(self) -> None: ...


def tell_cost(idle: float, before: int) -> None:
    """After the first pings, what it costs while nothing happens."""
    time.sleep(2.0)
    began = time.process_time()
    time.sleep(idle)
    used = time.process_time() - began
    now = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tell(cpu=used / idle, memory_mib=now / 1024, of_lines_mib=(now - before) / 1024)


def members(port: int, first: int, last: int, culprit: int) -> None:
    """Play these ranks: ping, and end a connection when its verdict comes. The culprit fails upon a line of input."""
    allow_files()
    connections, selector = {}, selectors.DefaultSelector()
    for rank in range(first, last):
        end = socket.create_connection(("127.0.0.1", port))
        end.send(f"{rank}\n".encode())
        connections[rank] = SupervisorConnection(end)
        selector.register(end, selectors.EVENT_READ, connections[rank])
    selector.register(sys.stdin, selectors.EVENT_READ)
    codes: list[int] = []
    each, due = PING_EVERY / len(connections), iter(())
    next_ping = time.monotonic()
    while len(codes) < last - first:
        for key, _ in selector.select(max(0.0, next_ping - time.monotonic())):
            if key.data is None:
                selector.unregister(sys.stdin)
                if culprit in connections:
                    connections[culprit].send(
                        {"failure": asdict(Failure(culprit, node(culprit), "ValueError: boom", 7))}
                    )
                continue
            received = [message["verdict"]["exit_code"] for message in key.data.read() if "verdict" in message]
            codes += received
            if received:
                selector.unregister(key.fileobj)
                key.fileobj.close()
        # One after the other, as the ranks of a real job do.
        while time.monotonic() >= next_ping:
            rank = next(due, None)
            if rank is None:
                due = iter(range(first, last))
                continue
            connections[rank].send({"ping": 1})
            next_ping += each
    tell(informed=len(codes), codes=sorted(set(codes)), at=time.monotonic())


def tell(**what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    numbers = [float(word) for word in sys.argv[2:]]
    if sys.argv[1] == "head":
        sys.exit(head(int(numbers[0]), numbers[1]))
    members(*map(int, numbers))
    os._exit(0)
